"""The stages of gpu_report.py, which runs each in a process: gpu_stages.py NAME SECONDS.

A stage yields rows, dicts; what stands under "detail" is for the JSON alone. It is stopped from
outside after so many seconds.
"""

import argparse
import collections
import contextlib
import csv
import importlib.metadata
import importlib.util
import itertools
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from functools import partial
from pathlib import Path

from pipeline.common.paths import ROOT

MARK = "@gpu_report "  # begins the lines in which a stage hands over a row
B, C, H = 10, 1024, 16  # of the paper's table; and the lengths, the most telling first
LENGTHS = (10_000, 1000, 100_000, 100, 10)
LONG, SHORT = 10_000, 1000  # of the other stages
METRICS = {  # of ncu: a column of the page, and what its number is multiplied by
    "gpu__time_duration.sum": ("µs", 1e-3),
    "smsp__inst_executed.sum": ("instructions an element", 32),
    "smsp__issue_active.avg.pct_of_peak_sustained_active": ("issue slots, %", 1),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("occupancy, %", 1),
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": ("memory, %", 1),
    "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed": ("shared memory, %", 1),
    "launch__registers_per_thread": ("registers", 1),
    "launch__occupancy_limit_registers": ("blocks by registers", 1),
    "launch__occupancy_limit_shared_mem": ("blocks by shared memory", 1),
}


def environment(seconds):
    """The machine and what is installed, in one row."""
    import torch

    row = {"card": "none", "CUDA of torch": torch.version.cuda or "none"}
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        row |= {"card": card.name, "multiprocessors": card.multi_processor_count}
        row["memory, GiB"] = round(card.total_memory / 2**30, 1)
    fields = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"
    query = output_of("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader")
    row |= dict(zip(fields.split(","), query.partition("\n")[0].split(", "))) if query else {}
    row |= {"machine": platform.platform(), "python": platform.python_version()}
    for name in ("torch", "numpy", "pytest", "cupy", "matplotlib", "fairseq", "numba"):
        row[name] = "none" if importlib.util.find_spec(name) is None else version(name)
    row["ncu"] = shutil.which("ncu") or "none"
    yield row | {"commit": output_of("git", "-C", ROOT, "describe", "--always", "--dirty")}


