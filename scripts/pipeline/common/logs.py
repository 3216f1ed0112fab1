"""Read what fairseq wrote: its trainings' numbers over updates and wall-clock, and hypotheses."""

import contextlib
import json
import math
import re
from datetime import datetime
from pathlib import Path

from pipeline.common.files import read_lines

_TIME = re.compile(r"\[?(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?)")
_INTERVAL = re.compile(r"epoch \d+:\s+\d+ / \d+ (.*=.*)")
_EPOCH = re.compile(r"epoch \d+ \| (?:valid on '([^']+)' subset \| )?(.+)")
_JSON = re.compile(r'\{"epoch": .*\}')
_LOADED = re.compile(r"No existing checkpoint found|Loaded checkpoint .+ @ (\d+) updates\)")
_SAVED = re.compile(r"Saved checkpoint .+ \(epoch \d+ @ (\d+) updates")


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
    """Return the run in a file as of `read_runs`, or None where there is nothing of a training."""
    curves, clocks, clock, began, base = {}, {0: 0.0}, 0.0, None, 0.0
    text = path.read_text(encoding="utf-8", errors="replace")
    for line in re.split(r"[\r\n]+", text):  # a progress bar ends with \r
        found = _TIME.match(line)
        now = datetime.fromisoformat(found[1]).timestamp() if found else None
        if found := _LOADED.search(line):
            # A session begins: what came after its checkpoint is forgotten, and the clock is set.
            at = int(found[1] or 0)
            for tag, entries in curves.items():
                curves[tag] = [entry for entry in entries if entry["updates"] <= at]
            clocks = {updates: clock for updates, clock in clocks.items() if updates <= at}
            base = clock = clocks[max(clocks)]
            began = None
        elif "begin training epoch" in line and began is None:
            began = now
        elif (found := _SAVED.search(line)) and now and began:
            clocks[int(found[1])] = base + max(0.0, now - began)
        elif logged := statistics(line):
            tag, numbers = logged
            if began is None and now is not None:
                began = now - numbers.get("wall", 0.0)
            updates = int(numbers.pop("num_updates"))
            # Without times, fairseq's own clock, which stands still in a resumed session.
            seconds = numbers.get("wall") or math.nan
            if now is not None:
                seconds = clock = clocks[updates] = max(clock, base + now - began)
            entries = curves.setdefault(tag, [])
            while entries and entries[-1]["updates"] >= updates:
                entries.pop()  # the same once more
            entries.append({**numbers, "updates": updates, "seconds": seconds})
    curves = {tag: entries for tag, entries in curves.items() if entries}
    intervals, epochs = curves.pop("train_inner", []), curves.pop("train", [])
    run = {"train": intervals or epochs, "valid": [], **curves}
    return run if any(run.values()) else None


def read_runs(path):
    """Return the trainings at `path`, a log or a folder with one: ``{name: run}``.

    The folder of a quick start may have several, in ``training/NAME/train.log``. A run is
    ``{"train": entries, "valid": entries}`` and, under its name, each further subset that was
    validated on. An entry is a dictionary of all numbers that fairseq logged at one point, by
    fairseq's names: "loss", "ppl", "lr", "bleu", …; beside these, always,

    - "updates": how many there had been. They rise from entry to entry.
    - "seconds": wall-clock since the training began, validating and saving included, pauses between
      sessions not. From the times of the lines; where lines have none, fairseq's "wall", or nan.

    Training is as of each log interval, or of each epoch where no interval was logged. A session
    that resumes a checkpoint goes on from there, and one that begins anew replaces what was before.

    Raises ValueError if there is no log, no training in it, or several in the folder itself.
    """
    path = Path(path)
    logs = [path] if path.is_file() else [*path.glob("*.log"), *path.glob("log.txt")]
    runs = {log.name: run for log in sorted(logs) if (run := _read(log))}
    if len(runs) > 1:
        raise ValueError(f"{path}: expected one log of fairseq-train, got {' and '.join(runs)}")
    logs = [] if runs else sorted(path.glob("training/**/train.log"))
    runs |= {log.parent.name: run for log in logs if (run := _read(log))}
    if not runs:
        wanted = "of fairseq-train in the formats simple or json, or a folder with one"
        raise ValueError(f"{path}: expected a log {wanted}, got none")
    return runs


def generated_file(path):
    """Return `path` if it is a file, or the ``generate-SPLIT.txt`` of a ``--results-path``.

    Raises ValueError if there is none or there are several.
    """
    found = sorted(path.glob("generate-*.txt")) if path.is_dir() else [path]
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise ValueError(f"{path}: expected one generate-*.txt, got {names}")
    return found[0]


def lines_of_kind(lines, kind):
    """Return ``{sentence number: text}`` of the lines of one kind.

    That is "S" (source), "T" (target), "H" (hypothesis as tokens) or "D" (detokenised). Of several
    hypotheses of a sentence the first counts, which is the best.
    """
    score = r"[^\t]*\t" if kind in "HD" else ""
    found = {}
    for line in lines:
        if match := re.fullmatch(rf"{kind}-(\d+)\t{score}(.*)", line):
            found.setdefault(int(match[1]), match[2])
    return found


def read_hypotheses(path, count, kind="D"):
    """Return the hypotheses in fairseq-generate's output, in the order of the test set.

    `path` is as of `generated_file`, `kind` as of `lines_of_kind`. Raises ValueError unless there
    is one hypothesis for each of `count` sentences.
    """
    file = generated_file(path)
    found = lines_of_kind(read_lines(file), kind)
    if found.keys() != set(range(count)):
        lost = sorted(set(range(count)) - found.keys())
        raise ValueError(
            f"hypotheses: expected {count:,} in {file}, one per line of the test set, got "
            f"{len(found):,}" + (f"; line {lost[0] + 1} is the first without one" if lost else "")
        )
    return [found[number] for number in range(count)]
