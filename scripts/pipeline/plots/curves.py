"""Draw the curves of training runs, from their logs.

    plot_training.py quickstart
    plot_training.py TaLK=checkpoints/iwslt14_de_en/talkconv \\
        Transformer=checkpoints/iwslt14_de_en/transformer --output curves.png

A RUN is what fairseq-train or fairseq-hydra-train printed (`--log-format simple` or `json`), or a
folder with one such file, as the quick starts (log.txt) and scripts/train.sh (hydra_train.log)
leave it. NAME=RUN gives it a name. A log of several runs, as that of the language models' quick
start, gives a curve for each.

Loss, perplexity, the scores of the validation and the learning rate, over updates and over
wall-clock. The thin line is training, the thick one validation.

Wall-clock is the time between the log's lines since a session began to train, so validating and
saving count. A run that was resumed goes on with the time that it had at the checkpoint; what it
had done beyond that counts neither as updates nor as time.
"""

import argparse
import ast
import json
import math
import os
import re
import sys
from datetime import datetime
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

# How fairseq names what it logs, and how it reads on an axis.
TITLES = {
    "loss": "loss",
    "ppl": "perplexity",
    "bleu": "BLEU",
    "rouge_1": "ROUGE-1",
    "rouge_2": "ROUGE-2",
    "rouge_l": "ROUGE-L",
    "rouge_lsum": "ROUGE-Lsum",
    "accuracy": "accuracy, %",
    "lr": "learning rate",
}
MARKERS, LINES = "os^Dv<>P", ("-", "--", "-.", ":")

# --- Reading a log ---

_TIME = re.compile(r"\[?(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,](\d+))?\]?")
_INTERVAL = re.compile(r"epoch \d+:\s+\d+ / \d+ (.*=.*)")
_EPOCH = re.compile(r"epoch \d+ \| (?:valid on '([^']+)' subset \| )?(.+)")
_JSON = re.compile(r'\{"epoch": .*\}')
_OPTIONS = re.compile(r"\{'_name': None, 'common': .*\}")
_LOADED = re.compile(r"Loaded checkpoint (.+) \(epoch \d+ @ (\d+) updates\)")
_SAVED = re.compile(r"Saved checkpoint .+ \(epoch \d+ @ (\d+) updates")


class _Run:
    """A run while its log is read; `curves` has an entry list for each tag of fairseq."""

    def __init__(self):
        self.arch, self.folders, self.curves = None, set(), {}
        self.forget_all()

    def forget_all(self):
        """Before its first update."""
        self.curves, self.clock, self.clocks = {}, 0.0, {0: 0.0}

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
        """As `read_log` returns it."""
        intervals, epochs = self.curves.pop("train_inner", []), self.curves.pop("train", [])
        return {"train": intervals or epochs, "valid": [], **self.curves}


def _numbers(pairs):
    """The pairs (name, text) that are numbers, as a dictionary."""
    numbers = {}
    for name, value in pairs:
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError):
            continue
    return numbers


def _statistics(line):
    """``(tag, {name: number})`` that fairseq logged in `line`; None if it is another line."""
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
        tag, pairs = "train_inner", [pair.split("=", 1) for pair in found[1].split(", ")]
    elif found := _EPOCH.search(line):
        tag = found[1] or "train"
        pairs = [pair.split(" ", 1) for pair in found[2].split(" | ") if " " in pair]
    else:
        return None
    numbers = _numbers(pair for pair in pairs if len(pair) == 2)
    return (tag, numbers) if "num_updates" in numbers else None


def _options(line):
    """``(save_dir, arch)`` where fairseq-train says with which options it starts, else None."""
    if not (found := _OPTIONS.search(line)):
        return None
    save_dir = re.search(r"'save_dir': ('[^']*'|\"[^\"]*\")", found[0])
    arch = re.search(r"'model': (?:\{'_name': |Namespace\(.*?\barch=)'(\w+)'", found[0])
    arch = arch or re.search(r"\barch='(\w+)'", found[0])
    return save_dir and ast.literal_eval(save_dir[1]), arch and arch[1]


def _read(path):
    """The `_Run` of each training in the log `path`, in the order of their beginnings."""
    runs, run, options, began, base = [], None, (None, None), None, 0.0
    text = path.read_text(encoding="utf-8", errors="replace")
    for line in re.split(r"[\r\n]+", text):  # a progress bar ends with \r
        found = _TIME.match(line)
        now = None
        if found:
            now = datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").timestamp()
            now += float(f"0.{found[2]}") if found[2] else 0.0

        if started := _options(line):
            options, began = started, None
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
            run.resume(updates) if updates else run.forget_all()
            run.arch = arch or run.arch
            run.folders |= {folder} - {None}
            began, base = None, run.clock
        elif "begin training epoch" in line and began is None:
            began = now
        elif run and (found := _SAVED.search(line)) and now and began:
            run.clocks[int(found[1])] = base + max(0.0, now - began)
        elif logged := _statistics(line):
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
    """The trainings in the log `path` (a file, or a folder with one): ``{name: run}``.

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
    """The one training in the log `path` (a file, or a folder with one).

    Returns ``{"train": entries, "valid": entries}`` and, under its name, each further subset that
    was validated on. An entry is a dictionary of all numbers that fairseq logged at one point, by
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


# --- Drawing ---


