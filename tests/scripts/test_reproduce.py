"""scripts/reproduce.sh from a tiny archive to a result, and scripts/results_table.py."""

import functools
import json
import os
import re
import subprocess
from types import SimpleNamespace

import archives
import pytest

import conftest
from conftest import ROOT

pytest.importorskip("fairseq")
from pipeline.common.command import BadInput
from pipeline.recipes import paper_tables as results_table
from pipeline.recipes.reproduce import main, once
from pipeline.recipes.reproduce import reproduce as run_steps

# --- One command a row ---

NAMES = sorted(
    str(path.relative_to(ROOT / "configs").with_suffix(""))
    for benchmark in archives.MAKE
    for path in (ROOT / "configs" / benchmark).glob("*.yaml")
)
# Two epochs of one update each; the windows, layers and criterion stay the row's. PyTorch waits
# for a process that loads data, so there is none.
TWO_UPDATES = ["optimization.max_epoch=2", "optimization.update_freq=[100]"]
TWO_UPDATES += ["dataset.num_workers=0"]
SMALL = {
    "fconv": {
        "encoder_embed_dim": 32, "encoder_layers": '"[(32, 3)] * 2"', "decoder_embed_dim": 32,
        "decoder_layers": '"[(32, 3)] * 2"', "decoder_out_embed_dim": 32,
    },
    "wikitext103": {
        "decoder_embed_dim": 32, "decoder_input_dim": 32, "decoder_output_dim": 32,
        "decoder_ffn_embed_dim": 64, "decoder_attention_heads": 4,
        "adaptive_input_cutoff": '"100,300"', "adaptive_softmax_cutoff": '"100,300"',
    },
    "others": {
        "encoder_embed_dim": 32, "encoder_ffn_embed_dim": 64, "encoder_attention_heads": 4,
        "decoder_embed_dim": 32, "decoder_ffn_embed_dim": 64, "decoder_attention_heads": 4,
    },
}  # fmt: skip
SCORES = {
    "iwslt14_de_en": {"tokenised_bleu", "sacrebleu", "chrf"},
    "wmt16_en_de": {"tokenised_bleu", "compound_split_tokenised_bleu", "sacrebleu", "chrf"},
    "wmt14_en_fr": {"tokenised_bleu", "sacrebleu", "chrf"},
    "cnn_dm": {"rouge_1", "rouge_2", "rouge_l", "rouge_lsum"},
    "wikitext103": {"perplexity"},
}


def shrunk(name):
    """Overrides by which a row trains in seconds."""
    benchmark, system = name.split("/")
    kind = next((kind for kind in SMALL if kind in (benchmark, system)), "others")
    overrides = [f"model.{key}={value}" for key, value in SMALL[kind].items()]
    if system == "ablation_5_head_a_channel":
        overrides += ["model.encoder_talk_heads=32", "model.decoder_talk_heads=32"]
    if benchmark == "wikitext103":
        overrides += ["task.tokens_per_sample=128", "eval_lm.context_window=64"]
    else:
        overrides += ["generation.beam=2", "generation.max_len_a=0", "generation.max_len_b=60"]
    epochs = 1 if system.endswith("_ema") else 2
    return [*TWO_UPDATES, *overrides, f"checkpoint.keep_last_epochs={epochs}"]


def reproduce(*arguments):
    """The finished process of the command."""
    return subprocess.run(
        [ROOT / "scripts/reproduce.sh", *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )


def dry_run(capfd, *arguments):
    """The lines that a dry run prints."""
    capfd.readouterr()
    assert main([*map(str, arguments), "--dry-run"]) == 0
    printed = capfd.readouterr()
    assert printed.err == ""
    return printed.out.splitlines()


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A function to a benchmark's options: its archive, made once, and where it is prepared."""
    folder = tmp_path_factory.mktemp("published")

    def options(benchmark):
        data = folder / benchmark / "data"
        if not data.exists():
            archives.MAKE[benchmark](data)
        vocabulary = "" if benchmark == "wikitext103" else "--vocabulary 400"
        return [
            "--data", data, "--data-bin", folder / benchmark / "bin", "--cpu",
            "--prepare", f"--other-counts --workers 1 {vocabulary}",
        ]  # fmt: skip

    return options


# One row, unless --long is given: the others differ in the model, and CNN-DM in the task.
FIRST = ("iwslt14_de_en/talkconv",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FIRST else pytest.mark.long) for name in NAMES]
)
def test_from_the_archive_to_a_result(published, tmp_path, name):
    benchmark = name.partition("/")[0]
    arguments = [
        name, *published(benchmark), "--save-dir", tmp_path / "run", "--results",
        tmp_path / "results.json", *shrunk(name),
    ]  # fmt: skip
    done = reproduce(*arguments)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    [result] = json.loads((tmp_path / "results.json").read_text())
    assert result["name"] == name and result["split"] == "test"
    assert result["scores"].keys() == SCORES[benchmark]
    assert result["updates"] == 2
    assert result["checkpoints"] == (
        ["checkpoint_last.pt"] if name.endswith("_ema") else ["checkpoint1.pt", "checkpoint2.pt"]
    )
    # It never passes for a measurement of the row.
    assert result["changed"]["optimization.max_epoch"] == 2 and result["other_data"]
    if not name.endswith("/talkconv"):
        return
    # Run again, nothing is left to do, also on other devices.
    again = reproduce(*arguments, "--devices", 1)
    assert again.returncode == 0
    assert "train: done before" in again.stdout and "evaluate: done before" in again.stdout
    assert len(json.loads((tmp_path / "results.json").read_text())) == 1


