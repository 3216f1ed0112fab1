"""scripts/quickstart_lm.sh from end to end on a few verses, what it refuses, and its table."""

import json
import re

import pytest
import torch
from quickstart_runs import TEST_VERSES, QuickStart, write_verses

from pipeline.data import corpus as prepare
from pipeline.quickstart import language_model

pytest.importorskip("fairseq")

MODELS = ("unigram", "transformer_lm", "talkconv_plus_wide_lm")

_script = QuickStart("quickstart_lm.sh", language_model.main, timeout=900)
command, quickstart, refusal = _script.command, _script.run, _script.refusal


@pytest.fixture
def verses(tmp_path):
    return write_verses(tmp_path / "verses", ("en",))


# --- The script ---


def stages(printed):
    return re.findall("^== (.*)", printed, re.MULTILINE)


def files(folder):
    """What a folder holds, and when it was written; what every run writes is left out."""
    return {
        path: path.stat().st_mtime_ns
        for path in folder.rglob("*")
        if path.name not in ("lock", "results.json")
    }


@pytest.mark.long
@pytest.mark.slow
def test_a_run_a_second_run_and_another_prompt(verses, tmp_path):
    # From another folder, with relative paths.
    arguments = ("--data", "verses", "--out", "run", "--updates", 6)
    first = quickstart(*arguments, "--prompt", "In the beginning", cwd=tmp_path)
    out = tmp_path / "run"
    assert not list(out.rglob("*.partial"))
    for model in MODELS:
        assert re.search(f"^{model} ", first, re.MULTILINE)
    assert len(re.findall("^In the beginning", first, re.MULTILINE)) == 3
    commands = first.split("== the commands, in order\n")[1].split("\n\n")[0].splitlines()
    for line, name in zip(commands, (
        "prepare_corpus.py", "fairseq-preprocess --only-source", "--arch transformer_lm", "mv ",
        "--arch talkconv_plus_wide_lm", "mv ", "fairseq-eval-lm", "fairseq-eval-lm",
        "fairseq-interactive",
    ), strict=True):  # fmt: skip
        assert name in line

    # Of the same size, trained on the same batches, and scored on every token of the test set.
    results = json.loads((out / "results.json").read_text())
    pieces = (out / "corpus/pieces/test.en").read_text().splitlines()
    assert results["test"]["sentences"] == TEST_VERSES
    assert results["test"]["tokens"] == sum(len(line.split()) + 1 for line in pieces)
    unigram, transformer, talk = results["models"]
    assert transformer["updates"] == talk["updates"] == 6
    assert abs(talk["parameters"] / transformer["parameters"] - 1) < 0.02
    trained = [line.split(" --arch ")[0] for line in commands if "--arch" in line]
    assert trained[0] == trained[1]

    # The second time everything is there: only the table is computed again.
    before = files(out)
    second = quickstart(*arguments, "--prompt", "In the beginning", cwd=tmp_path)
    assert stages(second)[:2] == [
        "continuations of: In the beginning",
        "perplexity on the test set",
    ]
    assert files(out) == before
    assert json.loads((out / "results.json").read_text()) == results

    # Another prompt needs nothing but another continuation.
    third = quickstart(*arguments, "--prompt", "God said", cwd=tmp_path)
    assert stages(third)[0] == "continuing a prompt"
    assert len(re.findall("^God said", third, re.MULTILINE)) == 3
    changed = {path.name for path in before if files(out)[path] != before[path]}
    assert changed <= {"prompt.txt", "continuations.txt", "log.txt", "commands.txt"}

    # Other settings, or another corpus under the same name, do not get mixed with these.
    other = ("--data", verses, "--out", out)
    assert "other settings" in refusal(*other, "--updates", 7)
    (verses / "valid.en").write_text("Word.\n" * 10)
    assert "--restart to replace it" in refusal(*other, "--updates", 6)


def write(folder, name, text):
    (folder / name).write_text(text)


