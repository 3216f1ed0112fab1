"""Train the model of configs/NAME.yaml with fairseq-hydra-train; see scripts/train.sh --help."""

import argparse
import difflib
import enum
import hashlib
import math
import os
import re
import shlex
import sys
import typing
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.common.files import write_whole
from pipeline.common.paths import CONFIGS, ROOT

DESCRIPTION = """\
Trains the model of configs/NAME.yaml, on the CPU, on one GPU, on several, or on several nodes.
The batch of an update is the recipe's on any number of devices: gradients are accumulated over
as many steps as that takes. Run it again to resume. TensorBoard's logs are written beside the
checkpoints.
"""
EXAMPLES = """\
examples:
  scripts/train.sh iwslt14_de_en/talkconv
  scripts/train.sh wmt16_en_de/talkconv --devices 4 --precision bf16
  scripts/train.sh wmt16_en_de/talkconv dataset.max_tokens=1792       # for half the memory
  scripts/train.sh wmt16_en_de/talkconv --nodes 2 --rendezvous node1  # the same on each node
  scripts/train.sh iwslt14_de_en/talkconv --cpu optimization.max_update=10
"""

# What may change when a run goes on; none of it makes another model of a row.
MAY_CHANGE = {
    "checkpoint.keep_interval_updates",
    "checkpoint.keep_last_epochs",
    "checkpoint.save_interval_updates",
    "common.log_interval",
    "dataset.max_tokens",
    "dataset.num_workers",
    "dataset.validate_after_updates",
    "optimization.max_epoch",
    "optimization.max_update",
    "optimization.update_freq",
}


class BadInput(Exception):
    """Something that the caller can mend; the message says what."""


def parse(arguments):
    parser = argparse.ArgumentParser(
        prog="scripts/train.sh",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="a file of configs/, without .yaml")
    parser.add_argument(
        "overrides", nargs="*", metavar="GROUP.KEY=VALUE", help="options that replace the config's"
    )
    parser.add_argument("--data", help="binarised data (default: data-bin/BENCHMARK)")
    parser.add_argument("--save-dir", help="folder of the run (default: checkpoints/NAME)")
    parser.add_argument(
        "--devices", type=int, metavar="N", help="GPUs of this node to use (default: all)"
    )
    parser.add_argument(
        "--cpu", action="store_true", help="use no GPU; --devices are then processes (default: 1)"
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="number of nodes")
    parser.add_argument(
        "--rendezvous", metavar="HOST[:PORT]", help="the node of --nodes where all of them meet"
    )
    parser.add_argument(
        "--precision",
        choices=("fp32", "fp16", "bf16"),
        help="numbers to train with (default: the config's on a GPU, fp32 on the CPU)",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="start again from the last checkpoint when a process dies, up to N times (default: 0)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the command and stop")
    return parser.parse_intermixed_args(arguments)


def read_config(name):
    """The full name and the config of ``configs/NAME.yaml``.

    Raises BadInput, with names that are like it, if there is none.
    """
    name = name.removeprefix("configs/").removesuffix(".yaml")
    names = sorted(
        path.relative_to(CONFIGS).with_suffix("").as_posix() for path in CONFIGS.glob("*/*.yaml")
    )
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        near = near or [other for other in names if other.startswith(name.partition("/")[0] + "/")]
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(names)}"
        raise BadInput(f"NAME: expected a config, got {name!r}; {hint}")
    return name, OmegaConf.load(CONFIGS / f"{name}.yaml")


def with_overrides(config, overrides):
    """A copy of `config` with ``["GROUP.KEY=VALUE", …]``, read as YAML, in it."""
    for override in overrides:
        if not re.match(r"\+{0,2}\w+\.[\w.]+=", override):
            raise BadInput(f"overrides: expected GROUP.KEY=VALUE, got {override!r}")
    return OmegaConf.merge(
        config, OmegaConf.from_dotlist([override.lstrip("+") for override in overrides])
    )


# --- The options of fairseq ---

# What an option of a type takes: in words, and as Python has it.
KINDS = {
    bool: ("true or false", bool),
    int: ("an integer", int),
    float: ("a number", (int, float)),
    str: ("text", (str, int, float)),
}


def check_options(config):
    """Raise BadInput for a key that is no option of fairseq's, or a value that one does not take.

    Hydra adds what it does not know, and fairseq's older models take any key. Importing what
    knows them, the dataclasses that fairseq registers and the flags of what has none, takes
    seconds.
    """
    import talk_fairseq  # noqa: F401  registers the models

    groups = {
        group: options if isinstance(options, dict) else {"_name": options}
        for group, options in OmegaConf.to_container(config).items()
    }
    known = known_options(groups)
    for group, options in groups.items():
        for name, value in options.items():
            key = f"{group}.{name}"
            if key not in known:
                raise BadInput(
                    f"options: expected those of fairseq, got {key}{did_you_mean(key, known)}"
                )
            expected = known[key](value)
            if expected:
                raise BadInput(f"{key}: expected {expected}, got {value!r}")


