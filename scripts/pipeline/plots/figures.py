"""What all pictures share: colours, panels, legends, and files that are written whole."""

from matplotlib.figure import Figure

from pipeline.common.files import whole

# They differ in hue also to colour-blind readers, and in lightness by steps of 11 of 100, so that
# they differ in grey too; the first few differ most.
PALETTE = ("#0d0d0d", "#d24305", "#073a8a", "#67bae9", "#09a67f", "#9d2779", "#3b1f03", "#ecd019")
MARKERS, LINES = "os^Dv<>P", ("-", "--", "-.", ":")


def looks(count):
    """Return `count` dictionaries of a line's colour, style and marker, all different up to 32."""
    return [
        {
            "color": PALETTE[number % len(PALETTE)],
            "linestyle": LINES[(number + number // len(PALETTE)) % len(LINES)],
            "marker": MARKERS[number % len(MARKERS)],
        }
        for number in range(count)
    ]


def save_figure(figure, path, **options):
    """Write `figure` in the format that `path` ends with, or PNG, whole or not at all."""
    with whole(path) as part:
        figure.savefig(part, format=path.suffix[1:] or "png", dpi=120, **options)


def panel_grid(count, columns, width, height):
    """Return a Figure and `count` axes, at most `columns` in a row, of a size in inches each."""
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(width * columns, height * rows + 0.6), layout="constrained")
    return figure, [figure.add_subplot(rows, columns, number + 1) for number in range(count)]


def add_legend(figure, axes, columns):
    """Add one legend for all `axes`, below them."""
    pairs = (pair for axis in axes for pair in zip(*axis.get_legend_handles_labels()))
    found = {label: handle for handle, label in pairs}
    columns = min(columns, len(found))
    figure.legend(found.values(), found, loc="outside lower center", frameon=False, ncols=columns)
