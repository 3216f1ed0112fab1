"""The scores of scripts/compare.sh that no tool computes for it, and those of summaries."""

import random
import statistics

import numpy as np
import pytest

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


def test_the_length_of_the_lead_is_chosen_in_validation(tmp_path):
    for split, words in (("valid", 5), ("test", 9)):
        source = [f"w{n}" for n in range(12)]
        (tmp_path / f"{split}.source").write_text(" ".join(source) + "\n")
        (tmp_path / f"{split}.target").write_text(" ".join(source[:words]) + "\n")
    results = {"task": "summ", "reference": "talkconv", "systems": {}}
    score(results, tmp_path, ["source", "target"], None)
    assert results["lead"]["words"] == 5 and results["lead"]["rouge_1"] < 100


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
    assert results["lead"]["words"] == 3
