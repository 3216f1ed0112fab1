"""Trains the model of configs/NAME.yaml on the CPU, on one GPU, several, or several nodes. The
batch of an update is the recipe's on any number of devices. Run it again to resume.
"""

import hashlib
import os
import re
import shlex

from omegaconf import OmegaConf

from pipeline.common import command
from pipeline.common.command import BadInput, check_path
from pipeline.common.files import write_whole
from pipeline.common.folder import Folder
from pipeline.common.paths import PROGRAMS
from pipeline.recipes import config as configs

STEPS = "optimization.update_freq"  # over which gradients are accumulated

# What may change when a run goes on.
MAY_CHANGE = configs.HARMLESS | {
    "batch_tokens",
    "checkpoint.keep_last_epochs",
    "optimization.max_epoch",
    "optimization.max_update",
    STEPS,
}


def parse(arguments):
    parser = command.parser("train.sh", __doc__)
    count = command.at_least(1)
    add = parser.add_argument
    add("name", metavar="NAME", help="a file of configs/, without .yaml, or the path of a YAML")
    add("overrides", nargs="*", metavar="GROUP.KEY=VALUE", help="options that replace the config's")
    add("--data", help="binarised data (default: the config's, or data-bin/BENCHMARK)")
    add("--save-dir", help="folder of the run (default: the config's, or checkpoints/NAME)")
    add("--devices", type=count, metavar="N", help="GPUs of this node (default: most that fit)")
    add("--cpu", action="store_true", help="use no GPU; --devices are then processes (default: 1)")
    add("--nodes", type=count, default=1, metavar="N", help="number of nodes")
    add("--rendezvous", metavar="HOST[:PORT]", help="the node of --nodes where all of them meet")
    add("--precision", choices=("fp32", "fp16", "bf16"), help="(default: the config's; CPU: fp32)")
    add("--restarts", type=command.at_least(0), default=0, metavar="N",
        help="go on when a process dies, up to N times (default: 0)")  # fmt: skip
    add("--dry-run", action="store_true", help="print the command and stop")
    args = parser.parse_intermixed_args(arguments)
    args.given = {word.lstrip("+").partition("=")[0]: word for word in args.overrides}
    return args


def check_folder(save_dir, trained):
    """Raise BadInput if `save_dir` holds the run of another config than `trained`.

    If an earlier session had another batch, its ``batch_tokens`` stay in `trained`.
    """
    record = save_dir / "trained.yaml"
    if record.exists():
        earlier = OmegaConf.load(record)
        others = configs.differences(earlier, trained, MAY_CHANGE)
        if "batch_tokens" in earlier:
            trained.batch_tokens = earlier.batch_tokens
        for key, (before, here) in others.items():
            got = f"got one with {key} {before}, not {here}; choose another folder"
            raise BadInput(f"--save-dir: expected a run of the same config in {save_dir}, {got}")
    elif list(save_dir.glob("*.pt")):
        got = f"got checkpoints of something else in {save_dir}; choose another folder"
        raise BadInput(f"--save-dir: expected a folder of scripts/train.sh, {got}")


def choose_devices(args, recipe, config):
    """Return ``(on_cpu, processes on this node)``; by default the most that share the batch.

    Where the caller sets the batch, all GPUs do. A dry run takes the given number of GPUs to be
    there. Raises BadInput if there are too few.
    """
    if args.cpu:
        return True, args.devices or 1
    if args.dry_run and args.devices:
        return False, args.devices
    import torch  # takes seconds

    found = torch.cuda.device_count()
    if args.devices and args.devices > found:
        wanted = f"at most the {found} GPUs of this machine, got {args.devices}"
        raise BadInput(f"--devices: expected {wanted}; --cpu uses processes instead")
    if args.devices or found == 0 or STEPS in args.given:
        return found == 0, args.devices or max(1, found)
    sharing = [n for n in range(1, found + 1) if steps_of(recipe, config, n * args.nodes)]
    return False, max(sharing, default=found)


def most_tokens(config):
    """Return the most tokens of a step of a process. Raises BadInput without such a limit."""
    if tokens := OmegaConf.select(config, "dataset.max_tokens"):
        return tokens
    wanted = "a number, by which the batch of an update is counted, got none"
    hint = "optimization.update_freq=[N] sets another batch"
    raise BadInput(f"dataset.max_tokens: expected {wanted}; {hint}")


def whole_batch(recipe):
    """Return the most tokens of an update of the recipe, by default one step of one process."""
    steps = OmegaConf.select(recipe, "optimization.update_freq") or [1]
    processes = OmegaConf.select(recipe, "distributed_training.distributed_world_size") or 1
    return most_tokens(recipe) * steps[0] * processes


def steps_of(recipe, config, processes):
    """Return over how many steps each process accumulates gradients for the recipe's batch.

    It is counted in tokens. Returns None if so many processes cannot share it evenly.
    """
    steps, rest = divmod(whole_batch(recipe), most_tokens(config) * processes)
    return None if rest else steps


def other_batch(args, recipe, config, processes):
    """Return ``{"batch_tokens": N}`` of what a caller sets, unless it is the recipe's batch."""
    if STEPS not in args.given or not OmegaConf.select(recipe, "dataset.max_tokens"):
        return {}
    tokens = OmegaConf.select(config, "dataset.max_tokens") or 0
    batch = tokens * (config.optimization.update_freq or [1])[0] * processes
    return {} if batch == whole_batch(recipe) else {"batch_tokens": batch}


