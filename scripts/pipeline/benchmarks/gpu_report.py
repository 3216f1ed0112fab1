"""Report on a GPU in one command: is the operator right there, how fast, and what limits it.

    scripts/gpu_report.sh                     all of it, in nine minutes
    scripts/gpu_report.sh --minutes 30 --out somewhere
    scripts/gpu_report.sh --dry-run           say what it would do, as it does without a GPU

Needs torch, CuPy, NumPy and pytest, and no set-up of the checkout. What needs more is left out, and
the page says so. The stages run in turn, the most telling first, each in a process of its own: one
that fails, or that a broken kernel hangs, is stopped and recorded, and the next one runs. A stage
has a share of the time that is left; what it does not take is for those that follow.

Writes report.json and report.md with each row that is measured and report.png with each stage, so
that they hold all that is known whenever this is stopped.
"""

import argparse
import collections
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from pipeline.benchmarks.gpu_stages import MARK, STAGES_COMMAND
from pipeline.common.files import write_whole

PLOTTED = ("of a copy", "per second", "issue slots, %")
NAMES = ("T", "dtype", "mode", "way", "sets", "kernel")  # columns that distinguish rows


class Stage(NamedTuple):
    """A part of the report."""

    name: str  # of its function in gpu_stages.py
    title: str
    share: float  # of the time, beside those of the others
    needs: tuple = ("cupy",)  # what `environment` must have found


STAGES = (
    Stage("correctness", "Is it right? The tests that need a GPU", 130, ("cupy", "pytest")),
    Stage("operator", "The operator beside its peers, and its goals", 140),
    Stage("half_precision", "Small windows in half precision", 30),
    Stage("windows", "Large windows", 30),
    Stage("capture", "A CUDA graph captured without a warm-up", 15),
    Stage("calls", "Small calls: eager, and replays of a CUDA graph", 25),
    Stage("rotation", "Inputs that do not come from the cache", 25),
    Stage("decoding", "Decoding: tokens per second", 50, ("cupy", "fairseq")),
    Stage("training", "Training: tokens per second", 50, ("cupy", "fairseq")),
    Stage("profile", "What limits the kernels", 45, ("cupy", "ncu")),
)


# --- One stage after the other ---


