"""scripts/evaluate.sh: the scores by hand and by the libraries' commands, and tiny models."""

import json
import math
import re
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from conftest import ROOT, SMALL_LM, fairseq

pytest.importorskip("fairseq")
from fairseq_cli import eval_lm, generate

from pipeline.common.command import BadInput
from pipeline.common.files import read_lines, write_lines
from pipeline.common.folder import Folder
from pipeline.common.logs import read_hypotheses
from pipeline.recipes import average, config, evaluate

SPANISH = ["task.source_lang=es", "task.target_lang=en", "generation.beam=2"]
EN_DE = "wmt16_en_de/talkconv"


def run(capfd, *arguments):
    """``(status, result or None, the last line of the errors)`` of the command."""
    capfd.readouterr()
    status, result = evaluate.main([*map(str, arguments), "--cpu"]), None
    if status == 0:
        result = json.loads((evaluation(*arguments).output / "scores.json").read_text())
    return status, result, (capfd.readouterr().err.splitlines() or [""])[-1]


def refusal(capfd, *arguments):
    status, _, line = run(capfd, *arguments)
    assert status == 2 and line.startswith("evaluate.sh: ")
    return line.removeprefix("evaluate.sh: ")


@pytest.mark.parametrize("module", ["recipes.evaluate", "recipes.average"])
def test_fairseq_prints_no_log(module):
    """It logs to the standard error unless the plugin is imported before it."""
    code = f"import logging, pipeline.{module}; print(logging.getLogger().handlers)"
    command = [sys.executable, "-c", code]
    assert subprocess.check_output(command, text=True, cwd=ROOT / "scripts") == "[]\n"


def write_prepared(folder, benchmark, source, target, lines, **rest):
    prepared = {
        "benchmark": benchmark, "source_lang": source, "target_lang": target, "tokenizer": "none",
        "lowercase": False, "subwords": "none", "lines": lines, "checks": [], **rest,
    }  # fmt: skip
    (folder / "prepared.json").write_text(json.dumps(prepared))


@pytest.fixture(scope="module")
def verses(corpus, tmp_path_factory):
    """`corpus` as the folder that a prepare script makes; its words pass for tokens."""
    folder = tmp_path_factory.mktemp("verses")
    shutil.copytree(corpus, folder, dirs_exist_ok=True)
    for split in ("valid", "test"):
        text = corpus.parent / f"{split}.en"
        shutil.copy(text, folder / text.name)
        shutil.copy(text, folder / f"tokenized.{text.name}")
    write_prepared(folder, "wmt16_en_de", "es", "en", {"train": 200, "valid": 50, "test": 43})
    return folder


@pytest.fixture
def folder_of_a_run(trained, tmp_path):
    """Three epochs of a run: each parameter of epoch n is n times that of `trained`."""
    folder = tmp_path / "run"
    folder.mkdir()
    for epoch in (1, 2, 3):
        state = torch.load(trained, weights_only=True)
        state["model"] = {
            key: value * epoch if value.is_floating_point() else value
            for key, value in state["model"].items()
        }
        torch.save(state, folder / f"checkpoint{epoch}.pt")
    shutil.copy(folder / "checkpoint2.pt", folder / "checkpoint_best.pt")
    return folder


def evaluation(*arguments):
    return evaluate.Evaluation(evaluate.parse([*map(str, arguments), "--cpu"]))


# --- Scores ---


def by_command(hypotheses, references, *options):
    """The scores that sacreBLEU's own command prints."""
    command = [sys.executable, "-m", "sacrebleu", references, "-i", hypotheses, *options]
    found = json.loads(subprocess.check_output(command, text=True))
    return found if isinstance(found, list) else [found]


@pytest.fixture
def texts(verses, tmp_path):
    """Hypotheses that are right in parts, one of them empty, and references; as lines and files."""
    references = read_lines(verses / "test.en")
    references = [line.replace(", ", "-").replace(".", " .") for line in references]
    hypotheses = [" ".join(line.split()[: 3 + n]) for n, line in enumerate(references)]
    hypotheses[4] = ""
    paths = tmp_path / "hypotheses", tmp_path / "references"
    for path, lines in zip(paths, (hypotheses, references)):
        write_lines(path, lines)
    return (hypotheses, references), paths


