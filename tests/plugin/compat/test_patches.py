"""What needs no patch, what the patches must not change, and how they are applied."""

import argparse
import contextlib
import errno
import io
import json
import os
import pickle
import re
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq")

import numpy as np
import torch
from fairseq import checkpoint_utils, models, options, utils
from fairseq.data import LanguagePairDataset, MonolingualDataset, data_utils
from fairseq.dataclass import initialize
from fairseq.dataclass.configs import EMAConfig
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.models import BaseFairseqModel
from fairseq.models.ema.ema import EMA
from fairseq.modules import LearnedPositionalEmbedding, SinusoidalPositionalEmbedding
from fairseq.modules.dynamic_convolution import DynamicConv_scripatable
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.tasks.language_modeling import LanguageModelingTask
from omegaconf import OmegaConf
from probing import (
    Anything,
    dictionary,
    tiny_transformer,
)
from test_numbers import trainer_of

from conftest import ROOT
from talk_fairseq import checkpoint_files, compat
from talk_fairseq.compat import cpu, patching, text, training
from talk_fairseq.compat.checkpoints import begin_average_at_checkpoint


def test_the_docs_list_the_patches():
    """Each under its file, and nothing that is not in that file."""
    page = (ROOT / "docs/development.md").read_text()
    table = dict(re.findall(r"^\| `(\w+\.py)` \| (.*) \|$", page, re.M))
    for source in Path(compat.__file__).parent.glob("*.py"):
        code, listed = source.read_text(), re.findall(r"`(\w+)`", table.get(source.name, ""))
        patched = re.findall(r"^@patches.*?^def (\w+)", code, re.M | re.S)
        assert set(patched) <= set(listed), source.name
        assert all(re.search(rf"\b{name}\b", code) for name in listed), source.name
        assert patched or source.name in ("__init__.py", "patching.py")


def test_a_patch_that_is_applied_again_changes_nothing():
    """Also where two patches stand on one another."""
    owner = SimpleNamespace(count=lambda: 1)
    for _ in range(2):

        @patching.patches(owner, "count")
        def count_one_more(original):
            return original() + 1

        @patching.patches(owner, "count")
        def count_twice(original):
            return 2 * original()

    assert owner.count() == 4


def test_a_command_that_runs_as_a_module_is_patched(monkeypatch):
    """As by ``python -m fairseq_cli.train`` or torchrun."""
    monkeypatch.setattr(patching, "_OF_COMMANDS", [])
    names = {"train": lambda: 1}  # in a process that it spawns, those of `main` are another copy
    exec("def main():\n    return train()", names)
    main = SimpleNamespace(**names, __spec__=SimpleNamespace(name="fairseq_cli.train"))
    monkeypatch.setitem(sys.modules, "__main__", main)
    patching.patches_command("train", "train")(lambda original: original() + 1)
    patching.patches_command("generate_of_another_name", "main")(None)  # which does not run
    assert main.train() == 2 and main.main() == 2


def test_a_command_that_is_imported_later_is_patched(monkeypatch):
    monkeypatch.setattr(patching, "_OF_COMMANDS", [])
    patching.patches_command("later", "main")(lambda original: original() + 1)
    patching.patches_command("hydra_later", "train")(lambda original: original() + 1)
    names = {}
    exec("def main():\n    return 1", names)
    later, without_main = SimpleNamespace(**names), SimpleNamespace(train=lambda: 1)
    monkeypatch.setitem(sys.modules, "fairseq_cli.later", later)
    monkeypatch.setitem(sys.modules, "fairseq_cli.hydra_later", without_main)
    for _ in range(2):
        options.get_parser("", "translation")  # as every command does
        assert later.main() == 2 and without_main.train() == 2


def test_dynamic_convolutions_can_be_scripted():
    conv = DynamicConv_scripatable(4, kernel_size=3, padding_l=2, num_heads=2, weight_softmax=True)
    x = torch.randn(5, 2, 4)
    assert torch.equal(torch.jit.script(conv)(x), conv(x))