def precision_of(args, on_cpu):
    """Return ``{option: value}`` of the precision, but for options that the caller sets."""
    precision = args.precision or ("fp32" if on_cpu else None)
    if on_cpu and precision == "fp16":
        raise BadInput("--precision: expected fp32 or bf16 on the CPU, got fp16")
    halves = {f"common.{half}": precision == half for half in ("fp16", "bf16")} if precision else {}
    if args.precision and (both := halves.keys() & args.given.keys()):
        raise BadInput(f"--precision: expected none beside {args.given[both.pop()]}, got both")
    return {key: half for key, half in halves.items() if key not in args.given}


def torchrun(args, name, save_dir, devices):
    """Return the words that run a program in so many processes on this node, for the run `name`."""
    meeting = ["--standalone"]
    if args.nodes > 1:
        # Nodes with this id form one run: another may use the same HOST[:PORT].
        own = hashlib.sha256(bytes(save_dir)).hexdigest()[:8]
        host, _, port = args.rendezvous.partition(":")
        meeting = ["--nnodes", args.nodes, "--rdzv-backend", "c10d"]
        meeting += ["--rdzv-id", f"{name.replace('/', '.')}-{own}"]
        meeting += ["--rdzv-endpoint", f"{host}:{port or 29500}"]
    if args.restarts:
        meeting += ["--max-restarts", args.restarts]
    return [PROGRAMS / "torchrun", *meeting, "--nproc-per-node", devices]


def plan(args, has_data=True):
    """Return ``(command, environment, folder, record)``. Without `has_data`, there is none yet."""
    name, recipe = configs.read_config(args.name)
    path = configs.find_config(args.name)[1]
    config = configs.with_overrides(recipe, args.overrides)
    if args.overrides or not args.dry_run:
        configs.check_options(config, path.stem)
    on_cpu, devices = choose_devices(args, recipe, config)
    if (args.nodes > 1) != bool(args.rendezvous):
        wanted = "HOST[:PORT] with several --nodes" if args.nodes > 1 else "none without --nodes"
        raise BadInput(f"--rendezvous: expected {wanted}, got {args.rendezvous or 'none'}")
    processes = devices * args.nodes

    data = configs.chosen_folder(args.data, config, "task.data", name).absolute()
    check_path("--data", data)
    save_dir = configs.chosen_folder(args.save_dir, config, "checkpoint.save_dir", name).absolute()
    check_path("--save-dir", save_dir)
    halves = precision_of(args, on_cpu)
    batch = other_batch(args, recipe, config, processes)
    trained = OmegaConf.merge({"name": name, **batch}, config)
    for key, half in halves.items():
        if half != bool(OmegaConf.select(config, key)):  # else the recipe says so itself
            OmegaConf.update(trained, key, half)
    if not args.dry_run:
        if has_data and not list(data.glob("dict*.txt")):
            raise BadInput(f"--data: expected binarised data, with dict*.txt, in {data}, got none")
        check_folder(save_dir, trained)

    options = {
        "common.user_dir": configs.user_dir(config),
        "common.tensorboard_logdir": save_dir / "tensorboard",
        "task.data": data,
        "checkpoint.save_dir": save_dir,
        "hydra.run.dir": save_dir,
        "distributed_training.distributed_world_size": processes,
    }
    if STEPS not in args.given:
        steps = steps_of(recipe, config, processes)
        if not steps:
            fit = [str(n) for n in range(1, 65) if steps_of(recipe, config, n)]
            raise BadInput(
                f"--devices: expected as many as share the batch of {whole_batch(recipe):,} tokens "
                f"in steps of {most_tokens(config):,} ({', '.join(fit)}), got {processes}; "
                "dataset.max_tokens=N sets other steps, optimization.update_freq=[N] another batch"
            )
        options[STEPS] = [steps]
    options |= {key: str(half).lower() for key, half in halves.items()}
    if on_cpu:
        options["common.cpu"] = "true"
        if processes > 1:
            # fairseq joins the processes before it imports the plugin, which patches this.
            options |= {
                "distributed_training.distributed_backend": "gloo",
                "distributed_training.distributed_init_method": "env://",
                "distributed_training.distributed_rank": "${oc.decode:${oc.env:RANK}}",
                "distributed_training.distributed_no_spawn": "true",
            }

    words = torchrun(args, name, save_dir, devices) if processes > 1 or args.restarts else []
    words += [PROGRAMS / "fairseq-hydra-train", "--config-dir", path.parent]
    settings = [f"{key}={value}" for key, value in options.items()]
    # Paths stand among the settings: Hydra runs fairseq in the folder of the run.
    paths = ("common.user_dir", "task.data", "checkpoint.save_dir")
    given = [override for key, override in args.given.items() if key not in paths]
    words += ["--config-name", path.stem, *configs.hydra_words([*settings, *given])]

    environment = {"PYTHONWARNINGS": "ignore"}  # fairseq calls much that PyTorch has deprecated
    if on_cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if args.restarts:
        # Else processes that start again look for each other where the dead ones listened.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return [str(word) for word in words], environment, save_dir, trained


def main(arguments=None):
    """Run the command; it becomes fairseq's, unless this is a dry run."""
    args = parse(arguments)

    def body():
        words, environment, save_dir, trained = plan(args)
        shown = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
        shown += [shlex.quote(word) for word in words]
        print(re.sub(r" (?='?\+\+)", r" \\\n    ", " ".join(shown)), flush=True)
        if args.dry_run:
            return
        if args.nodes == 1:  # locked until fairseq ends, or torchrun, which hands no lock on
            folder = Folder(save_dir, "training", (), "--save-dir")
            folder.acquire("train.lock", wait=10)  # what loads data ends 5 s after a kill
            os.set_inheritable(folder.lock.fileno(), True)
        write_whole(save_dir / "trained.yaml", OmegaConf.to_yaml(trained))
        os.execve(words[0], words, {**os.environ, **environment})

    return command.run("train.sh", body)
