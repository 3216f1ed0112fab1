"""Draw the curves of training runs, from their logs.

    plot_training.py quickstart
    plot_training.py TaLK=checkpoints/iwslt14_de_en/talkconv \\
        Transformer=checkpoints/iwslt14_de_en/transformer --output curves.png

A RUN is what fairseq-train or fairseq-hydra-train printed (`--log-format simple` or `json`), or a
folder with one such file, as the quick starts and scripts/train.sh leave it; of several trainings
in one file the last counts. NAME=RUN gives it a name. The folder of the language models' quick
start gives a curve for each model.

Draws loss, perplexity, the scores of the validation and the learning rate, over updates and over
wall-clock, in which validating and saving count. A run that was resumed goes on with the time of
its checkpoint. Thin lines are training; thick ones, with markers, are validation.
"""

import math
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from pipeline.common import command
from pipeline.common.logs import read_runs
from pipeline.plots.figures import add_legend, looks, save_figure

# How fairseq names what it logs, and how it reads on an axis.
TITLES = {
    "loss": "loss (base 2)",  # fairseq logs bits
    "ppl": "perplexity",
    "bleu": "BLEU",
    "rouge_1": "ROUGE-1",
    "rouge_2": "ROUGE-2",
    "rouge_l": "ROUGE-L",
    "rouge_lsum": "ROUGE-Lsum",
    "accuracy": "accuracy, %",
    "lr": "learning rate",
}
UNITS = {"hours": 3600, "minutes": 60, "seconds": 1}  # of time; the longest run has two or more


def label_logarithm(axis):
    """Put a logarithmic scale on y, with plain numbers at ticks that do not touch each other."""
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(LogFormatter())
    axis.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))


def look_of(name, tag, style):
    """Return how a curve of a run is drawn, and what the legend says of it."""
    look = style | {"markersize": 5}
    if tag == "train":
        return look | {"linewidth": 0.9, "alpha": 0.8, "marker": "", "label": f"{name}, training"}
    subset = "" if tag == "valid" else f" on {tag}"
    return look | {"linewidth": 2.2, "label": f"{name}, validation{subset}"}


def curves_figure(runs):
    """Return a Figure with a row for each of TITLES that a run has, over updates and wall-clock.

    Args:
        runs: ``{name: [run, …]}`` as of `read_runs`; those of one name, such as seeds, look alike.

    Raises ValueError where no run has any of them.
    """
    entries = [e for seeds in runs.values() for run in seeds for es in run.values() for e in es]
    drawn = [key for key in TITLES if any(key in entry for entry in entries)]
    if not drawn:
        raise ValueError(f"RUN: expected a log of {', '.join(TITLES)}, got none of them")
    longest = max((e["seconds"] for e in entries if math.isfinite(e["seconds"])), default=0)
    unit = next((unit for unit, length in UNITS.items() if longest > 2 * length), "seconds")

    figure = Figure(figsize=(11, 2.7 * len(drawn) + 0.4 + 0.25 * len(runs)), layout="constrained")
    axes = figure.subplots(len(drawn), 2, squeeze=False, sharey="row", sharex="col")
    for (name, seeds), style in zip(runs.items(), looks(len(runs))):
        for tag, curve in (named for run in seeds for named in run.items()):
            look = look_of(name, tag, style)
            for key, (over_updates, over_time) in zip(drawn, axes):
                points = [entry for entry in curve if key in entry]
                if not points or (key == "lr" and tag != "train"):
                    continue
                ys = [entry[key] for entry in points]
                dot = {"marker": "o"} if len(ys) == 1 else {}  # which no line shows
                over_updates.plot([e["updates"] for e in points], ys, **look | dot)
                over_time.plot([e["seconds"] / UNITS[unit] for e in points], ys, **look | dot)
    for key, row in zip(drawn, axes):
        row[0].set_ylabel(TITLES[key])
        for axis in row:
            axis.grid(alpha=0.3)
            if key == "ppl":
                label_logarithm(axis)
    axes[-1][0].set_xlabel("updates")
    axes[-1][0].xaxis.set_major_formatter("{x:,.0f}")
    axes[-1][1].set_xlabel(f"wall-clock, {unit}")
    add_legend(figure, axes.flat, 2)
    return figure


def named_runs(arguments):
    """Return ``{name: run}`` of the arguments ``PATH`` and ``NAME=PATH``.

    Raises ValueError for what cannot be read, and for a name that is given twice.
    """
    runs = {}
    for argument in arguments:
        name, given, path = argument.partition("=")
        if not given or Path(argument).exists():
            path = Path(argument)
            name = path.absolute().name if path.is_dir() else path.stem
            if path.name in ("log.txt", "train.log", "hydra_train.log"):
                name = path.absolute().parent.name
        if not str(path):
            raise ValueError(f"expected NAME=PATH, got {argument}")
        found = read_runs(path)
        for arch, run in found.items():
            full = name if len(found) == 1 else f"{name} {arch}"
            if full in runs:
                raise ValueError(f"RUN: expected different names, got {full!r} twice; see NAME=RUN")
            runs[full] = run
    return runs


def main(arguments=None):
    """Run the command; one line and status 2 for a run that cannot be read."""
    parser = command.parser("plot_training.py", __doc__)
    add = parser.add_argument
    add("runs", nargs="+", metavar="[NAME=]RUN", help="logs, or folders with one")
    add("--output", type=Path, default=Path("curves.png"), help="or .pdf (default: curves.png)")
    args = parser.parse_args(arguments)

    def draw():
        runs = named_runs(args.runs)
        save_figure(curves_figure({name: [run] for name, run in runs.items()}), args.output)
        print(f"written: {args.output} of {', '.join(runs)}")

    return command.run("plot_training.py", draw, (OSError, ValueError))