def test_an_arch_whose_defaults_are_lost_is_refused(monkeypatch):
    """As in fairseq-hydra-train, which fills in those of the model before it imports the plugin."""
    monkeypatch.setitem(sys.modules, "fairseq_cli.hydra_train", SimpleNamespace())
    monkeypatch.setattr("talk_fairseq.compat.models._APPLIED", set())
    given = {"task": {"_name": "language_modeling"}, "model": {"_name": "transformer_lm_gpt"}}
    cfg = OmegaConf.create(given)
    initialize.add_defaults.__wrapped__(cfg)
    message = "model._name: expected transformer_lm and the options of .*_gpt .* lost .*_layers"
    with pytest.raises(ValueError, match=message):
        initialize.add_defaults(cfg)
    cfg = OmegaConf.create(given)
    for _ in range(2):
        initialize.add_defaults(cfg)
        assert cfg.model.decoder_layers == 12


def test_a_model_of_a_yaml_keeps_its_longest_sentences():
    """In a checkpoint, which a command with other limits of its task may read."""
    cfg = OmegaConf.create({"_name": "fconv", "encoder_layers": "[(8, 3)]"})
    for longest in (12, 1024):
        limits = SimpleNamespace(max_source_positions=longest, max_target_positions=longest)
        task = SimpleNamespace(
            source_dictionary=dictionary(), target_dictionary=dictionary(), cfg=limits
        )
        assert models.build_model(cfg, task).encoder.embed_positions.num_embeddings == 12


def test_checkpoints_are_written_asynchronously_by_fairseq(tmp_path, monkeypatch):
    path = str(tmp_path / "a.pt")
    written = []
    monkeypatch.setattr(PathManager, "opena", lambda *file: written.append(file) or open(*file))
    checkpoint_utils.torch_persistent_save({"a": 1}, path, async_write=True)
    assert written == [(path, "wb")] and torch.load(path) == {"a": 1}


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


def test_arrays_are_read_as_they_were_written(tmp_path):
    """Of columns, of the other order of bytes, and inside a tuple."""
    written = [np.asfortranarray(np.arange(6).reshape(2, 3)), np.arange(3, dtype=">i4")]
    torch.save({"model": {}, "x": (*written,)}, tmp_path / "arrays.pt")
    read = checkpoint_files.read_checkpoint(tmp_path / "arrays.pt")["x"]
    for one, other in zip(read, written, strict=True):
        assert type(one) is np.ndarray and one.tolist() == other.tolist()


def test_integers_are_refused_under_each_name_of_a_tied_parameter():
    model = BaseFairseqModel()
    model.first, model.second = (torch.nn.Linear(2, 2, bias=False) for _ in "ab")
    model.second.weight = model.first.weight
    state = {**model.state_dict(), "second.weight": torch.ones(2, 2, dtype=torch.long)}
    with pytest.raises(RuntimeError, match="dtype mismatch for second.weight: torch.int64"):
        model.load_state_dict(state)


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


def test_a_tpu_that_is_there_stays_on(monkeypatch):
    words = ["x", "--arch", "transformer", "--bf16"]
    monkeypatch.setattr(distributed_utils, "xm", "torch_xla")
    assert options.parse_args_and_arch(options.get_training_parser(), words).tpu


