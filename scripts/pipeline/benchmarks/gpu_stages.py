"""The stages of gpu_report.py, which runs each in a process of its own: gpu_stages NAME SECONDS.

A stage yields rows, dictionaries; what is under "detail" is for the JSON alone. gpu_report.py stops
it after so many seconds.
"""

import argparse
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

STAGES_COMMAND = [sys.executable, ROOT / "scripts/run.py", "benchmarks.gpu_stages"]
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
    """Yield the machine and what is installed, in one row."""
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
    """Return the version of the distribution that a module is from."""
    for distribution in (name, f"{name}-cuda12x", f"{name}-cuda13x"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return "of no distribution"


def output_of(*command):
    """Return what a command prints, or nothing where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def correctness(seconds):
    """Run the tests that need a GPU: a row for each file."""
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
    """Return ``(pipeline.benchmarks.operator_speed, device)``."""
    from pipeline.benchmarks import operator_speed as bench

    return bench, "cuda" if bench.torch.cuda.is_available() else "cpu"


def cases(T, dtypes, modes, batch=None):
    """Yield ``(row, case)`` for each dtype and mode; a row begins with them."""
    bench, device = load_benchmark()
    for dtype, mode in itertools.product(dtypes, modes):
        case = bench.Case(T, batch or B, C, H, getattr(bench.torch, dtype), device)
        yield {"dtype": dtype, "mode": mode}, case


def operator(seconds):
    """Yield the operator's table with its goals, once the operator is known to be right."""
    bench, device = load_benchmark()
    dtypes = ("float32", "bfloat16")
    bench.check(dtypes, device)
    named = ("copy", "TaLK", bench.GRAPH, bench.PUBLISHED, bench.SDPA)
    bench.PEERS = {name: bench.PEERS[name] for name in named}
    args = argparse.Namespace(only="", limit=1, turns=5, device=device)
    for cell in bench.measure_all(itertools.product(LENGTHS, dtypes), (B, C, H), args):
        row = {key: cell[key] for key in ("T", "dtype", "mode", "error") if key in cell}
        if "results" in cell:
            results = cell["results"]
            ours, a_copy = results["TaLK"], results["copy"]
            row["error"] = ours.get("error", "")
            if "seconds" in ours and "seconds" in a_copy:
                row |= {"µs": ours["seconds"] * 1e6, "of a copy": bench.bandwidth(ours, a_copy)}
            for name, peer in list(results.items())[2:]:
                both = "seconds" in peer and "seconds" in ours
                row[f"x {name}"] = bench.times_faster(ours, peer) if both else peer.get("error")
            goals = bench.goals_of([cell], device)
            words = {True: "met", False: "MISSED", None: "not measured"}
            told = [f"{words[goal['met']]}: {goal['goal'].partition(': ')[2]}" for goal in goals]
            row |= {"goals": "; ".join(told), "detail": {"cell": cell, "goals": goals}}
        yield row


def measure(steps):
    """Return {name: seconds per step}, medians of five turns of about a twentieth of a second."""
    bench, device = load_benchmark()
    turns = {name: [] for name in steps}
    for name, step in steps.items():
        step()
        count = bench.count_for(0.05, bench.seconds_of(step, 1, device))
        steps[name] = partial(bench.seconds_of, step, count, device)
    for _ in range(5):
        for name, step in steps.items():
            turns[name].append(step())
    return {name: statistics.median(seconds) for name, seconds in turns.items()}


def measure_windows(case, mode, windows):
    """Return {(max_left, max_right): seconds} of talk_conv with each of the `windows`."""
    bench, _ = load_benchmark()

    def step(left, right):
        inputs = [case.x, case.offset_left, case.offset_right][: 3 if right else 2]
        rest = [left, right] if right else [None, left, right]
        return bench.iteration(lambda *tensors: bench.talk_conv(*tensors, *rest), inputs, mode)

    return measure({window: step(*window) for window in windows})


def half_precision(seconds):
    """Measure small windows in half precision beside large ones, as they may take a slow path."""
    for row, case in cases(LONG, ("bfloat16", "float16"), ("forward", "backward")):
        times = measure_windows(case, row["mode"], ((31, 31), (7, 7), (3, 3)))
        for (left, right), once in times.items():
            shown = {"windows": f"{left}+{right}", "µs": once * 1e6}
            yield row | shown | {"times that of 31+31": once / times[31, 31]}


def windows(seconds):
    """Measure windows of 10 to 100,000 at the longest length: the goal is at most 1.5 times."""
    for row, case in cases(max(LENGTHS), ("float32", "bfloat16"), ("forward", "backward"), 1):
        times = measure_windows(case, row["mode"], ((10, 0), (1000, 0), (100_000, 0)))
        for (left, _), once in times.items():
            shown = {"window": left, "µs": once * 1e6}
            yield row | shown | {"times the fastest": once / min(times.values())}


def capture(seconds):
    """Capture the first forward and backward pass of a process: nothing is compiled yet."""
    bench, device = load_benchmark()
    function, inputs = bench.peers.talk(bench.Case(SHORT, B, C, H, bench.torch.float32, device))
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
    """Measure a call where the work is small: calls from Python, and replays of a graph."""
    bench, device = load_benchmark()
    for T in (10, 100):
        for row, case in cases(T, ("float32", "bfloat16"), bench.MODES[:2]):
            for name, way in (("TaLK", "eager"), (bench.GRAPH, "graph")):
                row = {"T": T, **row, "way": way}
                try:
                    step, _ = bench.runner(name, *bench.peers.talk(case), row["mode"], device)
                except bench.Unavailable as error:
                    yield row | {"error": str(error)}
                else:
                    once = measure({name: step})[name]
                    yield row | {"per second": 1 / once, "µs": once * 1e6}


def rotation(seconds):
    """Measure the same inputs again and again, and eight in turn, which do not fit the cache."""
    bench, device = load_benchmark()
    for row, case in cases(SHORT, ("bfloat16", "float32"), ("forward", "backward")):
        every = [case, *(bench.Case(SHORT, B, C, H, case.dtype, device) for _ in range(7))]
        ours = [bench.iteration(*bench.peers.talk(case), row["mode"]) for case in every]
        copies = [bench.iteration(*bench.peers.copy(case), "forward") for case in every]
        steps = {
            (name, sets): partial(lambda turn: next(turn)(), itertools.cycle(some[:sets]))
            for name, some in (("TaLK", ours), ("copy", copies))
            for sets in (1, 8)
        }
        times = measure(steps)
        for sets in (1, 8):
            ours, a_copy = (
                case.moves(name, row["mode"]) / times[name, sets] for name in ("TaLK", "copy")
            )
            shown = {"sets": sets, "µs": times["TaLK", sets] * 1e6}
            yield row | shown | {"of a copy": ours / a_copy}


def from_script(name, options, seconds):
    """Yield the rows of another benchmark, stopped a little before this stage would be."""
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
    """Measure beam search with a model of IWSLT's size."""
    options = "--models talkconv,transformer,dynamicconv --batches 64 --beams 5 --dtype float16"
    options += f" --lengths 20,100 --turns 3 --limit {seconds / 8:.0f}"
    yield from from_script("benchmark_decoding.py", options, seconds)


def training(seconds):
    """Measure training steps with a model of IWSLT's size."""
    options = "--models talkconv,transformer,dynamicconv --precisions bfloat16,float32 --turns 3"
    options += f" --batches 2 --limit {seconds / 8:.0f}"
    yield from from_script("benchmark_training.py", options, seconds)


def profile(seconds):
    """Measure occupancy, issue slots and traffic of each kernel, by ncu."""
    command = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
    command += ["--kernel-name", "regex:talk_", "--metrics", ",".join(METRICS)]
    done = subprocess.run([*command, *STAGES_COMMAND, "launches", str(seconds)],
                          stdout=subprocess.PIPE, text=True)  # fmt: skip
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
    """Make what ncu profiles: one forward and one backward pass in each dtype."""
    bench, _ = load_benchmark()
    for row, case in cases(LONG, ("float32", "bfloat16", "float16"), ("forward+backward",)):
        bench.iteration(*bench.peers.talk(case), row["mode"])()
        yield row


def main():
    """Run the stage STAGE for about SECONDS, the two arguments; print each row after a mark."""
    for found in globals()[sys.argv[1]](float(sys.argv[2])):
        print(f"\n{MARK}{json.dumps(found)}", flush=True)
