"""scripts/gpu_report.sh: without a GPU, and with stages that are played."""

import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from conftest import ROOT

FOUND = {"card": "played", "torch": "2"}
PLAYED = """
import json, subprocess, sys, time

name, prefix = sys.argv[1:]
if name == "good":
    cell = {"T": 10, "results": {"a": {"of_a_copy": 0.91}, "b": {"error": "too slow"}}}
    json.dump({"cells": [cell]}, open(f"{prefix}.json", "w"))
    print("| a | 0.91 |")
elif name == "failing":
    raise ValueError("the kernel is wrong")
elif name == "endless":
    sleeper = subprocess.Popen(["sleep", "100"])
    print(sleeper.pid, flush=True)
    try:
        time.sleep(100)
    finally:
        json.dump({"cells": [{"T": 5, "results": {}}]}, open(f"{prefix}.json", "w"))
elif name == "last":
    print("12 passed")
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """gpu_report.py with the stages above, and one that has to be left out."""
    from pipeline.benchmarks import gpu_report as script

    (tmp_path / "played.py").write_text(PLAYED)
    command = f"PYTHON {shlex.quote(str(tmp_path / 'played.py'))}"
    stages = [
        script.Stage(name, f"The {name} stage", share, f"{command} {name} PREFIX", ())
        for name, share in (("good", 1), ("failing", 1), ("endless", 1), ("last", 2))
    ]
    missing = script.Stage("missing", "A stage for nvlink9", 1, "no", ("torch", "nvlink9"))
    monkeypatch.setattr(script, "environment", lambda: FOUND)
    monkeypatch.setattr(script, "STAGES", (*stages, missing))
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    yield script
    for number, handler in zip(numbers, handlers):  # those of pytest
        signal.signal(number, handler)


def is_running(pid):
    """Whether a process is there and no zombie."""
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def test_without_a_gpu(tmp_path):
    """It says what it finds, and what it would do or leave out, and writes nothing."""
    done = subprocess.run(
        [ROOT / "scripts/gpu_report.sh", "--dry-run", "--minutes", "5"],
        cwd=tmp_path, env={**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "card               none" in done.stdout and "would take 5 minutes" in done.stdout
    assert "Is it right?" in done.stdout and "left out, needs" in done.stdout
    assert not list(tmp_path.iterdir())


def test_a_folder_named_like_what_is_replaced(script, tmp_path):
    folder = tmp_path / "my_PYTHON PREFIX"
    folder.mkdir()
    (folder / "good.md").write_text("mine")
    assert script.run_stage(script.STAGES[0].command, 10, folder / "good") == ("done", "")
    assert (folder / "good.json").exists() and (folder / "good.md").read_text() == "mine"


def test_the_stages_in_turn(script, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/last.json").write_text("of an earlier report")
    start = time.monotonic()
    assert script.main(["--minutes", "0.2", "--out", str(tmp_path / "out")]) == 1  # one failed
    took = time.monotonic() - start
    record = json.loads((tmp_path / "out/report.json").read_text())
    good, failing, endless, last, missing = record["stages"]
    assert record["environment"] == FOUND and took < 15
    assert good["state"] == "done" and good["result"]["cells"][0]["T"] == 10
    assert (failing["state"], failing["why"]) == ("failed", "exit status 1")
    assert endless["state"] == "stopped" and "what would follow is left out" in endless["why"]
    assert endless["result"]["cells"][0]["T"] == 5  # what it wrote when it was interrupted
    assert not is_running((tmp_path / "out/endless.log").read_text().split()[0])
    assert last["state"] == "done" and last["result"] is None
    assert missing["state"] == "left out" and missing["why"] == "needs nvlink9"

    page = (tmp_path / "out/report.md").read_text()
    assert "card               played\n" in page
    assert "\n```\n| a | 0.91 |\n```\n" in page
    assert "ValueError: the kernel is wrong" in page and "```\n12 passed\n```" in page
    assert "left out needs nvlink9" in page
    assert "failed exit status 1" in capsys.readouterr().out


def test_a_stop_loses_nothing(script, tmp_path):
    """SIGTERM in the middle of a stage: what was measured is in the report, and nothing runs on."""
    stages = [tuple(stage) for stage in script.STAGES if stage.name in ("good", "endless", "last")]
    program = f"""
        import sys
        sys.path.insert(0, {str(ROOT / "scripts")!r})
        from pipeline.benchmarks import gpu_report
        gpu_report.STAGES = [gpu_report.Stage(*stage) for stage in {stages!r}]
        gpu_report.environment = lambda: {FOUND!r}
        gpu_report.main(["--minutes", "1", "--out", {str(tmp_path / "out")!r}])
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    log, deadline = tmp_path / "out/endless.log", time.monotonic() + 60
    while not (log.exists() and log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 128 + signal.SIGTERM
    record = json.loads((tmp_path / "out/report.json").read_text())
    states = [stage["state"] for stage in record["stages"]]
    assert states == ["done", "interrupted", "not reached"]
    assert record["stages"][0]["result"]["cells"] and not is_running(log.read_text().split()[0])
    assert "interrupted" in (tmp_path / "out/report.md").read_text()


def test_without_torch(script, monkeypatch):
    def environment():
        import no_such_torch  # noqa: F401

    monkeypatch.setattr(script, "environment", environment)
    with pytest.raises(SystemExit, match="expected torch and NumPy, got No module .*no_such_torch"):
        script.main([])


def test_commands_of_the_stages():
    """Each file that a stage names is there, and each option is one of its program."""
    from pipeline.benchmarks import gpu_report

    for stage in gpu_report.STAGES:
        words = shlex.split(stage.command)
        assert all((ROOT / word).is_file() for word in words if word.endswith(".py"))
        if words[-1] == "PREFIX":
            if "fairseq" in stage.needs:
                pytest.importorskip("fairseq")
            importlib.import_module(f"pipeline.benchmarks.{stage.name}").parse(words[2:])
