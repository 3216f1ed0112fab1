"""Table 6 of the paper on this machine: the operator alone beside its peers, over lengths.

    benchmark_talk_conv.py                    all of it, on a GPU where there is one
    benchmark_talk_conv.py --lengths 10,1000 --dtypes float32 --output results/talk_conv

First checks talk_conv against the reference, forward and backward, and stops where they differ.
Then, for each length and dtype, runs the peers in turn, in one process, and takes medians:
iterations per second, forward and forward + backward, achieved bandwidth as a share of that of a
copy measured in the same turns, and peak memory. Bandwidth counts what has to move: x and the
offsets read and the output written forward; its gradient, x and the offsets read and their
gradients written backward.
TaLK's backward pass is measured alone, too, each time from the same forward pass. Offsets, queries
and kernels are given, as in the paper. At the end it says which goals of the project this machine
meets: shares of a copy, ratios to peers, replays of a graph and memory, on a GPU or on a CPU.

Writes a table, PREFIX.json (after each length, dtype and mode, so an interrupted run loses no
other) and PREFIX.png.
"""

import argparse
import gc
import itertools
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from pipeline.benchmarks.harness import Unavailable, failures_as_unavailable
from pipeline.common.files import write_whole
from talk_fairseq import talk_conv, talk_conv_reference

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or every profile of torch 2.13 logs two lines

SIZES = (10, 1024, 16)  # B, C and H of the paper; the goals are for them
WINDOW = 31  # largest window to either side
MODES = ("forward", "forward+backward", "backward")
GRAPH = "TaLK, CUDA graph"


# --- The peers: each takes a Case and returns (function, its inputs) ---


class Case:
    """The inputs of one length and dtype; `x` and the offsets are shared by all peers."""

    def __init__(self, T, B, C, H, dtype, device):
        self.T, self.B, self.C, self.H, self.R = T, B, C, H, C // H
        self.dtype, self.device = dtype, device
        self.x = self.random(T, B, C)
        self.offset_left = torch.rand(T, B, H, device=device).to(dtype)
        self.offset_right = torch.rand(T, B, H, device=device).to(dtype)

    def random(self, *shape):
        return torch.randn(shape, device=self.device).to(self.dtype)

    @staticmethod
    def size(tensor):
        return tensor.numel() * tensor.element_size()

    def moves(self, name, mode):
        """Bytes that one iteration of a copy or of TaLK cannot but read and write; else None."""
        x, offsets = self.size(self.x), 2 * self.size(self.offset_left)
        if name == "copy":
            return 2 * x
        forward, backward = 2 * x + offsets, 3 * x + 2 * offsets
        floors = {"forward": forward, "backward": backward, "forward+backward": forward + backward}
        return floors[mode] if name.startswith("TaLK") else None

    def needs(self, elements):
        """Say so beforehand where a CPU's memory would not do; a GPU may try."""
        needed = elements * torch.tensor([], dtype=self.dtype).element_size()
        if self.device == "cpu":
            available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
            if needed > 0.7 * available:
                raise Unavailable(f"out of memory: needs {needed / 2**30:.0f} GiB")


def copy(case):
    return torch.clone, (case.x,)


def talk(case):
    def function(x, offset_left, offset_right):
        return talk_conv(x, offset_left, offset_right, WINDOW, WINDOW)

    return function, (case.x, case.offset_left, case.offset_right)


def published_method(case):
    """A prefix sum over the whole sequence in the input's dtype, then gather and interpolate."""
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

    case.needs(12 * case.x.numel())
    return function, (case.x, case.offset_left, case.offset_right)


def self_attention(case):
    """As in the paper: the score matrix is there, whole."""

    def function(query, key, value):
        scores = torch.bmm(query, key.transpose(1, 2)) / math.sqrt(case.R)
        return torch.bmm(scores.softmax(dim=-1), value)

    case.needs(3 * case.B * case.H * case.T**2)
    return function, tuple(case.random(case.B * case.H, case.T, case.R) for _ in range(3))