def run_stage(name, seconds, add):
    """Run a stage in a process of its own, calling `add` with each row: ``(state, error)``."""
    command = [*STAGES_COMMAND, name, str(seconds)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    late = threading.Event()

    def stop():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and all that it has started

    timer = threading.Timer(seconds, lambda: (late.set(), stop()))
    timer.start()
    last = collections.deque(maxlen=15)
    try:
        for line in process.stdout:
            if line.startswith(MARK):
                add(json.loads(line.removeprefix(MARK)))
            elif line.strip():
                print(f"    {line}", end="", flush=True)
                last.append(line)
        code = process.wait()
    finally:
        timer.cancel()
        stop()
    if late.is_set():
        return "stopped", f"its {seconds:.0f} s were over; what would follow is left out"
    return ("done", "") if code == 0 else ("failed", "".join(last).strip() or f"exit code {code}")


def missing(stage, found):
    """Return why a stage is left out, or nothing."""
    absent = [name for name in stage.needs if found.get(name, "none") == "none"]
    return f"needs {' and '.join(absent)}" if absent else ""


def report(found, folder, end):
    """Run the stages until `end` at most, and write what they find into `folder`."""
    record = {"environment": found, "stages": []}
    for stage in STAGES:
        why = missing(stage, found)
        entry = {"name": stage.name, "title": stage.title, "state": "not reached", "error": why}
        record["stages"].append(entry | {"seconds": 0, "rows": []})
        if why:
            record["stages"][-1]["state"] = "left out"
    waiting = [pair for pair in zip(STAGES, record["stages"]) if not pair[1]["error"]]
    folder.mkdir(parents=True, exist_ok=True)
    for i, (stage, entry) in enumerate(waiting):
        start = time.monotonic()
        seconds = (end - start) * stage.share / sum(other.share for other, _ in waiting[i:])
        print(f"== {stage.title} ({seconds:.0f} s at most)", flush=True)
        entry["state"] = "interrupted"  # until it has ended
        write(record, folder)

        def add(row, entry=entry):
            entry["rows"].append(row)
            print("   ", ", ".join(f"{key} {shown(row[key])}" for key in row if key != "detail"))
            write(record, folder)

        entry["state"], entry["error"] = run_stage(stage.name, max(seconds, 0.1), add)
        entry["seconds"] = round(time.monotonic() - start, 1)
        print(f"   {entry['state']} {entry['error']}", flush=True)
        try:
            plot(record, folder)
        except Exception as error:  # also without matplotlib: the numbers are what counts
            record["picture"] = f"No picture: {error!r}"
        write(record, folder)


# --- The page and the picture ---


def shown(value):
    """Return a value of a row as text."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def table(rows):
    """Yield lines of Markdown with a column for each key of the rows."""
    columns = list(dict.fromkeys(key for row in rows for key in row if key != "detail"))
    for cells in (columns, ["---"] * len(columns)):
        yield f"| {' | '.join(cells)} |"
    for row in rows:
        cells = (shown(row.get(column, "")).replace("|", "\\|") for column in columns)
        yield f"| {' | '.join(cells)} |".replace("\n", " ")


def page(record):
    """Yield the report in Markdown, in lines."""
    yield "# What TaLK convolutions do on this GPU\n"
    yield from table([{"": key, "found": value} for key, value in record["environment"].items()])
    goals = [
        goal
        for stage in record["stages"]
        for row in stage["rows"]
        for goal in (row.get("detail") or {}).get("goals", ())
        if goal["met"] is not None
    ]
    if goals:
        met = sum(goal["met"] for goal in goals)
        yield f"\n{met} of the {len(goals)} goals that were measured are met:\n"
        for goal in goals:
            word = "met" if goal["met"] else "**MISSED**"
            yield f"- {word}: {shown(goal['value'])}, {goal['goal']}"
    for stage in record["stages"]:
        yield f"\n## {stage['title']}\n\n{stage['state']}, {stage['seconds']} s\n"
        if stage["error"]:
            yield f"```\n{stage['error']}\n```\n"
        yield from table(stage["rows"]) if stage["rows"] else ()
    if "picture" in record:
        yield f"\n{record['picture']}"


def write(record, folder):
    """Write the JSON and the page."""
    write_whole(folder / "report.json", json.dumps(record, indent=1) + "\n")
    write_whole(folder / "report.md", "\n".join(page(record)) + "\n")


def plot(record, folder):
    """Draw a panel for each stage that has one of the columns PLOTTED."""
    from pipeline.plots.figures import bars_figure, save_figure

    panels = {}
    for stage in record["stages"]:
        for row in stage["rows"]:
            name = ", ".join(str(row[key]) for key in row if key in NAMES)
            for column in PLOTTED:
                if isinstance(row.get(column), float):
                    bars = panels.setdefault((stage["title"], column), {})
                    bars[f"{name} again" if name in bars else name] = row[column], []
    if panels:
        save_figure(bars_figure(panels, columns=len(panels)), folder / "report.png", dpi=100)
        record["picture"] = "![the same in bars](report.png)"


def main(arguments=None):
    """Run the command; `arguments` are those of the command line by default."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=9, help="the time it may take (default: 9)")
    add("--out", type=Path, default=Path("gpu_report"), help="folder (default: gpu_report)")
    add("--dry-run", action="store_true", help="only say what it would do")
    args = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    rows, end = [], time.monotonic() + 60 * args.minutes
    state, error = run_stage("environment", 120, rows.append)
    if not rows:
        raise SystemExit(f"environment: expected torch and NumPy, got {state}: {error}")
    found = rows[0]
    print("\n".join(f"{key:18} {value}" for key, value in found.items()))
    if args.dry_run or found["card"] == "none":
        print(f"\nOn a GPU this would take {args.minutes:g} minutes and fill {args.out}:\n")
        for stage in STAGES:
            why = missing(stage, found)
            print(f"  {stage.title}" + (f": left out, {why}" if why else ""))
        return
    report(found, args.out, end)
    print(f"written: {args.out}/report.json and report.md")