def test_bad_input_is_one_line_before_anything_is_made(capfd, tmp_path):
    refusal = functools.partial(conftest.refusal, capfd, main)
    here = ["--data-bin", tmp_path / "bin", "--save-dir", tmp_path / "run"]
    assert "arguments are required: NAME" in refusal(*here)
    assert "a config such as iwslt14" in refusal("iwslt14_de_en/talkcon", *here)
    name = "iwslt14_de_en/talkconv"
    assert "expected prepared.json, see scripts/prepare_iwslt" in refusal(name, *here)
    assert refusal(name, *here, "--data") == ("reproduce.sh: --data: expected a value (see --help)")
    assert refusal(name, *here, "--dta", "x") == (
        "reproduce.sh: unrecognized arguments: --dta x (see --help)"
    )
    assert "--average: expected a whole number of at least 1, got 0" in refusal(
        name, "--average", 0, *here
    )
    assert "optimization.max_updat: Key" in refusal(name, *here, "optimization.max_updat=3")
    assert "expected GROUP.KEY=VALUE, got 'twice'" in refusal(name, "twice", *here)
    split = (name, *here, "--data", "x", "--data-bin", "a:b")
    assert "--data: expected a path without ':', got " in refusal(*split)
    quoted = refusal(name, *here, "--data", "x", "--prepare", "'a")
    assert quoted == """reproduce.sh: --prepare: expected words of a shell, got "'a\""""
    averaged = ("iwslt14_de_en/talkconv_ema", "--average", 5, "--data", "x")
    assert "--average: expected 1 of a row with a moving" in refusal(*averaged, *here)
    averaged = ("iwslt14_de_en/talkconv_ema", "--data", "x", "checkpoint.keep_last_epochs=10")
    assert "--average: expected 1 of a row with a moving" in refusal(*averaged, *here)
    kept = (name, "--average", 11, "--data", "x", *here)
    assert "--average: expected at most 10, which are kept, got 11" in refusal(*kept)
    results = tmp_path.parent / f"{tmp_path.name}.json"
    results.write_text("{}")
    refused = refusal(name, "--data", "x", *here, "--results", results)
    assert "--results: expected a JSON list" in refused
    devices = (name, "--devices", 99, "--data", "x")
    assert "--devices: expected at most the" in refusal(*devices, *here)
    assert refusal(name, "--devices", "x", *here).startswith("reproduce.sh: --devices: expected")
    assert "no scripts/prepare_wmt17_zh_en.sh" in refusal("wmt17_zh_en/talkconv", "--data", "x")
    assert not list(tmp_path.iterdir())


def test_a_dry_run_prints_the_commands_of_the_steps(capfd, tmp_path):
    arguments = [
        "iwslt14_de_en/talkconv", "--data", "a b.tgz", "--prepare", "--download", "--data-bin",
        tmp_path / "bin", "--save-dir", tmp_path / "run", "--results", tmp_path / "r.json",
        "--average", 1, "--tune", "--precision", "bf16", "--cpu", "optimization.max_update=9",
    ]  # fmt: skip
    assert [line.replace(str(tmp_path), "T") for line in dry_run(capfd, *arguments)] == [
        "scripts/prepare_iwslt14_de_en.sh --output T/bin --data 'a b.tgz' --download",
        "scripts/train.sh iwslt14_de_en/talkconv --data T/bin --save-dir T/run --precision bf16 "
        "optimization.max_update=9 --cpu",
        "scripts/evaluate.sh iwslt14_de_en/talkconv T/run --data T/bin --results T/r.json "
        "--average 1 --tune optimization.max_update=9 --cpu",
    ]
    assert not list(tmp_path.iterdir())


