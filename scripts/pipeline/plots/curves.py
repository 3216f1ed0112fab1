"""Curves of training runs: loss, perplexity, scores and learning rate."""

import math

from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from pipeline.plots.figures import add_legend, looks

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


def label_logarithm(axis):
    """Put a logarithmic scale on y, with plain numbers at ticks that do not touch each other."""
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(LogFormatter())
    axis.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))


def curves_figure(runs, keys=None):
    """Return a Figure with a row for each of `keys` and two columns: over updates, over wall-clock.

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
    unit, length = ("hours", 3600) if longest > 7200 else ("minutes", 60)
    if longest <= 120:
        unit, length = "seconds", 1

    figure = Figure(figsize=(11, 2.7 * len(drawn) + 0.4 + 0.25 * len(runs)), layout="constrained")
    axes = figure.subplots(len(drawn), 2, squeeze=False, sharey="row", sharex="col")
    for (name, seeds), style in zip(runs.items(), looks(len(runs))):
        for run in seeds:
            for tag, curve in run.items():
                look = {**style, "linewidth": 2.2, "markersize": 5}
                what = f"{name}, validation" + ("" if tag == "valid" else f" on {tag}")
                if tag == "train":
                    look |= {"linewidth": 0.9, "alpha": 0.8, "marker": ""}
                    what = f"{name}, training"
                for key, row in zip(drawn, axes):
                    points = [entry for entry in curve if key in entry]
                    if points and (key != "lr" or tag == "train"):
                        for axis, x, scale in zip(row, ("updates", "seconds"), (1, length)):
                            xs = [entry[x] / scale for entry in points]
                            axis.plot(xs, [entry[key] for entry in points], **look, label=what)
    for key, row in zip(drawn, axes):
        row[0].set_ylabel(TITLES.get(key, key))
        for axis in row:
            axis.grid(alpha=0.3)
            if key == "ppl":
                label_logarithm(axis)
    axes[-1][0].set_xlabel("updates")
    axes[-1][0].xaxis.set_major_formatter("{x:,.0f}")
    axes[-1][1].set_xlabel(f"wall-clock, {unit}")
    add_legend(figure, axes.flat, 2)
    return figure