def same(score, command):
    """Whether ours is what the command prints: number, tool and signature."""
    assert round(score["score"], 2) == command["score"] > 1
    assert score["tool"] == f"sacreBLEU {command['signature']}"


def test_scores_are_those_of_sacrebleus_command(texts, tmp_path):
    lines, paths = texts
    ours = evaluate.translation_scores(*lines, compounds=True)
    same(ours["tokenised_bleu"], *by_command_json(paths, "--tokenize", "none", "--force"))
    split = tmp_path / "split_hypotheses", tmp_path / "split_references"
    for path, text in zip(split, lines):
        write_lines(path, map(evaluate.compound_split, text))
    same(ours["compound_split_tokenised_bleu"], *by_command_json(split, "--tokenize", "none"))
    assert ours["tokenised_bleu"]["score"] != ours["compound_split_tokenised_bleu"]["score"]
    detokenised = evaluate.detokenised_scores(*lines)
    bleu, chrf = by_command_json(paths, "-m", "bleu", "chrf")
    same(detokenised["sacrebleu"], bleu)
    same(detokenised["chrf"], chrf)


def by_command_json(paths, *options):
    found = by_command(*paths, *options, "-w", "2", "-f", "json")
    for score in found:
        fields = score["signature"].split("|version:")
        assert len(fields) == 2
    return found


# --- Hypotheses ---


def generated(path, numbers):
    path.write_text(
        "".join(
            f"S-{n}\tuno\nT-{n}\tone\nH-{n}\t-0.5\tbest {n}\nH-{n}\t-0.7\tother\nP-{n}\t-1\n"
            for n in numbers
        )
        + "Generate test with beam=5: BLEU4 = 0.00\n"
    )
    return path


def test_hypotheses_come_in_the_order_of_the_test_set(tmp_path):
    path = generated(tmp_path / "out", [2, 0, 1])
    assert read_hypotheses(path, 3, kind="H") == ["best 0", "best 1", "best 2"]


@pytest.mark.parametrize("numbers", [[0, 1], [0, 2, 3], [0, 1, 2, 3]])
def test_other_numbers_of_hypotheses_are_refused(tmp_path, numbers):
    with pytest.raises(ValueError, match="hypotheses: expected 3 in .*/out, one per line"):
        read_hypotheses(generated(tmp_path / "out", numbers), 3, kind="H")


def test_scores_need_as_many_references_as_hypotheses():
    with pytest.raises(ValueError, match="hypotheses: expected 2, one a reference, got 1"):
        evaluate.translation_scores(["a"], ["a", "b"])


def test_a_lost_hypothesis_leaves_no_scores(capfd, monkeypatch, verses, trained, tmp_path):
    def loses_the_last(cfg):
        generated(tmp_path / f"generate-{cfg.dataset.gen_subset}.txt", range(42))

    monkeypatch.setattr(generate, "main", loses_the_last)
    (tmp_path / "scores.json").write_text("{}")
    line = refusal(capfd, EN_DE, trained, "--data", verses, "--output", tmp_path, *SPANISH)
    assert line == (
        f"hypotheses: expected 43 in {tmp_path}/generate-test.txt, one per line of the test set, "
        "got 42; line 43 is the first without one"
    )
    assert not (tmp_path / "scores.json").exists()


# --- Whole runs ---


