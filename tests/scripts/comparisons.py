"""What the tests of scripts/compare.sh share: played commands and made-up results."""

import json
import math
import os
import shutil
from pathlib import Path

from conftest import status_of
from pipeline.common.command import Failed
from pipeline.common.fairseq import Bar, Commands
from pipeline.compare import sweep
from pipeline.compare.report import table
from pipeline.compare.scores import SCORES
from pipeline.recipes import average


def dictionaries(folder, languages, words):
    """A folder with dictionaries for the tasks, as of binarised data."""
    folder.mkdir()
    for name in [f"dict.{language}.txt" for language in languages] + ["dict.txt"]:
        (folder / name).write_text("".join(f"word{n} 1\n" for n in range(words)))
    return folder


def refusal(capsys, *arguments):
    """The one line with which a command stops that must not start."""
    assert status_of(sweep.main, *arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    return printed.err


class Played:
    """In place of fairseq: writes what its commands write, and notes what was run."""

    def __init__(self, monkeypatch, verses):
        self.ran, self.stop_at, self.broken, self.nan = [], None, None, None
        self.verses, self.why = verses, "RuntimeError: no"
        self.best_warmup, self.best_rates = None, {}  # with other warm-ups, a rate of 2e-3
        monkeypatch.setattr(Commands, "run", lambda *a, **k: self.run(*a, **k))
        monkeypatch.setattr(average, "average_checkpoints", str)
        monkeypatch.setattr(average, "save", lambda paths, to: to.write_text(paths))
        monkeypatch.setattr(sweep, "measure_speeds", self.measure)

    def prepare(self, output):
        os.mkdir(output)
        for split in ("valid", "test"):
            shutil.copy(self.verses / f"{split}.en", output)

    def run(self, commands, command, log, read=None, title=""):
        command = [str(word) for word in command]
        name = os.path.basename(command[0])
        if name == "fairseq-train":
            rate = command[command.index("--lr") + 1]
            checkpoints = Path(command[command.index("--save-dir") + 1])
            name = f"train {checkpoints.parents[2].name}"  # SYSTEM/RATE/SEED/checkpoints
            if rate != "2e-3":
                name += f" at {rate}"
            warmup = int(command[command.index("--warmup-updates") + 1])
            if "_" in checkpoints.parents[1].name:
                name += f" with {warmup}"
            end = command[command.index("--max-update") + 1]
            self.restored = sorted(path.name for path in checkpoints.glob("*.pt"))
        self.ran.append(name)
        log.parent.mkdir(parents=True, exist_ok=True)
        if name == self.broken:
            raise Failed(f"fairseq-train failed; its log ends with\n{self.why}")
        if name == "python":
            self.prepare(command[command.index("--output") + 1])
        elif name == "fairseq-preprocess":
            os.mkdir(command[command.index("--destdir") + 1])
        elif name.startswith("train"):
            checkpoints.mkdir(parents=True, exist_ok=True)
            for number in ("1_2", "last"):
                (checkpoints / f"checkpoint_{number}.pt").touch()
            if name == self.stop_at:
                raise KeyboardInterrupt
            (checkpoints / f"checkpoint_1_{end}.pt").touch()
            with open(log, "a") as file:
                file.write("INFO | num. shared model params: 1,234 (num. trained: 1,234)\n")
                for updates in (2, 4):
                    best = self.best_rates.get(warmup, 2e-3)
                    loss = 9 - updates + abs(1e3 * best - 1e3 * float(rate))
                    loss += abs((self.best_warmup or warmup) - warmup) / 1e3
                    file.write(valid_line(updates, math.nan if self.nan in (name, "all") else loss))
        else:
            folder = next(word for word in command if word.endswith("generated.partial"))
            os.mkdir(folder)
            lines = (self.verses / "test.en").read_text().splitlines()
            if "transformer" in folder:
                lines = [line.replace("the", "a") for line in lines]
            with open(f"{folder}/generate-test.txt", "w") as file:
                file.writelines(f"D-{n}\t-0.1\t{line}\n" for n, line in enumerate(lines))
            Bar(read, title)("INFO:fairseq.logging.progress_bar::      3 / 4 wps=204\n")

    def measure(self, args, words, checkpoints):
        self.ran.append("measure")
        if self.broken == "measure":
            raise AssertionError("sentences lengths")
        assert list(words) == list(checkpoints) and all(
            path.exists() for path in checkpoints.values()
        )
        return {name: speed(0.5 if name == "talkconv" else 1.0, args.turns) for name in words}


def valid_line(updates, loss):
    """What fairseq logs of a validation."""
    numbers = {"valid_loss": loss, "valid_ppl": 2**loss, "valid_num_updates": updates}
    logged = {"epoch": 1, **{name: str(number) for name, number in numbers.items()}}
    return f"2026-01-01 00:00:0{updates} | INFO | valid | {json.dumps(logged)}\n"


def speed(seconds, turns=2):
    return {
        "training": {"turns": [seconds] * turns, "seconds": seconds, "memory": 2**20},
        "generation": {"turns": [2 * seconds, seconds], "seconds": seconds, "memory": None},
        "seconds_per_update": seconds,
        "operations_per_update": 2e10 * seconds,
        "training_tokens_per_second": 800 / seconds,
        "generated_sentences_per_second": 10 / seconds,
    }


def arguments(verses, out, *others):
    return [
        "--data", str(verses), "--out", str(out), "--systems", "talkconv,transformer",
        "--updates", "4", "--lr", "2e-3", "--jobs", "1", *others,
    ]  # fmt: skip


def synthetic(task="mt", seeds=2):
    """Results of two systems; TaLK is twice as fast and has the second best score."""
    systems = {}
    for number, (name, seconds) in enumerate((("talkconv", 0.5), ("transformer", 1.0))):
        validation = [{"updates": n, "loss": 9 - n / 100 + number, "ppl": 40} for n in (100, 200)]
        scores = {SCORES[task]: 20.0 + number, "perplexity_per_word": 80}
        scores |= {"interval": [19, 21 + number], "p": 0.04 if number else None}
        systems[name] = {
            "parameters": 4_600_000 + number,
            "score": 20.5 + number,
            "interval": [19, 21 + number],
            "p": 0.04 if number else None,
            "perplexity_per_word": 80.0,
            "rouge_1": 31.0,
            "rouge_2": 11.0,
            "seeds": {
                str(seed): {**scores, "validation": validation} for seed in range(1, seeds + 1)
            },
            "speed": speed(seconds),
        }
    systems["broken"] = {"seeds": {}, "error": "ImportError: no such thing", "speed": None}
    results = {"task": task, "systems": systems, "updates": 200, "test": {"sentences": 1053}}
    return results | {
        "machine": "a machine",
        "signature": "nrefs:1",
        "baseline": "talkconv",
        "reference": "talkconv",
        "preset": "cpu",
    }


def cells(results, name):
    (line,) = (line for line in table(results) if line.startswith(f"| {name} "))
    return [cell.strip() for cell in line.strip("| ").split("|")]