@pytest.mark.parametrize("asked, gpu", [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("flag", ["fp16", "memory_efficient_fp16", "bf16"])
def test_only_fp16_is_refused_and_only_without_a_gpu(monkeypatch, asked, gpu, flag):
    """Where a CPU is `asked` for, or there is no GPU; the second flag sets the first as well."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    flags = {"fp16": "fp16" in flag, "memory_efficient_fp16": flag == "memory_efficient_fp16"}
    cfg = SimpleNamespace(common=SimpleNamespace(cpu=asked, **flags))
    if flag == "fp16" and (asked or not gpu):
        with pytest.raises(ValueError, match="expected a GPU for --fp16"):
            cpu.refuse_fp16_on_cpu(None, None, cfg)
    else:
        assert cpu.refuse_fp16_on_cpu(lambda *given: given, None, cfg) == (None, cfg)


@pytest.mark.parametrize("gpu, method", [(True, None), (False, "tcp://localhost:1")])
def test_processes_that_need_no_help_are_left_to_fairseq(monkeypatch, gpu, method):
    """Those of GPUs, and where the flags say how to meet."""
    for name, value in (("MASTER_ADDR", "localhost"), ("WORLD_SIZE", "2"), ("RANK", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    cfg = SimpleNamespace(distributed_init_method=method)
    assert training.join_torchrun(lambda given: given, cfg) is cfg
    assert vars(cfg) == {"distributed_init_method": method}


def test_other_errors_of_lengths_stay_what_they_are():
    def original(task):
        raise KeyError("sizes")

    with pytest.raises(KeyError):
        text.name_flags_that_limit_lengths(original, None)


def test_padding_takes_no_learned_position():
    """On either side; nor do columns count where the positions are given."""
    module = SimpleNamespace(max_positions=2, padding_idx=1)
    tokens = torch.tensor([[5, 6, 1], [1, 5, 6]])
    for given, positions in ((tokens, None), (tokens * 0 + 5, tokens)):
        found = text.check_learned_positions(lambda *given: given, module, given, None, positions)
        assert found == (module, given, None, positions)
    step = "expected at most 2 tokens, one for each learned position, got 3"
    with pytest.raises(ValueError, match=step):  # whose position is that of its column
        text.check_learned_positions(lambda *given: given, module, tokens, {})


def test_learned_positions_are_exported_for_any_length():
    positions = LearnedPositionalEmbedding(12, 4, 1)
    dynamic = {"input": {1: torch.export.Dim("T", min=2, max=50)}}
    program = torch.export.export(positions, (torch.full((1, 5), 4),), dynamic_shapes=dynamic)
    assert program.module()(torch.full((1, 9), 4)).shape == (1, 9, 4)


def test_numpy_and_torch_themselves_are_untouched(tmp_path):
    assert "int" not in vars(np) and "float" not in vars(np)
    assert torch.load.__module__ == "torch.serialization"
    torch.save({"model": {}, "mean": np.zeros(3)}, tmp_path / "numbers.pt")
    assert checkpoint_files.read_checkpoint(tmp_path / "numbers.pt")["mean"].shape == (3,)
    with pytest.raises(pickle.UnpicklingError, match="numpy"):
        torch.load(tmp_path / "numbers.pt", weights_only=True)
    assert data_utils.np.ndarray is np.ndarray


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_a_folder_that_cannot_be_flushed_costs_no_checkpoint(tmp_path, monkeypatch, number):
    """Some file systems know no such thing, and answer EINVAL; a broken disk is an error."""
    flush, path = os.fsync, tmp_path / "a.pt"

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, "no")
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    broken = pytest.raises(OSError) if number == errno.EIO else contextlib.nullcontext()
    with broken, checkpoint_files.whole_file(path) as file:
        file.write(b"whole")
    assert path.read_bytes() == b"whole"


def test_an_average_begins_at_a_checkpoint_that_has_none(tmp_path):
    """``--store-ema`` with ``--finetune-from-model``, or in a run that goes on with it."""
    path = str(tmp_path / "checkpoint.pt")
    trainer = trainer_of(tmp_path)
    trainer.consolidate_optimizer()
    trainer.save_checkpoint(path, {"train_iterator": {"epoch": 1}})
    averaging = trainer_of(tmp_path, "--store-ema", "--ema-fp32")
    trained = averaging.model.state_dict()["decoder.layers.0.fc1.weight"]
    with torch.no_grad():
        trained.zero_()
    assert "ema" not in averaging.load_checkpoint(path, reset_optimizer=True)
    assert trained.any()
    for average in (averaging.ema.model.state_dict(), averaging.ema.fp32_params):
        assert torch.equal(average["decoder.layers.0.fc1.weight"], trained)
    averaging.consolidate_optimizer()
    averaging.save_checkpoint(path, {"train_iterator": {"epoch": 1}})
    saved = checkpoint_files.read_checkpoint(path)["extra_state"]
    assert {"ema", "ema_fp32_params"} <= saved.keys()
    kept = averaging.load_checkpoint(path)  # by a command for as long as it runs
    assert not kept.keys() & {"ema", "ema_fp32_params"}


@pytest.mark.parametrize("flags", [(), ("--store-ema",)])
def test_other_processes_get_an_average_where_there_is_one(tmp_path, flags):
    """The first process sends what it has read: parameters once, or twice with an average."""
    path = str(tmp_path / "checkpoint.pt")
    trainer = trainer_of(tmp_path)
    trainer.consolidate_optimizer()
    trainer.save_checkpoint(path, {"train_iterator": {"epoch": 1}})
    trainer_of(tmp_path, *flags).load_checkpoint(path)
    assert ("ema" in begin_average_at_checkpoint(path)["extra_state"]) == bool(flags)


def test_a_file_that_lends_no_average_is_named(tmp_path):
    torch.save({"model": {}, "extra_state": {}}, tmp_path / "seed.pt")
    with pytest.raises(RuntimeError, match="seed.pt cannot be loaded: KeyError: 'ema'"):
        checkpoint_utils.load_ema_from_checkpoint(str(tmp_path / "seed.pt"))


def test_averages_in_float32_have_shared_parameters_once():
    """Copies by a second name would stay as they are, and be what a later run begins with."""
    model = tiny_transformer(share_all_embeddings=True).half()
    average = EMA(model, EMAConfig(store_ema=True, ema_fp32=True, ema_decay=0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    average.step(model, 1)
    assert not any(v.any() for name, v in average.fp32_params.items() if "version" not in name)


@pytest.mark.parametrize("processes", [1, 2])
def test_groups_of_batches_are_those_of_as_many_processes(processes):
    words = dictionary()
    lines, sizes = [torch.tensor([5, 2])] * 8, np.full(8, 2)
    pairs = LanguagePairDataset(lines, sizes, words, lines, sizes, words)

    def batches(num_shards):
        return FairseqTask(None).get_batch_iterator(
            pairs, max_sentences=1, num_shards=num_shards, grouped_shuffling=True
        )

    before = batches(2)
    next(before.next_epoch_itr())
    state = before.state_dict()
    refused = pytest.raises(ValueError, match="--grouped-shuffling: expected 2 processes until")
    with contextlib.nullcontext() if processes == 2 else refused:
        batches(processes).load_state_dict(state)
    batches(processes).load_state_dict({**state, "iterations_in_epoch": 0})  # between epochs


@pytest.mark.parametrize("given, source", [({}, 2000), ({"max_source_positions": 500}, 500)])
def test_the_longest_source_of_a_task_is_the_models(given, source):
    """From a YAML, as where flags set both; else longer ones would be left out of training."""
    task = {"_name": "translation", "max_source_positions": 2000, "max_target_positions": 300}
    for name in ("talkconv_plus", "talkconv"):
        cfg = OmegaConf.create({"task": task, "model": {"_name": name, **given}})
        initialize.add_defaults(cfg)
        assert cfg.model.max_source_positions == source
        assert cfg.model.max_target_positions == 300


@pytest.mark.parametrize("parts", ["num_workers", "num_shards"])
def test_a_context_is_of_the_block_before(parts):
    """Each worker or shard would have contexts of its own blocks alone."""
    with pytest.raises(ValueError, match="--context-window: expected at most 1 of .*, got 2"):
        LanguageModelingTask.eval_lm_dataloader(None, None, context_window=5, **{parts: 2})


def test_a_fairseq_of_another_shape_is_refused():
    with pytest.raises(AttributeError, match="'fairseq.utils' has no attribute 'no_such_name'"):
        patching.patches(utils, "no_such_name")
    with pytest.raises(AttributeError, match="'json' has no attribute 'np'"):
        patching.overlay(json, "np")


@pytest.mark.parametrize("half", ["fp16", "bf16"])
@pytest.mark.parametrize("lean", [False, True])
def test_noise_is_taken_where_parameters_have_copies_in_float32(half, lean):
    lean_ones = dict.fromkeys(("memory_efficient_fp16", "memory_efficient_bf16"), lean)
    cfg = SimpleNamespace(
        common=SimpleNamespace(**{"fp16": False, "bf16": False, half: True}, **lean_ones),
        model=SimpleNamespace(quant_noise_pq=0.1),
        optimization=SimpleNamespace(update_freq=[1]),
    )
    refused = pytest.raises(ValueError, match="expected --fp16 or --bf16 with --quant-noise-pq")
    with refused if lean else contextlib.nullcontext():
        assert training.refuse_noise_that_stays(lambda *given: given, None, cfg) == (None, cfg)


def test_noise_is_refused_where_a_criterion_passes_each_batch_twice():
    cfg = SimpleNamespace(
        common=SimpleNamespace(fp16=False, bf16=True, memory_efficient_bf16=False),
        model=SimpleNamespace(quant_noise_pq=0.1),
        optimization=SimpleNamespace(update_freq=[1]),
        criterion=SimpleNamespace(simcut_alpha=3.0),
    )
    with pytest.raises(ValueError, match="simcut_alpha: expected 0 with --quant-noise-pq"):
        training.refuse_noise_that_stays(lambda *given: given, None, cfg)
