"""Scores of given lines, as scripts/evaluate.sh computes them (test_evaluate.py has whole runs)."""

import pytest

pytest.importorskip("fairseq")

from pipeline.recipes import evaluate


@pytest.mark.parametrize(
    "line, parts",
    [
        ("a well-known word", "a well ##AT##-##AT## known word"),
        ("no hyphen - but a dash", "no hyphen - but a dash"),
        ("ab-cd-ef", "ab ##AT##-##AT## cd ##AT##-##AT## ef"),
        ("a-b-c", "a ##AT##-##AT## b-c"), ("a--b", "a ##AT##-##AT## -b"), ("-ab cd-", "-ab cd-"),
        ("12-jährige &quot;X-Y&quot;", "12 ##AT##-##AT## jährige &quot;X ##AT##-##AT## Y&quot;"),
        ("a @-@ b", "a @ ##AT##-##AT## @ b"),
        ("", ""),
    ],
)  # fmt: skip
def test_compounds_are_split_by_hand(line, parts):
    assert evaluate.compound_split(line) == parts


def test_lower_cased_models_are_scored_without_case():
    found = evaluate.detokenised_scores(["the old man ."], ["The Old Man ."], lowercase=True)
    assert found["chrf"]["score"] == pytest.approx(100)
    assert "case:lc" in found["sacrebleu"]["tool"]


def test_rouge_of_tokenised_summaries_ignores_escapes():
    found = evaluate.rouge_scores(["it &apos;s here . gone ."], ["it 's here . gone ."])
    assert {name: score["score"] for name, score in found.items()} == dict.fromkeys(
        ("rouge_1", "rouge_2", "rouge_l", "rouge_lsum"), pytest.approx(100)
    )
    # The second sentence comes first: one longest common subsequence, but two by sentences.
    swapped = evaluate.rouge_scores(["b c . d e f ."], ["d e f . b c ."])
    assert swapped["rouge_l"]["score"] < swapped["rouge_lsum"]["score"] == pytest.approx(100)


def test_moses_tokens_become_plain_text():
    lines = [
        "it &apos;s a test , isn &apos;t it ?",
        "&quot; self @-@ made &quot; &amp; &#91;1&#93;",
    ]
    assert evaluate.detokenise(lines, "en") == [
        "it's a test, isn't it?",
        '"self-made" & [1]',
    ]
