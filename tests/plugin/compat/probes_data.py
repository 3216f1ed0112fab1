"""Probes of the patches in compat/data.py."""

import subprocess
import sys
from itertools import islice

import pytest

pytest.importorskip("fairseq")

import numpy as np
import torch
from fairseq.data import (
    LanguagePairDataset,
    TokenBlockDataset,
    bucket_pad_length_dataset,
    data_utils,
    iterators,
)
from fairseq.data.indexed_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder
from fairseq.tasks.fairseq_task import FairseqTask
from probing import (
    breaks,
    dictionary,
    quiet_environment,
)


def batches_of(count, **options):
    sizes = np.arange(3, 3 + count)
    return data_utils.batch_by_size(
        np.arange(count), num_tokens_fn=lambda i: 1, num_tokens_vec=sizes, **options
    )


@breaks("AssertionError: 40")
def the_last_batch_is_kept(tmp_path):
    for options_of_batches in ({"max_sentences": 16}, {"max_tokens": 400}):
        batches = batches_of(43, required_batch_size_multiple=8, **options_of_batches)
        together = np.concatenate(batches).tolist()
        assert together == list(range(43)), len(together)


@breaks("AssertionError: 0")
def a_data_set_of_three_is_not_empty(tmp_path):
    batches = batches_of(3, max_tokens=1000, required_batch_size_multiple=8)
    assert [batch.tolist() for batch in batches] == [[0, 1, 2]], len(batches)


@breaks("IndexError")
def a_data_set_of_none_says_so(tmp_path):
    with pytest.raises(ValueError, match="expected sentences to batch, got none"):
        batches_of(0, max_tokens=1000, required_batch_size_multiple=8)
    assert list(batches_of(0, max_tokens=1000)) == []


@breaks("interpolation", since_numpy=(2, 4))
def batch_buckets_work(tmp_path):
    assert data_utils.get_buckets(np.array([1, 2, 3, 9]), 2).tolist() == [2, 9]


@breaks("compat", since_numpy=(2, 0))
def num_batch_buckets_of_pairs_work(tmp_path):
    words = dictionary()
    lines = [torch.tensor([5] * length + [2]) for length in (1, 4, 2)]
    sizes = np.array([len(line) for line in lines])
    with pytest.MonkeyPatch.context() as patch:
        # This one is broken as well, but probed above.
        patch.setattr(bucket_pad_length_dataset, "get_buckets", lambda *_: np.array([3, 5]))
        pairs = LanguagePairDataset(lines, sizes, words, lines, sizes, words, num_buckets=2)
    assert pairs.bucketed_num_tokens.tolist() == [3, 5, 3]


@breaks("AssertionError: -", since_numpy=(2, 0))
def parts_of_two_gibibytes_are_merged(tmp_path):
    for part in ("a", "b"):
        with MMapIndexedDataset.Index.writer(f"{tmp_path}/{part}.idx", np.uint16) as index:
            index.write([2**29, 2**29, 5])
        (tmp_path / f"{part}.bin").touch()
    builder = MMapIndexedDatasetBuilder(f"{tmp_path}/all.bin", dtype=np.uint16)
    for part in ("a", "b"):
        builder.merge_file_(f"{tmp_path}/{part}")
    builder.finalize(f"{tmp_path}/all.idx")
    index = MMapIndexedDataset.Index(f"{tmp_path}/all.idx")
    begins = index._pointers.tolist()
    assert begins == [0, 2**30, 2**31, 2**31 + 10, 3 * 2**30 + 10, 2**32 + 10], min(begins)


@breaks("compat", since_numpy=(2, 0))
def sample_break_mode_eos_works(tmp_path):
    lines = [torch.tensor([5, 6, 2]), torch.tensor([7, 2])]
    blocks = TokenBlockDataset(lines, [3, 2], block_size=None, pad=1, eos=2, break_mode="eos")
    assert [block.tolist() for block in blocks] == [[5, 6, 2], [7, 2]]


def lines_of_words():
    """A data set and its task; 12 sentences of one length, two per batch."""
    words = dictionary()
    lines = [torch.tensor([5, number, 2]) for number in range(4, 16)]
    pairs = LanguagePairDataset(lines, np.full(12, 3), words, lines, np.full(12, 3), words)
    return pairs, FairseqTask(None)


