"""What all pictures share: colours, curves and bars in panels, and files that are written whole."""

import os
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import AutoLocator, LogLocator, NullFormatter

# They differ in hue also to colour-blind readers, and in lightness by steps of 11 of 100, so that
# they differ in grey too; the first few differ most.
PALETTE = (
    "#0d0d0d", "#d24305", "#073a8a", "#67bae9", "#09a67f", "#9d2779", "#3b1f03", "#ecd019",
)  # fmt: skip
MARKERS, LINES = "os^Dv<>P", ("-", "--", "-.", ":")


def colours(count):
    """Return `count` colours as (r, g, b), which repeat after the eighth."""
    wanted = (PALETTE[number % len(PALETTE)] for number in range(count))
    return [tuple(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)) for colour in wanted]


def looks(count):
    """Return `count` dictionaries of a line's colour, style and marker, all different up to 32."""
    return [
        {
            "color": colour,
            "linestyle": LINES[(number + number // len(PALETTE)) % len(LINES)],
            "marker": MARKERS[number % len(MARKERS)],
        }
        for number, colour in enumerate(colours(count))
    ]


def save_figure(figure, path, dpi=120, **options):
    """Write `figure` as PNG to `path`, whole or not at all; `options` are those of savefig."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        figure.savefig(part, format="png", dpi=dpi, **options)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def label_logarithm(axis):
    """Put a logarithmic scale on y, with plain numbers at ticks that do not touch each other."""
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    if high < 3 * low:
        axis.yaxis.set_major_locator(AutoLocator())
    elif high < 100 * low:
        subs = (1, 2, 3, 5, 7) if high < 12 * low else (1, 2, 5)
        axis.yaxis.set_major_locator(LogLocator(subs=subs))
    axis.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}" if y >= 1000 else f"{y:.4g}")
    axis.yaxis.set_minor_formatter(NullFormatter())


def panels_figure(panels, xlabel, columns, ours):
    """Return a Figure with a panel for each of `panels`, on logarithmic axes.

    Where all points have one x, its panels have a bar for each name instead of a curve.

    Args:
        panels: {(title, ylabel): {name: [(x, y), …]}}; points whose y is 0 are left out.
        columns: the most panels that stand side by side.
        ours: names that begin so have thick curves.
    """
    if len({x for curves in panels.values() for points in curves.values() for x, _ in points}) < 2:
        bars = {
            key: {name: (y, []) for name, points in curves.items() for _, y in points if y}
            for key, curves in panels.items()
        }
        return bars_figure(bars, columns, ours)
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    figure, axes = panel_grid(len(panels), columns, 5, 4)
    for axis, ((title, ylabel), curves) in zip(axes, panels.items()):
        for name, look in zip(names, looks(len(names))):
            points = [(x, y) for x, y in curves.get(name, ()) if y]
            if points:
                width = 2.5 if name.startswith(ours) else 1
                axis.loglog(*zip(*points), label=name, linewidth=width, **look)
        places = sorted({x for points in curves.values() for x, _ in points})
        axis.set_xticks(places, [f"{x:,}" for x in places])
        axis.xaxis.set_minor_formatter(NullFormatter())
        label_logarithm(axis)
        axis.set(title=title, xlabel=xlabel, ylabel=ylabel)
        axis.grid(alpha=0.3)
    add_legend(figure, axes, 5)
    return figure


def bars_figure(panels, columns=4, ours="talkconv"):
    """Return a Figure with a bar for each name in each of `panels`.

    Args:
        panels: {(title, xlabel): {name: (length, points)}}; `points` are drawn over the bar.
        ours: names that begin so have a colour of their own.
    """
    names = list(dict.fromkeys(name for bars in panels.values() for name in bars))
    figure, axes = panel_grid(len(panels), columns, 6, 1 + 0.35 * max(4, len(names)))
    for axis, ((title, xlabel), bars) in zip(axes, panels.items()):
        texts = []
        for place, (name, (length, points)) in enumerate(bars.items()):
            axis.barh(place, length, color=PALETTE[1] if name.startswith(ours) else "0.75")
            axis.plot(points, [place] * len(points), "k.", markersize=4)
            texts.append(f"{name}: {length:,.0f}" if length >= 100 else f"{name}: {length:.3g}")
        lengths = [length for length, _ in bars.values()]
        if max(lengths, default=0) > 50 * min(lengths, default=0):
            axis.set_xscale("log")
        else:
            axis.locator_params(axis="x", nbins=5)
        axis.set_yticks(range(len(bars)), texts)
        axis.invert_yaxis()
        axis.set(title=title, xlabel=xlabel)
    return figure


def panel_grid(count, columns, width, height):
    """Return a Figure and `count` axes, at most `columns` in a row, of a size in inches each."""
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(width * columns, height * rows + 0.6), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes[count:]:
        axis.set_axis_off()
    return figure, axes[:count]


def add_legend(figure, axes, columns):
    """Add one legend for all `axes`, below them."""
    found = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            found.setdefault(label, handle)
    figure.legend(
        found.values(), found, loc="outside lower center", frameon=False,
        ncols=min(columns, len(found)),
    )  # fmt: skip
