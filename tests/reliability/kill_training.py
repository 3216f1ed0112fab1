#!/usr/bin/env python3
"""Kill a training run over and over, and see that nothing is lost.

    kill_training.py                    # 50 kills of one process
    kill_training.py --processes 2      # one of the two, whichever
    kill_training.py --kills 500 --seed 2

A small model trains on verses and saves after every update. It is killed (SIGKILL) at random
moments, every second time while a checkpoint is being written, and started again in the same
folder. After each kill

- every file `*.pt` is a whole checkpoint;
- the run goes on from one that is at most one update older than what it had done.

At the end, the parameters, their moving averages and the optimizer's state are, bit for bit, those
of a run that was left alone and saved only once. The status is 0 if all of this held, else 1.
"""

import argparse
import contextlib
import gzip
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from itertools import islice
from pathlib import Path

import fairseq_cli.preprocess
import fairseq_cli.train  # before talk_fairseq, which patches it
import torch
import torch._dynamo  # the first update would, in every process
from fairseq import checkpoint_utils, options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.trainer import Trainer

from talk_fairseq.checkpoint_files import read_checkpoint

ROOT = Path(__file__).resolve().parents[2]
MODEL = (
    "--arch talkconv --encoder-layers 1 --decoder-layers 1 --encoder-max-left 3 "
    "--encoder-max-right 2 --decoder-max-left 3 --encoder-embed-dim 32 --decoder-embed-dim 32 "
    "--encoder-ffn-embed-dim 32 --decoder-ffn-embed-dim 32 --encoder-attention-heads 4 "
    "--decoder-attention-heads 4 --share-all-embeddings --dropout 0.2 --attention-dropout 0.1 "
    "--offset-dropout 0.1"
).split()
TRAINING = (
    "--cpu --optimizer adam --lr 0.005 --lr-scheduler inverse_sqrt --warmup-updates 4 "
    "--max-tokens 400 --update-freq 2 --num-workers 0 --store-ema --ema-decay 0.9 "
    "--log-format none --validate-interval 1000"
).split()
MOST_UPDATES = 3  # between two kills, so that the run does not end before the last one


def train(data, save_dir, *flags):
    """Run fairseq-train with these flags in this process."""
    parser = options.get_training_parser()
    words = [str(word) for word in (data, "--save-dir", save_dir, *flags)]
    args = options.parse_args_and_arch(parser, words)
    if hasattr(checkpoint_utils.save_checkpoint, "best"):  # of an earlier run in this process
        del checkpoint_utils.save_checkpoint.best
    fairseq_cli.train.main(convert_namespace_to_omegaconf(args))


def train_together(rank, processes, meeting, *arguments):
    """`train` as one of several processes that meet at the file `meeting`, which they make."""
    if processes == 1:
        return train(*arguments)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=processes
    )
    return train(
        *arguments, "--distributed-world-size", processes, "--distributed-rank", rank,
        "--distributed-init-method", f"file://{meeting}", "--distributed-no-spawn",
    )  # fmt: skip


def fork(log, function, *arguments):
    """The id of a process that calls `function` and appends what it prints to `log`."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        function(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def fork_all(folder, save_dir, processes, *flags):
    """The processes of one run in `save_dir`, as their ids."""
    meeting = Path(tempfile.mkdtemp(dir=folder)) / "meeting"
    arguments = [folder / "bin", save_dir, *MODEL, *TRAINING, *flags]
    return [
        fork(folder / "log.txt", train_together, rank, processes, meeting, *arguments)
        for rank in range(processes)
    ]


def wait_for(process):
    """The exit status of a process, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def finish(processes, folder):
    """Wait for a run. Raises SystemExit if it failed."""
    if any([wait_for(process) for process in processes]):
        raise SystemExit(f"training failed: see {folder / 'log.txt'}")


def prepare(folder):
    """A binarised corpus of verses in `folder`: 120 to train on and 8 to validate."""
    for split, lines in (("train", 120), ("valid", 8)):
        for language in ("es", "en"):
            with gzip.open(ROOT / f"data/bible-es-en/{split}.{language}.gz", "rt") as text:
                (folder / f"{split}.{language}").write_text("".join(islice(text, lines)))
    parser = options.get_preprocessing_parser()
    words = ["--source-lang=es", "--target-lang=en", "--joined-dictionary", "--nwordssrc=500"]
    words += [f"--{split}pref={folder / split}" for split in ("train", "valid")]
    fairseq_cli.preprocess.main(parser.parse_args([*words, f"--destdir={folder / 'bin'}"]))


def last_update(save_dir):
    """The number of updates in ``checkpoint_last.pt``, 0 if there is none.

    Raises ValueError unless every checkpoint in the folder is whole.
    """
    paths = save_dir.glob("*.pt")
    updates = {
        path.name: read_checkpoint(path)["optimizer_history"][-1]["num_updates"] for path in paths
    }
    return updates.get("checkpoint_last.pt", 0)


def in_bytes(tensor):
    """The bytes of a tensor."""
    return tensor.contiguous().flatten().view(torch.uint8)