def test_folders_may_be_overrides_as_in_training(capfd):
    overrides = ["task.data=bin", "checkpoint.save_dir=run"]
    name = "iwslt14_de_en/talkconv"
    prepare, train, evaluate = dry_run(capfd, name, "--prepare", "--download", *overrides)
    assert prepare.startswith("scripts/prepare_iwslt14_de_en.sh --output bin ")
    assert train.startswith(f"scripts/train.sh {name} --data bin --save-dir run")
    assert evaluate.startswith(f"scripts/evaluate.sh {name} run --data bin ")


def test_what_is_trained_anew_is_scored_anew(tmp_path, monkeypatch):
    """Also where the words of scoring stay the same, and where the training before failed."""
    ran, status = [], 0

    def run_module(name, *words, lock):
        ran.append((name, *words))
        return status

    monkeypatch.setattr("pipeline.recipes.reproduce.run_module", run_module)
    folder = SimpleNamespace(path=tmp_path / "run", lock=None)
    folder.path.mkdir()
    made = tmp_path / "data/prepared.json"
    made.parent.mkdir()
    made.write_text("{}")
    train = ("recipes.train", "a", "--data", made.parent)
    score = ("recipes.evaluate", "a")

    def run(step):
        return once(folder, step[0].removeprefix("recipes."), step[1:], [])

    for step in (train, score, train, score):
        assert not run(step)
    assert ran == [train, score]
    other = (*train, "--precision")
    assert not run(other) and not run(score)
    assert ran[2:] == [other, score]
    status = 1
    assert run(train) == run(train) == 1
    status = 0
    for step in (other, score):  # which the failed one may have written over
        assert not run(step)
    assert ran[4:] == [train, train, other, score]

    made.write_text('{"lines": {"train": 9}}')  # prepared anew
    with pytest.raises(BadInput, match="--save-dir: expected a run of the data in .*data, got"):
        run(other)


def test_a_result_that_is_gone_is_made_again(tmp_path, monkeypatch):
    ran, results = [], tmp_path / "result.json"

    def run_module(name, *words, lock):
        ran.append(name)
        results.touch()
        return 0

    steps = [("evaluate", ["a"], [])]
    monkeypatch.setattr("pipeline.recipes.reproduce.run_module", run_module)
    found = tmp_path / "run", results, steps
    monkeypatch.setattr("pipeline.recipes.reproduce.steps_of", lambda _: found)
    for lost in (False, False, True):
        if lost:
            results.unlink()
        assert not run_steps(SimpleNamespace(dry_run=False))
        assert ran == ["recipes.evaluate"] * (1 + lost)


@pytest.mark.slow
@pytest.mark.long
def test_a_short_trial_averages_what_there_is(published, tmp_path):
    """Of the ten checkpoints that the row averages, a trial of some updates has one."""
    name = "iwslt14_de_en/talkconv"
    small = [word for word in shrunk(name) if "keep_last_epochs" not in word]
    arguments = [
        name, *published("iwslt14_de_en"), "--save-dir", tmp_path / "run", "--results",
        tmp_path / "results.json", *small,
    ]  # fmt: skip
    done = reproduce(*arguments)
    assert done.returncode == 2 and "expected 10 files like checkpoint" in done.stderr
    done = reproduce(*arguments, "--average", 1)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "train: done before" in done.stdout
    [result] = json.loads((tmp_path / "results.json").read_text())
    assert result["checkpoints"] == ["checkpoint_best.pt"] and result["changed"]["average"] == 1


def test_help_says_what_there_is():
    done = reproduce("--help")
    assert done.returncode == 0 and "--data PATH|URL" in done.stdout


# --- The tables ---


def result(name, scores, date="2020-01-01", **rest):
    return {
        "name": name, "date": date, "split": "test", "changed": {}, "other_data": [],
        "scores": {key: {"score": value, "tool": ""} for key, value in scores.items()}, **rest,
    }  # fmt: skip


def write(folder, name, value):
    path = folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def cells(text):
    """``{(number of the table, what the row is called): [cell, …]}``"""
    found, number = {}, None
    for line in text.splitlines():
        if title := re.match(r"\*\*Table (\d)", line):
            number = int(title[1])
        elif line.startswith("| "):
            label, *rest = (cell.strip() for cell in line.strip("|").split("|"))
            found[number, label] = rest
    return found


