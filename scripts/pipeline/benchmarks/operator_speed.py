"""Measure the operator beside its peers, and compare it with the goals of the project."""

import collections
import gc
import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from pipeline.benchmarks import harness, peers
from pipeline.benchmarks.harness import Unavailable
from pipeline.benchmarks.peers import GRAPH, PEERS, PUBLISHED, SDPA, Case
from talk_fairseq import talk_conv, talk_conv_reference

MODES = ("forward", "forward+backward", "backward")


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
                out = function(*inputs, *rest, peers.WINDOW, max_right)
                return out, *torch.autograd.grad(out, inputs, dout.to(out.dtype))

            got = run(talk_conv, inputs)
            want = run(talk_conv_reference, [t.double() for t in inputs])
            for index, (a, b) in enumerate(zip(got, want)):
                error = ((a.double() - b).abs().max() / b.abs().max()).item()
                if not error <= bounds[name] * (4 if index else 1):
                    raise SystemExit(f"talk_conv is wrong in {name} by {error:.2g}: not measured")


# --- Measuring ---


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


def seconds_of(step, count, device):
    """Return the seconds per iteration, over `count` of them."""
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


def count_for(seconds, once):
    """Return how many iterations of `once` seconds each fill about so many `seconds`."""
    return max(1, min(1000, int(seconds / once)))


def peak_memory(step, device):
    """Return the bytes that one iteration takes from PyTorch at its peak, beyond those before."""
    gc.collect()
    if device == "cuda":
        with harness.PeakMemory(device) as peak:
            step()
        return peak.bytes
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    events = profile.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    return max(itertools.accumulate((size for _, size in sorted(changes)), initial=0))


def measure(case, mode, args, earlier):
    """Return {peer: {"seconds": …, "memory": …} or {"error": why}} for one case and mode.

    `earlier` is {peer: (T, seconds)} of another length, and is brought up to date.
    """
    results, steps, turns = {}, {}, {}
    for name, (build, order) in PEERS.items():
        if args.only and not (name in ("copy", "TaLK") or args.only in name):
            continue
        moves = case.moves(name, mode)
        if mode == "backward" and moves is None:
            continue
        try:
            T, took = earlier.get(name, (case.T, 0))
            if (predicted := took * (case.T / T) ** order) > args.limit:
                raise Unavailable(f"too slow: about {predicted:.0f} s per iteration")
            with harness.failures_as_unavailable():
                step, memory = runner(name, *build(case), mode, args.device)
                once = seconds_of(step, 1, args.device)
        except Unavailable as error:
            results[name] = {"error": str(error)}
            continue
        results[name] = {"memory": memory} | ({"bytes": moves} if moves else {})
        turns[name] = []
        if once > args.limit / 4:
            turns[name] = [once]  # once is enough
        else:  # a turn is about a tenth of a second of each
            steps[name] = partial(seconds_of, step, count_for(0.1, once), args.device)

    for name, seconds in harness.in_turn(steps, args.turns):
        if isinstance(seconds, Unavailable):
            results[name] = {"error": str(seconds)}
            del turns[name]
        else:
            turns[name].append(seconds)
    for name, seconds in turns.items():
        results[name]["seconds"] = statistics.median(seconds)
        earlier[name] = (case.T, results[name]["seconds"])
    return results


def measure_all(places, sizes, args):
    """Yield {"T": …, "dtype": …, "mode": …, "results": …} for each mode of (T, dtype) in `places`.

    Where the inputs (B, C and H are the `sizes`) have no room, an "error" is in place of the last
    two.
    """
    earlier = collections.defaultdict(dict)
    for T, dtype in places:
        try:
            with harness.failures_as_unavailable():
                case = Case(T, *sizes, getattr(torch, dtype), args.device)
                case.needs(6 * case.x.numel())
        except Unavailable as error:
            yield {"T": T, "dtype": dtype, "error": str(error)}
            continue
        for mode in MODES:
            results = measure(case, mode, args, earlier[dtype, mode])
            yield {"T": T, "dtype": dtype, "mode": mode, "results": results}


# --- The goals ---


class Goal(NamedTuple):
    """``value(row of TaLK, row of the peer)`` should be at least, or at most, `bound`."""

    what: str
    peer: str
    value: Callable
    bound: float
    mode: str = "forward"
    lengths: tuple = (1000, 10_000, 100_000)
    dtypes: tuple = ("float32", "bfloat16")
    at_most: bool = False


def bandwidth(talk, copy):
    """Return the bandwidth as a share of the copy's."""
    return talk["bytes"] / talk["seconds"] / (copy["bytes"] / copy["seconds"])


def times_faster(talk, peer):
    """Return how many times as fast as the peer TaLK is."""
    return peer["seconds"] / talk["seconds"]


def peak(talk, copy):
    """Return what is held at the peak of a forward pass, over x, the offsets and the output."""
    inputs = talk["bytes"] - copy["bytes"] / 2
    return (inputs + talk["memory"]) / talk["bytes"]


GOALS = {
    "cuda": (
        Goal("of a copy's bandwidth", "copy", bandwidth, 0.85),
        Goal("of a copy's bandwidth", "copy", bandwidth, 0.7, "backward"),
        Goal("times the published method", PUBLISHED, times_faster, 2, lengths=(10, 100)),
        Goal("replays of a CUDA graph per second", GRAPH, lambda talk, graph: 1 / graph["seconds"],
             100_000, lengths=(10, 100)),
        Goal("times attention", SDPA, times_faster, 8, lengths=(1000,), dtypes=("bfloat16",)),
        Goal("times attention", SDPA, times_faster, 70, lengths=(10_000,), dtypes=("bfloat16",)),
        Goal("times the published method", PUBLISHED, times_faster, 10, "forward+backward",
             (10_000,)),
        Goal("of x, offsets and output at the peak", "copy", peak, 1.05, at_most=True),
    ),
    "cpu": (
        Goal("of a copy's time", "copy", lambda talk, copy: talk["seconds"] / copy["seconds"], 1.5,
             "forward", (1000,), ("float32",), at_most=True),
        Goal("times attention", SDPA, times_faster, 12, "forward+backward", (1000,), ("float32",)),
    ),
}  # fmt: skip


def goals_of(cells, device):
    """Return [{"goal": …, "value": …, "met": …}] of the goals that concern the `cells`.

    What was not measured has None twice, and an "error".
    """
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