def known_options(groups):
    """``{"model.dropout": function, …}`` of every option there is beside the names in `groups`.

    Each function returns None for a value that the option takes, else what it expects, in words.
    Raises BadInput for a name that fairseq does not register.
    """
    from fairseq import models, tasks
    from fairseq.dataclass.configs import FairseqConfig
    from fairseq.registry import REGISTRIES
    from hydra.conf import HydraConf

    declared = {group.name: group.type for group in fields(FairseqConfig)} | {"hydra": HydraConf}
    registries = {group: registry["registry"] for group, registry in REGISTRIES.items()}
    registries |= {"model": models.ARCH_MODEL_REGISTRY, "task": tasks.TASK_REGISTRY}
    known = {}
    for group, schema in declared.items():
        if group in registries and group in groups:
            registry, name = registries[group], groups[group].get("_name")
            if name not in registry:
                raise BadInput(
                    f"{group}._name: expected one that fairseq registers, got {name!r}"
                    + did_you_mean(str(name), registry)
                )
            known[f"{group}._name"] = lambda value: None
            schema = getattr(registry[name], "__dataclass", None)
            if schema is None and hasattr(registry[name], "add_args"):
                parser = argparse.ArgumentParser(add_help=False)
                registry[name].add_args(parser)
                for flag in parser._actions:
                    known[f"{group}.{flag.dest}"] = partial(expected_by_flag, flag)
        if is_dataclass(schema):
            empty = OmegaConf.structured(schema)
            for field in fields(schema):
                known[f"{group}.{field.name}"] = partial(expected_by_field, empty, field)
    return known


def expected_by_field(empty, field, value):
    """What a field of the structured config `empty` expects; None if it takes `value`."""
    try:
        taken = OmegaConf.merge(empty, {field.name: value})
    except OmegaConfBaseException:
        return in_words(field.type)
    return expected_range(field.name, field.default, OmegaConf.to_container(taken)[field.name])


def expected_by_flag(flag, value):
    """What an argparse flag expects; None if it takes `value`, which fairseq uses as it stands."""
    from fairseq.utils import eval_bool

    if value is None:
        return None
    if flag.choices:
        return None if value in flag.choices else f"one of {', '.join(map(str, flag.choices))}"
    kind = bool if flag.nargs == 0 or flag.type is eval_bool else flag.type or str
    if kind in KINDS:
        words, types = KINDS[kind]
        values = value if isinstance(value, list) and flag.nargs in ("+", "*") else [value]
        # For Python, True is a number.
        fits = all(
            isinstance(one, types) and isinstance(one, bool) == (kind is bool) for one in values
        )
        return expected_range(flag.dest, flag.default, value) if fits else words
    try:
        kind(str(value))
    except Exception:  # whatever a function of fairseq raises
        return f"what the flag {flag.option_strings[0]} takes"


# By how the names of options end.
COUNTS = ("coder_layers", "_dim", "_heads", "max_tokens", "batch_size", "update_freq")
SHARES = ("dropout", "layerdrop", "label_smoothing")


def expected_range(name, default, value):
    """The numbers that an option expects, in words; None if `value` is one of them or no number.

    Numbers are negative only where fairseq's default is, as that means "off", and counts 0
    likewise.
    """
    numbers = [
        n for n in (value if isinstance(value, list) else [value]) if type(n) in (int, float)
    ]
    if name.endswith(SHARES):
        return None if all(0 <= n <= 1 for n in numbers) else "0 to 1"
    default = default if type(default) in (int, float) else math.inf
    least = 1 if name.endswith(COUNTS) and default > 0 else 0
    return None if default < 0 or all(n >= least for n in numbers) else f"at least {least}"


def in_words(kind):
    """What a type in one of fairseq's dataclasses stands for."""
    inner = [part for part in typing.get_args(kind) if part is not type(None)]
    if typing.get_origin(kind) is typing.Union:
        return in_words(inner[0])
    if typing.get_origin(kind) in (list, tuple):
        return "a list, each " + in_words(inner[0])
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return f"one of {', '.join(kind.__members__)}"
    if is_dataclass(kind):
        return "some of " + ", ".join(field.name for field in fields(kind))
    return KINDS[kind][0] if kind in KINDS else "another type"


