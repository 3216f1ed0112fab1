"""Measure the operator alone beside its peers, over lengths: Table 6 of the paper.

    benchmark_talk_conv.py                    all of it, on a GPU where there is one
    benchmark_talk_conv.py --lengths 10,1000 --dtypes float32 --output results/talk_conv

First checks talk_conv against the reference, then runs the peers in turn and takes medians.
Offsets, queries and kernels are given, as in the paper. "of a copy" is bandwidth as a share of that
of a copy of x. It counts what has to move: forward, x, the offsets and the output; backward, the
output's gradient, x and the offsets, and their gradients. TaLK's backward pass is measured alone,
too, from one forward pass.

Prints tables, and writes PREFIX.json after each turn.
"""

import contextlib
import itertools
import math
from functools import partial

import torch
import torch.nn.functional as F

from pipeline.benchmarks import harness
from pipeline.benchmarks.harness import Unavailable, peak_memory
from pipeline.common.command import at_least, one_of, several
from talk_fairseq import TaLKConvState, talk_conv, talk_conv_reference, talk_conv_update

SIZES = (10, 1024, 16)  # B, C and H of the paper
MODES = ("forward", "forward+backward", "backward")
# The largest error of an output, relative to its largest number; gradients may have four times it.
BOUNDS = {"float64": 1e-11, "float32": 2e-6, "float16": 6e-4, "bfloat16": 4e-3}
WINDOW = 31  # largest window to either side
GRAPH = "TaLK, CUDA graph"


class Case:
    """The inputs of one length and dtype; `x` and the offsets are shared by all peers."""

    def __init__(self, T, B, C, H, dtype, device):
        self.T, self.B, self.C, self.H, self.R = T, B, C, H, C // H
        self.dtype, self.device = dtype, device
        self.x = self.random(T, B, C)
        self.offset_left = torch.rand(T, B, H, device=device).to(dtype)
        self.offset_right = torch.rand(T, B, H, device=device).to(dtype)

    def random(self, *shape):
        """Return normal random numbers of the case's dtype and device."""
        return torch.randn(shape, device=self.device).to(self.dtype)

    def moves(self, name, mode):
        """Return the bytes that an iteration of a copy or of TaLK has to move; None for others."""
        x, offsets = self.x.nbytes, 2 * self.offset_left.nbytes
        if name == "copy":
            return 2 * x
        forward, backward = 2 * x + offsets, 3 * x + 2 * offsets
        floors = {"forward": forward, "backward": backward, "forward+backward": forward + backward}
        return floors[mode] if name.startswith("TaLK") else None

    def needs(self, elements):
        """Raise Unavailable where a CPU's memory lacks room for so many elements."""
        room = math.inf
        if self.device == "cpu":
            with contextlib.suppress(OSError):  # not Linux
                room = 0.7 * harness.linux_bytes("meminfo", "MemAvailable")
        if (needed := elements * self.dtype.itemsize) > room:
            raise Unavailable(f"out of memory: needs {needed / 2**30:.0f} GiB")


def copy(case):
    """Build a copy of `x`, the least that any operator has to move."""
    return torch.clone, (case.x,)


def talk(case, window=WINDOW):
    """Build talk_conv with windows of 31 to either side, or of another size."""
    function = partial(talk_conv, max_left=window, max_right=window)
    return function, (case.x, case.offset_left, case.offset_right)


def published_method(case):
    """Build a prefix sum over the whole sequence in the input's dtype, gather and interpolate."""
    time_steps = torch.arange(case.T, device=case.device, dtype=case.dtype)[:, None, None]
    # Its positions are as rough as the dtype: bfloat16 would have 1003 rows end at 1004.
    positions = torch.arange(case.T + 1, dtype=case.dtype).double()
    end = positions[positions <= case.T].max().item()

    def at(sums, position):
        whole = position.floor()
        fraction = (position - whole)[..., None]
        index = whole.long()[..., None].expand(-1, -1, -1, case.R)
        low, high = sums.gather(0, index), sums.gather(0, (index + 1).clamp(max=case.T))
        return low + fraction * (high - low)

    def function(x, offset_left, offset_right):
        sums = F.pad(x.cumsum(0), (0, 0, 0, 0, 1, 0)).view(case.T + 1, case.B, case.H, case.R)
        left = (time_steps - offset_left * WINDOW).clamp(0, end)
        right = (time_steps + 1 + offset_right * WINDOW).clamp(0, end)
        return (at(sums, right) - at(sums, left)).view_as(x) / (2 * WINDOW + 1)

    case.needs(24 * case.x.numel())
    return function, (case.x, case.offset_left, case.offset_right)


def self_attention(case):
    """Build attention as in the paper, with the whole matrix of scores in memory."""

    def function(query, key, value):
        scores = torch.bmm(query, key.transpose(1, 2)) / math.sqrt(case.R)
        return torch.bmm(scores.softmax(dim=-1), value)

    case.needs(3 * case.B * case.H * case.T**2)
    return function, tuple(case.random(case.B * case.H, case.T, case.R) for _ in range(3))


def sdpa(case):
    """Build PyTorch's fused attention."""
    return F.scaled_dot_product_attention, tuple(
        case.random(case.B, case.H, case.T, case.R) for _ in range(3)
    )