def sdpa(case):
    return F.scaled_dot_product_attention, tuple(
        case.random(case.B, case.H, case.T, case.R) for _ in range(3)
    )


def unfold(x, K):
    """(T, B, C) -> (T, B, C, K): the K rows around each time step, as fairseq's modules do it."""
    T, B, C = x.shape
    padded = F.pad(x, (0, 0, 0, 0, K // 2, K - 1 - K // 2))
    return padded.as_strided((T, B, C, K), (B * C, C, 1, B * C))


def refuse_wrapped_offsets(windows):
    """Raise Unavailable where the gradient of `windows` would be written past its end on CUDA.

    PyTorch 2.13 sends a bmm over an inner dimension of 1, as in the backward pass of a product with
    one column, to a Triton kernel with offsets of 32 bits (pytorch#196431). Below that size it is
    right, and can be several times as fast as what the variable has PyTorch call instead: a peer
    is to be at its best.
    """
    wraps = windows.is_cuda and windows.requires_grad and windows.numel() > 2**31
    if wraps and os.environ.get("TORCH_DISABLE_NATIVE_JIT") != "1":
        raise Unavailable("over 2^31 elements: needs TORCH_DISABLE_NATIVE_JIT=1")


def dynamic_conv_unfolded(case, K):
    def function(x, kernels):
        windows = unfold(x, K).reshape(-1, case.R, K)
        refuse_wrapped_offsets(windows)
        return torch.bmm(windows, kernels.softmax(-1).view(-1, K, 1)).view_as(x)

    case.needs(2 * K * case.x.numel())
    return function, (case.x, case.random(case.T, case.B, case.H, K))


def dynamic_conv_band(case, K):
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
    def function(x, kernels):
        windows = unfold(x, K).reshape(case.T * case.B, case.H, case.R, K)
        refuse_wrapped_offsets(windows)
        return torch.einsum("nhrk,hk->nhr", windows, kernels.softmax(-1)).reshape_as(x)

    case.needs(2 * K * case.x.numel())
    return function, (case.x, case.random(case.H, K))


def depthwise_conv1d(case, K):
    """In its own layout, (B, C, T)."""

    def function(x, kernels):
        return F.conv1d(x, kernels, padding=K // 2, groups=case.C)

    return function, (case.random(case.B, case.C, case.T), case.random(case.C, 1, K))


def causal_conv1d(case):
    try:
        from causal_conv1d import causal_conv1d_fn
    except ImportError:
        raise Unavailable("not installed") from None
    return causal_conv1d_fn, (case.random(case.B, case.C, case.T), case.random(case.C, 4))


# name -> (builder, how time grows with T)
PEERS = {
    "copy": (copy, 1),
    "TaLK": (talk, 1),
    GRAPH: (talk, 1),
    "published TaLK method": (published_method, 1),
    "self-attention": (self_attention, 2),
    "scaled_dot_product_attention": (sdpa, 2),
    "DynamicConv k=3, unfolded": (partial(dynamic_conv_unfolded, K=3), 1),
    "DynamicConv k=3, band": (partial(dynamic_conv_band, K=3), 2),
    "DynamicConv k=31, unfolded": (partial(dynamic_conv_unfolded, K=31), 1),
    "DynamicConv k=31, band": (partial(dynamic_conv_band, K=31), 2),
    "LightConv k=31, unfolded": (partial(light_conv_unfolded, K=31), 1),
    "depthwise conv1d k=31": (partial(depthwise_conv1d, K=31), 1),
    "causal_conv1d k=4": (causal_conv1d, 1),
}


# --- Correctness first ---


def check(dtypes, device):
    """Raise SystemExit unless talk_conv is right on this machine, forward and backward."""
    bounds = {"float64": 1e-11, "float32": 2e-6, "float16": 6e-4, "bfloat16": 4e-3}
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
            for index, (a, b) in enumerate(zip(got, want)):
                error = ((a.double() - b).abs().max() / b.abs().max()).item()
                if not error <= bounds[name] * (4 if index else 1):
                    raise SystemExit(f"talk_conv is wrong in {name} by {error:.2g}: not measured")


# --- Measuring ---


def iteration(function, inputs, mode):
    """A callable that does one iteration."""
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
    """``(step, bytes)``: a callable that does one iteration, and its peak memory; warmed up."""
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


def seconds_of(step, count, device):
    """Seconds an iteration, over `count` of them."""
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / count
    start = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - start) / count


def peak_memory(step, device):
    """Bytes that one iteration takes from PyTorch at its peak, beyond what is held before it."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    events = profile.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    return max(itertools.accumulate((size for _, size in sorted(changes)), initial=0))


def measure(case, mode, args, earlier):
    """{peer: {"seconds": …, "memory": …} or {"error": why}} for one case and mode."""
    results, steps, turns, counts = {}, {}, {}, {}
    for name, (build, order) in PEERS.items():
        if args.only and not (name in ("copy", "TaLK") or args.only in name):
            continue
        moves = case.moves(name, mode)
        if mode == "backward" and moves is None:
            continue
        try:
            T, took = earlier.get(name, (case.T, 0))
            if (predicted := took * (case.T / T) ** order) > args.limit:
                raise Unavailable(f"too slow: about {predicted:.0f} s an iteration")
            with failures_as_unavailable():
                step, memory = runner(name, *build(case), mode, args.device)
                once = seconds_of(step, 1, args.device)
        except Unavailable as error:
            results[name] = {"error": str(error)}
            continue
        results[name] = {"memory": memory} | ({"bytes": moves} if moves else {})
        if once > args.limit / 4:
            turns[name] = [once]  # once is enough
        else:
            steps[name], turns[name] = step, []
            # A turn is about a tenth of a second of each, so that a busy moment hits them all.
            counts[name] = max(1, min(1000, int(0.1 / once)))

    for _ in range(args.turns):
        for name in list(steps):
            try:
                with failures_as_unavailable():
                    turns[name].append(seconds_of(steps[name], counts[name], args.device))
            except Unavailable as error:
                results[name] = {"error": str(error)}
                del steps[name], turns[name]
    for name, seconds in turns.items():
        results[name]["seconds"] = statistics.median(seconds)
        earlier[name] = (case.T, results[name]["seconds"])
    return results


def print_table(title, results):
    """Iterations a second, ratio to TaLK, bandwidth, memory."""
    print(f"\n{title}")
    print(f"  {'':30} {'it/s':>10} {'TaLK is':>9} {'GB/s':>7} {'of copy':>8} {'peak MiB':>9}")
    base = results["TaLK"].get("seconds")
    speeds = {
        name: row["bytes"] / row["seconds"]
        for name, row in results.items()
        if "bytes" in row and "seconds" in row
    }
    for name, row in results.items():
        if "error" in row:
            print(f"  {name:30} {row['error']}")
            continue
        ratio = f"{row['seconds'] / base:.1f}x" if base else ""
        speed = f"{speeds[name] / 1e9:.1f}" if name in speeds else ""
        both = name in speeds and "copy" in speeds
        share = f"{speeds[name] / speeds['copy']:.0%}" if both else ""
        print(f"  {name:30} {1 / row['seconds']:10,.1f} {ratio:>9} {speed:>7} {share:>8} "
              f"{row['memory'] / 2**20:9,.1f}")  # fmt: skip
    sys.stdout.flush()


# --- The goals ---


class Goal(NamedTuple):
    """``value(row of TaLK, row of the peer)`` is to be at least, or at most, `bound`."""

    what: str
    peer: str
    value: Callable
    bound: float
    mode: str = "forward"
    lengths: tuple = (1000, 10_000, 100_000)
    dtypes: tuple = ("float32", "bfloat16")
    at_most: bool = False


def bandwidth(talk, copy):
    """As a share of the copy's."""
    return talk["bytes"] / talk["seconds"] / (copy["bytes"] / copy["seconds"])


def times_faster(talk, peer):
    return peer["seconds"] / talk["seconds"]


def times_slower(talk, peer):
    return talk["seconds"] / peer["seconds"]


def a_second(talk, peer):
    return 1 / peer["seconds"]


def peak(talk, copy):
    """What is held at the peak of a forward pass, over x, the offsets and the output."""
    inputs = talk["bytes"] - copy["bytes"] / 2
    return (inputs + talk["memory"]) / talk["bytes"]


SDPA, PUBLISHED = "scaled_dot_product_attention", "published TaLK method"
GOALS = {
    "cuda": (
        Goal("of a copy's bandwidth", "copy", bandwidth, 0.85),
        Goal("of a copy's bandwidth", "copy", bandwidth, 0.7, "backward"),
        Goal("times the published method", PUBLISHED, times_faster, 2, lengths=(10, 100)),
        Goal("replays of a CUDA graph a second", GRAPH, a_second, 100_000, lengths=(10, 100)),
        Goal("times attention", SDPA, times_faster, 8, lengths=(1000,), dtypes=("bfloat16",)),
        Goal("times attention", SDPA, times_faster, 70, lengths=(10_000,), dtypes=("bfloat16",)),
        Goal("times the published method", PUBLISHED, times_faster, 10, "forward+backward",
             (10_000,)),
        Goal("of x, offsets and output at the peak", "copy", peak, 1.05, at_most=True),
    ),
    "cpu": (
        Goal("of a copy's time", "copy", times_slower, 1.5, "forward", (1000,), ("float32",), True),
        Goal("times attention", SDPA, times_faster, 12, "forward+backward", (1000,), ("float32",)),
    ),
}  # fmt: skip


def goals_of(cells, device):
    """[{"goal": …, "value": …, "met": …}]; what was not measured has None twice, and an "error"."""
    found = []
    for goal, cell in itertools.product(GOALS[device], cells):
        T, dtype, mode, results = (cell[key] for key in ("T", "dtype", "mode", "results"))
        if mode != goal.mode or T not in goal.lengths or dtype not in goal.dtypes:
            continue
        bound = f"at {'most' if goal.at_most else 'least'} {goal.bound:,}"
        record = {"goal": f"T={T:,}, {dtype}, {mode}: {bound} {goal.what}"}
        talk, peer = rows = [results.get(name, {}) for name in ("TaLK", goal.peer)]
        if all("seconds" in row for row in rows):
            value = record["value"] = goal.value(talk, peer)
            record["met"] = value <= goal.bound if goal.at_most else value >= goal.bound
        else:
            errors = [row["error"] for row in rows if "error" in row]
            record |= {"value": None, "met": None, "error": errors[0] if errors else "left out"}
        found.append(record)
    return found


def print_goals(goals):
    """A line each."""
    measured = [goal for goal in goals if goal["value"] is not None]
    print(f"\n{sum(goal['met'] for goal in measured)} of {len(measured)} goals are met:")
    for goal in goals:
        word = {True: "met", False: "MISSED", None: "not measured"}[goal["met"]]
        value = goal["error"] if goal["value"] is None else f"{goal['value']:,.3f}"
        print(f"  {word:12} {value:>12}  {goal['goal']}")


def plot(cells, path):
    """Iterations a second and peak memory over the length, log-log; one row of plots a dtype."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    dtypes = sorted({cell["dtype"] for cell in cells})
    figure, axes = plt.subplots(len(dtypes), 3, figsize=(17, 5 * len(dtypes)), squeeze=False)
    columns = [
        ("forward", "iterations a second", lambda row: 1 / row["seconds"]),
        ("forward+backward", "iterations a second", lambda row: 1 / row["seconds"]),
        ("forward", "peak memory, MiB", lambda row: row["memory"] / 2**20),
    ]
    markers = "osv^<>DPX*hd+"
    for line, dtype in zip(axes, dtypes):
        for axis, (mode, label, value) in zip(line, columns):
            for (name, _), marker in zip(PEERS.items(), markers):
                points = [
                    (cell["T"], value(cell["results"][name]))
                    for cell in cells
                    if (cell["dtype"], cell["mode"]) == (dtype, mode)
                    and "seconds" in cell["results"].get(name, {})
                ]
                points = [(T, v) for T, v in points if v > 0]
                if points:
                    ours = name.startswith("TaLK")
                    axis.loglog(
                        *zip(*points), marker=marker, label=name, linewidth=2.5 if ours else 1
                    )
            axis.set(title=f"{mode}, {dtype}", xlabel="T", ylabel=label)
            axis.grid(alpha=0.3)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=5, frameon=False)
    figure.tight_layout(rect=(0, 0.14 / len(dtypes), 1, 1))
    figure.savefig(path, dpi=120)


def main(arguments=None):
    """Run the command; `arguments` are those of the command line by default."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    integers = partial(lambda text: [int(word) for word in text.split(",")])
    parser.add_argument("--lengths", type=integers, default=[10, 100, 1000, 10_000, 100_000])
    parser.add_argument("--dtypes", default="float32,bfloat16", help="default: float32,bfloat16")
    parser.add_argument("--batch", type=int, default=SIZES[0], help="B (10)")
    parser.add_argument("--channels", type=int, default=SIZES[1], help="C (1024)")
    parser.add_argument("--heads", type=int, default=SIZES[2], help="H (16)")
    parser.add_argument("--only", default="", metavar="TEXT", help="peers with this in their name")
    parser.add_argument("--turns", type=int, default=7, help="turns the medians are of (7)")
    parser.add_argument("--limit", type=float, default=5, help="seconds an iteration may take (5)")
    parser.add_argument("--cpu", action="store_true", help="measure the CPU where there is a GPU")
    parser.add_argument("--output", type=Path, default=Path("results/talk_conv"), metavar="PREFIX")
    args = parser.parse_args(arguments)
    args.device = "cuda" if torch.cuda.is_available() and not args.cpu else "cpu"
    dtypes = args.dtypes.split(",")
    torch.manual_seed(0)

    check(dtypes, args.device)
    if args.device == "cuda":
        machine = torch.cuda.get_device_name()
    else:
        machine = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    print(f"talk_conv is right in {', '.join(dtypes)}. Measuring on {machine}, torch "
          f"{torch.__version__}, B={args.batch}, C={args.channels}, H={args.heads}.")  # fmt: skip

    cells = []
    sizes = {"B": args.batch, "C": args.channels, "H": args.heads, "window": WINDOW}
    record = {"machine": machine, "torch": torch.__version__, "sizes": sizes, "cells": cells}
    json_path, png_path = (args.output.with_name(args.output.name + e) for e in (".json", ".png"))
    json_path.parent.mkdir(parents=True, exist_ok=True)
    for dtype in dtypes:
        earlier = {mode: {} for mode in MODES}
        for T in args.lengths:
            try:
                with failures_as_unavailable():
                    case = Case(
                        T, args.batch, args.channels, args.heads, getattr(torch, dtype), args.device
                    )
                    case.needs(6 * case.x.numel())
            except Unavailable as error:
                print(f"\nT={T}, {dtype}: {error}")
                continue
            for mode in MODES:
                results = measure(case, mode, args, earlier[mode])
                print_table(f"T={T:,}, {dtype}, {mode}", results)
                cells.append({"T": T, "dtype": dtype, "mode": mode, "results": results})
                write_whole(json_path, json.dumps(record, indent=1) + "\n")

    if not cells:
        raise SystemExit("nothing was measured")
    goals = goals_of(cells, args.device) if (args.batch, args.channels, args.heads) == SIZES else []
    if goals:
        record["goals"] = goals
        write_whole(json_path, json.dumps(record, indent=1) + "\n")
        print_goals(goals)
    plot(cells, png_path)
    print(f"\nwritten: {json_path} and {png_path}")
