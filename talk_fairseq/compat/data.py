"""Patches of fairseq's batches and epochs: every sentence once, also in a run that resumes."""

import atexit
import inspect
import math
import threading
import types

import numpy as np
from fairseq.data.iterators import BackgroundConsumer

from talk_fairseq.compat.patching import overlay, patches


@patches("fairseq.data.data_utils", "batch_by_size")
def keep_last_batch(original, indices, *args, **kwargs):
    """Append the indices that fairseq lost as a last batch.

    Batches follow the order of ``indices``, so what is lost is a tail. Raises ValueError for no
    indices. Without it: fairseq silently drops a last batch whose size is no multiple of 8: 40 of
    43 sentences are translated, and a data set of fewer than 8 is "empty".
    """
    if not isinstance(indices, np.ndarray):
        indices = np.fromiter(indices, dtype=np.int64)
    try:
        batches = list(original(indices, *args, **kwargs))
    except IndexError:
        if len(indices) > 0:
            raise
        raise ValueError(
            "expected sentences to batch, got none: the data set is empty, "
            "or every sentence is over the maximum length"
        ) from None
    kept = sum(len(batch) for batch in batches)
    return batches + [indices[kept:]] if kept < len(indices) else batches


@patches("fairseq.tasks.fairseq_task.FairseqTask", "get_batch_iterator")
def make_same_batches_when_resuming(original, self, dataset, *args, **kwargs):
    """Make the batches of all epochs as for epoch 1, unless each epoch has batches of its own.

    Without it: a run that resumes in its second epoch or later trains on other batches, since
    fairseq makes them once, from the seed and the epoch that the process begins with. During that
    epoch, some sentences are seen twice and others never.
    """
    given = inspect.signature(original).bind(self, dataset, *args, **kwargs).arguments
    anew = given.get("disable_iterator_cache") or given.get("update_epoch_batch_itr")
    if anew or not self.can_reuse_epoch_itr(dataset) or dataset in self.dataset_to_epoch_iter:
        return original(**given)
    epoch = given.get("epoch", 1)
    iterator = original(**given | {"epoch": 1})
    iterator.epoch = epoch
    dataset.set_epoch(epoch)
    return iterator


@patches("fairseq.data.iterators.GroupedIterator", "__init__")
def group_batches_from_resumed_position(
    original, self, iterable, chunk_size, skip_remainder_batch=False
):
    """Count the groups of ``--update-freq`` from where an epoch is resumed.

    Without it: a run that resumes within a group, with another ``--update-freq``, may leave out the
    end of the epoch, and train on all of that epoch once more.
    """
    batches = len(iterable) - getattr(iterable, "n", 0)
    original(self, iterable, chunk_size, skip_remainder_batch)
    if not skip_remainder_batch:
        self.total = self.n + math.ceil(batches / chunk_size)


@patches("fairseq.data.iterators.EpochBatchIterator", "_get_iterator_for_epoch")
def shuffle_epochs_after_curriculum(original, self, epoch, shuffle, *args, **kwargs):
    """Shuffle the epochs after the first N of ``--curriculum N``.

    Without it: none is shuffled, since fairseq decides that when it makes a data loader, once for
    all epochs; a run that resumes makes another.
    """
    if self.reuse_dataloader and self.dataloader is not None:
        self.epoch_batch_sampler.shuffle = shuffle
    return original(self, epoch, shuffle, *args, **kwargs)


@patches("fairseq.data.iterators.EpochBatchIterator", "state_dict")
def save_number_of_shards(original, self):
    """Save how many processes share an epoch, for `resume_epoch_with_other_world_size`."""
    return {**original(self), "num_shards": self.num_shards}


@patches("fairseq.data.iterators.EpochBatchIterator", "load_state_dict")
def resume_epoch_with_other_world_size(original, self, state_dict):
    """Resume an epoch where the processes that shared it stopped.

    Batches are dealt out in one order, so the sum of what all processes have had tells where to
    resume; what the new processes cannot share evenly is seen again. Raises ValueError during an
    epoch of ``--grouped-shuffling``, whose order depends on the number of processes. Without it:
    more processes end in ``Cannot resume training due to dataloader mismatch``, and fewer see
    sentences again.
    """
    before = state_dict.get("num_shards", self.num_shards)
    done = state_dict.get("iterations_in_epoch", 0) * before
    if self.grouped_shuffling and done and before != self.num_shards:
        wanted = f"{before} processes until the end of the epoch, got {self.num_shards}"
        raise ValueError(f"--grouped-shuffling: expected {wanted}")
    return original(self, {**state_dict, "iterations_in_epoch": done // self.num_shards})


@patches("fairseq.data.indexed_dataset.MMapIndexedDatasetBuilder", "finalize")
def write_offsets_beyond_two_gibibytes(original, self, index_file):
    """Write where sentences begin, also in a file of 2 GiB or more that was merged from parts.

    Without it: ``fairseq-preprocess --workers 2`` adds up sizes in int32, which NumPy 2 does not
    widen. Training then ends with ``offset must be non-negative``, and from 4 GiB on it silently
    reads other sentences.
    """
    self._sizes = [int(size) for size in self._sizes]
    return original(self, index_file)


@atexit.register
def stop_reading_ahead():
    """Let the threads that read batches ahead end before the process does.

    Each may take 10 seconds for the batch that it reads. Without it: a process that ends while such
    a thread is inside PyTorch aborts, with exit status 134, as trainings of language models
    sometimes do at their end.
    """
    for thread in threading.enumerate():
        if isinstance(thread, BackgroundConsumer):
            thread._max_len = 0  # its next batch is its last
            with thread._queue.not_full:
                thread._queue.maxsize = math.inf  # a full queue would hold it
                thread._queue.not_full.notify()
            thread.join(timeout=10)


def percentile(a, q, interpolation):
    """Return ``np.percentile``, with numpy 1's name of ``method``."""
    return np.percentile(a, q, method=interpolation)


# Without these: ``--sample-break-mode eos``, ``--num-batch-buckets`` and ``--arch
# nacrf_transformer`` fail with numpy 2.
overlay("fairseq.data.data_utils", "np", percentile=percentile)
overlay("fairseq.modules.dynamic_crf_layer", "np", float=float)
for module in ("language_pair_dataset", "token_block_dataset"):
    overlay(f"fairseq.data.{module}", "np", compat=types.SimpleNamespace(long=np.int64))