def version(name):
    """Of the distribution that a module is from."""
    for distribution in (name, f"{name}-cuda12x", f"{name}-cuda13x"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return "there"


def output_of(*command):
    """What a command prints, or nothing where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def correctness(seconds):
    """The tests that need a GPU, a row for each file."""
    for name in ("test_operator", "test_cuda", "test_decoding", "test_short_conv"):
        with tempfile.TemporaryDirectory() as folder:
            path, start = Path(folder, "junit.xml"), time.monotonic()
            command = [sys.executable, "-m", "pytest", "-q", "-k", "cuda", f"--junit-xml={path}"]
            subprocess.run([*command, f"tests/ops/{name}.py"], cwd=ROOT)
            row = {"file": name, "seconds": time.monotonic() - start}
            if not path.is_file():
                yield row | {"first of them": "pytest did not end well"}
                continue
            suite = xml.etree.ElementTree.parse(path).find("testsuite")
        counts = {key: int(suite.get(key)) for key in ("failures", "errors", "skipped")}
        row |= {"passed": int(suite.get("tests")) - sum(counts.values())} | counts
        wrong = {
            case.get("name"): problem.get("message", "").partition("\n")[0][:200]
            for case in suite
            for problem in (*case.findall("failure"), *case.findall("error"))
        }
        yield row | {"first of them": next(map(": ".join, wrong.items()), ""), "detail": wrong}


def load_benchmark():
    """``(scripts/benchmark_talk_conv.py, device)``."""
    from pipeline.benchmarks import operator as bench

    return bench, "cuda" if bench.torch.cuda.is_available() else "cpu"


def operator(seconds):
    """The operator's table with its goals, once the operator is known to be right."""
    bench, device = load_benchmark()
    dtypes = ("float32", "bfloat16")
    bench.check(dtypes, device)
    named = ("copy", "TaLK", bench.GRAPH, bench.PUBLISHED, bench.SDPA)
    bench.PEERS = {name: bench.PEERS[name] for name in named}
    args = argparse.Namespace(only="", limit=1, turns=5, device=device)
    earlier = collections.defaultdict(dict)
    for T, dtype in itertools.product(LENGTHS, dtypes):
        try:
            with bench.failures_as_unavailable():
                case = bench.Case(T, B, C, H, getattr(bench.torch, dtype), device)
        except bench.Unavailable as error:
            yield {"T": T, "dtype": dtype, "error": str(error)}
            continue
        for mode in bench.MODES:
            results = bench.measure(case, mode, args, earlier[dtype, mode])
            cell = {"T": T, "dtype": dtype, "mode": mode, "results": results}
            ours, a_copy = results["TaLK"], results["copy"]
            row = {"T": T, "dtype": dtype, "mode": mode, "error": ours.get("error", "")}
            if "seconds" in ours and "seconds" in a_copy:
                row |= {"µs": ours["seconds"] * 1e6, "of a copy": bench.bandwidth(ours, a_copy)}
            for name, peer in list(results.items())[2:]:
                both = "seconds" in peer and "seconds" in ours
                row[f"x {name}"] = bench.times_faster(ours, peer) if both else peer.get("error")
            goals = bench.goals_of([cell], device)
            words = {True: "met", False: "MISSED", None: "not measured"}
            told = [f"{words[goal['met']]}: {goal['goal'].partition(': ')[2]}" for goal in goals]
            yield row | {"goals": "; ".join(told), "detail": {"cell": cell, "goals": goals}}


def in_turn(bench, device, steps):
    """{name: seconds a step}, medians of five turns of about a twentieth of a second each."""
    counts, turns = {}, {name: [] for name in steps}
    for name, step in steps.items():
        step()
        counts[name] = max(1, min(1000, int(0.05 / bench.seconds_of(step, 1, device))))
    for _ in range(5):
        for name, step in steps.items():
            turns[name].append(bench.seconds_of(step, counts[name], device))
    return {name: statistics.median(seconds) for name, seconds in turns.items()}


def talk(bench, max_left, max_right):
    """talk_conv with these windows, as a function of tensors alone."""

    def function(x, offset_left, offset_right=None):
        return bench.talk_conv(x, offset_left, offset_right, max_left, max_right)

    return function


def halves(seconds):
    """Small windows in halves beside large ones: short windows may take a slow path."""
    bench, device = load_benchmark()
    for dtype, mode in itertools.product(("bfloat16", "float16"), ("forward", "backward")):
        case = bench.Case(LONG, B, C, H, getattr(bench.torch, dtype), device)
        inputs = bench.talk(case)[1]
        steps = {w: bench.iteration(talk(bench, w, w), inputs, mode) for w in (31, 7, 3)}
        times = in_turn(bench, device, steps)
        for w, once in times.items():
            row = {"dtype": dtype, "mode": mode, "windows": f"{w}+{w}", "µs": once * 1e6}
            yield row | {"times that of 31+31": once / times[31]}


def windows(seconds):
    """Windows of 10 to 100,000 at the longest length: the goal is 1.5 times between them."""
    bench, device = load_benchmark()
    for dtype, mode in itertools.product(("float32", "bfloat16"), ("forward", "backward")):
        case = bench.Case(max(LENGTHS), 1, C, H, getattr(bench.torch, dtype), device)
        inputs, sizes = (case.x, case.offset_left), (10, 1000, 100_000)
        steps = {w: bench.iteration(talk(bench, w, 0), inputs, mode) for w in sizes}
        times = in_turn(bench, device, steps)
        for w, once in times.items():
            row = {"dtype": dtype, "mode": mode, "window": w, "µs": once * 1e6}
            yield row | {"times the fastest": once / min(times.values())}


def capture(seconds):
    """A CUDA graph of the first forward and backward pass of a process: nothing is compiled yet."""
    bench, device = load_benchmark()
    function, inputs = bench.talk(bench.Case(SHORT, B, C, H, bench.torch.float32, device))
    inputs = [tensor.requires_grad_() for tensor in inputs]

    def step():
        out = function(*inputs)
        return out, *bench.torch.autograd.grad(out.sum(), inputs)

    graph = bench.torch.cuda.CUDAGraph()
    with bench.torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    same = all(map(bench.torch.equal, captured, step()))
    yield {"forward and backward, without a warm-up": "captured", "same bits as eager": same}


def calls(seconds):
    """What a call costs where the work is small: calls from Python, and replays of a graph."""
    bench, device = load_benchmark()
    for T, dtype, mode in itertools.product((10, 100), ("float32", "bfloat16"), bench.MODES[:2]):
        case = bench.Case(T, B, C, H, getattr(bench.torch, dtype), device)
        for name, way in (("TaLK", "eager"), (bench.GRAPH, "graph")):
            row = {"T": T, "dtype": dtype, "mode": mode, "way": way}
            try:
                step, _ = bench.runner(name, *bench.talk(case), mode, device)
            except bench.Unavailable as error:
                yield row | {"error": str(error)}
            else:
                once = in_turn(bench, device, {name: step})[name]
                yield row | {"a second": 1 / once, "µs": once * 1e6}


def rotation(seconds):
    """One set of inputs again and again, and eight in turn, which do not fit the cache."""
    bench, device = load_benchmark()
    for dtype, mode in itertools.product(("bfloat16", "float32"), ("forward", "backward")):
        cases = [bench.Case(SHORT, B, C, H, getattr(bench.torch, dtype), device) for _ in range(8)]
        ours = [bench.iteration(*bench.talk(case), mode) for case in cases]
        copies = [bench.iteration(*bench.copy(case), "forward") for case in cases]
        steps = {
            (name, sets): partial(lambda turn: next(turn)(), itertools.cycle(some[:sets]))
            for name, some in (("TaLK", ours), ("copy", copies))
            for sets in (1, 8)
        }
        times = in_turn(bench, device, steps)
        for sets in (1, 8):
            speeds = [cases[0].moves(name, mode) / times[name, sets] for name in ("TaLK", "copy")]
            row = {"dtype": dtype, "mode": mode, "sets": sets, "µs": times["TaLK", sets] * 1e6}
            yield row | {"of a copy": speeds[0] / speeds[1]}


def from_script(name, options, seconds):
    """The rows of another benchmark, stopped a little before this stage would be."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder, "result")
        command = [sys.executable, ROOT / "scripts" / name, *options.split(), "--output", prefix]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, timeout=0.9 * seconds, check=True)
        if not prefix.with_suffix(".json").exists():
            raise SystemExit(f"{name}: stopped before its first result")
        for cell in json.loads(prefix.with_suffix(".json").read_text())["cells"]:
            sizes = {key: value for key, value in cell.items() if key != "results"}
            for model, result in cell["results"].items():
                shown = {key: result.get(key, "") for key in ("tokens_per_second", "error")}
                yield sizes | {"model": model} | shown | {"detail": result}


def decoding(seconds):
    """Beam search with a model of IWSLT's size."""
    options = "--models talkconv,transformer,dynamicconv --batches 64 --beams 5 --dtype float16"
    options += f" --lengths 20,100 --turns 3 --limit {seconds / 8:.0f}"
    yield from from_script("benchmark_decoding.py", options, seconds)


def training(seconds):
    """Training steps with a model of IWSLT's size."""
    options = "--models talkconv,transformer,dynamicconv --precisions bfloat16,float32 --turns 3"
    options += f" --batches 2 --limit {seconds / 8:.0f}"
    yield from from_script("benchmark_training.py", options, seconds)


def profile(seconds):
    """Occupancy, issue slots and traffic of each kernel, by ncu."""
    workload = [
        sys.executable,
        ROOT / "scripts/run.py",
        "benchmarks.gpu_stages",
        "launches",
        str(seconds),
    ]
    command = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
    command += ["--kernel-name", "regex:talk_", "--metrics", ",".join(METRICS), *workload]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    # After lines of ncu and of the workload: the names of the columns, their units, and the rows.
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(lines))[1:]
    if not rows:
        raise SystemExit(f"ncu measured no kernel:\n{done.stdout[-1000:]}")
    for row in rows:
        shown = {"kernel": row["Kernel Name"].partition("(")[0], "threads": row.get("Block Size")}
        for metric, (column, factor) in METRICS.items():
            with contextlib.suppress(KeyError, ValueError):
                number = float(row[metric].replace(",", "")) * factor
                shown[column] = number / (LONG * B * C) if "element" in column else number
        yield shown


def launches(seconds):
    """What ncu profiles: one forward and one backward pass in each dtype."""
    bench, device = load_benchmark()
    for dtype in ("float32", "bfloat16", "float16"):
        _, inputs = bench.talk(bench.Case(LONG, B, C, H, getattr(bench.torch, dtype), device))
        bench.iteration(talk(bench, 31, 31), inputs, "forward+backward")()
        yield {"dtype": dtype}


def main():
    """Run the stage STAGE for about SECONDS, the two arguments; print each row after a mark."""
    for found in globals()[sys.argv[1]](float(sys.argv[2])):
        print(f"\n{MARK}{json.dumps(found)}", flush=True)
