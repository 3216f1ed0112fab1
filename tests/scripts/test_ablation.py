"""scripts/ablation.sh without its trainings: the commands, the scores it keeps, what it refuses."""

import json
import shlex
from types import SimpleNamespace

import pytest

from conftest import ROOT

pytest.importorskip("fairseq")
from test_train import PREPARED

from pipeline.recipes import ablation, train


def test_a_dry_run_prints_all_commands(tmp_path, capsys):
    arguments = ["--dry-run", "--save-dir", str(tmp_path / "runs"), "--data", "a folder"]
    assert ablation.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7 * 5 * 2 and not list(tmp_path.iterdir())
    for line in lines[:2]:
        script, name, *words = shlex.split(line)
        assert (ROOT / script).exists() and name == "iwslt14_de_en/ablation_1_one_window"
        assert "a folder" in words
    # Training takes what it is given.
    words = shlex.split(lines[0])[1:]
    assert "common.seed=1" in train.plan(train.parse([*words, "--dry-run"]))[0][-1]


def test_goes_on_and_counts_what_diverged(tmp_path, monkeypatch, capsys):
    (tmp_path / "prepared.json").write_text(json.dumps(PREPARED | {"checks": []}))
    scores = {("ablation_1_one_window", seed): "diverged" for seed in (1, 2)}
    scores |= {("ablation_2_normalised", 1): 35.0, ("ablation_2_normalised", 2): 36.0}
    made = []

    def score(row, seed, args):
        if len(made) == 3:
            raise ablation.Failed(f"{row}, seed {seed}: train.py failed with status 1")
        made.append((row, seed))
        return scores[row, seed]

    monkeypatch.setattr(ablation, "score", score)
    start = ["--data", str(tmp_path), "--results", str(tmp_path / "x/ablation.json")]
    start += ["--rows", "ablation_1_one_window,ablation_2_normalised", "--seeds", "1,2"]
    assert ablation.main(start) == 1
    assert "ablation_2_normalised, seed 2: train.py failed" in capsys.readouterr().err
    made = made[:2]
    assert ablation.main(start) == 0
    assert made == [*list(scores)[:2], ("ablation_2_normalised", 2)]
    results = json.loads((tmp_path / "x/ablation.json").read_text())
    assert results.keys() == {"ablation_1_one_window", "ablation_2_normalised"}
    assert results["ablation_1_one_window"]["seeds"] == {"1": "diverged", "2": "diverged"}
    assert results["ablation_2_normalised"]["seeds"] == {"1": 35.0, "2": 36.0}
    lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    cells = [[cell.strip() for cell in line[:4]] for line in lines]
    assert cells[2] == ["ablation_1_one_window", "diverges", "diverged", "2"]
    assert cells[3] == ["ablation_2_normalised", "35.70 +- .1", "35.50 +- 0.71", "2"]


def test_a_refused_run_has_not_diverged(tmp_path, monkeypatch):
    monkeypatch.setattr(ablation, "run_module", lambda *_: 2)
    args = SimpleNamespace(save_dir=tmp_path, data=tmp_path, cpu=True, overrides=[])
    folder = tmp_path / "ablation_1_one_window/seed_1"
    folder.mkdir(parents=True)
    (folder / "crash.pt").touch()  # of an earlier run
    message = "ablation_1_one_window, seed 1: scripts/train.sh failed with status 2"
    with pytest.raises(ablation.Failed, match=message):
        ablation.score("ablation_1_one_window", 1, args)


def test_a_run_that_leaves_a_crash_behind_has_diverged(tmp_path, monkeypatch):
    folder = tmp_path / "ablation_1_one_window/seed_1"
    folder.mkdir(parents=True)
    monkeypatch.setattr(ablation, "run_module", lambda *_: (folder / "crash.pt").touch() or 1)
    args = SimpleNamespace(save_dir=tmp_path, data=tmp_path, cpu=True, overrides=[])
    assert ablation.score("ablation_1_one_window", 1, args) == "diverged"


def test_scores_by_bleu_on_the_validation_set(tmp_path, monkeypatch):
    ran, folder = [], tmp_path / "ablation_7_relu/seed_4/evaluation"
    monkeypatch.setattr(ablation, "run_module", lambda *words: ran.append([*map(str, words)]))
    folder.mkdir(parents=True)
    scores = {"tokenised_bleu": {"score": 36.456}, "sacrebleu": {"score": 35.1}}
    (folder / "scores.json").write_text(json.dumps({"scores": scores}))
    given = ["common.seed=9", "model.dropout=0.2"]
    args = SimpleNamespace(save_dir=tmp_path, data=tmp_path, cpu=False, overrides=given)
    assert ablation.score("ablation_7_relu", 4, args) == 36.46
    training, scoring = ran
    assert training[-1] == "common.seed=4" and training[-3:-1] == scoring[-2:] == given
    assert scoring[scoring.index("--split") + 1] == "valid"


def test_keeps_other_settings_apart(tmp_path, monkeypatch, capsys):
    (tmp_path / "prepared.json").write_text(json.dumps(PREPARED | {"checks": []}))
    monkeypatch.setattr(ablation, "score", lambda *_: 30.0)
    start = ["--data", str(tmp_path), "--rows", "ablation_7_relu", "--seeds", "1"]
    first, second = (["--results", str(tmp_path / name), "--"] for name in ("a.json", "b.json"))
    # The batch is the recipe's in steps of any size.
    for more in (first, [*first, "dataset.max_tokens=2000"], [*second, "model.dropout=0.2"]):
        assert ablation.main([*start, *more]) == 0
    assert json.loads((tmp_path / "a.json").read_text())["ablation_7_relu"]["changed"] == {}
    assert " model.dropout 0.2 |" in capsys.readouterr().out
    assert ablation.main([*start, *first, "model.dropout=0.2"]) == 2
    assert "expected results of ablation_7_relu with the same" in capsys.readouterr().err
    assert ablation.main([*start, *second, "model.droput=0.2"]) == 2
    assert "model.droput: Key" in capsys.readouterr().err


def test_two_at_once_keep_the_rows_of_both(tmp_path, monkeypatch):
    (tmp_path / "prepared.json").write_text(json.dumps(PREPARED | {"checks": []}))
    rows = ["ablation_1_one_window", "ablation_2_normalised"]

    def command(row):
        arguments = ["--data", str(tmp_path), "--results", str(tmp_path / "ablation.json")]
        return ablation.main([*arguments, "--rows", row, "--seeds", "1"])

    def score(row, seed, args):
        """The other command begins and ends while the first one trains."""
        if row == rows[0]:
            assert command(rows[1]) == 0
        return 35.0

    monkeypatch.setattr(ablation, "score", score)
    assert command(rows[0]) == 0
    assert json.loads((tmp_path / "ablation.json").read_text()).keys() == set(rows)
