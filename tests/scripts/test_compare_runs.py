"""scripts/compare.sh from start to end: killed and continued, and each task."""

import json
import math
import subprocess
import time

import pytest
from comparisons import arguments
from quickstart_runs import TEST_VERSES, kill_group, write_verses

from conftest import ROOT

pytest.importorskip("fairseq")

from pipeline.compare.report import TITLES


@pytest.fixture
def verses(tmp_path):
    return write_verses(tmp_path / "verses", ("es", "en"))


@pytest.mark.slow
@pytest.mark.long
def test_a_comparison_killed_in_training_resumes_where_it_was(verses, tmp_path):
    out = tmp_path / "run"
    command = [
        ROOT / "scripts/compare.sh",
        *arguments(verses, out, "--updates", "20", "--turns", "1"),
    ]
    checkpoints = out / "transformer/2e-3/1/checkpoints"
    with open(tmp_path / "printed", "w") as printed:
        run = subprocess.Popen(command, start_new_session=True, stdout=printed)
        try:
            deadline = time.monotonic() + 600
            while time.monotonic() < deadline and run.poll() is None:
                if list(checkpoints.glob("checkpoint_*_*.pt")):
                    break
                time.sleep(0.1)
        finally:
            kill_group(run)
    reached = max(
        int(path.stem.rpartition("_")[2]) for path in checkpoints.glob("checkpoint_*_*.pt")
    )
    assert reached < 20
    trained = (out / "talkconv/2e-3/1/averaged.pt").stat().st_mtime_ns
    assert not (out / "results.json").exists()

    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "training talkconv" not in done.stdout and "training transformer" in done.stdout
    assert (out / "talkconv/2e-3/1/averaged.pt").stat().st_mtime_ns == trained
    assert f"@ {reached} updates" in (out / "transformer/2e-3/1/train.log").read_text()
    assert not list(out.rglob("*.partial")) and not checkpoints.exists()

    results = json.loads((out / "results.json").read_text())
    counts = [row["parameters"] for row in results["systems"].values()]
    assert max(counts) <= 1.05 * min(counts)
    for row in results["systems"].values():
        assert 0 <= row["score"] < 50
        assert [e["updates"] for e in row["seeds"]["1"]["validation"]] == list(range(1, 21))
        assert row["speed"]["training_tokens_per_second"] > 0
        assert row["speed"]["generated_sentences_per_second"] > 0
    assert f"{TEST_VERSES} sentences" in done.stdout
    for name in ("validation.png", "speed.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")

    # The second time everything is there.
    again = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "==" not in again.stdout and (out / "compare.md").read_text() in again.stdout


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    "task, systems",
    [
        ("mt", "talkconv_plus,lightconv,dynamicconv,convs2s"),
        ("lm", "talkconv,talkconv_plus,transformer,lightconv,dynamicconv"),
        ("summ", "talkconv,transformer,dynamicconv"),
    ],
)
def test_each_task_from_start_to_end(tmp_path, task, systems):
    data = write_verses(tmp_path / "text", ("es", "en"))
    if task == "summ":
        for language, name in (("es", "source"), ("en", "target")):
            for path in data.glob(f"*.{language}*"):
                path.rename(data / path.name.replace(f".{language}", f".{name}"))
    out = tmp_path / "run"
    command = [
        ROOT / "scripts/compare.sh", "--task", task, "--systems", systems,
        "--data", data, "--out", out, "--updates", "2", "--turns", "1", "--lr", "1e-3",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads((out / "results.json").read_text())
    assert ",".join(results["systems"]) == systems
    for name, row in results["systems"].items():
        assert 0 <= row["score"] < math.inf, name
        for speed in ("training_tokens", "generated_sentences"):
            assert row["speed"][f"{speed}_per_second"] > 0, name
    assert TITLES[task] in (out / "compare.md").read_text() or task == "lm"
    assert len(list(out.glob("*.png"))) == 2
