"""The synthetic tasks: what they ask for, and that the command trains and scores."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pipeline.compare import synthetic
from pipeline.compare.synthetic import BLANK, IGNORED, MARKER, REACH, SEGMENT, TASKS, WORDS, B

T = 64


def wanted(task, x, t):
    """Return what the task asks for at `t` of the tokens `x`, in plain Python."""
    if task.startswith("lag"):
        places = int(task[3:])
        return x[t - places] if t >= places else IGNORED
    if task == "marker":
        starts = [s for s in range(1, t + 1) if x[s - 1] == MARKER and x[s] != MARKER]
        return x[starts[-1]] if starts and t - starts[-1] <= REACH else IGNORED
    if task == "reverse":
        segment, place = divmod(t, SEGMENT)
        return x[segment * SEGMENT - place] if segment and place else IGNORED
    past = [s for s in range(t) if x[s] == x[t]]
    return x[past[0] + 1] if x[t] < WORDS // 2 and past else IGNORED  # recall


@pytest.mark.parametrize("length", (T, 4 * T))
@pytest.mark.parametrize("task", TASKS)
def test_what_a_task_asks_for(task, length):
    x, y = TASKS[task](length, torch.Generator().manual_seed(3))
    assert x.shape == y.shape == (length, B) and x.max() <= MARKER == BLANK
    for b in range(B):
        row = x[:, b].tolist()
        assert y[:, b].tolist() == [wanted(task, row, t) for t in range(length)]
    assert (y != IGNORED).any()


def test_the_command_trains_and_scores(tmp_path, capsys):
    output = tmp_path / "out/synthetic.v2"
    words = ["--tasks", "lag5", "--systems", "talkconv_plus", "--seeds", "1", "--steps", "150"]
    assert synthetic.main([*words, "--lr", "1e-9,3e-3", "--output", str(output)]) == 0
    found = json.loads(Path(f"{output}.json").read_text())["systems"]["talkconv_plus"]["lag5"]
    assert found.pop("rate") == 3e-3 and found.keys() == {"1x", "4x"}
    assert all(accuracy > 95 for (accuracy,) in found.values())
    assert Path(f"{output}.md").read_text() in capsys.readouterr().out


@pytest.mark.parametrize(
    "option, value, expected",
    [
        ("--tasks", "lag99", "some of lag5, "),
        ("--tasks", "lag5,lag5", "different values, got lag5,lag5"),
        ("--systems", "rnn", "some of talkconv, "),
        ("--systems", "talkconv,lightconv,talkconv", "different values, got talkconv,"),
        ("--steps", "0", "a whole number of at least 1, got 0"),
        ("--lr", "0", "a positive number, got 0"),
        ("--lr", "1e-3,inf", "a positive number, got inf"),
        ("--lr", "1e-3,0.001", "different values, got 1e-3,0.001"),
    ],
)
def test_a_command_that_cannot_be_used(option, value, expected, capsys):
    with pytest.raises(SystemExit) as stop:
        synthetic.main([option, value])
    assert stop.value.code == 2 and f"{option}: expected {expected}" in capsys.readouterr().err


def test_a_run_that_does_not_go_on_does_not_say_so(tmp_path, capsys, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(synthetic, "measure", stopped)
    assert synthetic.main(["--output", str(tmp_path / "synthetic")]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "synthetic.sh: interrupted"


def test_an_output_that_cannot_be_written_is_refused_before_training(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(synthetic, "measure", lambda *_: pytest.fail("it trains"))
    (tmp_path / "file").touch()
    assert synthetic.main(["--output", str(tmp_path / "file" / "synthetic")]) == 1
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_no_training_sees_what_is_scored(monkeypatch):
    """Sequences are other ones, in training, in validation and for each seed of a score."""
    drawn = []

    def make(length, generator):
        drawn.append((generator.initial_seed(), length))
        return synthetic.lag(length, generator, 5)

    monkeypatch.setitem(TASKS, "lag5", make)
    model = torch.nn.Embedding(WORDS + 1, WORDS + 1)
    monkeypatch.setattr(synthetic, "build", lambda flags, seed: (model, 0))
    monkeypatch.setattr(synthetic, "logits", lambda model, first, x: model(x))
    for seed in (1, 2):
        synthetic.trained({}, "lag5", 1, 1e-3, seed)
    seen = set(drawn)
    drawn.clear()
    for seed in (0, 1, 2):
        synthetic.accuracy(model, 0, "lag5", T, seed, batches=1)
    assert len(seen) == 2 and len(set(drawn)) == 3 and not seen & set(drawn)


def test_seeds_rates_and_lengths(monkeypatch):
    monkeypatch.setattr(synthetic, "trained", lambda flags, task, steps, lr, seed: (lr, seed))
    monkeypatch.setattr(
        synthetic, "accuracy", lambda lr, of, task, length, seed: (-abs(lr - 2), of, length, seed)
    )
    found = synthetic.measure({}, "lag5", SimpleNamespace(lr=[1, 2, 3], seeds=3, steps=1))
    assert found == {
        "rate": 2,
        "1x": [(0, seed, T, seed) for seed in (1, 2, 3)],
        "4x": [(0, seed, 4 * T, seed) for seed in (1, 2, 3)],
    }