def test_a_trained_model(capfd, verses, trained, tmp_path):
    out = tmp_path / "out"
    arguments = [EN_DE, trained, "--data", verses, "--output", out, *SPANISH]
    status, result, _ = run(capfd, *arguments, "--results", tmp_path / "results/row.json")
    assert status == 0
    assert list(result["scores"]) == [
        "tokenised_bleu",
        "compound_split_tokenised_bleu",
        "sacrebleu",
        "chrf",
    ]
    assert result["lines"] == 43 and result["updates"] == 24
    assert result["checkpoints"] == ["checkpoint_last.pt"]
    assert result["settings"]["generation.beam"] == 2
    assert result["settings"]["generation.lenpen"] == 0.35  # the recipe's
    assert result["changed"]["generation.beam"] == 2
    assert result["reported"] == "compound_split_tokenised_bleu"
    # The hypotheses are kept, one per line, and score the same by hand.
    bleu, chrf = by_command_json((out / "test.en", verses / "test.en"), "-m", "bleu", "chrf")
    assert round(result["scores"]["chrf"]["score"], 2) == chrf["score"] > 1
    assert round(result["scores"]["sacrebleu"]["score"], 2) == bleu["score"]
    assert json.loads((tmp_path / "results/row.json").read_text()) == [result]
    # fairseq's own command translates the same.
    output = fairseq(
        "generate", verses, "--path", trained, "--beam", 2, "--lenpen", 0.35, "--max-tokens", 3584,
        "--left-pad-source", "--cpu",
    )  # fmt: skip
    (tmp_path / "fairseq.txt").write_text(output)
    assert read_hypotheses(tmp_path / "fairseq.txt", 43, kind="H") == read_lines(
        out / "tokenized.test.en"
    )
    told = evaluate.table(result)
    assert "compound_split_tokenised_bleu" in told and "|tok:none|" in told
    assert "not the recipe: generation.beam 2" in told


