"""Read the logs of fairseq's trainings: the numbers of each run over updates and wall-clock."""

import contextlib
import json
import math
import os
import re
from datetime import datetime
from pathlib import Path

_TIME = re.compile(r"\[?(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?)")
_INTERVAL = re.compile(r"epoch \d+:\s+\d+ / \d+ (.*=.*)")
_EPOCH = re.compile(r"epoch \d+ \| (?:valid on '([^']+)' subset \| )?(.+)")
_JSON = re.compile(r'\{"epoch": .*\}')
_OPTIONS = re.compile(r"\{'_name': None, 'common': .*\}")
_ARCH = r"(?:'model': \{'_name': |\barch=)'(\w+)'"
_LOADED = re.compile(r"Loaded checkpoint (.+) \(epoch \d+ @ (\d+) updates\)")
_SAVED = re.compile(r"Saved checkpoint .+ \(epoch \d+ @ (\d+) updates")


class _Run:
    """A run while its log is read; `curves` has an entry list for each tag of fairseq."""

    def __init__(self):
        self.arch, self.folders, self.curves = None, set(), {}
        self.clock, self.clocks = 0.0, {0: 0.0}  # of now, and of numbers of updates

    def resume(self, updates):
        """Forget what came after `updates`, and set the clock to what it was there."""
        for tag, entries in self.curves.items():
            self.curves[tag] = [entry for entry in entries if entry["updates"] <= updates]
        self.clocks = {at: clock for at, clock in self.clocks.items() if at <= updates}
        self.clock = self.clocks[max(self.clocks)]

    def add(self, tag, entry):
        entries = self.curves.setdefault(tag, [])
        while entries and entries[-1]["updates"] >= entry["updates"]:
            entries.pop()  # the same once more
        entries.append(entry)

    def finished(self):
        """Return the run as `read_log` does."""
        curves = {tag: entries for tag, entries in self.curves.items() if entries}
        intervals, epochs = curves.pop("train_inner", []), curves.pop("train", [])
        return {"train": intervals or epochs, "valid": [], **curves}


def statistics(line):
    """Return ``(tag, {name: number})`` that fairseq logged in `line`; None for another line.

    The formats are simple and json (``--log-format``). Tags are "train_inner" for an interval of
    training, "train" for an epoch, and the name of the subset for a validation. The number of
    updates is always there: "num_updates".
    """
    if found := _JSON.search(line):
        try:
            logged = json.loads(found[0])
        except ValueError:
            return None
        # At an end of an epoch or of a validation, names begin with what they are of.
        tag = next((k.removesuffix("_num_updates") for k in logged if "_num_updates" in k), None)
        pairs = [(k.removeprefix(f"{tag}_"), value) for k, value in logged.items()]
        tag = tag or "train_inner"
    elif found := _INTERVAL.search(line):
        tag, pairs = "train_inner", [pair.partition("=")[::2] for pair in found[1].split(", ")]
    elif found := _EPOCH.search(line):
        tag = found[1] or "train"
        pairs = [pair.partition(" ")[::2] for pair in found[2].split(" | ")]
    else:
        return None
    numbers = {}
    for name, value in pairs:
        with contextlib.suppress(TypeError, ValueError):  # a text
            numbers[name] = float(value)
    return (tag, numbers) if "num_updates" in numbers else None


def _read(path):
    """Return the `_Run` of each training in the log `path`, in the order of their beginnings."""
    runs, run, options, began, base = [], None, (None, None), None, 0.0
    text = path.read_text(encoding="utf-8", errors="replace")
    for line in re.split(r"[\r\n]+", text):  # a progress bar ends with \r
        found = _TIME.match(line)
        now = datetime.fromisoformat(found[1]).timestamp() if found else None
        if _OPTIONS.search(line):
            named = re.search(r"'save_dir': '([^']*)'", line), re.search(_ARCH, line)
            options, began = [found and found[1] for found in named], None
        elif "No existing checkpoint found" in line or (found := _LOADED.search(line)):
            updates = 0 if "No existing" in line else int(found[2])
            folder, arch = options
            same = [other for other in runs if folder in other.folders]
            if updates and not same:
                source = os.path.dirname(found[1])
                same = [other for other in runs if source in other.folders] or runs[-1:]
            if same:
                run = same[-1]
            else:
                run = _Run()
                runs.append(run)
            run.resume(updates)
            run.arch = arch or run.arch
            run.folders |= {folder} - {None}
            began, base = None, run.clock
        elif "begin training epoch" in line and began is None:
            began = now
        elif run and (found := _SAVED.search(line)) and now and began:
            run.clocks[int(found[1])] = base + max(0.0, now - began)
        elif logged := statistics(line):
            tag, numbers = logged
            if run is None:  # a log that lacks its beginning
                run = _Run()
                runs.append(run)
            if began is None and now is not None:
                began = now - numbers.get("wall", 0.0)
            updates = int(numbers.pop("num_updates"))
            # Without times, fairseq's own clock, which stands still in a resumed session.
            seconds = numbers.get("wall") or math.nan
            if now is not None:
                seconds = run.clock = max(run.clock, base + now - began)
                run.clocks[updates] = run.clock
            if "ppl" not in numbers and "loss" in numbers:
                bits = numbers.get("nll_loss", numbers["loss"])
                numbers["ppl"] = 2**bits if bits < 1000 else math.inf
            run.add(tag, {**numbers, "updates": updates, "seconds": seconds})
    return [run for run in runs if any(run.curves.values())]


def read_runs(path):
    """Return the trainings in the log `path` (a file, or a folder with one): ``{name: run}``.

    A run is as `read_log` returns it. Names are the archs where there are several runs. A session
    that resumes a checkpoint belongs to the run that saved it; one that begins anew in the folder
    of an earlier one replaces that.

    Raises ValueError if there is no log or nothing of a training in it.
    """
    path = Path(path)
    if path.is_dir():
        logs = sorted({*path.glob("*.log"), *path.glob("log.txt")})
        found = [(log, runs) for log in logs if (runs := _read(log))]
        if len(found) != 1:
            got = " and ".join(log.name for log, _ in found) or "none"
            raise ValueError(f"{path}: expected one log of fairseq-train in the folder, got {got}")
        runs = found[0][1]
    elif path.is_file():
        runs = _read(path)
        if not runs:
            raise ValueError(
                f"{path}: expected a log of fairseq-train in the formats simple or json, got none "
                "of its statistics"
            )
    else:
        raise ValueError(f"{path}: expected a log or a folder with one, got no such file")
    named = {}
    for number, run in enumerate(runs, 1):
        name = run.arch or f"run {number}"
        named[name if name not in named else f"{name} {number}"] = run.finished()
    return named


def read_log(path):
    """Return the one training in the log `path` (a file, or a folder with one).

    It is ``{"train": entries, "valid": entries}`` and, under its name, each further subset that was
    validated on. An entry is a dictionary of all numbers that fairseq logged at one point, by
    fairseq's names: "loss", "ppl", "lr", "bleu", …; beside these, always,

    - "updates": how many there had been. They rise from entry to entry.
    - "seconds": wall-clock since the training began, validating and saving included, pauses between
      sessions not. From the times of the lines; where lines have none, fairseq's "wall", or nan.

    Training is as of each log interval, or of each epoch where no interval was logged.

    Raises ValueError if there is no log, nothing of a training in it, or several trainings.
    """
    runs = read_runs(path)
    if len(runs) > 1:
        raise ValueError(f"{path}: expected the log of one run, got those of {', '.join(runs)}")
    return next(iter(runs.values()))
