"""scripts/average_checkpoints.py on checkpoints small enough to average by hand."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conftest import ROOT
from pipeline.recipes import average

pytest.importorskip("fairseq")

SCRIPT = ROOT / "scripts/average_checkpoints.py"


def write(path, model, **rest):
    torch.save({"model": model, "args": argparse.Namespace(arch="x"), **rest}, path)
    return str(path)


def run(tmp_path, *arguments):
    """The exit status of the command."""
    output = str(tmp_path / "averaged.pt")
    return average.main(["--output", output, "--inputs", *map(str, arguments)])


def averaged(tmp_path, *arguments):
    assert run(tmp_path, *arguments) == 0
    return torch.load(tmp_path / "averaged.pt", weights_only=True)


@pytest.fixture
def refusal(tmp_path, capsys):
    """Returns the one line that the command ends with; nothing may have been written."""

    def refusal(*arguments):
        assert run(tmp_path, *arguments) == 1
        assert not list(tmp_path.glob("averaged.pt*"))
        line = capsys.readouterr().err.removesuffix("\n")
        assert line.startswith("average_checkpoints.py: ") and "\n" not in line
        return line

    return refusal


def test_the_mean_is_computed_in_float64_and_rounded_once(tmp_path):
    torch.manual_seed(0)
    values = [torch.randn(5, 3) * 10**power for power in (-4, 0, 4)]
    paths = [write(tmp_path / f"{i}.pt", {"w": value}) for i, value in enumerate(values)]
    expected = sum(value.double() for value in values) / 3
    assert torch.equal(averaged(tmp_path, *paths)["model"]["w"], expected.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_type_of_the_parameters_is_kept(tmp_path, dtype):
    # In float16 the sum of these overflows; their mean does not.
    values = [torch.tensor([60000.0, 1.0], dtype=dtype), torch.tensor([60000.0, 2.0], dtype=dtype)]
    paths = [write(tmp_path / f"{i}.pt", {"w": value}) for i, value in enumerate(values)]
    mean = averaged(tmp_path, *paths)["model"]["w"]
    assert mean.dtype == dtype
    assert mean.tolist() == [values[0][0].item(), 1.5]


def test_the_rest_is_the_last_checkpoint_without_its_optimizer(tmp_path):
    first = write(tmp_path / "1.pt", {"n": torch.tensor([4])}, extra_state={"epoch": 1})
    last = write(
        tmp_path / "2.pt",
        {"n": torch.tensor([9])},
        extra_state={"epoch": 2},
        last_optimizer_state={"step": 3},
    )
    state = averaged(tmp_path, first, last)
    assert state["model"]["n"].tolist() == [9]  # a counter has no mean
    assert state["extra_state"] == {"epoch": 2}
    assert state["args"].arch == "x"
    assert "last_optimizer_state" not in state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tied_tensors_stay_tied(tmp_path, dtype):
    paths = []
    for value in (1.0, 2.0):
        tied = torch.full((2, 2), value, dtype=dtype)
        model = {"embed": tied, "output": tied, "other": torch.full((2, 2), 7.0, dtype=dtype)}
        paths.append(write(tmp_path / f"{value}.pt", model))
    model = averaged(tmp_path, *paths)["model"]
    assert model["embed"].tolist() == [[1.5, 1.5], [1.5, 1.5]]
    assert model["embed"].data_ptr() == model["output"].data_ptr()
    assert model["other"].tolist() == [[7.0, 7.0], [7.0, 7.0]]


def test_tensors_tied_only_at_the_end_are_averaged_apart(tmp_path):
    one, two = torch.ones(2), torch.zeros(2)
    first = write(tmp_path / "1.pt", {"a": one, "b": two})
    last = write(tmp_path / "2.pt", {"a": one, "b": one})
    model = averaged(tmp_path, first, last)["model"]
    assert model["a"].tolist() == [1.0, 1.0] and model["b"].tolist() == [0.5, 0.5]


def numbered(folder, names):
    for number, name in enumerate(names):
        write(folder / name, {"w": torch.tensor([10.0**number])})


def test_last_epochs_and_last_updates_count_by_number(tmp_path):
    epochs = ["checkpoint2.pt", "checkpoint9.pt", "checkpoint10.pt"]
    updates = ["checkpoint_1_900.pt", "checkpoint_2_1000.pt"]
    numbered(tmp_path, [*epochs, *updates, "checkpoint_last.pt", "checkpoint_best.pt"])
    assert averaged(tmp_path, tmp_path, "--last-epochs", 2)["model"]["w"] == (10 + 100) / 2
    again = averaged(tmp_path, tmp_path, "--last-updates", 1, "--force")
    assert again["model"]["w"] == 10_000


@pytest.mark.parametrize(("maximize", "expected"), [(False, (10 + 1) / 2), (True, (10 + 100) / 2)])
def test_best_follows_the_metric_of_the_run(tmp_path, maximize, expected):
    cfg = {"checkpoint": {"maximize_best_checkpoint_metric": maximize}}
    for number, value in enumerate(("4.100", "9.50", "10.2000")):
        path = tmp_path / f"checkpoint.best_bleu_{value}.pt"
        write(path, {"w": torch.tensor([10.0**number])}, cfg=cfg)
    assert averaged(tmp_path, tmp_path, "--best", 2)["model"]["w"] == expected


def test_best_by_two_metrics_is_refused(tmp_path, refusal):
    numbered(tmp_path, ["checkpoint.best_bleu_4.1.pt", "checkpoint.best_loss_4.1.pt"])
    assert "of one metric" in refusal(tmp_path, "--best", 1)


def test_too_few_files_name_the_pattern(tmp_path, refusal):
    numbered(tmp_path, ["checkpoint1.pt"])
    line = refusal(tmp_path, "--last-epochs", 2)
    assert r"2 files like checkpoint(\d+)\.pt" in line and line.endswith("got 1")
    assert r"checkpoint_\d+_(\d+)\.pt" in refusal(tmp_path, "--last-updates", 1)


def test_the_last_of_no_files_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(tmp_path, tmp_path, "--last-epochs", 0)
    assert "--last-epochs: expected a whole number of at least 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"w": torch.ones(3)}, "got another w in"),
        ({"v": torch.ones(2), "w": torch.ones(2)}, "got another v in"),
        ({}, "got another w in"),
    ],
)
def test_models_that_differ_are_refused(tmp_path, other, expected, refusal):
    first = write(tmp_path / "1.pt", {"w": torch.ones(2)})
    line = refusal(first, write(tmp_path / "2.pt", other))
    assert expected in line and line.endswith(f"in {tmp_path / '2.pt'}")


def test_broken_files_are_named(tmp_path, refusal):
    good = write(tmp_path / "good.pt", {"w": torch.ones(1000)})
    cut = tmp_path / "cut.pt"
    cut.write_bytes(Path(good).read_bytes()[:900])
    line = refusal(good, cut)
    assert f"in {cut}, got a truncated or foreign file" in line
    line = refusal(good, tmp_path / "absent.pt")
    assert "No such file or directory: " in line and "absent.pt" in line
    assert not list(tmp_path.glob("averaged.pt*"))


def test_a_file_that_would_run_code_is_refused(tmp_path, refusal):
    path = tmp_path / "evil.pt"
    torch.save({"model": {}, "args": Path(tmp_path)}, path)
    assert "the unsafe type pathlib" in refusal(path)


def test_the_folder_of_the_output_is_made(tmp_path):
    path = write(tmp_path / "1.pt", {"w": torch.ones(2)})
    assert average.main(["--inputs", path, "--output", str(tmp_path / "new/averaged.pt")]) == 0
    assert (tmp_path / "new/averaged.pt").exists()


def test_an_output_that_exists_needs_force(tmp_path, capsys):
    path = write(tmp_path / "1.pt", {"w": torch.ones(2)})
    averaged(tmp_path, path)
    assert run(tmp_path, path) == 1
    assert "averaged.pt, which exists" in capsys.readouterr().err
    assert averaged(tmp_path, path, "--force")["model"]["w"].tolist() == [1.0, 1.0]


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch, capsys):
    path = write(tmp_path / "1.pt", {"w": torch.ones(2)})
    averaged(tmp_path, path)

    def disk_full(state, file):
        file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", disk_full)
    assert run(tmp_path, path, "--force") == 1
    assert "No space left" in capsys.readouterr().err
    assert torch.load(tmp_path / "averaged.pt", weights_only=True)["model"]["w"].tolist() == [1, 1]
    assert not list(tmp_path.glob("*.tmp"))


def test_several_inputs_with_a_choice_are_refused(refusal):
    assert "one folder" in refusal("a.pt", "b.pt", "--last-epochs", 1)


def test_a_folder_without_a_choice_is_refused(tmp_path, refusal):
    expected = "--inputs: expected files, or a folder with a choice such as --last-epochs 5, got"
    folder, file = tmp_path / "run", write(tmp_path / "1.pt", {"w": torch.ones(2)})
    folder.mkdir()
    for inputs in ([folder], [file, folder]):
        assert f"{expected} the folder {folder}" in refusal(*inputs)


@pytest.mark.parametrize(("maximize", "expected"), [(False, 1.0), (True, 100.0)])
def test_best_of_an_old_run(tmp_path, maximize, expected):
    """One whose options are a Namespace."""
    args = argparse.Namespace(maximize_best_checkpoint_metric=maximize)
    for number, value in enumerate(("4.1", "9.5", "10.2")):
        state = {"model": {"w": torch.tensor([10.0**number])}, "args": args}
        torch.save(state, tmp_path / f"checkpoint.best_bleu_{value}.pt")
    assert averaged(tmp_path, tmp_path, "--best", 1)["model"]["w"] == expected


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_many_checkpoints_take_the_memory_of_two(tmp_path):
    size = 5_000_000  # numbers of a model, which are 20 MB
    for number in range(4):
        state = {
            "model": {f"layer{n}": torch.full((size // 20,), float(number)) for n in range(20)},
            "args": argparse.Namespace(),
            "last_optimizer_state": torch.ones(2 * size),
        }
        torch.save(state, tmp_path / f"checkpoint{number}.pt")
    del state
    script = f"""
import threading, time
from pipeline.recipes import average

def memory():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

def watch():
    while running:
        peaks.append(memory())
        time.sleep(0.001)

before, peaks, running = memory(), [], True
thread = threading.Thread(target=watch)
thread.start()
average.main(["--inputs", "{tmp_path}", "--last-epochs", "4", "--output", "mean.pt"])
running = False
thread.join()
print(max(peaks) - before)
"""
    # What is freed goes back to the system at once, whatever the watching thread allocates between.
    settings = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT / "scripts"), **settings},
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    mean = torch.load(tmp_path / "mean.pt", weights_only=True)["model"]["layer7"]
    assert mean.shape == (size // 20,) and mean.eq(1.5).all()
    assert int(done.stdout.splitlines()[-1]) < 3 * 4 * size