@pytest.mark.parametrize(
    "damage, expected",
    [
        (lambda v: (v / "test.en").unlink(), "test.en: no such file"),
        (lambda v: (v / "train.en.gz").unlink(), "train.en: no such file"),
        (lambda v: write(v, "test.en", ""), "test.en: empty"),
        (lambda v: write(v, "valid.en", "One.\n\nThree.\n"), "valid.en: line 2 is empty"),
        (lambda v: (v / "valid.en").write_bytes(b"\xff\xfe\xfa\n"), "valid.en: not readable"),
        (lambda v: write(v, "train.en.gz", "no gzip"), "train.en.gz: not readable"),
    ],
)
def test_a_corpus_that_cannot_be_used(verses, tmp_path, damage, expected):
    damage(verses)
    out = tmp_path / "run"
    assert expected in refusal("--data", verses, "--out", out)
    assert not out.exists()


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--minutes", "1.5"], "--minutes: expected a number of at least 2, got 1.5"),
        (["--minutes"], "--minutes: expected a value"),
        (["--updates", "0"], "--updates: expected a whole number of at least 1, got 0"),
        (["--updates", "2.5"], "--updates: expected a whole number of at least 1, got 2.5"),
        (["--prompt", ""], "--prompt: expected one line, got ''"),
        (["--prompt", "two\nlines"], r"--prompt: expected one line, got 'two\nlines'"),
        (["--lang", "fr"], "train.fr: no such file"),
        (["--target-lang", "es"], "unrecognized arguments: --target-lang es"),
        (["--fast"], "unrecognized arguments: --fast"),
        (["50"], "unrecognized arguments: 50"),
    ],
)
def test_options_that_cannot_be_used(tmp_path, arguments, expected):
    out = tmp_path / "run"
    line = refusal("--out", out, *arguments)
    assert line.startswith("quickstart_lm.sh: ") and expected in line
    assert not out.exists()


def test_a_folder_of_the_other_quick_start(tmp_path):
    settings = '{"data": "data/bible-es-en", "languages": ["es", "en"]}\n'
    (tmp_path / "settings.json").write_text(settings)
    assert "other settings" in refusal("--out", tmp_path)
    assert (tmp_path / "settings.json").read_text() == settings


def test_help():
    printed = quickstart("--help")
    for option in ("--minutes", "--updates", "--prompt", "--cpu", "--out", "--restart", "--data"):
        assert option in printed


# --- The corpus of one language ---


def test_a_long_line_of_one_language_is_no_sentence_to_translate(verses, tmp_path):
    write(verses, "test.en", "God said. " * 600 + "\n")
    corpus = prepare.read_corpus(verses, ["en"])
    counts = prepare.prepare(corpus, ["en"], 300, tmp_path / "corpus")
    assert counts["test.en"] > 1000
    assert (tmp_path / "corpus/pieces/test.en").read_text().count("\n") == 1


def test_a_long_source_is_cut_where_that_is_asked_for(tmp_path):
    verses = write_verses(tmp_path / "verses", ("en", "es"))
    write(verses, "test.en", "God said. " * 600 + "\n")
    write(verses, "test.es", "Dijo Dios. " * 9 + "\n")
    corpus = prepare.read_corpus(verses, ["en", "es"])
    with pytest.raises(ValueError, match="test.en: expected at most 1000 pieces per sentence"):
        prepare.prepare(corpus, ["en", "es"], 300, tmp_path / "whole")
    prepare.prepare(corpus, ["en", "es"], 300, tmp_path / "corpus", cut_source=7)
    pieces = (tmp_path / "corpus/pieces/test.en").read_text().split()
    assert len(pieces) == 7 and "".join(pieces) in "▁God▁said." * 7
    assert len((tmp_path / "corpus/pieces/test.es").read_text().split()) >= 18  # a target is whole
    sides = ["en", "simple.en"]
    simple = {f"{split}.{side}": corpus["test.es"] for split in ("train", "test") for side in sides}
    counts = prepare.prepare(simple, sides, 300, tmp_path / "simple", cut_source=7)
    assert counts["test.en"] == 7 and counts["test.simple.en"] >= 18
    assert (tmp_path / "corpus/test.en").read_text() == corpus["test.en"][0] + "\n"