@pytest.fixture(scope="module")
def lm_verses(corpus, lm_corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm_verses")
    shutil.copytree(lm_corpus, folder, dirs_exist_ok=True)
    for split in ("valid", "test"):
        shutil.copy(corpus.parent / f"{split}.en", folder / f"{split}.en")
    write_prepared(folder, "wikitext103", "en", None, {"train": 200, "valid": 50, "test": 43})
    return folder


def test_a_language_model(capfd, lm_verses, trained_lm, tmp_path):
    arguments = [
        "wikitext103/talkconv", trained_lm, "--data", lm_verses, "--output", tmp_path,
        "task.tokens_per_sample=64", "eval_lm.context_window=16",
    ]  # fmt: skip
    status, result, _ = run(capfd, *arguments)
    assert status == 0 and list(result["scores"]) == ["perplexity"]
    words = sum(len(line.split()) + 1 for line in (lm_verses / "test.en").read_text().splitlines())
    assert result["scores"]["perplexity"]["tool"] == (
        f"fairseq-eval-lm: {words:,} words, 16 tokens of context"
    )
    output = fairseq(
        "eval-lm", lm_verses, "--path", trained_lm, *SMALL_LM[:4], "--context-window", 16,
        "--sample-break-mode", "none", "--max-tokens", 3072, "--cpu",
    )  # fmt: skip
    theirs = float(re.search(r"Perplexity: ([\d.]+)", output)[1])
    assert result["scores"]["perplexity"]["score"] == pytest.approx(theirs, abs=0.006)
    # A text of other words than those that were scored.
    other = tmp_path / "other"
    shutil.copytree(lm_verses, other)
    text = (other / "test.en").read_text()
    (other / "test.en").write_text(text.replace(" ", " and ", 1))
    arguments[3] = other
    assert refusal(capfd, *arguments) == (
        f"tokens: expected {words + 1:,}, the words and ends of line of test, got {words:,}"
    )


# --- Checkpoints ---


def test_checkpoints_are_averaged(verses, trained, folder_of_a_run):
    row = evaluation(
        EN_DE, folder_of_a_run, "--data", verses, "checkpoint.keep_last_epochs=2", *SPANISH
    )
    assert row.average == 2
    row.output.mkdir()
    mean = torch.load(row.model(2), weights_only=True)["model"]
    for key, value in torch.load(trained, weights_only=True)["model"].items():
        if value.is_floating_point():
            torch.testing.assert_close(mean[key], 2.5 * value)  # of 2 and 3 times it
    assert [path.name for path in row.paths(2)] == ["checkpoint2.pt", "checkpoint3.pt"]
    assert row.model(1) == folder_of_a_run / "checkpoint_best.pt"


def test_a_moving_average_is_scored_in_place_of_the_weights(verses, trained, tmp_path):
    state = torch.load(trained, weights_only=True)
    state["extra_state"]["ema"] = {key: value * 0 for key, value in state["model"].items()}
    torch.save(state, tmp_path / "checkpoint_last.pt")
    options = ["--data", verses, "ema.store_ema=true", "checkpoint.keep_last_epochs=1", *SPANISH]
    for checkpoints in (tmp_path, tmp_path / "checkpoint_last.pt"):
        row = evaluation(EN_DE, checkpoints, *options)
        row.output.mkdir(exist_ok=True)
        averaged = torch.load(row.model(1), weights_only=True)["model"]
        assert not any(value.any() for value in averaged.values())
    row = evaluation(EN_DE, tmp_path, *options)
    with pytest.raises(BadInput, match="--average: expected 1 of a row with a moving average, got"):
        row.model(2)
    shutil.copy(trained, tmp_path / "checkpoint_last.pt")
    with pytest.raises(BadInput, match="CHECKPOINTS: expected a moving average in .*, got none"):
        row.model(1)


def test_too_few_checkpoints_are_refused(capfd, verses, folder_of_a_run):
    line = refusal(capfd, EN_DE, folder_of_a_run, "--data", verses, *SPANISH)
    assert line.startswith("expected 10 files like checkpoint") and "got 3" in line


def test_what_is_not_of_the_recipe(folder_of_a_run):
    _, recipe = config.read_config(EN_DE)
    assert evaluate.other_settings(EN_DE, recipe, recipe, folder_of_a_run) == {}
    trained = OmegaConf.merge(
        {"name": EN_DE},
        recipe,
        {
            "optimization": {"max_update": 5},
            "dataset": {"max_tokens": 100},
            "generation": {"beam": 9},
        },
    )
    OmegaConf.save(trained, folder_of_a_run / "trained.yaml")
    given = config.with_overrides(recipe, ["generation.lenpen=2", "model.dropout=0.7"])
    assert evaluate.other_settings(EN_DE, recipe, given, folder_of_a_run) == {
        "generation.lenpen": 2,
        "optimization.max_update": 5,
    }
    shorter = config.with_overrides(recipe, ["task.max_source_positions=9"])
    others = evaluate.other_settings(EN_DE, recipe, shorter, folder_of_a_run)
    assert others == {"optimization.max_update": 5, "task.max_source_positions": 9}
    trained.batch_tokens = 100
    OmegaConf.save(trained, folder_of_a_run / "trained.yaml")
    others = evaluate.other_settings(EN_DE, recipe, recipe, folder_of_a_run)
    assert others == {"optimization.max_update": 5, "batch_tokens": 100}
    with pytest.raises(BadInput, match="expected a run of wmt16_en_de/fconv, got one of"):
        evaluate.other_settings("wmt16_en_de/fconv", recipe, recipe, folder_of_a_run)


def test_what_is_not_the_published_data():
    checks = [
        {"what": "lines of a", "found": 100, "published": [100, 90]},
        {"what": "pairs to train on", "found": 101, "published": [100]},
        {"what": "lines of b", "found": 50, "published": [100]},
        {"what": "lines of c", "found": 99, "published": [100], "exact": False},
        {"what": "lines of d", "found": 99, "published": [100], "exact": True},
        {"what": "lines of e", "found": 100, "published": [100], "exact": True},
    ]
    assert evaluate.other_data({"checks": checks}) == ["lines of b", "lines of d"]


def test_one_checkpoint_of_a_run_is_no_mean(verses, folder_of_a_run):
    for name in ("averaged.pt", "checkpoint.best_loss_2.pt"):
        shutil.copy(folder_of_a_run / "checkpoint_best.pt", folder_of_a_run / name)
    one = {"average": 1}
    names = {"checkpoint3.pt": one, "checkpoint.best_loss_2.pt": one, "averaged.pt": {}}
    for name, changed in names.items():
        row = evaluation(EN_DE, folder_of_a_run / name, "--data", verses)
        assert row.average == 1 and row.changed == changed


def test_data_may_be_an_override_as_in_training(verses, folder_of_a_run):
    assert evaluation(EN_DE, folder_of_a_run, f"task.data={verses}").data == verses


def test_data_of_ones_own_needs_no_script_but_all_keys(verses, tmp_path):
    with pytest.raises(BadInput, match="expected prepared.json, see docs/recipes.md, in .*, got"):
        evaluate.read_prepared("billion_word/talkconv", tmp_path)
    prepared = json.loads((verses / "prepared.json").read_text())
    for name in ("checks", "tokenizer", "subwords", "lowercase"):
        rest = {key: prepared[key] for key in prepared if key != name}
        (tmp_path / "prepared.json").write_text(json.dumps(rest))
        with pytest.raises(BadInput, match=f"expected {name} in .*prepared.json, got none"):
            evaluate.read_prepared(EN_DE, tmp_path)


def test_paths_that_fairseq_would_split_are_refused(capfd, verses):
    line = refusal(capfd, EN_DE, "a:b.pt", "--data", verses, *SPANISH)
    assert line.startswith("CHECKPOINTS: expected a path without ':', got ")


@pytest.mark.parametrize("options", [["--split", "valid"], ["--tune"]])
def test_a_split_that_is_not_there_is_refused_at_once(verses, trained, tmp_path, options):
    shutil.copytree(verses, tmp_path / "data")
    path = tmp_path / "data/prepared.json"
    prepared = json.loads(path.read_text())
    del prepared["lines"]["valid"]
    path.write_text(json.dumps(prepared))
    with pytest.raises(BadInput, match="--data: expected lines of valid in .*, got none"):
        evaluation(EN_DE, trained, "--data", tmp_path / "data", *options, *SPANISH)


# --- Tuning ---


def test_tuning_chooses_on_the_validation_set(capfd, monkeypatch, verses, folder_of_a_run):
    scored = []

    def score(self, split, settings):
        scored.append((split, dict(settings)))
        # On test the best would be others.
        best = {"valid": (2, 0.8), "test": (1, 2)}[split]
        value = 30 - abs(settings["average"] - best[0])
        value -= abs(settings.get("generation.lenpen", 0.35) - best[1])
        return {"compound_split_tokenised_bleu": {"score": value, "tool": "none"}}

    monkeypatch.setattr(evaluate.Evaluation, "score", score)
    arguments = [EN_DE, folder_of_a_run, "--data", verses, "--tune", *SPANISH]
    monkeypatch.setattr(evaluate, "AVERAGES", [1, 2])
    status, result, _ = run(capfd, *arguments, "checkpoint.keep_last_epochs=3")
    assert status == 0
    assert result["settings"]["average"] == 2 and result["settings"]["generation.lenpen"] == 0.8
    assert result["tuned"] and "average" not in result["changed"]
    assert [split for split, _ in scored].count("test") == 1 and scored[-1][0] == "test"
    tried = [settings.get("generation.lenpen") for split, settings in scored if split == "valid"]
    assert tried[:3] == [0.35] * 3 and sorted(tried[3:]) == evaluate.LENPENS
    assert len(result["trials"]) == len(tried)
    assert result["checkpoints"] == ["checkpoint2.pt", "checkpoint3.pt"]
    arguments[1] = folder_of_a_run / "checkpoint3.pt"  # of those that the recipe averages
    assert run(capfd, *arguments)[1]["changed"]["average"] == 1


def test_a_training_that_is_not_at_its_end_is_not_the_recipe(
    capfd, monkeypatch, verses, folder_of_a_run
):
    monkeypatch.setattr(evaluate.Evaluation, "score", lambda *_: {})
    arguments = [EN_DE, folder_of_a_run, "--data", verses, "--average", 3]
    assert "optimization.max_update" not in run(capfd, *arguments)[1]["changed"]
    last = folder_of_a_run / "checkpoint_last.pt"
    shutil.copy(folder_of_a_run / "checkpoint3.pt", last)
    assert run(capfd, *arguments)[1]["changed"]["optimization.max_update"] == 24
    state = torch.load(last, weights_only=True)
    end = config.read_config(EN_DE)[1].optimization.max_update
    state["optimizer_history"][-1]["num_updates"] = end
    torch.save(state, last)
    assert "optimization.max_update" not in run(capfd, *arguments)[1]["changed"]


def test_one_evaluation_at_a_time(capfd, verses, folder_of_a_run):
    """There is one file for means, and one for hypotheses."""
    folder = Folder(folder_of_a_run / "evaluation", "evaluation", (), "--output")
    with closing(folder):
        folder.acquire()
        line = refusal(capfd, EN_DE, folder_of_a_run, "--data", verses, "--average", 3)
    assert line.startswith("--output: another evaluation")


def test_tuning_looks_for_the_lowest_perplexity(monkeypatch, lm_verses, folder_of_a_run):
    row = evaluation("wikitext103/talkconv", folder_of_a_run, "--data", lm_verses)
    monkeypatch.setattr(
        row,
        "score",
        lambda split, settings: {"perplexity": {"score": (settings["average"] - 3) ** 2}},
    )
    settings, trials = evaluate.tune(row, {"average": 1}, {"average": [1, 2, 3, 4]})
    assert settings == {"average": 3} and len(trials) == 4


def test_nothing_to_choose_from(lm_verses, folder_of_a_run):
    for checkpoints in (folder_of_a_run / "checkpoint3.pt", folder_of_a_run.with_name("none")):
        checkpoints.is_file() or checkpoints.mkdir()
        row = evaluation("wikitext103/talkconv", checkpoints, "--data", lm_verses)
        with pytest.raises(BadInput, match="--tune: expected several checkpoints to choose from"):
            evaluate.candidates_of(row)


def test_of_equal_scores_the_recipes_stays(monkeypatch, verses, folder_of_a_run):
    row = evaluation(
        EN_DE, folder_of_a_run, "--data", verses, "checkpoint.keep_last_epochs=3", *SPANISH
    )
    monkeypatch.setattr(row, "score", lambda *_: {row.reported: {"score": math.pi}})
    candidates = evaluate.candidates_of(row)
    assert candidates["average"] == [3, 1]  # 5 and 10 are not there
    assert candidates["generation.lenpen"][0] == 0.35
    settings, _ = evaluate.tune(row, {"average": 3, "generation.lenpen": 0.35}, candidates)
    assert settings == {"average": 3, "generation.lenpen": 0.35}


# --- Bad input ---


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["wmt16_en_de/talkcon"], "NAME: expected a config such as wmt16_en_de/talkconv"),
        (["iwslt14_de_en/talkconv"], "--data: expected iwslt14_de_en in "),
        ([EN_DE, "--average", "3", *SPANISH], "--average: expected 1 of a single checkpoint"),
        ([EN_DE, *SPANISH, "generation.bem=3"], "generation.bem: Key 'bem' not in"),
        ([EN_DE, *SPANISH, "beam=3"], "overrides: expected GROUP.KEY=VALUE, got 'beam=3'"),
    ],
)
def test_bad_input_is_one_line(capfd, verses, trained, tmp_path, arguments, message):
    name, *rest = arguments
    line = refusal(capfd, name, trained, "--data", verses, "--output", tmp_path, *rest)
    assert line.startswith(message)