PAPER = {
    (2, "ConvS2S"): ["25.2", "40.5"],
    (2, "Transformer big"): ["28.4 (29.3)", "41.0 (43.2)"],
    (2, "LightConv"): ["28.9", "43.1"],
    (2, "DynamicConv"): ["29.7", "43.2"],
    (2, "TaLK"): ["29.6", "43.2"],
    (3, "Transformer"): ["34.4"],
    (3, "LightConv"): ["34.8"],
    (3, "DynamicConv"): ["35.2"],
    (3, "TaLK"): ["35.5"],
    (4, "Self-attention"): ["39.26/15.98/36.35"],
    (4, "LightConv"): ["39.52/15.97/36.51"],
    (4, "DynamicConv"): ["39.84/16.25/36.73"],
    (4, "TaLK standard"): ["40.03/18.45/36.13"],
    (4, "TaLK deep"): ["40.59/18.97/36.81"],
    (5, "Adaptive inputs (Transformer)"): ["20.5"],
    (5, "DynamicConv"): ["25.0"],
    (5, "TaLK"): ["23.3"],
    (7, "One window of 1, no normalisation"): ["diverges"],
    (7, "+ output normalisation"): ["35.70 +- .1"],
    (7, "+ windows 1,3,7,15x4"): ["36.23 +- .1"],
    (7, "+ offset dropout"): ["36.37 +- .05"],
    (7, "+ one head a channel (H=512)"): ["36.51 +- .07"],
    (7, "H=4"): ["36.65 +- .05"],
    (7, "ReLU in place of Swish"): ["36.21 +- .05"],
}


def test_without_results_the_tables_hold_the_papers_scores(tmp_path):
    found = cells(results_table.tables(tmp_path))
    assert {key: row[::2] for key, row in found.items() if key in PAPER} == PAPER
    rows = [row for (_, label), row in found.items() if label and not label.startswith("---")]
    assert len(rows) == len(PAPER)
    assert {cell for row in rows for cell in row[1::2]} == {"not yet measured"}


def test_results_stand_beside_the_papers_scores(tmp_path):
    en_de = {"tokenised_bleu": 28.1, "compound_split_tokenised_bleu": 28.7}
    write(tmp_path, "wmt16_en_de/talkconv", [result("wmt16_en_de/talkconv", en_de)])
    rouge = {"rouge_1": 40.1, "rouge_2": 18.2, "rouge_l": 30.3, "rouge_lsum": 36.4}
    write(tmp_path, "cnn_dm/talkconv_deep", [result("cnn_dm/talkconv_deep", rouge)])
    first = result("wikitext103/talkconv", {"perplexity": 24.5})
    last = result("wikitext103/talkconv", {"perplexity": 23.456}, "2020-01-02")
    write(tmp_path, "wikitext103/talkconv", [first, last])
    seeds, as_it_is = {"1": 36.2, "2": 36.26}, {"changed": {}, "other_data": []}
    ablation = {
        "ablation_1_one_window": {"seeds": {"1": "diverged"}, **as_it_is},
        "ablation_3_windows": {"seeds": seeds, **as_it_is},
        "ablation_7_relu": {
            "seeds": {"1": 3.0}, "changed": {"model.dropout": 0.2}, "other_data": ["lines of train"]
        },
    }  # fmt: skip
    write(tmp_path, "iwslt14_de_en/ablation", ablation)
    text = results_table.tables(tmp_path)
    found = cells(text)
    assert found[2, "TaLK"] == ["29.6", "28.70", "43.2", "not yet measured"]
    assert found[4, "TaLK deep"][1] == "40.10/18.20/36.40"
    assert found[5, "TaLK"][1] == "23.46"
    assert found[7, "One window of 1, no normalisation"][1] == "diverged (seeds: 1)"
    assert found[7, "+ windows 1,3,7,15x4"][1] == "36.23 +- 0.04 (seeds: 2)"
    assert found[7, "ReLU in place of Swish"][1] == "not yet measured"
    assert "- ablation_7_relu: model.dropout, lines of train" in text


def test_results_of_other_settings_are_listed_and_not_in_the_tables(tmp_path):
    name = "iwslt14_de_en/talkconv"
    score = {"tokenised_bleu": 35.0}
    others = [
        result(name, score, "2020-01-01", changed={"optimization.max_update": 2}),
        result(name, score, "2020-01-02", other_data=["lines of a"]),
        result(name, score, "2020-01-03", split="valid"),
    ]
    write(tmp_path, name, others)
    text = results_table.tables(tmp_path)
    assert cells(text)[3, "TaLK"] == ["35.5", "not yet measured"]
    assert "- iwslt14_de_en/talkconv, 2020-01-01: optimization.max_update" in text
    assert "2020-01-02: lines of a" in text and "2020-01-03: scored on valid" in text
    write(tmp_path, name, [result(name, {"tokenised_bleu": 35.25}), *others])
    assert cells(results_table.tables(tmp_path))[3, "TaLK"] == ["35.5", "35.25"]


@pytest.mark.parametrize(
    "text, expected", [("[{", "expected JSON"), ("{}", "expected a JSON list")]
)
def test_results_that_cannot_be_read_are_named(tmp_path, capsys, text, expected):
    (tmp_path / "wmt16_en_de").mkdir()
    (tmp_path / "wmt16_en_de/talkconv.json").write_text(text)
    assert results_table.main(["--results", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("results_table.py: ") and "talkconv.json" in error and expected in error
