"""Probes of the patches in compat/checkpoints.py."""

import argparse
import os
import resource
import sys
from collections import OrderedDict
from types import ModuleType
from unittest.mock import patch

import pytest

pytest.importorskip("fairseq")

import numpy as np
import torch
from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from probing import (
    Anything,
    breaks,
)


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
