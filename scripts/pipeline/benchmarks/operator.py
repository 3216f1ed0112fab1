"""Measure the operator alone beside its peers, over lengths: Table 6 of the paper.

    benchmark_talk_conv.py                    all of it, on a GPU where there is one
    benchmark_talk_conv.py --lengths 10,1000 --dtypes float32 --output results/talk_conv

First checks talk_conv against the reference, then runs the peers in turn and takes medians.
Offsets, queries and kernels are given, as in the paper. "of a copy" is bandwidth as a share of that
of a copy of x. It counts what has to move: forward, x, the offsets and the output; backward, the
output's gradient, x and the offsets, and their gradients. TaLK's backward pass is measured alone,
too, from one forward pass.

Prints tables, and writes PREFIX.json after each length, dtype and mode.
"""

import itertools
import re
from functools import partial

import torch

from pipeline.benchmarks import harness
from pipeline.benchmarks.harness import Unavailable, one_of, peak_memory, several
from pipeline.benchmarks.peers import GRAPH, PEERS, WINDOW, Case
from pipeline.common.command import at_least
from talk_fairseq import TaLKConvState, talk_conv, talk_conv_reference, talk_conv_update

SIZES = (10, 1024, 16)  # B, C and H of the paper
MODES = ("forward", "forward+backward", "backward")
# By how much an output may be off, relative to the largest; the others by four times as much.
BOUNDS = {"float64": 1e-11, "float32": 2e-6, "float16": 6e-4, "bfloat16": 4e-3}


def check(dtypes, device):
    """Raise SystemExit unless talk_conv is right here: forward, backward and step by step."""
    for name in dtypes:
        for shape, max_right in (((129, 2, 24), 31), ((301, 1, 64), 0)):
            case = Case(*shape, 4, getattr(torch, name), device)
            right = [case.offset_right] if max_right else []
            inputs = [case.x, case.offset_left, *right]
            dout = case.random(*shape)

            def run(function, inputs, max_right=max_right, dout=dout):
                inputs = [t.detach().requires_grad_() for t in inputs]
                rest = [] if max_right else [None]
                out = function(*inputs, *rest, WINDOW, max_right)
                return out, *torch.autograd.grad(out, inputs, dout.to(out.dtype))

            got = run(talk_conv, inputs)
            want = run(talk_conv_reference, [t.double() for t in inputs])
            if not max_right:
                got, want = (*got, step_by_step(case)), (*want, want[0])
            for index, (a, b) in enumerate(zip(got, want)):
                error = ((a.double() - b).abs().max() / b.abs().max()).item()
                if not error <= BOUNDS[name] * (4 if index else 1):
                    raise SystemExit(f"talk_conv is wrong in {name} by {error:.2g}: not measured")


def step_by_step(case):
    """Return the output of talk_conv_update over the case, as in a decoder."""
    state = TaLKConvState(case.B, case.C, WINDOW, case.dtype, case.device)
    steps = zip(case.x.split(1), case.offset_left.split(1))
    return torch.cat([talk_conv_update(*step, state, WINDOW) for step in steps])


def iteration(function, inputs, mode):
    """Return a callable that does one iteration."""
    if mode == "forward":
        inputs = [t.detach() for t in inputs]

        def step():
            with torch.no_grad():
                return function(*inputs)

        return step

    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    out = function(*inputs)
    dout = torch.randn_like(out)
    if mode == "backward":
        return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)
    return lambda: torch.autograd.grad(function(*inputs), inputs, dout)


def runner(name, function, inputs, mode, device):
    """Return ``(step, bytes)``: a warm callable that does one iteration, and its peak memory."""
    if name == "copy":
        mode = "forward"  # it has no backward pass that copies
    if name != GRAPH:
        step = iteration(function, inputs, mode)
        step()
        return step, peak_memory(step, device)

    if device == "cpu":
        raise Unavailable("needs a GPU")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # a backward pass runs on the stream of its forward pass
        step = iteration(function, inputs, mode)
        for _ in range(3):
            step()

    def capture():  # which takes the memory that its replays use
        with torch.cuda.graph(graph, stream=stream):
            graph.kept = step, step()  # with the inputs, which only `step` holds

    return graph.replay, peak_memory(capture, device)


def seconds_of(step, count):
    """Return the seconds per iteration, over `count` of them."""

    def iterations():
        for _ in range(count):
            step()

    return harness.timed(iterations)[0] / count


def predicted(name, cell, cells):
    """Return the seconds of an iteration, by the last of the `cells` of this dtype and mode."""
    for earlier in reversed(cells):
        row = earlier["results"].get(name, {})
        if "seconds" in row and all(earlier[key] == cell[key] for key in ("dtype", "mode")):
            return row["seconds"] * (cell["T"] / earlier["T"]) ** PEERS[name][1]
    return 0


def measure(case, mode, args, report):
    """Measure the peers in one case and mode: a cell of the `report`."""
    cell = {"T": case.T, "dtype": str(case.dtype).removeprefix("torch."), "mode": mode}
    names = [name for name in PEERS if name in ("copy", "TaLK") or re.search(args.only, name)]
    if mode == "backward":
        names = [name for name in names if case.moves(name, mode)]

    def prepare(name, row):
        if (seconds := predicted(name, cell, report.cells)) > args.limit:
            raise Unavailable(f"too slow: about {seconds:.0f} s per iteration")
        step, row["memory"] = runner(name, *PEERS[name][0](case), mode, args.device)
        if moves := case.moves(name, mode):
            row["bytes"] = moves
        once = seconds_of(step, 1)
        count = max(1, min(1000, int(0.1 / once)))  # a turn is about a tenth of a second
        return partial(seconds_of, step, count)

    report.measure(cell, names, prepare, {"iterations": 1}, args.limit / 4)


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
    with harness.Report(args, "TaLK", sizes=facts) as report:
        print(f"talk_conv is right in {', '.join(args.dtypes)}. Measuring on {report.where}.")
        for T, dtype in itertools.product(args.lengths, args.dtypes):
            try:
                case = Case(T, *sizes, getattr(torch, dtype), args.device)
                case.needs(6 * case.x.numel())
            except RuntimeError as error:
                print(f"\nT={T:,}, {dtype}: {harness.why_not(error)}")
                continue
            for mode in MODES:
                measure(case, mode, args, report)
    if not report.cells:
        raise SystemExit("nothing was measured")
