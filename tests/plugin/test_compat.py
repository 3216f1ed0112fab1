"""Every patch of talk_fairseq/compat: what fairseq does without it, and with it.

A probe states what should hold. It must pass here, where the patches are in force, and must fail
with the error it names in a process of its own that has only fairseq: the day one passes there,
its patch can go. Below them, the commands themselves run on dummy data with ``--user-dir``.
"""

import argparse
import contextlib
import copy
import io
import json
import os
import pickle
import re
import resource
import runpy
import shutil
import subprocess
import sys
import traceback
from collections import OrderedDict
from itertools import islice
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import pytest

pytest.importorskip("fairseq")

import numpy as np
import torch
from fairseq import checkpoint_utils, models, options, search, trainer, utils
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.data import (
    Dictionary,
    LanguagePairDataset,
    MonolingualDataset,
    TokenBlockDataset,
    bucket_pad_length_dataset,
    data_utils,
    iterators,
)
from fairseq.dataclass import initialize
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.models import distributed_fairseq_model
from fairseq.models.transformer import TransformerModel
from fairseq.modules import LayerDropModuleList, SinusoidalPositionalEmbedding
from fairseq.modules.dynamic_crf_layer import DynamicCRF
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.tasks.language_modeling import LanguageModelingTask
from omegaconf import OmegaConf

PLUGIN = Path(__file__).resolve().parents[2] / "talk_fairseq"
ALONE = __name__ == "__main__"  # without the patches

if not ALONE:
    sys.path.insert(0, str(PLUGIN.parent))
    from talk_fairseq import checkpoint_files, compat
    from talk_fairseq.compat import patching, text

PROBES = {}
WITHOUT_ERROR = set()  # probes that need no patch with this NumPy


def breaks(error, since_numpy=1):
    """Register a probe, which takes a folder, with a pattern of its error without the patch.

    Before the major version `since_numpy` of NumPy there is no error.
    """

    def register(probe):
        PROBES[probe.__name__] = (probe, error)
        if int(np.__version__.split(".")[0]) < since_numpy:
            WITHOUT_ERROR.add(probe.__name__)
        return probe

    return register


# Checkpoints


def save_and_load(tmp_path, **state):
    path = tmp_path / "checkpoint.pt"
    history = {"optimizer_name": "Adam", "lr_scheduler_state": {}, "num_updates": 1}
    iterator = {"train_iterator": {"epoch": 1}}
    given = {"model": {}, "optimizer_history": [history], "extra_state": iterator, **state}
    torch.save(given, path)
    return checkpoint_utils.load_checkpoint_to_cpu(str(path))


@breaks("Unsupported global: GLOBAL argparse.Namespace")
def options_in_a_namespace_load(tmp_path):
    args = argparse.Namespace(arch="transformer", max_positions=9, criterion="cross_entropy")
    assert save_and_load(tmp_path, args=args)["args"].arch == "transformer"


@breaks(r"Unsupported global: GLOBAL numpy\._?core\.multiarray\.scalar")
def metrics_of_eval_bleu_load(tmp_path):
    metrics = {code: np.dtype(code).type(1) for code in ("f2", "f4", "f8", "i4", "i8", "u1", "?")}
    metrics["counts"] = np.arange(4)
    loaded = save_and_load(tmp_path, metrics=metrics)["metrics"]
    assert {key: type(value) for key, value in loaded.items()} == {
        key: type(value) for key, value in metrics.items()
    }
    assert loaded["counts"].tolist() == [0, 1, 2, 3] and loaded["f8"] == 1


@breaks("Unsupported global: GLOBAL fairseq.distributed.utils._TensorPlaceholder")
def broadcast_optimizer_states_load(tmp_path):
    placeholder = distributed_utils._TensorPlaceholder(index=3)
    loaded = save_and_load(tmp_path, last_optimizer_state={"exp_avg": placeholder})
    assert loaded["last_optimizer_state"]["exp_avg"].index == 3