def did_you_mean(key, known):
    """The end of a message that names what of `known` is most like `key`, if anything is."""
    in_other_groups = [other for other in known if other.endswith("." + key.partition(".")[2])]
    cutoff = 0 if in_other_groups else 0.6
    near = difflib.get_close_matches(key, in_other_groups or known, n=1, cutoff=cutoff)
    return f"; did you mean {near[0]}?" if near else ""


# --- The run ---


def check_data(name, data):
    """Raise BadInput unless `data` is a folder of fairseq-preprocess."""
    if not list(data.glob("dict*.txt")):
        prepare = ROOT / f"scripts/prepare_{name.partition('/')[0]}.sh"
        how = f"make it with scripts/{prepare.name}" if prepare.exists() else "give --data"
        state = "one without dict*.txt" if data.is_dir() else "none"
        raise BadInput(f"--data: expected binarised data in {data}, got {state}; {how}")


def check_folder(save_dir, trained):
    """Raise BadInput if `save_dir` holds the run of another config than `trained`."""
    record = save_dir / "trained.yaml"
    if save_dir.exists() and not save_dir.is_dir():
        raise BadInput(f"--save-dir: expected a folder, got the file {save_dir}")
    if record.exists():
        before, here = (dict(flat(config)) for config in (OmegaConf.load(record), trained))
        for key in sorted((before.keys() | here.keys()) - MAY_CHANGE):
            if before.get(key) != here.get(key):
                raise BadInput(
                    f"--save-dir: expected a run of the same config in {save_dir}, got one with "
                    f"{key} {before.get(key)}, not {here.get(key)}; choose another folder"
                )
    elif list(save_dir.glob("*.pt")):
        raise BadInput(
            f"--save-dir: expected a folder of scripts/train.sh, got checkpoints of something "
            f"else in {save_dir}; choose another folder"
        )


def flat(config, prefix=""):
    """The pairs ``("model.dropout", 0.3)`` of a nested config."""
    for key, value in OmegaConf.to_container(config).items():
        if isinstance(value, dict):
            yield from flat(OmegaConf.create(value), f"{prefix}{key}.")
        else:
            yield prefix + key, value


def gpus():
    """The number of GPUs that PyTorch can use."""
    import torch

    return torch.cuda.device_count()


def choose_devices(args, recipe, config):
    """``(on_cpu, processes on this node)``; without --devices the most that share the batch.

    A dry run takes the given number of GPUs to be there. Raises BadInput if there are too few.
    """
    for option in ("devices", "nodes"):
        if (count := getattr(args, option)) is not None and count < 1:
            raise BadInput(f"--{option}: expected at least 1, got {count}")
    if args.cpu:
        return True, args.devices or 1
    if args.dry_run and args.devices:
        return False, args.devices
    found = gpus()
    if args.devices and args.devices > found:
        raise BadInput(
            f"--devices: expected at most the {found} GPUs of this machine, got {args.devices}"
            + ("; add --cpu for so many processes without a GPU" if found == 0 else "")
        )
    if args.devices or found == 0:
        return found == 0, args.devices or 1
    sharing = [n for n in range(1, found + 1) if shared_evenly(recipe, config, n * args.nodes)]
    return False, max(sharing, default=found)


def shared_evenly(recipe, config, processes):
    """Whether so many processes make up the recipe's batch, which is counted in tokens.

    Raises BadInput if those of the config are not.
    """
    if config.dataset.max_tokens is None:
        raise BadInput("dataset.max_tokens: expected a number, as the recipe's batch has, got null")
    return whole_batch(recipe) % (config.dataset.max_tokens * processes) == 0


def whole_batch(recipe):
    """The most tokens that an update of the recipe sees."""
    return (
        recipe.dataset.max_tokens
        * recipe.optimization.update_freq[0]
        * recipe.distributed_training.distributed_world_size
    )


def accumulation(recipe, config, processes):
    """Over how many steps each process accumulates gradients for the recipe's batch.

    Raises BadInput if the processes cannot share it evenly.
    """
    if shared_evenly(recipe, config, processes):
        return whole_batch(recipe) // (config.dataset.max_tokens * processes)
    steps, left = divmod(whole_batch(recipe), config.dataset.max_tokens)
    counts = [str(n) for n in range(1, 65) if steps % n == 0 and not left]
    share, uneven = divmod(whole_batch(recipe), processes)
    tokens = next((n for n in range(config.dataset.max_tokens, 99, -1) if share % n == 0), None)
    hints = [f"these fit: {', '.join(counts)}"] if counts else []
    if tokens and not uneven:
        hints.append(f"{processes} fit with dataset.max_tokens={tokens}")
    hints.append("optimization.update_freq=[N] sets another batch")
    raise BadInput(
        f"--devices: expected devices that share the batch of {whole_batch(recipe):,} tokens in "
        f"steps of {config.dataset.max_tokens:,}, got {processes}; {'; '.join(hints)}"
    )