def unfold(x, K):
    """Return (T, B, C, K), the K rows of `x` (T, B, C) around each time step, as fairseq does."""
    T, B, C = x.shape
    # PyTorch 2.13 writes gradients of such products past their end on CUDA (pytorch#196431).
    if x.is_cuda and x.requires_grad and x.numel() * K > 2**31:
        raise Unavailable("over 2^31 elements")
    padded = F.pad(x, (0, 0, 0, 0, K // 2, K - 1 - K // 2))
    return padded.as_strided((T, B, C, K), (B * C, C, 1, B * C))


def dynamic_conv_unfolded(case, K):
    """Build DynamicConv of width K as fairseq's models run it, from unfolded windows."""

    def function(x, kernels):
        windows = unfold(x, K).reshape(-1, case.R, K)
        return torch.bmm(windows, kernels.softmax(-1).view(-1, K, 1)).view_as(x)

    case.needs(2 * K * case.x.numel())
    return function, (case.x, case.random(case.T, case.B, case.H, K))


def dynamic_conv_band(case, K):
    """Build DynamicConv of width K in fairseq's other form, with band matrices."""

    def function(x, kernels):
        T, groups = case.T, case.B * case.H
        kernels = kernels.softmax(-1).view(T, groups, K).transpose(0, 1)
        band = kernels.new_zeros(groups, T, T + K - 1)
        band.as_strided((groups, T, K), (T * (T + K - 1), T + K, 1)).copy_(kernels)
        rows = x.view(T, groups, case.R).transpose(0, 1)
        return torch.bmm(band.narrow(2, K // 2, T), rows).transpose(0, 1).reshape_as(x)

    case.needs(3 * case.B * case.H * case.T**2)
    return function, (case.x, case.random(case.T, case.B, case.H, K))


def light_conv_unfolded(case, K):
    """Build LightConv of width K, from unfolded windows."""

    def function(x, kernels):
        windows = unfold(x, K).reshape(case.T * case.B, case.H, case.R, K)
        return torch.einsum("nhrk,hk->nhr", windows, kernels.softmax(-1)).reshape_as(x)

    case.needs(2 * K * case.x.numel())
    return function, (case.x, case.random(case.H, K))


def depthwise_conv1d(case, K):
    """Build PyTorch's convolution, in its own layout (B, C, T)."""
    function = partial(F.conv1d, padding=K // 2, groups=case.C)
    return function, (case.random(case.B, case.C, case.T), case.random(case.C, 1, K))


# name -> (builder, how time grows with T)
PEERS = {
    "copy": (copy, 1),
    "TaLK": (talk, 1),
    "TaLK, windows of 3": (partial(talk, window=3), 1),
    "TaLK, windows of 1,000": (partial(talk, window=1000), 1),
    GRAPH: (talk, 1),
    "published TaLK method, in PyTorch": (published_method, 1),
    "self-attention": (self_attention, 2),
    "scaled_dot_product_attention": (sdpa, 2),
    "DynamicConv k=3, unfolded": (partial(dynamic_conv_unfolded, K=3), 1),
    "DynamicConv k=3, band": (partial(dynamic_conv_band, K=3), 2),
    "DynamicConv k=31, unfolded": (partial(dynamic_conv_unfolded, K=31), 1),
    "DynamicConv k=31, band": (partial(dynamic_conv_band, K=31), 2),
    "LightConv k=31, unfolded": (partial(light_conv_unfolded, K=31), 1),
    "depthwise conv1d k=31": (partial(depthwise_conv1d, K=31), 1),
}


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
    print(f"talk_conv is right in {', '.join(dtypes)}")


def step_by_step(case):
    """Return the output of talk_conv_update over the case, as in a decoder."""
    state = TaLKConvState(case.B, case.C, WINDOW, case.dtype, case.device)
    steps = zip(case.x.split(1), case.offset_left.split(1))
    return torch.cat([talk_conv_update(*step, state, WINDOW) for step in steps])


def iteration(function, inputs, mode):
    """Return a callable that does one iteration."""
    if mode == "forward":
        return torch.no_grad()(partial(function, *(t.detach() for t in inputs)))
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

    return harness.timed(iterations) / count


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
    always = ("copy", "TaLK")
    names = [name for name in PEERS if name in always or any(part in name for part in args.only)]
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
    add("--lengths", type=several(at_least(1)), default=[10, 100, 1000, 10_000, 100_000],
        metavar="T,T", help="(default: 10,100,1000,10000,100000)")  # fmt: skip
    add("--dtypes", type=several(one_of(BOUNDS)), default=["float32", "bfloat16"],
        metavar="A,B", help="(default: float32,bfloat16)")  # fmt: skip
    for name, letter, size in zip(("batch", "channels", "heads"), "BCH", SIZES):
        add(f"--{name}", type=at_least(1), default=size, help=f"{letter} (default: {size})")
    add("--only", type=lambda text: text.split("|"), default=[""], metavar="A|B",
        help="peers with one of these in their name")  # fmt: skip
    args = parser.parse_args(arguments)
    for part in args.only:
        if not any(part in name for name in PEERS):
            parser.error(f"--only: expected parts of {' | '.join(PEERS)}, got {part}")
    if args.channels % args.heads:
        parser.error(f"--heads: expected a divisor of {args.channels} channels, got {args.heads}")
    return args


def main(arguments=None):
    """Run the command; `arguments` are those of the command line by default."""
    args = parse(arguments)
    sizes = (args.batch, args.channels, args.heads)
    torch.manual_seed(0)

    check(args.dtypes, args.device)
    facts = dict(zip("BCH", sizes), window=WINDOW)
    report = harness.Report(args, "TaLK", sizes=facts)
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
    print(f"\nwritten: {report.path}")