@breaks("Unsupported global: GLOBAL fairseq.meters.AverageMeter")
def meters_of_fairseq_0_9_load(tmp_path):
    old = ModuleType("fairseq.meters")
    old.AverageMeter = type("AverageMeter", (), {"__module__": "fairseq.meters"})
    meter = old.AverageMeter()
    meter.avg, meter.count = 3.9, 7
    with patch.dict(sys.modules, {"fairseq.meters": old}):  # to be pickled
        loaded = save_and_load(tmp_path, train_meters={"train_loss": meter})
    assert vars(loaded["train_meters"]["train_loss"]) == {"avg": 3.9, "count": 7}


@breaks("OSError|RuntimeError")  # which of torch's errors depends on where it is cut
def a_truncated_checkpoint_is_named(tmp_path):
    path = tmp_path / "cut.pt"
    torch.save({"model": {"w": torch.ones(2000)}}, path)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match=rf"in {path}, got a truncated or foreign file"):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))


@breaks("UnpicklingError")
def a_text_as_a_checkpoint_is_named(tmp_path):
    path = tmp_path / "text.pt"
    path.write_text("not a checkpoint\n" * 9)
    with pytest.raises(ValueError, match=rf"in {path}, got a truncated or foreign file"):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))


@breaks("KeyError: 'best_loss'")
def a_checkpoint_of_another_library_is_named(tmp_path):
    path = tmp_path / "foreign.pt"
    torch.save({"layer.weight": torch.ones(2)}, path)
    with pytest.raises(ValueError, match=rf"in {path}, got the keys \['layer.weight'\]"):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))


class Anything:
    """A type that is on no list."""