def same(one, other):
    """Whether two nested states hold the same bits, of zeros and NaN too."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        kinds = [(tensor.dtype, tensor.shape) for tensor in (one, other)]
        return kinds[0] == kinds[1] and torch.equal(*map(in_bytes, (one, other)))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def what_counts(path):
    """What training goes on from: the model, its moving average, the optimizer and the place."""
    state = read_checkpoint(path)
    extra = state["extra_state"]
    return {
        "model": state["model"],
        "moving average": extra.get("ema"),
        "optimizer": state["last_optimizer_state"],
        "place": extra["train_iterator"],
        "schedule": state["optimizer_history"][-1],
    }


def unfinished(save_dir):
    """``{(name, time of the last change), …}`` of the files in a folder that are being written."""
    found = set()
    for path in save_dir.glob("*.tmp"):
        with contextlib.suppress(FileNotFoundError):  # it is whole by now
            found.add((path.name, path.stat().st_mtime_ns))
    return found


def wait_for_moment(save_dir, process, numbers, writing, before):
    """Wait until it is time to kill `process`; False if it ended before.

    That is after up to `MOST_UPDATES` checkpoints, and then a random moment, or one while the next
    checkpoint is `writing`; what was `unfinished` `before` the process began is not.
    """

    def saved():
        with contextlib.suppress(FileNotFoundError):
            return (save_dir / "checkpoint_last.pt").stat().st_ino

    left, last, since, interval = numbers.randint(0, MOST_UPDATES), saved(), time.time(), 0.5
    while left:
        if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return False
        if (here := saved()) != last:
            last, left = here, left - 1
            since, interval = time.time(), time.time() - since
        time.sleep(0.0005)
    if writing:
        part = numbers.choice((".pt.tmp", "last.pt.tmp"))
        while not any(name.endswith(part) for name, _ in unfinished(save_dir) - before):
            if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return False
        time.sleep(numbers.choice((0, numbers.uniform(0, 0.002))))
    else:
        time.sleep(numbers.uniform(0, min(interval, 2)))
    return True


def campaign(folder, kills, processes, seed):
    """Kill and go on; returns the kills survived, those during a save, and what is not the same."""
    numbers = random.Random(seed)
    updates = (MOST_UPDATES + 1) * kills + 5
    length = ["--max-update", updates]
    finish([fork(folder / "log.txt", prepare, folder)], folder)
    alone = [*length, "--no-epoch-checkpoints", "--save-interval", 10**6]
    print(f"a run of {updates} updates that is left alone", flush=True)
    finish(fork_all(folder, folder / "alone", processes, *alone), folder)

    done = multiprocessing.RawValue("q", 0)
    set_num_updates = Trainer.set_num_updates

    def count(trainer, number):
        set_num_updates(trainer, number)
        done.value = number

    Trainer.set_num_updates = count
    killed = folder / "killed"
    killed.mkdir()
    often = [*length, "--save-interval-updates", 1, "--keep-interval-updates", 2]
    often += ["--keep-last-epochs", 2]
    survived = saving = 0
    for number in range(kills):
        before = unfinished(killed)  # by the run that was killed last
        run = fork_all(folder, killed, processes, *often)
        victim = numbers.randrange(processes)
        # Rank 0 writes; where another is to die, rank 0 says when.
        if not wait_for_moment(killed, run[0], numbers, number % 2 == 0, before):
            raise SystemExit(f"the run ended by itself: see {folder / 'log.txt'}")
        os.kill(run[victim], signal.SIGKILL)
        wait_for(run.pop(victim))
        for process in run:  # as torchrun ends the others
            os.kill(process, signal.SIGTERM)
            wait_for(process)
        begun = sorted(name for name, _ in unfinished(killed) - before)
        saving += bool(begun)
        try:
            saved = last_update(killed)
        except ValueError as error:
            print(f"kill {number + 1}: {error}", flush=True)
            break
        lost = done.value - saved
        survived += 0 <= lost <= 1
        print(
            f"kill {number + 1}: update {done.value}, goes on from {saved}"
            + (f", was writing {', '.join(begun)}" if begun else ""),
            flush=True,
        )
    finish(fork_all(folder, killed, processes, *often), folder)
    Trainer.set_num_updates = set_num_updates
    ends = [what_counts(folder / name / "checkpoint_last.pt") for name in ("alone", "killed")]
    different = [name for name in ends[0] if not same(ends[0][name], ends[1][name])]
    left = sorted(path.name for path in killed.glob("*.tmp"))
    return survived, saving, different + left


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50, metavar="N", help="default: 50")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument("--seed", type=int, default=1, help="of the moments (default: 1)")
    args = parser.parse_args(arguments)
    for option in ("kills", "processes"):
        if getattr(args, option) < 1:
            parser.error(f"--{option}: expected at least 1, got {getattr(args, option)}")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        try:
            survived, saving, different = campaign(
                Path(folder), args.kills, args.processes, args.seed
            )
        except SystemExit:
            print((Path(folder) / "log.txt").read_text()[-3000:], file=sys.stderr)
            raise
    print(
        f"kills survived of kills done: {survived} of {args.kills}, {saving} of them during a save"
    )
    print("not as in the run left alone:", ", ".join(different) or "nothing")
    return 0 if survived == args.kills and not different else 1


if __name__ == "__main__":
    sys.exit(main())
