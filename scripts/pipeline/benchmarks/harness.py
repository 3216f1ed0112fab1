"""What the benchmarks share: turns, memory, what cannot run, tables, files and options."""

import contextlib
import ctypes
import gc
import math
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

import torch

from pipeline.common.command import at_least, parser
from pipeline.common.files import write_json
from pipeline.common.machine import has_gpu, machine
from pipeline.common.tables import markdown

# The columns of a table, and what a number of a row is multiplied by to stand there.
COLUMNS = {
    "iterations_per_second": ("iterations/s", 1),
    "sentences_per_second": ("sentences/s", 1),
    "tokens_per_second": ("tokens/s", 1),
    "speed_up": ("speed-up of TaLK", 1),
    "of_a_copy": ("of a copy", 1),
    "memory": ("peak MiB", 2**-20),
    "error": ("error", 1),
}


class Unavailable(RuntimeError):
    """Why a peer or a model cannot run."""


def why_not(error):
    """Return in one line why something cannot run, of a RuntimeError; PyTorch's are long."""
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        return "out of memory"
    return str(error).partition("\n")[0][:100]


def timed(step):
    """Return the seconds of one call of `step`, with its work on a GPU."""
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    wait()
    start = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - start


def in_turn(steps, turns):
    """Yield the names of `steps`, a dictionary, `turns` times: forwards and backwards in turn.

    So a busy moment of the machine hits them all alike, and none always follows the same other.
    What the caller deletes from `steps` takes no further turn.
    """
    for turn in range(turns):
        yield from list(steps)[:: -1 if turn % 2 else 1]


def summarise(results, ours, amounts):
    """Add to the rows with "turns" their median, and each of the `amounts` per second of it.

    `amounts` is {name: amount that a step works on}. "speed_up" is how many times faster than that
    row the one named `ours` is: the median over the turns. "of_a_copy" is the bandwidth of a row
    that says how many "bytes" it moves, as a share of that of the row "copy".
    """
    our_turns, copy = results.get(ours, {}).get("turns"), results.get("copy", {})
    for row in results.values():
        for key in ("speed_up", "of_a_copy"):
            row.pop(key, None)  # of a row that may have failed since
        if "turns" in row:
            row["seconds"] = statistics.median(row["turns"])
            for name, amount in amounts.items():
                row[f"{name}_per_second"] = amount / row["seconds"]
            if our_turns:
                row["speed_up"] = statistics.median(b / a for a, b in zip(our_turns, row["turns"]))
            if "bytes" in row and "seconds" in copy:
                row["of_a_copy"] = row["bytes"] / row["seconds"] / (copy["bytes"] / copy["seconds"])


def peak_memory(step, device):
    """Return the bytes that one call of `step` takes at its peak, beyond what was held before.

    They are of PyTorch's allocator on CUDA, and on Linux without it of the process's resident
    memory; None elsewhere.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        # fairseq's trainer would forget the peak at the end of a step.
        with mock.patch("torch.cuda.reset_peak_memory_stats"):
            step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    before = None
    with contextlib.suppress(OSError, AttributeError):  # not Linux, or not allowed
        ctypes.CDLL(None).malloc_trim(0)  # or memory that was freed would be used unseen
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        before = linux_bytes("self/status", "VmRSS")
    step()
    return None if before is None else max(0, linux_bytes("self/status", "VmHWM") - before)


def linux_bytes(file, field):
    """Return in bytes a number that a file of /proc has in KiB; OSError where it is not Linux."""
    text = Path("/proc", file).read_text()
    return int(text.partition(field + ":")[2].split()[0]) * 1024


def show_progress(text=""):
    """Show `text` on a terminal, in a line that the next call replaces."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def shown(value):
    """Return a value as a cell of a table."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else value


def title(cell):
    """Return in words what the results of a cell are of."""
    return ", ".join(f"{key} {shown(value)}" for key, value in cell.items() if key != "results")


def table(results):
    """Return in Markdown a row for each name in the results, with the COLUMNS that are there."""
    keys = [key for key in COLUMNS if any(row.get(key) is not None for row in results.values())]
    rows = []
    for name, row in results.items():
        values = [row.get(key) and row[key] * COLUMNS[key][1] for key in keys]
        rows.append([name, *map(shown, values)])
    return markdown(["", *(COLUMNS[key][0] for key in keys)], rows)


class Report:
    """What a benchmark has measured so far, which PREFIX.json holds after each step.

    Args:
        args: options with `output`, the prefix, the `device` and the number of `turns`.
        ours: the name of the row that the others are compared with.
        facts: what the JSON says beside the machine and the `cells`.
    """

    def __init__(self, args, ours, **facts):
        self.path, self.turns, self.ours = Path(f"{args.output}.json"), args.turns, ours
        facts = {"machine": machine(args.device), "torch": torch.__version__, **facts}
        print(f"Measuring: {title(facts)}", flush=True)
        gc.freeze()  # what is imported is no garbage, and takes long to look through
        self.cells = []
        self.record = {**facts, "cells": self.cells}
        try:
            write_json(self.path, self.record)
        except OSError as error:
            raise SystemExit(f"--output: expected a path to write to, got {error}") from None

    def measure(self, cell, names, prepare, amounts, enough=math.inf):
        """Measure in turn what `prepare` gives, print the table, and return the steps that ran.

        Args:
            cell: what the results are of; they are added to it, {name: row}. A row has the "turns"
                in seconds, and what `summarise` adds; of a step that fails, it is {"error": why}.
            names: what to measure.
            prepare: ``prepare(name, row)`` returns a warm step: a callable that does the work once
                and returns its seconds. It may add to the row, and raises Unavailable where it
                cannot run.
            amounts: as of `summarise`.
            enough: a step that takes longer than so many seconds takes no further turn.
        """
        words, results, steps = title(cell), {}, {}
        self.cells.append(cell | {"results": results})
        try:
            for name in names:
                show_progress(f"{words}: {name}, warming up")
                results[name] = {}
                try:
                    steps[name] = prepare(name, results[name])
                except RuntimeError as error:
                    results[name] = {"error": why_not(error)}
                write_json(self.path, self.record)
            left = dict(steps)
            for name in in_turn(left, self.turns):
                show_progress(f"{words}: measuring {name}")
                try:
                    seconds = steps[name]()
                except RuntimeError as error:
                    results[name] = {"error": why_not(error)}
                    del left[name]
                else:
                    results[name].setdefault("turns", []).append(seconds)
                    if seconds > enough:
                        del left[name]
                summarise(results, self.ours, amounts)
                write_json(self.path, self.record)
        finally:
            show_progress()
            print(f"\n{words}", table(results), sep="\n", flush=True)
        return {name: step for name, step in steps.items() if "error" not in results[name]}


def option_parser(name, description, turns, limit, output):
    """Return a parser for ``scripts/NAME`` with the options that all benchmarks have."""
    options = parser(name, description)
    add = options.add_argument
    add("--cpu", dest="device", action="store_const", const="cpu",
        default="cuda" if has_gpu() else "cpu",
        help="measure the CPU where there is a GPU")  # fmt: skip
    add("--turns", type=at_least(1), default=turns, help=f"whose medians count (default: {turns})")
    add("--limit", type=at_least(0, float), default=limit, metavar="SECONDS",
        help=f"leave out what takes longer than this (default: {limit})")  # fmt: skip
    add("--output", type=Path, default=Path(output), metavar="PREFIX", help=f"(default: {output})")
    return options