@breaks(r"Unsupported global: GLOBAL \S*Anything")
def bytes_of_the_same_job_load(tmp_path):
    sent = []
    here = torch.device("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_utils, "get_rank", lambda group: 0)
        patch.setattr(distributed_utils, "broadcast", lambda tensor, **_: sent.append(tensor))
        distributed_utils._broadcast_object_slow(Anything(), 0, None, here)
        patch.setattr(distributed_utils, "get_rank", lambda group: 1)
        patch.setattr(distributed_utils, "broadcast", lambda tensor, **_: tensor.copy_(sent.pop(0)))
        got = distributed_utils._broadcast_object_slow(None, 0, None, here)
    assert isinstance(got, Anything)


def cut_at(size, write):
    """Call `write` where no file may be longer than `size` bytes, as on a disk that fills up."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        with pytest.raises(OSError):
            write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@breaks("AssertionError: 1000 bytes")
def a_copy_is_whole_or_not_there(tmp_path):
    source, last = tmp_path / "checkpoint1.pt", tmp_path / "checkpoint_last.pt"
    source.write_bytes(b"1" * 5000)
    last.write_bytes(b"0" * 4000)
    cut_at(1000, lambda: PathManager.copy(str(source), str(last), overwrite=True))
    assert last.read_bytes() == b"0" * 4000, f"{last.stat().st_size} bytes"
    assert PathManager.copy(str(source), str(last), overwrite=True)
    assert last.read_bytes() == source.read_bytes()
    assert sorted(tmp_path.iterdir()) == [source, last]


@breaks(r"AssertionError: \['replace'\]")
def a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path):
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "replace"):
            original = getattr(os, name)

            def call(*arguments, name=name, original=original):
                calls.append(name)
                return original(*arguments)

            patch.setattr(os, name, call)
        patch.setattr(os, "rename", os.replace)
        checkpoint_utils.torch_persistent_save({}, str(tmp_path / "checkpoint1.pt"))
    assert calls == ["fsync", "replace", "fsync"], calls  # the file, then its folder
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint1.pt"]


class FailsOnce:
    """What cannot be saved at the first try."""

    tries = 0

    def __reduce__(self):
        FailsOnce.tries += 1
        if FailsOnce.tries == 1:
            raise OSError("no space left")
        return (OrderedDict, ())


@breaks("RuntimeError|OSError")
def a_second_try_to_save_begins_anew(tmp_path):
    path = tmp_path / "checkpoint1.pt"
    FailsOnce.tries = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.sleep", lambda seconds: None)
        checkpoint_utils.torch_persistent_save({"model": {}, "x": FailsOnce()}, str(path))
    assert FailsOnce.tries == 2
    assert torch.load(path) == {"model": {}, "x": {}}


@breaks("checkpoint2.pt.tmp")
def what_a_killed_run_was_writing_is_removed(tmp_path):
    for name in ("checkpoint1.pt", "checkpoint2.pt.tmp", "notes.tmp"):
        (tmp_path / name).touch()
    checkpoint_utils.verify_checkpoint_directory(str(tmp_path))
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["checkpoint1.pt", "notes.tmp"], " ".join(left)


# Data


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


def dictionary():
    words = Dictionary()
    for number in range(20):
        words.add_symbol(f"w{number}")
    return words


@breaks("interpolation", since_numpy=2)
def batch_buckets_work(tmp_path):
    assert data_utils.get_buckets(np.array([1, 2, 3, 9]), 2).tolist() == [2, 9]


@breaks("compat", since_numpy=2)
def num_batch_buckets_of_pairs_work(tmp_path):
    words = dictionary()
    lines = [torch.tensor([5] * length + [2]) for length in (1, 4, 2)]
    sizes = np.array([len(line) for line in lines])
    with pytest.MonkeyPatch.context() as patch:
        # This one is broken as well, but probed above.
        patch.setattr(bucket_pad_length_dataset, "get_buckets", lambda *_: np.array([3, 5]))
        pairs = LanguagePairDataset(lines, sizes, words, lines, sizes, words, num_buckets=2)
    assert pairs.bucketed_num_tokens.tolist() == [3, 5, 3]


@breaks("compat", since_numpy=2)
def sample_break_mode_eos_works(tmp_path):
    lines = [torch.tensor([5, 6, 2]), torch.tensor([7, 2])]
    blocks = TokenBlockDataset(lines, [3, 2], block_size=None, pad=1, eos=2, break_mode="eos")
    assert [block.tolist() for block in blocks] == [[5, 6, 2], [7, 2]]


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


def lines_of_words():
    """A data set and its task; 12 sentences of one length, two a batch."""
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


@breaks("has no attribute 'float'")
def the_crf_layer_works(tmp_path):
    layer = DynamicCRF(num_embedding=9, low_rank=2, beam_size=4)
    loss = layer(torch.randn(2, 3, 9), torch.randint(0, 9, (2, 3)), torch.ones(2, 3).bool())
    assert torch.isfinite(loss).all()
    layer.forward_decoder(torch.randn(2, 3, 9), torch.ones(2, 3).bool())


# Models


@breaks("SiLU")
def swish_is_silu(tmp_path):
    x = torch.randn(5)
    assert torch.equal(utils.get_activation_fn("swish")(x), torch.nn.functional.silu(x))
    assert utils.get_activation_fn("relu") is torch.nn.functional.relu


def tiny_transformer(**options_of_model):
    words = dictionary()
    sizes = {
        f"{side}_{what}": number
        for side in ("encoder", "decoder")
        for what, number in (
            ("layers", 1),
            ("embed_dim", 8),
            ("ffn_embed_dim", 8),
            ("attention_heads", 2),
        )
    }
    args = argparse.Namespace(**sizes, **options_of_model)
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
    torch.manual_seed(0)
    return TransformerModel.build_model(args, task).eval()


@breaks("SiLU")
def a_transformer_with_swish_runs(tmp_path):
    model = tiny_transformer(activation_fn="swish")
    logits, _ = model(torch.tensor([[5, 6, 2]]), torch.tensor([3]), torch.tensor([[2, 5]]))
    assert logits.shape == (1, 2, 24)


@breaks("AssertionError: 6 layers")
def an_arch_in_yaml_is_that_arch(tmp_path):
    for model in ("transformer_lm_big", {"_name": "transformer_lm_big", "decoder_embed_dim": 64}):
        cfg = OmegaConf.create({"task": {"_name": "language_modeling"}, "model": model})
        initialize.add_defaults(cfg)
        assert cfg.model.decoder_layers == 12, f"{cfg.model.decoder_layers} layers"
        assert cfg.model.decoder_embed_dim == (1024 if isinstance(model, str) else 64)
        assert cfg.model.dropout == 0.1  # of the model's dataclass


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


def test_a_row_with_one_word_left_keeps_it():
    """A prompt or a prefix may repeat an n-gram; the same where TorchScript compiles it."""
    blocker = NGramRepeatBlock(2)
    tokens = torch.tensor([[2, 5, 6, 5], [2, 5, 6, 5], [2, 7, 8, 9]])
    given = torch.arange(30.0).view(3, 10)
    given[1, [*range(6), *range(7, 10)]] = -torch.inf  # the prompt goes on with 6
    expected = given.clone()
    expected[0, 6] = -torch.inf
    for block in (blocker, torch.jit.script(blocker)):
        for dtype in (torch.float32, torch.float16):
            lprobs = given.to(dtype)
            assert torch.equal(block(tokens, lprobs, 3, 1, 3), expected.to(dtype))
            assert torch.equal(lprobs, expected.to(dtype))  # in place, as in fairseq


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


# Training without a GPU


@breaks("AssertionError: tpu")
def the_bf16_flag_does_not_ask_for_a_tpu(tmp_path):
    parser = options.get_training_parser()
    args = options.parse_args_and_arch(parser, ["x", "--arch", "transformer", "--bf16"])
    assert args.bf16 and not args.tpu, "tpu"


@breaks("AttributeError")  # as deep as a Trainer without a model comes
def fp16_on_a_cpu_is_refused(tmp_path):
    common = SimpleNamespace(fp16=True, memory_efficient_fp16=False, cpu=True, tpu=False)
    with pytest.raises(ValueError, match="expected a GPU for --fp16, got a CPU"):
        trainer.Trainer(SimpleNamespace(common=common), None, None, None)


@breaks("AdaptiveLoss is not compatible")
def one_process_trains_with_adaptive_loss(tmp_path):
    class Derived(AdaptiveLoss):
        """A user's criterion, which must stay what it is."""

    cfg = SimpleNamespace(ddp_backend="pytorch_ddp", sentence_avg=False)
    task = SimpleNamespace(target_dictionary=dictionary())
    for criterion in (AdaptiveLoss, Derived):
        assert type(criterion.build_criterion(cfg, task)) is criterion
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_utils, "get_global_world_size", lambda: 2)
        with pytest.raises(Exception, match="AdaptiveLoss is not compatible"):
            AdaptiveLoss.build_criterion(cfg, task)


