"""What the benchmarks share: options, turns, memory, what cannot run, tables and files."""

import argparse
import contextlib
import ctypes
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch

from pipeline.common.files import write_whole
from pipeline.common.machine import machine

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or every profile of torch 2.13 logs two lines


class Unavailable(Exception):
    """Why a peer or a model cannot run."""


@contextlib.contextmanager
def failures_as_unavailable():
    """Raise Unavailable, in one line, for a lack of memory and for what a device cannot do."""
    try:
        yield
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        raise Unavailable("out of memory") from None
    except RuntimeError as error:
        raise Unavailable(str(error).partition("\n")[0][:100]) from None


def refuse_too_large(needed, share, device, verb="needs"):
    """Raise Unavailable where `needed` bytes exceed this share of a CPU's memory; a GPU may try."""
    if device == "cpu" and hasattr(os, "sysconf"):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        if needed > share * available:
            raise Unavailable(f"out of memory: {verb} {needed / 2**30:.0f} GiB")


# --- Time ---


def synchronize():
    """Wait for the GPU, where one is in use."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def timed(step):
    """Return ``(seconds, result)`` of one call of `step`, with its work on a GPU."""
    synchronize()
    start = time.perf_counter()
    result = step()
    synchronize()
    return time.perf_counter() - start, result


def in_turn(steps, turns):
    """Call `steps`, {name: callable}, in turn, so that a busy moment of the machine hits them all.

    Yields (name, result) for each call; the result is the Unavailable of a step that failed. Such a
    step, and one that the caller deletes from `steps`, takes no further turn.
    """
    for _ in range(turns):
        for name in list(steps):
            try:
                with failures_as_unavailable():
                    result = steps[name]()
            except Unavailable as error:
                result = error
                del steps[name]
            yield name, result


def training_speeds(steps, turns=5, seconds=0.0, report=None):
    """Time training steps in turn, so that a busy moment of the machine hits them all.

    Args:
        steps: {name: callable}; each call is one step, and should do the same work every time.
        turns: in each turn every step runs at least once, after one call of each to warm up.
        seconds: a step is called again within its turn until it has run this long.
        report: called with the result so far, after each turn.

    Returns:
        {name: [seconds per step, the mean of a turn's calls, one entry per turn]}.
    """

    def mean(step):
        calls, took = 0, 0.0
        while not calls or took < seconds:
            took += timed(step)[0]
            calls += 1
        return took / calls

    for step in steps.values():
        step()
    names, speeds = list(steps), {name: [] for name in steps}
    for turn in range(turns):
        first = turn % len(names)  # so that none always follows the same other
        for name in names[first:] + names[:first]:
            speeds[name].append(mean(steps[name]))
        if report is not None:
            report(speeds)
    return speeds


def times_faster(speeds, name, other):
    """Return how many times faster `name` is than `other`: the median over the turns."""
    return statistics.median(b / a for a, b in zip(speeds[name], speeds[other]))


def summary(turns, **amounts):
    """Return the seconds of the turns, their median, and each amount per second of the median."""
    seconds = statistics.median(turns)
    rates = {f"{name}_per_second": amount / seconds for name, amount in amounts.items()}
    return {"turns": turns, "seconds": seconds, **rates}


# --- Memory ---


class PeakMemory:
    """Measure, as a context, the memory needed inside it at most beyond what was held before.

    `bytes` is of PyTorch's allocator on CUDA, and on Linux without it the process's resident
    memory; None elsewhere.
    """

    def __init__(self, device):
        self.device, self.bytes = device, None

    def __enter__(self):
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            self.before = None
            with contextlib.suppress(OSError, AttributeError):  # not Linux, or not allowed
                ctypes.CDLL(None).malloc_trim(0)  # or memory that was freed would be used unseen
                Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
                self.before = self.resident("VmRSS")
        return self

    def __exit__(self, *_):
        if self.device == "cuda":
            torch.cuda.synchronize()
            self.bytes = torch.cuda.max_memory_allocated() - self.before
        elif self.before is not None:
            self.bytes = max(0, self.resident("VmHWM") - self.before)

    @staticmethod
    def resident(field):
        """Return a number of /proc/self/status in bytes."""
        status = Path("/proc/self/status").read_text()
        return int(status.partition(field + ":")[2].split()[0]) * 1024


# --- Output ---


def show_progress(text=""):
    """Show `text` on a terminal, in a line that the next call replaces."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def print_table(title, headers, rows, notes=()):
    """Print ``{name: cells}`` with a title above; the cells are texts, one for each header.

    A row that is a text in place of its cells says why there are none. The headers `notes` are of
    further cells, which are aligned to the left.
    """
    from tabulate import tabulate  # here, as gpu_report runs without it

    show_progress()
    none = [""] * (len(headers) + len(notes))
    cells = [[name, *(none if isinstance(row, str) else row)] for name, row in rows.items()]
    align = ["left", *["right"] * len(headers), *["left"] * len(notes)] if rows else None
    table = tabulate(cells, ["", *headers, *notes], "plain", colalign=align, disable_numparse=True)
    head, *lines = table.splitlines()
    width = max(map(len, rows), default=0)
    for number, (name, row) in enumerate(rows.items()):
        if isinstance(row, str):
            lines[number] = f"{name:{width}}  {row}"
    print(f"\n{title}", *(line.rstrip() for line in (head, *lines)), sep="\n  ", flush=True)


def mebibytes(size, digits=0):
    """Return a number of bytes in MiB as a cell of a table; nothing for None."""
    return "" if size is None else f"{size / 2**20:,.{digits}f}"


class Report:
    """The files of a benchmark: PREFIX.json, and PREFIX.png at the end.

    `record` is what the JSON holds: the machine, the given `facts` and the list `cells`; `where` is
    the machine in words.
    """

    def __init__(self, prefix, device, **facts):
        self.json, self.png = (prefix.with_name(prefix.name + end) for end in (".json", ".png"))
        versions = {"machine": machine(device), "torch": torch.__version__}
        self.where, self.cells = "{machine}, torch {torch}".format(**versions), []
        self.record = {**versions, **facts, "cells": self.cells}

    def save(self):
        """Write the JSON, whole."""
        self.json.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.json, json.dumps(self.record, indent=1) + "\n")

    def finish(self, figure):
        """Write the JSON and `figure(cells)`, where anything was measured."""
        from pipeline.plots.figures import save_figure  # here, as gpu_report runs without it

        self.save()
        if self.cells:
            save_figure(figure(self.cells), self.png)
        print(f"\nwritten: {self.json} and {self.png}")


# --- Options ---


def option_parser(description):
    """Return a parser that prints `description` as it stands, with the option --cpu."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="measure the CPU where there is a GPU")
    return parser


def device_of(args):
    """Return "cuda" where there is a GPU and `args` have no --cpu, else "cpu"."""
    return "cuda" if torch.cuda.is_available() and not args.cpu else "cpu"


def natural(text, least=1):
    """Return a whole number, as a type of an option."""
    if int(text) < least:
        raise argparse.ArgumentTypeError(f"expected at least {least}, got {text}")
    return int(text)


def naturals(text, least=1):
    """Return a list of whole numbers, separated by commas."""
    return [natural(word, least) for word in text.split(",")]


def some_of(known):
    """Return the type of an option that lists some of the names `known`."""

    def names(text):
        for name in text.split(","):
            if name not in known:
                expected = ", ".join(known)
                raise argparse.ArgumentTypeError(f"expected some of {expected}, got {name}")
        return text.split(",")

    return names
