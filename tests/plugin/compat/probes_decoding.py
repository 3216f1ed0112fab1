"""Probes of the patches in compat/decoding.py."""

import argparse

import pytest

pytest.importorskip("fairseq")


import torch
from fairseq import search
from fairseq.data import (
    MonolingualDataset,
)
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.tasks.language_modeling import LanguageModelingTask
from probing import breaks, dictionary


@breaks("AssertionError: 1 of 2 blocks")
def a_perplexity_is_of_every_token(tmp_path):
    words = dictionary()
    lines = [torch.tensor([5] * length) for length in (9, 2)]
    blocks = [(line, line, line) for line in lines]  # source, future and past target
    data = MonolingualDataset(blocks, [9, 2], words, targets=["future"])
    task = LanguageModelingTask(argparse.Namespace(), words)
    try:
        batches = task.eval_lm_dataloader(data, batch_size=8, max_positions=4, num_workers=0)
    except ValueError as error:
        assert "expected blocks of at most 4 tokens to score, got 1 longer ones" in str(error)
    else:
        raise AssertionError(f"{sum(batch['nsentences'] for batch in batches)} of 2 blocks")
    kept = task.eval_lm_dataloader(data, batch_size=8, max_positions=9, num_workers=0)
    assert sum(batch["nsentences"] for batch in kept) == 2


@breaks(r"AssertionError: \[\]")
def repeated_ngrams_are_blocked(tmp_path):
    """Whatever padding follows in the buffer, and beside another hypothesis."""
    for size, written, blocked in (
        (3, [5, 6, 7, 5, 6], [7]),
        (3, [5, 6, 7, 5, 6, 8, 5, 6], [7, 8]),
        (3, [5, 5, 5], [5]),
        (3, [5, 5], []),
        (2, [5, 6, 7, 5], [6]),
        (1, [5, 6], [5, 6]),
        (4, [5, 6, 7, 5, 6], []),
    ):
        tokens = torch.ones(2, 12, dtype=torch.long)  # padding
        tokens[:, 0] = 2
        tokens[0, 1 : len(written) + 1] = torch.tensor(written)
        tokens[1, 1 : len(written) + 1] = torch.arange(10, 10 + len(written))
        lprobs = NGramRepeatBlock(size)(tokens, torch.zeros(2, 30), 1, 2, len(written))
        found = lprobs[0].isinf().nonzero().flatten().tolist()
        assert found == blocked, found
        assert lprobs[1].isinf().sum() == (len(written) if size == 1 else 0)


@breaks("IndexError: index 4[01] is out of bounds for dimension 0 with size 2")
def diverse_beams_take_sentences_by_row(tmp_path):
    torch.manual_seed(0)
    first, second = torch.randn(2, 2, 4, 24), torch.randn(2, 2, 4, 24)

    def penalties(numbers, kept):
        """Run two steps of which the second keeps some rows, with sentences so numbered."""
        beams = search.DiverseBeamSearch(dictionary(), num_groups=2, diversity_strength=0.5)
        numbers = torch.tensor(numbers)
        beams.step(0, first[0].log_softmax(-1), torch.zeros(2, 4, 0), None, numbers)
        scores = torch.zeros(len(kept), 4, 1)
        return beams.step(1, second[0][kept].log_softmax(-1), scores, None, numbers[kept])

    for kept in ([0, 1], [1]):
        expected = penalties([0, 1], kept)
        # The sentences of a last batch; and those of a first one, sorted by length.
        for numbers in ([40, 41], [1, 0]):
            for got, wanted in zip(penalties(numbers, kept), expected, strict=True):
                assert torch.equal(got, wanted)
