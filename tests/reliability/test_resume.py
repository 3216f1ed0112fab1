"""A run that is stopped, wherever, and goes on ends bit for bit as one that was never stopped.

Runs are processes forked from one that has imported fairseq, which is this file run by itself; see
kill_training.py, which also kills runs while they save.
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
KILL = [sys.executable, "-W", "ignore", ROOT / "tests/reliability/kill_training.py"]


def stop_and_go_on(folder, processes, updates, stops, *flags):
    """Train with `flags`: at once, saving after every update, and from what was saved at `stops`.

    Returns the updates at which epochs ended, and for each run but the first what of its end is
    not as that of the first; `stops` may be "all".
    """
    import kill_training as runs

    def run(name, *more):
        length = ["--max-update", updates]
        runs.finish(runs.fork_all(folder, folder / name, processes, *length, *flags, *more), folder)
        end = runs.what_counts(folder / name / "checkpoint_last.pt")
        return {key: runs.same(end[key], alone[key]) for key in end} if alone else end

    runs.torch.set_num_threads(1)
    runs.finish([runs.fork(folder / "log.txt", runs.prepare, folder)], folder)
    alone = None
    alone = run("alone", "--save-interval", 1000, "--no-epoch-checkpoints")
    same = {"often": run("often", "--save-interval-updates", 1)}
    saved = {
        runs.read_checkpoint(path)["optimizer_history"][-1]["num_updates"]: path
        for path in (folder / "often").glob("checkpoint*.pt")
        if path.stem not in ("checkpoint_last", "checkpoint_best")
    }
    for stop in sorted(saved) if stops == "all" else map(int, stops.split(",")):
        (folder / str(stop)).mkdir()
        shutil.copy(saved[stop], folder / str(stop) / "checkpoint_last.pt")
        same[stop] = run(str(stop))
    epochs = [update for update, path in saved.items() if "_" not in path.stem]
    different = {name: [key for key in end if not end[key]] for name, end in same.items()}
    return {"epochs": sorted(epochs), "different": different}


def stopped(folder, processes, updates, stops, *flags):
    """What `stop_and_go_on` returns, from a process that has only imported."""
    arguments = [str(word) for word in (folder, processes, updates, stops, *flags)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, *arguments], capture_output=True, text=True
    )
    log = folder / "log.txt"
    assert done.returncode == 0, done.stderr[-2000:] + (log.read_text() if log.exists() else "")
    return json.loads(done.stdout.splitlines()[-1])


def nothing_differs(found, stops):
    return found["different"] == {"often": []} | {str(stop): [] for stop in stops}


# The defaults of kill_training.py: dropout, gradients of two batches an update, moving averages.
WORKERS = ["--num-workers", "2"]


@pytest.fixture
def runs():
    """The script as a module of this process, which is not to train."""

    import kill_training  # imports the plugin, and the file as it is run must not yet

    return kill_training


def test_the_same_bits(runs):
    numbers = torch.tensor([0.0, math.nan, 1.5])

    def state(tensor):
        return {"layers": [tensor, {"step": 3}], "flag": torch.tensor(True)}

    assert runs.same(state(numbers), state(numbers.clone()))
    assert runs.same(numbers, numbers.repeat_interleave(2)[::2])
    minus = torch.tensor([-0.0, math.nan, 1.5])
    for other in (minus, numbers.double(), numbers[None], numbers.tolist(), None):
        assert not runs.same(state(numbers), state(other))
        assert not runs.same(state(other), state(numbers))


def test_what_an_earlier_run_left_unfinished_is_not_being_written(runs, tmp_path):
    left, begun = tmp_path / "checkpoint_last.pt.tmp", tmp_path / "checkpoint_1_2.pt.tmp"
    left.touch()
    before = runs.unfinished(tmp_path)
    assert [name for name, _ in before] == [left.name] and not runs.unfinished(tmp_path) - before
    begun.touch()
    assert [name for name, _ in runs.unfinished(tmp_path) - before] == [begun.name]
    os.utime(left, ns=(0, 0))  # written anew
    assert len(runs.unfinished(tmp_path) - before) == 2


def test_stopped_anywhere(tmp_path):
    """During the first epoch and later ones, at their ends, and after the last update."""
    stops = [1, 6, 8, 12, 14]
    found = stopped(tmp_path, 1, 14, ",".join(map(str, stops)), *WORKERS)
    assert found["epochs"] == [6, 12]
    assert nothing_differs(found, stops)


@pytest.mark.long
def test_two_processes(tmp_path):
    stops = [4, 5]
    found = stopped(tmp_path, 2, 7, "4,5", "--update-freq", "2")
    assert found["epochs"] == [3, 6]
    assert nothing_differs(found, stops)


OTHERS = {
    "all": [],
    "one batch an update": ["--update-freq", "1"],
    "several numbers of batches": ["--update-freq", "1,3,2"],
    "cosine": ["--lr-scheduler", "cosine", "--warmup-updates", "2"],
    "fixed": ["--lr-scheduler", "fixed", "--force-anneal", "2", "--lr-shrink", "0.5"],
    "polynomial_decay": ["--lr-scheduler", "polynomial_decay", "--total-num-update", "20"],
    "nag": ["--optimizer", "nag", "--momentum", "0.9", "--clip-norm", "0.1"],
    "adafactor": ["--optimizer", "adafactor"],
    "label smoothing": ["--criterion", "label_smoothed_cross_entropy", "--label-smoothing", "0.1"],
    "R-Drop": ["--criterion", "label_smoothed_cross_entropy_with_rdrop", "--rdrop-alpha", "5"],
    "a curriculum": ["--curriculum", "2"],
    "layers dropped": [
        *("--encoder-layerdrop", "0.3", "--decoder-layerdrop", "0.3"),
        *("--ddp-backend", "legacy_ddp"),
    ],
    "a buffer of none": ["--data-buffer-size", "0"],
    "a validation seed": ["--fixed-validation-seed", "7"],
    "batches made anew": ["--update-epoch-batch-itr", "True"],
}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("name", OTHERS)
def test_other_ways_to_train(name, processes, tmp_path):
    found = stopped(tmp_path, processes, 16, "all", *WORKERS, *OTHERS[name])
    assert len(found["epochs"]) >= 1
    assert nothing_differs(found, range(1, 17))


def kill(*arguments):
    done = subprocess.run([*KILL, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.endswith("not as in the run left alone: nothing\n")
    return re.search(r"kills survived of kills done: (\d+) of (\d+), (\d+) of them", done.stdout)


@pytest.mark.long
def test_six_kills():
    survived, done, saving = map(int, kill("--kills", 6).groups())
    assert survived == done == 6 and saving >= 1


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_fifty_kills(processes):
    survived, done, saving = map(int, kill("--processes", processes).groups())
    # Of two processes, half of the kills strike the one that does not write.
    assert survived == done == 50 and saving >= 15 // processes


if __name__ == "__main__":
    folder, processes, updates, stops, *flags = sys.argv[1:]
    print(json.dumps(stop_and_go_on(Path(folder), int(processes), updates, stops, *flags)))