def test_missing_files_are_named(capfd, verses, trained, tmp_path):
    line = refusal(capfd, EN_DE, tmp_path / "none", "--data", verses, *SPANISH)
    assert line == f"CHECKPOINTS: expected {tmp_path / 'none'}, got none"
    line = refusal(capfd, EN_DE, trained, "--data", tmp_path, *SPANISH)
    expected = "--data: expected prepared.json, see scripts/prepare_wmt16_en_de.sh, in "
    assert line.startswith(expected)
    short = tmp_path / "short"
    shutil.copytree(verses, short)
    (short / "tokenized.test.en").write_text("one line\n")
    line = refusal(capfd, EN_DE, trained, "--data", short, "--output", tmp_path, *SPANISH)
    assert line == "hypotheses: expected 1, one a reference, got 43"


def test_results_are_a_list_that_grows(play, capfd, verses, folder_of_a_run, tmp_path):
    path = tmp_path / "row.json"
    path.write_text('{"by": "hand"}')
    where = [EN_DE, folder_of_a_run, "--data", verses, *SPANISH, "--split", "valid"]
    where += ["--average", 1, "--results", path]
    assert refusal(capfd, *where).startswith("--results: expected a JSON list")
    assert path.read_text() == '{"by": "hand"}' and not play.configs
    path.unlink()
    for count in (1, 2):
        assert run(capfd, *where)[0] == 0
        assert len(json.loads(path.read_text())) == count


