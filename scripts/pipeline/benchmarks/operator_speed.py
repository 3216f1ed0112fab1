"""Measure the operator beside its peers, and compare it with the goals of the project."""

import collections
import gc
import itertools
import re
from functools import partial
from typing import NamedTuple

import torch

from pipeline.benchmarks import harness, peers
from pipeline.benchmarks.harness import COLUMNS, Unavailable
from pipeline.benchmarks.peers import GRAPH, PEERS, PUBLISHED, SDPA, Case
from talk_fairseq import talk_conv, talk_conv_reference

MODES = ("forward", "forward+backward", "backward")
# By how much an output may be off, relative to the largest; a gradient by four times as much.
BOUNDS = {"float64": 1e-11, "float32": 2e-6, "float16": 6e-4, "bfloat16": 4e-3}


def check(dtypes, device):
    """Raise SystemExit unless talk_conv is right on this machine, forward and backward."""
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
                if not error <= BOUNDS[name] * (4 if index else 1):
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


def seconds_of(step, count):
    """Return the seconds per iteration, over `count` of them."""

    def iterations():
        for _ in range(count):
            step()

    return harness.timed(iterations)[0] / count


def peak_memory(step, device):
    """Return the bytes that one iteration takes at its peak, beyond those before."""
    gc.collect()
    with harness.PeakMemory(device) as peak:
        step()
    return peak.bytes


def measure(case, mode, args, earlier):
    """Return {peer: {"seconds": …, "memory": …, …} or {"error": why}} for one case and mode.

    `earlier` is {peer: (T, seconds)} of another length, and is brought up to date.
    """
    results, steps = {}, {}
    for name, (build, order) in PEERS.items():
        if name not in ("copy", "TaLK") and not re.search(args.only, name):
            continue
        moves = case.moves(name, mode)
        if mode == "backward" and moves is None:
            continue
        harness.show_progress(f"T={case.T:,}, {mode}: {name}, warming up")
        try:
            T, took = earlier.get(name, (case.T, 0))
            if (predicted := took * (case.T / T) ** order) > args.limit:
                raise Unavailable(f"too slow: about {predicted:.0f} s per iteration")
            with harness.failures_as_unavailable():
                step, memory = runner(name, *build(case), mode, args.device)
                once = seconds_of(step, 1)
        except Unavailable as error:
            results[name] = {"error": str(error)}
            continue
        results[name] = {"memory": memory} | ({"bytes": moves} if moves else {})
        count = max(1, min(1000, int(0.1 / once)))  # a turn is about a tenth of a second of each
        steps[name] = partial(seconds_of, step, count)

    harness.measure(results, steps, args.turns, args.limit / 4)
    harness.summarise(results, "TaLK", iterations=1)
    a_copy = results["copy"]
    for name, row in results.items():
        if "seconds" in row:
            earlier[name] = (case.T, row["seconds"])
            if "bytes" in row and "seconds" in a_copy:
                speed = row["bytes"] / row["seconds"]
                row["of_a_copy"] = speed / (a_copy["bytes"] / a_copy["seconds"])
    return results


def measure_all(places, sizes, args):
    """Yield {"T": …, "dtype": …, "mode": …, "results": …} for each mode of (T, dtype) in `places`.

    B, C and H are the `sizes`. Where the inputs have no room, there is no cell.
    """
    earlier = collections.defaultdict(dict)
    for T, dtype in places:
        try:
            with harness.failures_as_unavailable():
                case = Case(T, *sizes, getattr(torch, dtype), args.device)
                case.needs(6 * case.x.numel())
        except Unavailable as error:
            print(f"\nT={T:,}, {dtype}: {error}")
            continue
        for mode in MODES:
            results = measure(case, mode, args, earlier[dtype, mode])
            yield {"T": T, "dtype": dtype, "mode": mode, "results": results}


# --- The goals ---


class Goal(NamedTuple):
    """At least this for a number of a peer's row, one of harness.COLUMNS."""

    peer: str
    number: str
    least: float
    mode: str
    lengths: tuple
    dtypes: tuple = ("float32", "bfloat16")


LONG, SHORT = (1000, 10_000, 100_000), (10, 100)
GOALS = {
    "cuda": (
        Goal("TaLK", "of_a_copy", 0.85, "forward", LONG),
        Goal("TaLK", "of_a_copy", 0.7, "backward", LONG),
        Goal(GRAPH, "iterations_per_second", 100_000, "forward", SHORT),
        Goal(PUBLISHED, "speed_up", 2, "forward", SHORT),
        Goal(PUBLISHED, "speed_up", 10, "forward+backward", (10_000,)),
        Goal(SDPA, "speed_up", 8, "forward", (1000,), ("bfloat16",)),
        Goal(SDPA, "speed_up", 70, "forward", (10_000,), ("bfloat16",)),
    ),
    "cpu": (
        Goal("copy", "speed_up", 1 / 1.5, "forward", (1000,), ("float32",)),
        Goal(SDPA, "speed_up", 12, "forward+backward", (1000,), ("float32",)),
    ),
}


def goals_of(cells, device):
    """Return a row for each goal that concerns one of the `cells`, with what was measured."""
    found = []
    for goal, cell in itertools.product(GOALS[device], cells):
        T, dtype, mode, results = (cell[key] for key in ("T", "dtype", "mode", "results"))
        if mode == goal.mode and T in goal.lengths and dtype in goal.dtypes:
            row = results.get(goal.peer, {})
            value = row.get(goal.number)
            met = {True: "yes", False: "NO", None: row.get("error", "not measured")}
            found.append({
                "goal": f"{harness.title(cell)}: {goal.peer}, {COLUMNS[goal.number][0]}",
                "at least": goal.least, "measured": value,
                "met": met[None if value is None else value >= goal.least],
            })  # fmt: skip
    return found