# --- The table ---


@pytest.fixture
def scored(tmp_path):
    """A corpus small enough to count by hand, and a model that was scored on it."""
    corpus = tmp_path / "corpus"
    (corpus / "pieces").mkdir(parents=True)
    (corpus / "pieces/train.en").write_text("▁a b\n▁a\n")
    (corpus / "pieces/test.en").write_text("▁a c\n")
    (corpus / "test.en").write_text("ac\n")
    torch.save(
        {
            "model": {},
            "optimizer_history": [{"num_updates": 3}, {"num_updates": 1234}],
            "extra_state": {"previous_training_time": 56.7},
        },
        tmp_path / "model.pt",
    )
    write_score(tmp_path)
    return tmp_path


def write_score(folder, tokens="3"):
    (folder / "model.txt").write_text(
        "x | INFO | fairseq_cli.eval_lm | num. model params: 4,152,832\n"
        f"x | INFO | fairseq_cli.eval_lm | Evaluated {tokens} tokens in 0.1s (30.00 tokens/s)\n"
        "x | INFO | fairseq_cli.eval_lm | Loss (base 2): 2.0000, Perplexity: 4.00\n"
    )


def compared(folder):
    return language_model.compare(folder / "corpus", "en", [folder / "model.pt"])


def test_the_table_by_hand(scored):
    results = compared(scored)
    assert results["test"] == {"sentences": 1, "words": 1, "tokens": 3, "unknown tokens": 1}
    # Each once more than it occurs: "▁a" and the end 3 of 9, "b" 2, the unknown "c" 1.
    unigram, model = results["models"]
    assert unigram["perplexity_per_token"] == pytest.approx(81 ** (1 / 3))
    assert unigram["perplexity_per_word"] == pytest.approx(81 ** (1 / 2))  # "ac" and the end
    assert model == {
        "model": "model",
        "parameters": 4152832,
        "updates": 1234,
        "seconds": 57,
        "perplexity_per_token": 4,
        "perplexity_per_word": 8,
    }
    assert language_model.table(results).splitlines() == [
        "| model   | parameters | updates | seconds | test tokens | ppl/token | ppl/word |",
        "|:--------|-----------:|--------:|--------:|------------:|----------:|---------:|",
        "| unigram |            |         |         |           3 |      4.33 |      9.0 |",
        "| model   |  4,152,832 |   1,234 |      57 |           3 |      4.00 |      8.0 |",
        "",
        "on 1 sentences of 1 words; unknown tokens: 1",
    ]


def damage_score(folder):
    (folder / "model.txt").write_text("Traceback\n")


def repeat_score(folder):
    score = folder / "model.txt"
    score.write_text(2 * score.read_text())


@pytest.mark.parametrize(
    "damage, expected",
    [
        (lambda f: write_score(f, "2"), "expected a score of all 3 tokens, got 2"),
        (lambda f: write_score(f, "4"), "expected a score of all 3 tokens, got 4"),
        (damage_score, "model.txt: expected the output of fairseq-eval-lm"),
        (repeat_score, "model.txt: expected the output of fairseq-eval-lm, once"),
        (lambda f: (f / "model.txt").unlink(), "model.txt"),
        (lambda f: (f / "model.pt").unlink(), "model.pt"),
        (lambda f: (f / "model.pt").write_text("no"), "expected a checkpoint"),
        (lambda f: (f / "corpus/test.en").unlink(), "test.en"),
    ],
)
def test_a_score_of_something_else_is_an_error(scored, damage, expected):
    damage(scored)
    with pytest.raises((OSError, ValueError), match=re.escape(expected)):
        compared(scored)