def iterator_over(pairs, task, epoch=1, processes=1, rank=0):
    return task.get_batch_iterator(
        pairs, max_sentences=2, seed=1, epoch=epoch, num_shards=processes, shard_id=rank
    )


@breaks("AssertionError: other batches")
def a_run_that_goes_on_has_the_same_batches(tmp_path):
    one, other = (
        [sorted(batch) for batch in iterator_over(*lines_of_words(), epoch).frozen_batches]
        for epoch in (1, 3)
    )
    assert one == other, "other batches"
    pairs, task = lines_of_words()
    assert iterator_over(pairs, task, epoch=3).epoch == 3
    anew = task.get_batch_iterator(
        pairs, max_sentences=2, seed=1, epoch=3, update_epoch_batch_itr=True
    )
    assert [sorted(batch) for batch in anew.frozen_batches] != one


@breaks("AssertionError: other batches")
def they_are_the_same_where_the_epoch_is_no_keyword(tmp_path):
    """As tasks of fairseq's examples pass it on."""
    one, other = (
        task.get_batch_iterator(pairs, None, 2, None, False, 1, 1, 1, 0, 0, epoch).frozen_batches
        for epoch in (1, 3)
        for pairs, task in [lines_of_words()]
    )
    assert [sorted(batch) for batch in one] == [sorted(batch) for batch in other], "other batches"


@breaks("AssertionError: epoch 3 in order")
def a_curriculum_ends(tmp_path):
    """In a run that goes on from one epoch to the next, as in one that begins later."""
    iterator, later = (iterator_over(*lines_of_words(), epoch) for epoch in (1, 3))
    epochs = [
        [batch["id"].tolist() for batch in iterator.next_epoch_itr(shuffle=epoch > 2)]
        for epoch in (1, 2, 3)
    ]
    assert epochs[0] == epochs[1] and epochs[2] != epochs[0], "epoch 3 in order"
    assert epochs[2] == [batch["id"].tolist() for batch in later.next_epoch_itr(shuffle=True)]


@breaks("AssertionError: 4 of 5 batches")
def an_epoch_ends_with_another_accumulation(tmp_path):
    begun = iterators.CountingIterator(range(5, 10), start=5)  # of 10 batches
    groups = list(iterators.GroupedIterator(begun, 4))
    left = [batch for group in groups for batch in group]
    assert left == [5, 6, 7, 8, 9], f"{len(left)} of 5 batches"
    assert not begun.has_next()


@breaks("dataloader mismatch")
def an_epoch_goes_on_in_more_processes(tmp_path):
    for before, done, after in ((1, 4, 2), (1, 5, 2), (2, 2, 1), (3, 1, 2)):
        seen = []
        for rank in range(before):
            iterator = iterator_over(*lines_of_words(), processes=before, rank=rank)
            batches = iterator.next_epoch_itr()
            seen += [batch["id"].tolist() for batch in islice(batches, done)]
            state = iterator.state_dict()
        for rank in range(after):
            iterator = iterator_over(*lines_of_words(), processes=after, rank=rank)
            iterator.load_state_dict(state)
            seen += [batch["id"].tolist() for batch in iterator.next_epoch_itr()]
        ids = sorted(number for batch in seen for number in batch)
        twice = (before * done) % after  # batches that the processes cannot share evenly
        assert sorted(set(ids)) == list(range(12)) and len(ids) == 12 + 2 * twice, ids


READS_AHEAD = """
import torch
from fairseq.data.iterators import BufferedIterator

class Batches:
    def __len__(self):
        return 10**9
    def __iter__(self):
        x = torch.ones(300, 300)
        while True:
            x @ x
            yield x

waits, computes = BufferedIterator(1, Batches()), BufferedIterator(0, Batches())
print(*(len(next(batches)) for batches in (waits, computes)))
"""


@breaks("died with <Signals.SIGABRT: 6>")
def a_process_ends_while_batches_are_read_ahead(tmp_path):
    """One thread waits for room in its queue, the other, which has no limit, is inside PyTorch."""
    patched = "import talk_fairseq" if "talk_fairseq" in sys.modules else ""
    command = [sys.executable, "-c", patched + READS_AHEAD]
    run = subprocess.run(command, env=quiet_environment(), capture_output=True, text=True)
    run.check_returncode()
    assert run.stdout == "300 300\n"
