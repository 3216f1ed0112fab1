"""scripts/gpu_report.sh: without a GPU, with stages that are played, and the stages on a CPU."""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from conftest import ROOT

FOUND = {"card": "played", "cupy": "14", "pytest": "9", "fairseq": "none", "ncu": "none"}
STAGES = """
    import json, os, subprocess, sys, time

    def row(**values):
        print("@gpu_report " + json.dumps(values), flush=True)

    name = sys.argv[1]
    if name == "environment":
        row(**FOUND)
    elif name == "good":
        row(T=10, dtype="float32", **{"of a copy": 0.91}, detail={"goals": [
            {"goal": "T=10: at least 0.85 of a copy", "value": 0.91, "met": True},
            {"goal": "T=10: at least 9 times attention", "value": 8.0, "met": False},
            {"goal": "T=10: not measured", "value": None, "met": None, "error": "too slow"},
        ]})
    elif name == "failing":
        row(a=1)
        raise ValueError("the kernel is wrong")
    elif name == "endless":
        sleeper = subprocess.Popen(["sleep", "100"])
        row(pids=[os.getpid(), sleeper.pid])
        time.sleep(100)
    elif name == "last":
        row(b="x|y")
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """gpu_report.py with the stages above, of a share of the time each."""
    from pipeline.benchmarks import gpu_report as script

    played = tmp_path / "played.py"
    played.write_text(textwrap.dedent(STAGES).replace("FOUND", repr(FOUND)))
    stages = [
        script.Stage(name, f"The {name} stage", share)
        for name, share in (("good", 1), ("failing", 1), ("endless", 1), ("last", 2))
    ]
    missing = script.Stage("missing", "A stage for fairseq", 1, ("cupy", "fairseq"))
    monkeypatch.setattr(script, "STAGES_COMMAND", [sys.executable, played])
    monkeypatch.setattr(script.signal, "signal", lambda number, handler: None)  # of pytest
    monkeypatch.setattr(script, "STAGES", (*stages, missing))
    return script


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


def test_the_stages_in_turn(script, tmp_path, capsys):
    start = time.monotonic()
    script.main(["--minutes", "0.2", "--out", str(tmp_path / "out")])
    took = time.monotonic() - start
    record = json.loads((tmp_path / "out/report.json").read_text())
    good, failing, endless, last, missing = record["stages"]
    assert record["environment"] == FOUND and took < 12
    assert good["state"] == "done" and good["rows"][0]["of a copy"] == 0.91
    assert failing["state"] == "failed" and "the kernel is wrong" in failing["error"]
    assert failing["rows"] == [{"a": 1}] and last["rows"] == [{"b": "x|y"}]
    assert endless["state"] == "stopped" and "what would follow is left out" in endless["error"]
    assert 2 < endless["seconds"] < 5  # a third of what was left
    assert not any(map(is_running, endless["rows"][0]["pids"]))
    assert missing["state"] == "left out" and missing["error"] == "needs fairseq"

    page = (tmp_path / "out/report.md").read_text()
    assert "1 of the 2 goals that were measured are met" in page and "**MISSED**: 8," in page
    assert "| 10 | float32 | 0.91 |" in page and "| x\\|y |" in page and "needs fairseq" in page
    assert "detail" not in page and "report.png" in page
    assert (tmp_path / "out/report.png").read_bytes().startswith(b"\x89PNG")
    assert "the kernel is wrong" in capsys.readouterr().out


def test_a_stop_loses_nothing(script, tmp_path):
    """SIGTERM in the middle of a stage: what was measured is in the report, and nothing runs on."""
    program = f"""
        import sys
        sys.path.insert(0, {str(ROOT / "scripts")!r})
        from pipeline.benchmarks import gpu_report
        gpu_report.STAGES_COMMAND = {list(map(str, script.STAGES_COMMAND))!r}
        gpu_report.STAGES = [gpu_report.Stage(n, n, 1) for n in ("good", "endless", "last")]
        gpu_report.main(["--minutes", "1", "--out", {str(tmp_path / "out")!r}])
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    path, rows = tmp_path / "out/report.json", []
    deadline = time.monotonic() + 60
    while not rows and time.monotonic() < deadline:
        time.sleep(0.05)
        if path.exists():  # whole at any moment
            rows = json.loads(path.read_text())["stages"][1]["rows"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 128 + signal.SIGTERM
    good, endless, last = json.loads(path.read_text())["stages"]
    states = [stage["state"] for stage in (good, endless, last)]
    assert states == ["done", "interrupted", "not reached"] and endless["rows"] == rows
    assert not any(map(is_running, rows[0]["pids"]))
    assert "interrupted" in (tmp_path / "out/report.md").read_text()
    assert sorted(file.name for file in path.parent.iterdir()) == [
        "report.json", "report.md", "report.png",
    ]  # fmt: skip


def test_without_matplotlib(script, tmp_path, monkeypatch):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "pipeline.plots.figures", raising=False)
    monkeypatch.setattr(script, "STAGES", script.STAGES[:1])
    script.main(["--minutes", "0.2", "--out", str(tmp_path / "out")])
    assert "No picture: ModuleNotFoundError" in (tmp_path / "out/report.md").read_text()
    assert not (tmp_path / "out/report.png").exists()


def test_without_torch(script, monkeypatch):
    monkeypatch.setattr(script, "STAGES_COMMAND", [sys.executable, "no such file"])
    with pytest.raises(SystemExit, match="environment: expected torch .*, got failed: .*no such f"):
        script.main([])


# ---------------------------------------------------------------- the stages, on a CPU


