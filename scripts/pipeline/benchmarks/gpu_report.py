"""Report on a GPU in one command: whether the operator is right there, and how fast it is.

    scripts/gpu_report.sh                     all of it, in nine minutes
    scripts/gpu_report.sh --minutes 30 --out somewhere
    scripts/gpu_report.sh --dry-run           say what it would do, as it does without a GPU

Needs torch, CuPy, NumPy and pytest, and no set-up of the checkout. Stages that need more are left
out, and the page says so. The stages run in turn, the most telling first, each in a process of its
own. If a stage fails, or hangs in a broken kernel, it is stopped and recorded, and the next one
runs. Each has a share of the time that is left, and leaves what it does not use to the next ones.

Writes report.json and report.md after each stage. What a stage prints is in NAME.log as it comes,
and what a benchmark measures in NAME.json.
"""

import shlex
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from pipeline.common.command import at_least, parser
from pipeline.common.files import read_json, write_json, write_whole
from pipeline.common.machine import versions
from pipeline.common.paths import ROOT

TAIL = 1000  # lines of a stage's output that the page shows


class Stage(NamedTuple):
    """A part of the report."""

    name: str
    title: str
    share: float  # of the time, beside those of the others
    command: str  # in words for a shell; PYTHON and PREFIX are replaced
    needs: tuple  # modules


TESTS = ("test_operator", "test_cuda", "test_decoding", "test_short_conv")
STAGES = (
    *(Stage(name, f"Is it right? {name}.py", 35,
            f"PYTHON -m pytest -q -k cuda tests/ops/{name}.py", ("cupy", "pytest"))
      for name in TESTS),
    Stage("operator", "The operator beside its peers", 220,
          "PYTHON scripts/benchmark_talk_conv.py --lengths 10000,1000,100000,100,10 --turns 5 "
          "--limit 1 --only 'TaLK|scaled' --output PREFIX", ("cupy",)),
    Stage("decoding", "Decoding: tokens per second", 60,
          "PYTHON scripts/benchmark_decoding.py --models talkconv,transformer,dynamicconv "
          "--lengths 20,100 --batches 64 --beams 5 --dtype float16 --limit 10 --output PREFIX",
          ("cupy", "fairseq")),
    Stage("training", "Training: tokens per second", 60,
          "PYTHON scripts/benchmark_training.py --models talkconv,transformer,dynamicconv "
          "--precisions bfloat16,float32 --turns 3 --batches 2 --limit 10 --output PREFIX",
          ("cupy", "fairseq")),
)  # fmt: skip


def environment():
    """Return what there is: the card, as its driver tells, and the versions."""
    import torch

    found = {"card": "none", "CUDA of torch": torch.version.cuda or "none"}
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        found |= {"card": card.name, "multiprocessors": card.multi_processor_count}
        found["memory, GiB"] = round(card.total_memory / 2**30, 1)
    fields = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"
    told = output_of("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader")
    found |= dict(zip(fields.split(","), told.partition("\n")[0].split(", "))) if told else {}
    return found | versions() | {"commit": output_of("git", "describe", "--always", "--dirty")}


def output_of(*words):
    """Return what a command prints, or nothing where it fails."""
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def missing(stage):
    """Return why a stage is left out, or nothing."""
    absent = [name for name in stage.needs if not find_spec(name)]
    return f"needs {' and '.join(absent)}" if absent else ""


def run_stage(command, seconds, prefix):
    """Run a stage in its own process for at most `seconds`, and return ``(state, why)``."""
    given = {"PYTHON": sys.executable, "PREFIX": str(prefix)}
    words = [given.get(word, word) for word in shlex.split(command)]
    prefix.with_suffix(".json").unlink(missing_ok=True)  # of an earlier report
    # Interrupted, it may still write what it has measured. All that it has started ends with it.
    limit = ["timeout", "--signal=INT", f"--kill-after={max(2, 0.1 * seconds)}", f"{0.9 * seconds}"]
    began = time.monotonic()
    with open(f"{prefix}.log", "w", encoding="utf-8") as log:
        process = subprocess.Popen([*limit, *words], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    try:
        code = process.wait()
    finally:
        process.terminate()
        process.wait()
    if code and time.monotonic() - began > 0.9 * seconds:
        return "stopped", f"its {seconds:.0f} s were over; what would follow is left out"
    return ("done", "") if code == 0 else ("failed", f"exit status {code}")


def report(found, folder, end):
    """Run the stages until `end` at most, and write what they find; return whether one failed."""
    stages = [stage._asdict() | {"state": "left out", "why": missing(stage)} for stage in STAGES]
    waiting = [stage for stage in stages if not stage["why"]]
    if not waiting:
        raise SystemExit(f"gpu_report.sh: expected modules for a stage, {stages[0]['why']}")
    for stage in waiting:
        stage["state"] = "not reached"
    folder.mkdir(parents=True, exist_ok=True)
    for i, stage in enumerate(waiting):
        left = end - time.monotonic()
        seconds = left * stage["share"] / sum(other["share"] for other in waiting[i:])
        print(f"== {stage['title']} ({seconds:.0f} s at most)", flush=True)
        stage["state"], prefix = "interrupted", folder / stage["name"]  # until it has ended
        try:
            stage["state"], stage["why"] = run_stage(stage["command"], max(seconds, 0.1), prefix)
        finally:
            result = prefix.with_suffix(".json")
            stage["result"] = read_json(result) if result.exists() else None
            record = {"environment": found, "stages": stages}
            write_json(folder / "report.json", record)
            write_whole(folder / "report.md", "\n".join(page(record, folder)) + "\n")
        print(f"   {stage['state']} {stage['why']}", flush=True)
    return any(stage["state"] == "failed" for stage in stages)


def page(record, folder):
    """Yield the report in Markdown, in lines: what each stage prints."""
    yield "# What TaLK convolutions do on this GPU\n\n```"
    yield from in_lines(record["environment"])
    for stage in record["stages"]:
        log = folder / f"{stage['name']}.log"
        yield f"```\n\n## {stage['title']}\n\n{stage['state']} {stage['why']}\n\n```"
        if log.exists():
            yield from log.read_text(errors="replace").splitlines()[-TAIL:]
    yield "```"


def in_lines(found):
    """Return what `environment` has found as lines of text."""
    return [f"{key:18} {value}" for key, value in found.items()]


def main(arguments=None):
    """Run the command; `arguments` are those of the command line by default."""
    options = parser("gpu_report.sh", __doc__)
    add = options.add_argument
    add("--minutes", type=at_least(0.1, float), default=9, help="the time it may take (default: 9)")
    add("--out", type=Path, default=Path("gpu_report"), help="folder (default: gpu_report)")
    add("--dry-run", action="store_true", help="only say what it would do")
    args = options.parse_args(arguments)
    # A background job ignores it, and so would the stages, which it asks to write their results.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    end = time.monotonic() + 60 * args.minutes
    try:
        found = environment()
    except ImportError as error:
        raise SystemExit(f"gpu_report.sh: expected torch and NumPy, got {error}") from None
    print(*in_lines(found), sep="\n")
    if args.dry_run or found["card"] == "none":
        print(f"\nOn a GPU this would take {args.minutes:g} minutes and fill {args.out}:\n")
        for stage in STAGES:
            why = missing(stage)
            print(f"  {stage.title}" + (f": left out, {why}" if why else ""))
        return
    failed = report(found, args.out.absolute(), end)
    print(f"written: {args.out}/report.json and report.md")
    return int(failed)