@breaks("AssertionError: None")
def processes_of_torchrun_find_each_other(tmp_path):
    cfg = SimpleNamespace(
        distributed_init_method=None,
        distributed_world_size=1,
        distributed_backend="nccl",
        distributed_no_spawn=False,
        pipeline_model_parallel=False,
        tpu=False,
    )
    single = copy.copy(cfg)
    distributed_utils.infer_init_method(single)
    assert single == cfg
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("MASTER_ADDR", "localhost"),
            ("MASTER_PORT", "29500"),
            ("WORLD_SIZE", "2"),
            ("RANK", "1"),
        ):
            patch.setenv(name, value)
        distributed_utils.infer_init_method(cfg)
    assert cfg.distributed_init_method == "env://", cfg.distributed_init_method
    assert (cfg.distributed_world_size, cfg.distributed_rank) == (2, 1)
    assert cfg.distributed_no_spawn and cfg.distributed_backend == "gloo"


@contextlib.contextmanager
def one_process_of_a_group(folder):
    """Yields a function that makes a model one that is trained in several processes."""
    store = torch.distributed.FileStore(str(folder / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield lambda model, ddp_backend: models.DistributedFairseqModel(
            SimpleNamespace(
                tpu=False,
                ddp_backend=ddp_backend,
                device_id=0,
                broadcast_buffers=False,
                bucket_cap_mb=25,
                find_unused_parameters=False,
                gradient_as_bucket_view=False,
                ddp_comm_hook="none",
                heartbeat_timeout=-1,
            ),
            model,
            torch.distributed.group.WORLD,
            torch.device("cpu"),
        )
    finally:
        torch.distributed.destroy_process_group()


@breaks("device_ids")
def pytorch_ddp_runs_on_a_cpu(tmp_path):
    with one_process_of_a_group(tmp_path) as distributed:
        model = distributed(torch.nn.Linear(2, 2), "pytorch_ddp")
        assert model(torch.ones(1, 2)).shape == (1, 2)


class DropsItsLayers(torch.nn.Module):
    def __init__(self, p):
        super().__init__()
        self.layers = LayerDropModuleList(p, [torch.nn.Linear(2, 2)])
        self.last = torch.nn.Linear(2, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


@breaks("Expected to have finished reduction")
def layers_are_dropped_in_several_processes(tmp_path):
    def on_a_cpu(module, device_ids, output_device, **options):
        return torch.nn.parallel.DistributedDataParallel(module, **options)

    def train(model):
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()

    with (
        one_process_of_a_group(tmp_path) as distributed,
        patch.object(distributed_fairseq_model, "DistributedDataParallel", on_a_cpu),
    ):
        train(distributed(DropsItsLayers(0), "pytorch_ddp"))
        train(distributed(DropsItsLayers(1), "legacy_ddp"))
        try:
            train(distributed(DropsItsLayers(1), "pytorch_ddp"))
        except ValueError as error:
            assert "--ddp-backend: expected legacy_ddp to drop layers" in str(error)


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    """What each probe ends with in a process without the patches."""
    folder = tmp_path_factory.mktemp("alone")
    command = [sys.executable, "-W", "ignore", __file__, str(folder)]
    subprocess.run(command, check=True, capture_output=True, env=quiet_environment())
    return json.loads((folder / "outcomes.json").read_text())


def run_alone(folder):
    outcomes = {}
    for name, (probe, _) in PROBES.items():
        (folder / name).mkdir()
        try:
            probe(folder / name)
            outcomes[name] = "it works"
        except Exception as error:
            outcomes[name] = "".join(traceback.format_exception_only(error))
    (folder / "outcomes.json").write_text(json.dumps(outcomes))


@pytest.mark.parametrize("name", PROBES)
def test_it_breaks_without_the_patch(name, alone):
    if name in WITHOUT_ERROR:
        pytest.skip(f"nothing to patch with NumPy {np.__version__}")
    assert re.search(PROBES[name][1], alone[name]), alone[name]


@pytest.mark.parametrize("name", PROBES)
def test_it_works_with_the_patch(name, tmp_path):
    PROBES[name][0](tmp_path)


# What needs no patch, and what the patches must not change


def test_weights_of_old_sinusoidal_embeddings_load():
    model = tiny_transformer()
    assert isinstance(model.encoder.embed_positions, SinusoidalPositionalEmbedding)
    state = model.state_dict()
    for side in ("encoder", "decoder"):
        state[f"{side}.embed_positions._float_tensor"] = torch.zeros(1)
        state[f"{side}.embed_positions.weights"] = torch.zeros(7, 8)
        state[f"{side}.version"] = torch.tensor([3.0])
    tiny_transformer().load_state_dict(state, strict=True)


def test_files_are_not_unpickled_fully(tmp_path):
    path = tmp_path / "other.pt"
    torch.save({"model": {}, "args": Anything()}, path)
    with pytest.raises(ValueError, match=rf"in {path}, got the unsafe type \S+\.Anything"):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path)
    with pytest.raises(FileNotFoundError):
        checkpoint_files.read_checkpoint(tmp_path / "absent.pt")


def test_full_batches_are_as_in_fairseq():
    options_of_batches = {"max_tokens": 150, "required_batch_size_multiple": 8}
    original = data_utils.batch_by_size.__wrapped__
    sizes = np.full(64, 10)
    arguments = (np.arange(64), None, sizes)
    patched = data_utils.batch_by_size(*arguments, **options_of_batches)
    for got, wanted in zip(patched, original(*arguments, **options_of_batches), strict=True):
        assert got.tolist() == wanted.tolist()


def test_a_loader_without_a_maximum_has_every_block():
    """As fairseq's own scripts call it: the default of ``max_positions`` is None."""
    words = dictionary()
    lines = [torch.tensor([5] * length) for length in (9, 2)]
    data = MonolingualDataset(
        [(line, line, line) for line in lines], [9, 2], words, targets=["future"]
    )
    task = LanguageModelingTask(argparse.Namespace(), words)
    batches = task.eval_lm_dataloader(data, batch_size=8, num_workers=0)
    assert sum(batch["nsentences"] for batch in batches) == 2


def test_standard_input_may_be_text(monkeypatch):
    """As a program or a test puts an ``io.StringIO`` in its place."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("a b\n c\rd \n\u00e9"))
    assert list(text.read_lines_of_input(None, "-", 2)) == [["a b", "c\rd"], ["\u00e9"]]


def test_numpy_and_torch_themselves_are_untouched():
    assert "int" not in vars(np) and "float" not in vars(np)
    assert torch.load.__module__ == "torch.serialization"
    assert data_utils.np.ndarray is np.ndarray


def test_importing_twice_changes_nothing():
    step, load = search.DiverseBeamSearch.step, checkpoint_utils.torch
    for module in set(patching.APPLIED.values()):
        source = Path(sys.modules[module].__file__)
        again = type(sys)(module)
        exec(compile(source.read_text(), source, "exec"), again.__dict__)
    assert search.DiverseBeamSearch.step is step and checkpoint_utils.torch is load


def test_the_table_lists_every_patch():
    _, _, rows, _ = re.split("^=+$", compat.__doc__, flags=re.MULTILINE)
    listed, file = {}, None
    for line in rows.strip().splitlines():
        row = re.fullmatch(r"    (\w+) +(\S.*)", line)
        if row:
            listed[row[1]] = file
        else:
            file = (Path(compat.__file__).parent / line).resolve()
    applied = {
        name: Path(sys.modules[module].__file__) for name, module in patching.APPLIED.items()
    }
    assert listed == applied


def test_a_fairseq_of_another_shape_is_refused():
    with pytest.raises(AttributeError, match="expected fairseq.utils.no_such_name in fairseq"):
        patching.patches(utils, "no_such_name")(lambda original: None)
    with pytest.raises(AttributeError, match="expected json.np in fairseq, got none"):
        patching.overlay(json, np)


# The commands


def quiet_environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def fairseq(command, *arguments, fails=False, **options_of_run):
    """Run a command of fairseq with the plugin; its output, or its last line if it ``fails``."""
    code = f"from fairseq_cli.{command} import cli_main; cli_main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments), "--user-dir", str(PLUGIN)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=quiet_environment(),
        check=False,
        **options_of_run,
    )
    assert (done.returncode != 0) == fails, done.stdout[-3000:]
    return done.stdout.strip().splitlines()[-1] if fails else done.stdout


SIZES = [
    f"--{side}-{what}={number}"
    for side in ("encoder", "decoder")
    for what, number in (("layers", 1), ("embed-dim", 8), ("ffn-embed-dim", 8))
] + ["--encoder-attention-heads=2", "--decoder-attention-heads=2"]
TRAIN = [*"--cpu --optimizer adam --lr 0.01 --num-workers 0 --max-tokens 300".split()]
SHORT = ["--cpu", "--batch-size=16", "--beam=2", "--max-len-b=10"]
BLEU = ["--eval-bleu", "--eval-bleu-detok=moses", '--eval-bleu-args={"max_len_b": 10}']
MODEL = ["--arch=talkconv", "--encoder-max-left=3", "--decoder-max-left=5", *SIZES]
TRANSLATION = ["--task=translation", *MODEL, *TRAIN]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Text of 60 + 20 + 43 lines whose translation is its reverse."""
    folder = tmp_path_factory.mktemp("corpus")
    numbers = np.random.default_rng(0)
    for split, count in (("train", 60), ("valid", 20), ("test", 43)):
        lines = [numbers.integers(30, size=numbers.integers(2, 9)) for _ in range(count)]
        for language, order in (("de", 1), ("en", -1)):
            text = "".join(" ".join(f"w{i}" for i in line[::order]) + "\n" for line in lines)
            (folder / f"{split}.{language}").write_text(text)
    return folder


def preprocess(corpus, destination, **how):
    prefixes = [f"--{split}pref={corpus / split}" for split in ("train", "valid", "test")]
    flags = ["--source-lang=de", "--target-lang=en", "--joined-dictionary"]
    return fairseq("preprocess", *prefixes, *flags, f"--destdir={destination}", **how)


@pytest.fixture(scope="session")
def data(corpus, tmp_path_factory):
    destination = tmp_path_factory.mktemp("data")
    preprocess(corpus, destination)
    return destination


@pytest.fixture(scope="session")
def trained(data, tmp_path_factory):
    """A folder with checkpoint1.pt and checkpoint2.pt, validated with BLEU."""
    folder = tmp_path_factory.mktemp("trained")
    flags = [*BLEU, "--best-checkpoint-metric=bleu", "--max-epoch=2", f"--save-dir={folder}"]
    out = fairseq("train", data, *TRANSLATION, *flags)
    assert "| bleu " in out and (folder / "checkpoint2.pt").exists()
    return folder


def hypotheses(out):
    return [line for line in out.splitlines() if line.startswith("H-")]


def test_all_43_sentences_are_generated(data, trained):
    path = f"--path={trained / 'checkpoint_best.pt'}"
    out = fairseq("generate", data, path, *SHORT, "--scoring=sacrebleu")
    assert len(hypotheses(out)) == 43
    assert "Translated 43 sentences" in out and "BLEU = " in out


def test_diverse_beams_and_sentences_over_the_maximum(data, trained, corpus):
    flags = ["--max-source-positions=6", "--skip-invalid-size-inputs-valid-test"]
    groups = ["--diverse-beam-groups=2", "--diverse-beam-strength=0.5"]
    path = f"--path={trained / 'checkpoint_best.pt'}"
    out = fairseq("generate", data, path, *SHORT, *flags, *groups)
    lengths = [len(line.split()) + 1 for line in (corpus / "test.de").open()]
    kept = sum(length <= 6 for length in lengths)
    assert 16 < kept < 43 and len(hypotheses(out)) == kept
    assert f"{43 - kept} samples have invalid sizes and will be skipped" in out


def test_interactive_translates_every_line(data, trained, corpus):
    with open(corpus / "test.de") as lines:
        path = f"--path={trained / 'checkpoint_best.pt'}"
        out = fairseq("interactive", data, path, *SHORT, "--buffer-size=100", stdin=lines)
    assert len(hypotheses(out)) == 43


def test_validation_sees_every_sentence(data, trained):
    path = f"--path={trained / 'checkpoint_best.pt'}"
    flags = ["--task=translation", "--valid-subset=test", "--max-tokens=10000", "--cpu"]
    assert "| bsz 43" in fairseq("validate", data, path, *flags)


@pytest.mark.slow
def test_averaging_resuming_and_finetuning(data, trained, tmp_path):
    averaged = tmp_path / "averaged.pt"
    script = PLUGIN.parent / "scripts" / "average_checkpoints.py"
    epochs = ["--inputs", str(trained), "--last-epochs=2", "--output", str(averaged)]
    runpy.run_path(str(script))["main"](epochs)
    first, second, mean = (
        checkpoint_files.read_checkpoint(path)["model"]["encoder.layers.0.fc1.weight"]
        for path in (trained / "checkpoint1.pt", trained / "checkpoint2.pt", averaged)
    )
    torch.testing.assert_close(mean, (first + second) / 2)

    resumed = ["--max-epoch=3", f"--save-dir={tmp_path}", "--no-epoch-checkpoints"]
    restore = f"--restore-file={trained / 'checkpoint_last.pt'}"
    out = fairseq("train", data, *TRANSLATION, *resumed, restore)
    assert "Loaded checkpoint" in out and "begin training epoch 3" in out

    tuned = ["--max-epoch=1", "--bf16", "--no-save", f"--finetune-from-model={averaged}"]
    out = fairseq("train", data, *TRANSLATION, *tuned, f"--save-dir={tmp_path / 'tuned'}")
    assert "loading pretrained model from" in out and "done training" in out


def test_fp16_on_a_cpu_is_one_clear_line(data, tmp_path):
    line = fairseq("train", data, *TRANSLATION, "--no-save", "--fp16", fails=True)
    assert line == "ValueError: expected a GPU for --fp16, got a CPU: use --bf16, --amp or neither"


def test_preprocess_checks_the_corpora_before_it_writes(corpus, tmp_path):
    here, out = tmp_path / "corpus", tmp_path / "data"
    shutil.copytree(corpus, here)
    (here / "test.en").unlink()
    assert f"No such file or directory: '{here / 'test.en'}'" in preprocess(here, out, fails=True)
    assert not out.exists()

    (here / "valid.en").write_text("w1\n")
    args = argparse.Namespace(source_lang="de", target_lang="en", only_source=False)
    vars(args).update(dict_only=False, trainpref=f"{here}/train", validpref=f"{here}/valid")
    args.testpref = None
    lines = re.escape(f"'{here}/valid.de': 20, '{here}/valid.en': 1")
    with pytest.raises(ValueError, match=f"as many lines in both languages, got .{lines}"):
        text.check_corpora_first(None, args)
    args.only_source, args.validpref = True, f"{here}/train,{here}/valid"
    assert text.check_corpora_first(lambda given: given, args) is args


@pytest.mark.slow
def test_language_models_train_and_are_scored(corpus, data, tmp_path):
    shutil.copy(data / "dict.de.txt", tmp_path / "dict.txt")
    for file in data.glob("*.de-en.de.*"):
        shutil.copy(file, tmp_path / file.name.replace(".de-en.de", ""))
    flags = ["--tokens-per-sample=32", "--sample-break-mode=eos"]
    model = ["--task=language_modeling", "--arch=transformer_lm", f"--save-dir={tmp_path}"]
    sizes = [size for size in SIZES if size.startswith("--decoder")]
    fairseq("train", tmp_path, *model, *sizes, *TRAIN, *flags, "--max-update=3")

    path = f"--path={tmp_path / 'checkpoint_last.pt'}"
    out = fairseq("eval_lm", tmp_path, path, "--cpu", *flags)
    words = (corpus / "test.de").read_text().split()
    assert f"Evaluated {len(words) + 43} tokens" in out
    # Without the flags every block is longer than the model allows.
    line = fairseq("eval_lm", tmp_path, path, "--cpu", fails=True)
    assert line.startswith("ValueError: expected blocks of at most 32 tokens to score, got")


@pytest.mark.parametrize("precision, shown", [("medium", "medium"), ("low", "got 'low'")])
def test_matmul_precision_of_the_environment(precision, shown):
    code = "import talk_fairseq, torch; print(torch.get_float32_matmul_precision())"
    env = {**os.environ, "TALK_MATMUL_PRECISION": precision}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert shown in done.stdout + done.stderr
    assert (done.returncode == 0) == (precision == "medium")


LEVEL = "logging.getLogger().getEffectiveLevel()"
NUMBA = "logging.getLogger('numba.core.ssa').getEffectiveLevel()"


@pytest.mark.parametrize(
    "program, level",
    [
        (f"import fairseq_cli.interactive, talk_fairseq, logging; print({LEVEL})", "20"),
        (f"import talk_fairseq, logging; print({LEVEL})", "30"),
        (
            f"import logging; logging.basicConfig(level=40); import talk_fairseq; print({LEVEL})",
            "40",
        ),
        (f"import logging, fairseq, talk_fairseq; print({NUMBA})", "30"),
    ],
    ids=["a command", "a program", "a program with a level", "fairseq first"],
)
def test_the_log_has_the_level_of_the_program(program, level):
    """A module of fairseq sets DEBUG, with which Numba fills pages when it compiles a kernel."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == level, done.stderr[-3000:]


@pytest.mark.slow
def test_two_processes_resume_one(data, trained, tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    entry = tmp_path / "train.py"
    entry.write_text("from fairseq_cli.train import cli_main\n\ncli_main()\n")
    restore = f"--restore-file={trained / 'checkpoint_last.pt'}"
    flags = [*TRANSLATION, *BLEU, "--max-epoch=3", restore, f"--save-dir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, *torchrun, str(entry), str(data), *flags, "--user-dir", str(PLUGIN)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=quiet_environment(),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "training on 2 devices" in done.stdout and "Loaded checkpoint" in done.stdout
    assert (tmp_path / "checkpoint3.pt").exists()


if ALONE:
    run_alone(Path(sys.argv[1]))