@pytest.fixture
def stages(monkeypatch):
    """gpu_stages.py with small sizes, and a benchmark that does not wait."""
    from pipeline.benchmarks import gpu_stages as stages
    from pipeline.benchmarks import operator_speed as bench

    monkeypatch.setattr(stages, "load_benchmark", lambda: (bench, "cpu"))
    for name, value in (("B", 2), ("C", 32), ("H", 4), ("LENGTHS", (40, 5)), ("LONG", 40)):
        monkeypatch.setattr(stages, name, value)
    monkeypatch.setattr(stages, "SHORT", 20)
    monkeypatch.setattr(bench, "PEERS", bench.PEERS)  # the stage leaves some out
    monkeypatch.setattr(bench, "peak_memory", lambda step, device: (step(), 0)[1])
    monkeypatch.setattr(bench, "seconds_of", lambda step, count, device: step() is None or 0.1)
    return stages


@pytest.mark.parametrize(
    ("name", "rows", "columns"),
    [
        ("operator", 12, {"T", "dtype", "mode", "µs", "of a copy", "goals", "detail"}),
        ("half_precision", 12, {"dtype", "mode", "windows", "µs", "times that of 31+31"}),
        ("windows", 12, {"dtype", "mode", "window", "µs", "times the fastest"}),
        ("calls", 16, {"T", "dtype", "mode", "way"}),
        ("rotation", 8, {"dtype", "mode", "sets", "µs", "of a copy"}),
        ("capture", 1, {"same bits as eager"}),
        ("environment", 1, {"card", "torch", "cupy", "ncu", "commit"}),
    ],
)
def test_stages_yield_rows(stages, monkeypatch, name, rows, columns):
    """A graph is played: what is captured runs at once."""
    graph = SimpleNamespace(replay=lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    found = list(getattr(stages, name)(10))
    assert len(found) == rows and all(columns <= row.keys() for row in found)
    json.dumps(found)


def test_the_operator_is_not_measured_where_it_is_wrong(stages, monkeypatch):
    bench, _ = stages.load_benchmark()
    right = bench.talk_conv
    monkeypatch.setattr(bench, "talk_conv", lambda *arguments: 1.001 * right(*arguments))
    with pytest.raises(SystemExit, match="talk_conv is wrong"):
        next(stages.operator(10))


def test_correctness(stages, tmp_path, monkeypatch):
    """The tests' results come from pytest's own record, and a test that fails is named."""
    (tmp_path / "tests/ops").mkdir(parents=True)
    for name in ("test_operator", "test_cuda", "test_decoding"):
        (tmp_path / f"tests/ops/{name}.py").write_text(
            "def test_cuda_right(): pass\ndef test_cuda_wrong(): assert 1 == 2\ndef test_other(): 0"
        )
    (tmp_path / "tests/ops/test_cuda.py").write_text("import os; os._exit(3)")
    monkeypatch.setattr(stages, "ROOT", tmp_path)
    rows = {row["file"]: row for row in stages.correctness(60)}
    assert [rows["test_operator"][key] for key in ("passed", "failures", "skipped")] == [1, 1, 0]
    assert rows["test_operator"]["first of them"] == "test_cuda_wrong: assert 1 == 2"
    assert rows["test_cuda"]["first of them"] == "pytest did not end well"
    assert rows["test_decoding"]["failures"] == 1


NCU = """#!/bin/sh
echo '==PROF== Connected'
echo '"ID","Kernel Name","Block Size","gpu__time_duration.sum","smsp__inst_executed.sum"'
echo '"","","","nsecond","inst"'
echo '"0","talk_forward_float32_wide(Problem)","(320, 1, 1)","193,000","2,560"'
"""


def test_profile(stages, tmp_path, monkeypatch):
    """ncu, played."""
    (tmp_path / "ncu").write_text(NCU)
    (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (row,) = stages.profile(10)
    assert row == {
        "kernel": "talk_forward_float32_wide", "threads": "(320, 1, 1)", "µs": 193,
        "instructions an element": 2560 * 32 / (40 * 2 * 32),
    }  # fmt: skip
    (tmp_path / "ncu").write_text("#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM'; exit 1\n")
    with pytest.raises(SystemExit, match="ERR_NVGPUCTRPERM"):
        next(stages.profile(10))


def test_other_benchmarks(stages, monkeypatch):
    """One that is stopped: what it has written until then is read."""

    def run(command, **_):
        prefix = command[command.index("--output") + 1]
        cells = [{"T": 5, "results": {"a": {"tokens_per_second": 9.5}, "b": {"error": "slow"}}}]
        prefix.with_suffix(".json").write_text(json.dumps({"cells": cells}))
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(stages.subprocess, "run", run)
    for stage in (stages.decoding, stages.training):
        rows = [{k: row[k] for k in row if k != "detail"} for row in stage(10)]
        assert rows == [
            {"T": 5, "model": "a", "tokens_per_second": 9.5, "error": ""},
            {"T": 5, "model": "b", "tokens_per_second": "", "error": "slow"},
        ]


def test_another_benchmark_without_a_result(stages, monkeypatch):
    monkeypatch.setattr(stages.subprocess, "run", lambda command, **_: None)
    with pytest.raises(SystemExit, match="benchmark_decoding.py: stopped before its first result"):
        next(stages.decoding(10))


@pytest.mark.parametrize("name", ["decoding", "training"])
def test_options_of_the_other_benchmarks(stages, monkeypatch, name):
    """Those that the stages give are options there."""
    pytest.importorskip("fairseq")
    other = importlib.import_module(f"pipeline.benchmarks.{name}")
    seen = []
    monkeypatch.setattr(stages, "from_script", lambda *arguments: seen.append(arguments) or ())
    list(getattr(stages, name)(100))
    (script, options, _), *_ = seen
    assert (ROOT / "scripts" / script).is_file()
    other.parse(options.split())