def colours(count):
    """`count` colours, from dark to light in even steps, so that they differ in grey too."""
    return [tuple(c) for c in matplotlib.colormaps["plasma"](np.linspace(0, 0.85, count))[:, :3]]


def save_figure(figure, path, dpi=120):
    """Write `figure` as PNG to `path`, whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        figure.savefig(part, format="png", dpi=dpi)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _time_unit(seconds):
    """``(unit, its seconds)`` that suits a time."""
    for unit, length in (("hours", 3600), ("minutes", 60)):
        if seconds > 2 * length:
            return unit, length
    return "seconds", 1


def curves_figure(runs, keys=None):
    """A Figure with a row for each of `keys` and two columns: over updates, over wall-clock.

    Args:
        runs: ``{name: run}``, a run being what `read_log` returns, or a list of such: the same
            training with several seeds, drawn alike.
        keys: names of fairseq's numbers (default: those of `TITLES` that some run has).

    Raises ValueError for no runs, and where no run has any of `keys`.
    """
    if not runs:
        raise ValueError("runs: expected at least one run, got none")
    runs = {name: [run] if isinstance(run, dict) else list(run) for name, run in runs.items()}
    entries = [e for seeds in runs.values() for run in seeds for es in run.values() for e in es]
    wanted = TITLES if keys is None else keys
    drawn = [key for key in wanted if any(key in entry for entry in entries)]
    if not drawn:
        raise ValueError(f"keys: expected some of what was logged, got {', '.join(wanted)}")
    longest = max((e["seconds"] for e in entries if math.isfinite(e["seconds"])), default=0)
    unit, length = _time_unit(longest)

    figure = Figure(figsize=(11, 2.7 * len(drawn) + 0.4 + 0.25 * len(runs)), layout="constrained")
    axes = figure.subplots(len(drawn), 2, squeeze=False, sharey="row", sharex="col")
    styles = zip(runs.items(), colours(len(runs)))
    for number, ((name, seeds), colour) in enumerate(styles):
        style = {"color": colour, "linestyle": LINES[number % len(LINES)]}
        for run in seeds:
            for tag, curve in run.items():
                look = {"linewidth": 0.9, "alpha": 0.8}
                if tag != "train":
                    marker = MARKERS[number % len(MARKERS)]
                    look = {"linewidth": 2.2, "marker": marker, "markersize": 5}
                for key, row in zip(drawn, axes):
                    points = [e for e in curve if key in e]
                    if not points or (key == "lr" and tag != "train"):
                        continue
                    y = [e[key] for e in points]
                    what = f"{name}, {'training' if tag == 'train' else 'validation'}"
                    what += "" if tag in ("train", "valid") else f" on {tag}"
                    row[0].plot([e["updates"] for e in points], y, **style, **look, label=what)
                    hours = [e["seconds"] / length for e in points]
                    row[1].plot(hours, y, **style, **look, label=what)
    for key, row in zip(drawn, axes):
        row[0].set_ylabel(TITLES.get(key, key))
        for axis in row:
            axis.grid(alpha=0.3)
            if key == "ppl":
                axis.set_yscale("log")
                axis.yaxis.set_major_formatter("{x:,.0f}")
                _label_within_decade(axis)
    axes[-1][0].set_xlabel("updates")
    axes[-1][0].xaxis.set_major_formatter("{x:,.0f}")
    axes[-1][1].set_xlabel(f"wall-clock, {unit}")
    legend = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            legend.setdefault(label, handle)
    columns = 2 if len(legend) > 1 else 1
    figure.legend(legend.values(), legend, loc="outside lower center", ncols=columns, frameon=False)
    return figure


def _label_within_decade(axis):
    """A logarithmic axis of little more than a decade shows few of its powers of ten."""
    low, high = axis.get_ylim()
    if high < 100 * low:
        axis.yaxis.set_minor_formatter("{x:,.0f}")
        axis.tick_params(axis="y", which="minor", labelsize=7)


def plot_curves(runs, path, keys=None):
    """Write `curves_figure` of `runs` and `keys` to `path`, as PNG."""
    save_figure(curves_figure(runs, keys), path)


# --- The command ---


def named_runs(arguments):
    """``{name: run}`` of the arguments ``PATH`` and ``NAME=PATH``.

    Raises ValueError for what cannot be read, and for a name that is given twice.
    """
    runs = {}
    for argument in arguments:
        name, given, path = argument.partition("=")
        if not given or Path(argument).exists():
            path = Path(argument)
            name = path.name if path.is_dir() else path.stem
            if path.name in ("log.txt", "hydra_train.log"):
                name = path.absolute().parent.name
        found = read_runs(path)
        for arch, run in found.items():
            full = name if len(found) == 1 else f"{name} {arch}"
            if full in runs:
                raise ValueError(f"RUN: expected different names, got {full!r} twice; see NAME=RUN")
            runs[full] = run
    return runs


def main(arguments=None):
    """Run the command; one line and status 2 for a run that cannot be read."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="[NAME=]RUN", help="logs, or folders with one")
    parser.add_argument(
        "--output", type=Path, default=Path("curves.png"), help="default: curves.png"
    )
    args = parser.parse_args(arguments)
    try:
        runs = named_runs(args.runs)
        plot_curves(runs, args.output)
    except (OSError, ValueError) as error:
        print(f"plot_training.py: {error}", file=sys.stderr)
        return 2
    print(f"written: {args.output} of {', '.join(runs)}")
    return 0
