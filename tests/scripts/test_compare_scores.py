"""The scores of scripts/compare.sh that no tool computes for it, and those of summaries."""

import random
import statistics

import numpy as np
import pytest
import torch

pytest.importorskip("fairseq")

from scipy import stats

from pipeline.compare.scores import paired_bootstrap, score


def test_p_of_a_paired_bootstrap():
    generator = np.random.default_rng(1)
    baseline = generator.random(400)
    for shift in (0, 0.01, 0.03, 0.1):
        scores = baseline + shift + 0.3 * generator.standard_normal(400)
        assert paired_bootstrap(scores, baseline) == pytest.approx(
            stats.ttest_rel(scores, baseline).pvalue, abs=0.04
        )
    assert paired_bootstrap(baseline, baseline) == 1


def generated(folder, lines):
    """What fairseq-generate writes of the translations or summaries `lines`."""
    folder.mkdir(parents=True)
    text = "".join(f"D-{n}\t-0.1\t{line}\n" for n, line in enumerate(lines))
    (folder / "generate-test.txt").write_text(text)


def test_p_and_interval_are_of_all_seeds(tmp_path):
    words = "the a old small large tool is here there and of".split()
    generator = random.Random(1)
    references = [" ".join(generator.choices(words, k=8)) for _ in range(40)]
    (tmp_path / "test.en").write_text("".join(f"{line}\n" for line in references))
    worse = ["the tool", *references[1:]]
    far = [" ".join(generator.choices(words, k=8)) for _ in range(40)]
    for seed, lines in (("1", worse), ("2", far)):
        generated(tmp_path / "talkconv" / seed / "generated", references)
        generated(tmp_path / "lightconv" / seed / "generated", lines)
    systems = {name: {"seeds": {"1": {}, "2": {}}} for name in ("talkconv", "lightconv")}
    results = {"task": "mt", "reference": "talkconv", "systems": systems}
    score(results, tmp_path, ["es", "en"], lambda *run: tmp_path.joinpath(*run))
    row = systems["lightconv"]
    first, second = row["seeds"].values()
    assert first["p"] != second["p"] and row["p"] == max(first["p"], second["p"])
    ends = zip(first["interval"], second["interval"])
    assert row["interval"] == [pytest.approx(statistics.mean(end)) for end in ends]
    assert first["bleu"] != second["bleu"]
    assert row["score"] == pytest.approx((first["bleu"] + second["bleu"]) / 2)


def test_the_length_of_the_lead_is_chosen_in_validation(tmp_path):
    for split, words in (("valid", 5), ("test", 9)):
        source = [f"{split}{n}" for n in range(12)]
        (tmp_path / f"{split}.source").write_text(" ".join(source) + "\n")
        (tmp_path / f"{split}.target").write_text(" ".join(source[:words]) + "\n")
    results = {"task": "summ", "reference": "talkconv", "systems": {}}
    score(results, tmp_path, ["source", "target"], None)
    assert results["lead"]["words"] == 5
    assert results["lead"]["rouge_1"] == pytest.approx(100 * 2 * 5 / (5 + 9))  # of test, F-measure


def test_translations_that_are_the_same_do_not_differ(tmp_path):
    references = ["a small tool is here", "one large tool is there", "the tools are old"] * 10
    (tmp_path / "test.en").write_text("".join(f"{line}\n" for line in references))
    names = ("talkconv", "transformer", "lightconv")
    for name, lines in zip(names, (references, references, ["a tool is here"] * 30)):
        generated(tmp_path / name / "1/generated", lines)
    systems = {name: {"seeds": {"1": {}}} for name in names}
    results = {"task": "mt", "reference": "talkconv", "systems": systems}
    score(results, tmp_path, ["es", "en"], lambda *run: tmp_path.joinpath(*run))
    assert [systems[name]["p"] for name in names[:2]] == [None, 1]
    assert systems["lightconv"]["p"] < 0.01


def test_scores_of_summaries_are_of_each_seed(tmp_path):
    corpus, references = tmp_path / "corpus", ["a small tool", "one large tool", "the tools"] * 20
    corpus.mkdir()
    for split in ("valid", "test"):
        (corpus / f"{split}.source").write_text("a small tool that is here\n" * 60)
        (corpus / f"{split}.target").write_text("".join(f"{line}\n" for line in references))
    for name, seed, lines in (
        ("talkconv", 1, references), ("dynamicconv", 1, ["a small tool"] * 60),
        ("dynamicconv", 2, references),
    ):  # fmt: skip
        generated(tmp_path / name / str(seed) / "generated", lines)
    systems = {"talkconv": {"seeds": {"1": {}}}, "dynamicconv": {"seeds": {"1": {}, "2": {}}}}
    results = {"task": "summ", "reference": "talkconv", "systems": systems}
    score(results, corpus, ["source", "target"], lambda *run: tmp_path.joinpath(*run))
    assert (
        systems["talkconv"]["rouge_2"] == pytest.approx(100) and results["baseline"] == "talkconv"
    )
    first, second = systems["dynamicconv"]["seeds"].values()
    assert first["rouge_2"] < second["rouge_2"] == pytest.approx(100)
    assert first["p"] < 0.01 and "p" not in second  # its seed has no reference
    assert systems["dynamicconv"]["p"] == first["p"] and systems["talkconv"]["p"] is None
    for key, mean in (("rouge_1", "rouge_1"), ("rouge_2", "rouge_2"), ("rouge_l", "score")):
        both = (first[key] + second[key]) / 2
        assert systems["dynamicconv"][mean] == pytest.approx(both)
    assert results["lead"]["words"] == 3


