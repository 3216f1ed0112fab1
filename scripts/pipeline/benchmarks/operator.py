"""Measure the operator alone beside its peers, over lengths: Table 6 of the paper.

    benchmark_talk_conv.py                    all of it, on a GPU where there is one
    benchmark_talk_conv.py --lengths 10,1000 --dtypes float32 --output results/talk_conv

First checks talk_conv against the reference, then runs the peers in turn and takes medians.
Offsets, queries and kernels are given, as in the paper. "of a copy" is bandwidth as a share of that
of a copy of x. It counts what has to move: forward, x, the offsets and the output; backward, the
output's gradient, x and the offsets, and their gradients. TaLK's backward pass is measured alone,
too, from one forward pass. At the end are the goals of the project, and which this machine meets.

Writes a table, PREFIX.json (after each length, dtype and mode) and PREFIX.png.
"""

import itertools

import torch

from pipeline.benchmarks import harness
from pipeline.benchmarks.harness import one_of, several
from pipeline.benchmarks.operator_speed import BOUNDS, check, goals_of, measure_all
from pipeline.benchmarks.peers import PEERS, WINDOW
from pipeline.common.command import at_least

SIZES = (10, 1024, 16)  # B, C and H of the paper; the goals are for them


def figure(cells):
    """Return a Figure of iterations per second over the length, a panel per dtype and mode."""
    from pipeline.plots.figures import add_legend, looks, panel_grid

    panels = {}
    for cell in cells:
        if cell["mode"] != "backward":
            panels.setdefault(f"{cell['mode']}, {cell['dtype']}", []).append(cell)
    drawing, axes = panel_grid(len(panels), 2, 5, 4)
    for axis, (title, cells) in zip(axes, panels.items()):
        for name, look in zip(PEERS, looks(len(PEERS))):
            rows = ((cell["T"], cell["results"].get(name, {})) for cell in cells)
            points = sorted((T, 1 / row["seconds"]) for T, row in rows if "seconds" in row)
            if points:
                axis.loglog(*zip(*points), label=name, **look)
        axis.set(title=title, xlabel="T, time steps", ylabel="iterations per second")
        axis.grid(alpha=0.3)
    add_legend(drawing, axes, 3)
    return drawing


def parse(arguments=None):
    """Return the options."""
    parser = harness.option_parser("benchmark_talk_conv.py", __doc__, 7, 5, "results/talk_conv")
    add = parser.add_argument
    add("--lengths", type=several(at_least(1)), default=[10, 100, 1000, 10_000, 100_000])
    add("--dtypes", type=several(one_of(BOUNDS)), default=["float32", "bfloat16"])
    for name, letter, size in zip(("batch", "channels", "heads"), "BCH", SIZES):
        add(f"--{name}", type=at_least(1), default=size, help=f"{letter} (default: {size})")
    add("--only", default="", metavar="REGEX", help="peers with this in their name")
    return parser.parse_args(arguments)


def main(arguments=None):
    """Run the command; `arguments` are those of the command line by default."""
    args = parse(arguments)
    sizes = (args.batch, args.channels, args.heads)
    torch.manual_seed(0)

    check(args.dtypes, args.device)
    facts = dict(zip("BCH", sizes), window=WINDOW)
    with harness.Report(args, figure, sizes=facts) as report:
        print(f"talk_conv is right in {', '.join(args.dtypes)}. Measuring on {report.where}.")
        for cell in measure_all(itertools.product(args.lengths, args.dtypes), sizes, args):
            report.cells.append(cell)
            if sizes == SIZES:
                report.record["goals"] = goals_of(report.cells, args.device)
            report.save()
            print(f"\n{harness.title(cell)}", *harness.cell_table(cell), sep="\n", flush=True)
    if not report.cells:
        raise SystemExit("nothing was measured")
    if goals := report.record.get("goals"):
        print("\nThe project's goals:", *harness.table(goals), sep="\n")
