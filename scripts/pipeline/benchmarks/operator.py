"""Measure the operator alone beside its peers, over lengths: Table 6 of the paper.

    benchmark_talk_conv.py                    all of it, on a GPU where there is one
    benchmark_talk_conv.py --lengths 10,1000 --dtypes float32 --output results/talk_conv

First checks talk_conv against the reference, forward and backward, and stops where they differ.
Then, for each length and dtype, runs the peers in turn, in one process, and takes medians:
iterations per second, forward and forward + backward, bandwidth as a share of that of a copy
measured in the same turns, and peak memory. Bandwidth counts what has to move: forward, x and the
offsets are read and the output is written; backward, the output's gradient, x and the offsets are
read and the gradients are written. TaLK's backward pass is measured alone, too, each time from the
same forward pass. Offsets, queries and kernels are given, as in the paper. At the end the goals of
the project are listed, with whether this machine meets them.

Writes a table, PREFIX.json (after each length, dtype and mode, so an interrupted run loses no
other) and PREFIX.png.
"""

from pathlib import Path

import torch

from pipeline.benchmarks import harness
from pipeline.benchmarks.harness import naturals
from pipeline.benchmarks.operator_speed import bandwidth, check, goals_of, measure_all
from pipeline.benchmarks.peers import PEERS, WINDOW

SIZES = (10, 1024, 16)  # B, C and H of the paper; the goals are for them


def print_results(title, results):
    """Print iterations per second, TaLK's speed-up, bandwidth and memory of each peer."""
    base, a_copy = results["TaLK"].get("seconds"), results.get("copy", {})
    rows = {}
    for name, row in results.items():
        rows[name] = row.get("error") or [
            f"{1 / row['seconds']:,.1f}",
            f"{row['seconds'] / base:.1f}x" if base else "",
            f"{row['bytes'] / row['seconds'] / 1e9:.1f}" if "bytes" in row else "",
            f"{bandwidth(row, a_copy):.0%}" if "bytes" in row and "seconds" in a_copy else "",
            harness.mebibytes(row["memory"], 1),
        ]
    harness.print_table(title, ("it/s", "speed-up of TaLK", "GB/s", "of copy", "peak MiB"), rows)


def print_goals(goals):
    """Print a line for each goal."""
    measured = [goal for goal in goals if goal["value"] is not None]
    print(f"\n{sum(goal['met'] for goal in measured)} of {len(measured)} goals are met:")
    for goal in goals:
        word = {True: "met", False: "MISSED", None: "not measured"}[goal["met"]]
        value = goal["error"] if goal["value"] is None else f"{goal['value']:,.3f}"
        print(f"  {word:12} {value:>12}  {goal['goal']}")


def figure(cells):
    """Return a Figure of iterations per second and peak memory over the length, a row per dtype."""
    from pipeline.plots.figures import panels_figure

    panels = {}
    for dtype in sorted({cell["dtype"] for cell in cells}):
        for mode, label, value in (
            ("forward", "iterations per second", lambda row: 1 / row["seconds"]),
            ("forward+backward", "iterations per second", lambda row: 1 / row["seconds"]),
            ("forward", "peak memory, MiB", lambda row: row["memory"] / 2**20),
        ):
            curves = panels.setdefault((f"{mode}, {dtype}", label), {name: [] for name in PEERS})
            for cell in cells:
                if (cell["dtype"], cell["mode"]) == (dtype, mode):
                    for name, row in cell["results"].items():
                        if "seconds" in row:
                            curves[name].append((cell["T"], value(row)))
    return panels_figure(panels, "T, time steps", columns=3, ours="TaLK")


def main(arguments=None):
    """Run the command; `arguments` are those of the command line by default."""
    parser = harness.option_parser(__doc__)
    add = parser.add_argument
    add("--lengths", type=naturals, default=[10, 100, 1000, 10_000, 100_000])
    add("--dtypes", default="float32,bfloat16", help="default: float32,bfloat16")
    for name, letter, size in zip(("batch", "channels", "heads"), "BCH", SIZES):
        add(f"--{name}", type=int, default=size, help=f"{letter} (default: {size})")
    add("--only", default="", metavar="TEXT", help="peers with this in their name")
    add("--turns", type=int, default=7, help="turns that the medians are of (default: 7)")
    add("--limit", type=float, default=5, help="seconds that an iteration may take (default: 5)")
    add("--output", type=Path, default=Path("results/talk_conv"), metavar="PREFIX")
    args = parser.parse_args(arguments)
    args.device = harness.device_of(args)
    dtypes, sizes = args.dtypes.split(","), (args.batch, args.channels, args.heads)
    torch.manual_seed(0)

    check(dtypes, args.device)
    report = harness.Report(args.output, args.device, sizes=dict(zip("BCH", sizes), window=WINDOW))
    print(f"talk_conv is right in {', '.join(dtypes)}. Measuring on {report.where}, "
          f"B={args.batch}, C={args.channels}, H={args.heads}.")  # fmt: skip
    places = ((T, dtype) for dtype in dtypes for T in args.lengths)
    for cell in measure_all(places, sizes, args):
        if "error" in cell:
            print(f"\nT={cell['T']}, {cell['dtype']}: {cell['error']}")
            continue
        print_results(f"T={cell['T']:,}, {cell['dtype']}, {cell['mode']}", cell["results"])
        report.cells.append(cell)
        report.save()
    if not report.cells:
        raise SystemExit("nothing was measured")
    if sizes == SIZES and (goals := goals_of(report.cells, args.device)):
        report.record["goals"] = goals
        print_goals(goals)
    report.finish(figure)