def test_p_of_summaries_is_of_rouge_2(tmp_path):
    """Summaries with as many pairs of words in common, but longer common subsequences."""
    for split in ("valid", "test"):
        (tmp_path / f"{split}.source").write_text("any text\n" * 30)
        (tmp_path / f"{split}.target").write_text("one two three four five six\n" * 30)
    for name, line in (("talkconv", "one two x z"), ("dynamicconv", "one two x four")):
        generated(tmp_path / name / "1/generated", [line] * 30)
    systems = {name: {"seeds": {"1": {}}} for name in ("talkconv", "dynamicconv")}
    results = {"task": "summ", "reference": "talkconv", "systems": systems}
    score(results, tmp_path, ["source", "target"], lambda *run: tmp_path.joinpath(*run))
    assert systems["dynamicconv"]["rouge_l"] > systems["talkconv"]["rouge_l"]
    assert systems["dynamicconv"]["p"] == 1


def test_a_seed_without_the_reference_has_no_p(tmp_path):
    references = ["a small tool is here", "one large tool is there", "the tools are old"] * 10
    (tmp_path / "test.en").write_text("".join(f"{line}\n" for line in references))
    for name, lines in (("transformer", references), ("lightconv", ["a tool is here"] * 30)):
        generated(tmp_path / name / "2/generated", lines)
    systems = {name: {"seeds": {"2": {}}} for name in ("transformer", "lightconv")}
    results = {"task": "mt", "reference": "talkconv", "systems": systems}
    score(results, tmp_path, ["es", "en"], lambda *run: tmp_path.joinpath(*run))
    assert systems["lightconv"]["p"] is None and "baseline" not in results


@pytest.mark.parametrize("language", ["zh", "zh-CN", "zh_TW"])
def test_chinese_is_scored_by_its_characters(tmp_path, language):
    (tmp_path / f"test.{language}").write_text("我们今天去公园散步。\n" * 9, encoding="utf-8")
    generated(tmp_path / "talkconv/1/generated", ["我们今天去公园走走。"] * 9)
    systems = {"talkconv": {"seeds": {"1": {}}}}
    results = {"task": "mt", "reference": "talkconv", "systems": systems}
    score(results, tmp_path, ["en", language], lambda *run: tmp_path.joinpath(*run))
    assert systems["talkconv"]["score"] > 30 and "tok:zh" in results["signature"]


def test_the_reference_alone_has_no_p(tmp_path):
    (tmp_path / "test.en").write_text("a small tool is here\n" * 30)
    generated(tmp_path / "talkconv/1/generated", ["a tool is here"] * 30)
    systems = {"talkconv": {"seeds": {"1": {}}}}
    results = {"task": "mt", "reference": "talkconv", "systems": systems}
    score(results, tmp_path, ["es", "en"], lambda *run: tmp_path.joinpath(*run))
    assert systems["talkconv"]["p"] is None and "baseline" not in results


def test_scores_of_language_models_by_hand(tmp_path):
    """Pieces of three and two words of text; each seed has a loss of its own."""
    (tmp_path / "pieces").mkdir()
    (tmp_path / "pieces/train.en").write_text("▁a b\n▁a\n")
    (tmp_path / "pieces/test.en").write_text("▁a c\n")
    (tmp_path / "test.en").write_text("ac\n")
    for seed, loss in (("1", 2), ("2", 4)):
        folder = tmp_path / "talkconv" / seed
        folder.mkdir(parents=True)
        state = {
            "model": {},
            "optimizer_history": [{"num_updates": 3}],
            "extra_state": {"previous_training_time": 1},
        }
        torch.save(state, folder / "averaged.pt")
        (folder / "averaged.txt").write_text(
            "num. model params: 1,234\nEvaluated 3 tokens in 0.1s\n"
            f"Loss (base 2): {loss}.0000, Perplexity: {2**loss}.00\n"
        )
    systems = {"talkconv": {"seeds": {"1": {}, "2": {}}}}
    results = {"task": "lm", "reference": "talkconv", "systems": systems}
    score(results, tmp_path, ["en"], lambda *run: tmp_path.joinpath(*run))
    row = systems["talkconv"]
    assert row["seeds"]["1"] == {"perplexity_per_token": 4, "perplexity_per_word": 8}
    assert (row["score"], row["perplexity_per_word"]) == ((4 + 16) / 2, (8 + 64) / 2)
    assert results["unigram"]["perplexity_per_token"] == pytest.approx(81 ** (1 / 3))
    assert results["unigram"]["perplexity_per_word"] == pytest.approx(81 ** (1 / 2))