def hydra_value(value):
    """`value` for Hydra's command line, quoted where it needs to be and is not."""
    value = str(value)
    if value[:1] in ("'", '"', "[", "{") or re.fullmatch(r"[\w./:@%+-]*", value):
        return value
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def plan(args):
    """What to run: ``(command, environment, folder, record of the run)``. Raises BadInput."""
    name, recipe = read_config(args.name)
    config = with_overrides(recipe, args.overrides)
    if args.overrides or not args.dry_run:
        check_options(config)
    on_cpu, devices = choose_devices(args, recipe, config)
    if args.nodes > 1 and not args.rendezvous:
        raise BadInput("--rendezvous: expected HOST[:PORT] with --nodes, got none")
    if args.restarts < 0:
        raise BadInput(f"--restarts: expected at least 0, got {args.restarts}")
    processes = devices * args.nodes

    benchmark, system = name.split("/")
    data = Path(args.data or ROOT / "data-bin" / benchmark).absolute()
    save_dir = Path(args.save_dir or ROOT / "checkpoints" / name).absolute()
    trained = OmegaConf.merge({"name": name}, config)
    if not args.dry_run:
        check_data(name, data)
        check_folder(save_dir, trained)

    options = {
        "common.user_dir": ROOT / "talk_fairseq",
        "common.tensorboard_logdir": save_dir / "tensorboard",
        "task.data": data,
        "checkpoint.save_dir": save_dir,
        "hydra.run.dir": save_dir,
        "distributed_training.distributed_world_size": processes,
    }
    if not any(re.match(r"\+*optimization\.update_freq=", given) for given in args.overrides):
        options["optimization.update_freq"] = [accumulation(recipe, config, processes)]
    precision = args.precision or ("fp32" if on_cpu else None)
    if on_cpu and precision == "fp16":
        raise BadInput("--precision: expected fp32 or bf16 on the CPU, got fp16")
    if precision:
        options["common.fp16"] = str(precision == "fp16").lower()
        options["common.bf16"] = str(precision == "bf16").lower()
    if on_cpu:
        options["common.cpu"] = "true"
        if processes > 1:
            # fairseq joins the processes before it imports the plugin, whose mend of this it lacks.
            options |= {
                "distributed_training.distributed_backend": "gloo",
                "distributed_training.distributed_init_method": "env://",
                "distributed_training.distributed_rank": "${oc.decode:${oc.env:RANK}}",
                "distributed_training.distributed_no_spawn": "true",
            }

    # Nodes with this id form one run: another may use the same HOST[:PORT].
    meeting_id = name.replace("/", ".") + "-" + hashlib.sha256(bytes(save_dir)).hexdigest()[:8]
    programs = Path(sys.executable).parent
    command = [programs / "fairseq-hydra-train"]
    if processes > 1 or args.restarts:
        host, _, port = (args.rendezvous or "").partition(":")
        meeting = (
            ["--standalone"]
            if args.nodes == 1
            else ["--nnodes", args.nodes, "--rdzv-backend", "c10d", "--rdzv-id", meeting_id]
            + ["--rdzv-endpoint", f"{host}:{port or 29500}"]
        )
        meeting += ["--max-restarts", args.restarts] if args.restarts else []
        command = [programs / "torchrun", *meeting, "--nproc-per-node", devices, *command]
    command += ["--config-dir", CONFIGS / benchmark, "--config-name", system]
    command += [f"++{key}={hydra_value(value)}" for key, value in options.items()]
    for override in args.overrides:
        key, _, value = override.lstrip("+").partition("=")
        command.append(f"++{key}={hydra_value(value)}")

    environment = {"PYTHONWARNINGS": "ignore"}  # fairseq calls much that PyTorch has deprecated
    if on_cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if args.restarts:
        # Else processes that start again look for each other where the dead ones listened.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return [str(word) for word in command], environment, save_dir, trained


def main(arguments=None):
    args = parse(arguments)
    try:
        command, environment, save_dir, trained = plan(args)
    except BadInput as error:
        print(f"train.sh: {error}", file=sys.stderr)
        return 2
    shown = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    shown += [shlex.quote(word) for word in command]
    print(re.sub(r" (?='?\+\+)", r" \\\n    ", " ".join(shown)), flush=True)
    if args.dry_run:
        return 0
    save_dir.mkdir(parents=True, exist_ok=True)
    write_whole(save_dir / "trained.yaml", OmegaConf.to_yaml(trained))
    os.execve(command[0], command, {**os.environ, **environment})