# --- What is scored ---


@pytest.fixture
def play(monkeypatch):
    """In place of fairseq-generate: writes `hypothesis` for each of 50 sentences, keeps configs."""

    def main(cfg):
        main.configs.append(cfg)
        lines = "".join(f"H-{n}\t-0.5\t{main.hypothesis}\n" for n in range(50))
        folder = Path(cfg.common_eval.results_path)
        (folder / f"generate-{cfg.dataset.gen_subset}.txt").write_text(lines)

    main.configs, main.hypothesis = [], "the word"
    monkeypatch.setattr(generate, "main", main)
    return main


def test_settings_and_split_are_those_that_were_asked_for(play, verses, folder_of_a_run):
    row = evaluation(
        EN_DE, folder_of_a_run, "--data", verses, "checkpoint.keep_last_epochs=3", *SPANISH
    )
    row.output.mkdir()
    row.score("valid", {"average": 3, "generation.lenpen": 0.35})
    row.score("valid", {"average": 1, "generation.lenpen": 1.75})
    mean, best = play.configs
    assert mean.dataset.gen_subset == best.dataset.gen_subset == "valid"
    assert (mean.generation.lenpen, best.generation.lenpen) == (0.35, 1.75)
    assert mean.generation.beam == best.generation.beam == 2
    assert mean.common_eval.path == str(row.output / "averaged.pt")
    assert best.common_eval.path == str(folder_of_a_run / "checkpoint_best.pt")


def test_a_perplexity_is_of_the_split_that_was_asked_for(monkeypatch, lm_verses, trained_lm):
    scored = []
    monkeypatch.setattr(eval_lm, "main", lambda cfg: scored.append(cfg) or {"loss": 3})
    row = evaluation("wikitext103/talkconv", trained_lm, "--data", lm_verses)
    assert row.score("valid", {"average": 1})["perplexity"]["score"] == 8
    assert [cfg.dataset.gen_subset for cfg in scored] == ["valid"]


def test_text_is_scored_as_its_data_was_prepared(play, verses, trained, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(verses, data)
    prepared = json.loads((data / "prepared.json").read_text())
    prepared |= {"tokenizer": "moses", "lowercase": True, "subwords": "subword_nmt"}
    (data / "prepared.json").write_text(json.dumps(prepared))
    play.hypothesis = "it &apos;s a word"
    out = tmp_path / "out"
    out.mkdir()
    row = evaluation(EN_DE, trained, "--data", data, "--output", out, *SPANISH)
    scores = row.score("valid", {"average": 1})
    assert "case:lc" in scores["sacrebleu"]["tool"] and "case:lc" in scores["chrf"]["tool"]
    assert read_lines(out / "valid.en") == ["it's a word"] * 50
    assert read_lines(out / "tokenized.valid.en") == ["it &apos;s a word"] * 50
    assert play.configs[0].common_eval.post_process == "subword_nmt"


@pytest.mark.parametrize(
    "checkpoint, expected",
    [
        ({"keep_last_epochs": 10}, (10, average.EPOCHS)),
        ({"keep_interval_updates": 5, "keep_last_epochs": -1}, (5, average.UPDATES)),
        ({}, (1, average.EPOCHS)),
    ],
)
def test_what_a_recipe_averages(checkpoint, expected):
    assert evaluate.recipe_average(OmegaConf.create({"checkpoint": checkpoint})) == expected
