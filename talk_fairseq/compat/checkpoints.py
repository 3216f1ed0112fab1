"""Patches of fairseq's checkpoints: read without running code, named in errors, written whole."""

import os
import shutil
import tarfile
import time
from functools import partial
from pathlib import Path

import fairseq.checkpoint_utils
import torch
from fairseq.file_io import PathManager

from talk_fairseq import checkpoint_files
from talk_fairseq.checkpoint_files import naming, whole_file
from talk_fairseq.compat.patching import overlay, patches
from talk_fairseq.models import released

checkpoint_files.allow_checkpoint_types()

# Without it: a truncated or foreign checkpoint fails with ``OSError: Invalid argument``, pickle's
# ``Unsupported operand``, zip's ``failed finding central directory`` or ``KeyError: 'best_loss'``.
# Other fairseqs ask for weights_only=False.
overlay(
    "fairseq.checkpoint_utils",
    "torch",
    load=lambda file, map_location="cpu", **_: checkpoint_files.read_checkpoint(file, map_location),
)

# Unpickles without a list of safe types what comes from this very job; this module of fairseq reads
# no files. Without it: when several processes resume, all but one refuse what the first sends.
overlay("fairseq.distributed.utils", "torch", load=partial(torch.load, weights_only=False))


@patches("fairseq.checkpoint_utils", "load_checkpoint_to_cpu")
def name_file_of_bad_options(original, path, *args, **kwargs):
    """Name the checkpoint in errors about its options and its history; fairseq names no file."""
    with naming(path):
        return original(path, *args, **kwargs)


@patches("fairseq.trainer.Trainer", "load_checkpoint")
def name_file_of_bad_training_state(original, self, filename, *args, **kwargs):
    """Name the checkpoint in errors about the optimizer or the data loader; fairseq does not.

    Raises FileNotFoundError for a file elsewhere than in ``--save-dir`` that is not there. Without
    it: after a mistyped ``--restore-file``, training begins with random parameters.
    Drops the moving average from what it returns, since nothing reads it after that.
    """
    cfg = self.cfg.checkpoint
    elsewhere = Path(filename).parent.resolve() != Path(cfg.save_dir).resolve()
    if elsewhere and self.is_data_parallel_master and not PathManager.isfile(filename):
        option = "--continue-once" if filename == cfg.continue_once else "--restore-file"
        raise FileNotFoundError(f"{option}: expected a checkpoint, got {filename}")
    begin_average_at_checkpoint.wanted = self.cfg.ema.store_ema
    with naming(filename):
        extra_state = original(self, filename, *args, **kwargs)
    for name in ("ema", "ema_fp32_params"):
        (extra_state or {}).pop(name, None)
    return extra_state


@patches("fairseq.checkpoint_utils", "load_ema_from_checkpoint")
def name_file_without_average(original, fpath):
    """Name the file of ``--ema-seed-model`` in errors, such as that it has no average."""
    with naming(fpath):
        return original(fpath)


def begin_average_at_checkpoint(path, **options):
    """Read a checkpoint; where an average is wanted and it has none, its parameters are one."""
    state = fairseq.checkpoint_utils.load_checkpoint_to_cpu(path, **options)
    if begin_average_at_checkpoint.wanted:  # else it would be sent to other processes for nothing
        state["extra_state"].setdefault("ema", state["model"])
    return state


begin_average_at_checkpoint.wanted = False

# Without it: ``--store-ema`` cannot begin at a checkpoint that has no average, but ends in
# ``KeyError: 'model'``, since fairseq lets go of the parameters before it asks for them.
overlay("fairseq.trainer", "checkpoint_utils", load_checkpoint_to_cpu=begin_average_at_checkpoint)


@patches("fairseq.checkpoint_utils", "load_model_ensemble_and_task")
def name_file_of_bad_model(original, filenames, arg_overrides=None, task=None, *args, **kwargs):
    """Load several models one by one, and name the one that cannot be loaded.

    Without it: fairseq does not say which of them does not fit its options or dictionary.
    """
    ensemble, cfg = [], None
    for filename in filenames:
        with naming(filename):
            models, cfg, task = original([filename], arg_overrides, task, *args, **kwargs)
        ensemble += models
    return ensemble, cfg, task


class ArchiveInside(tarfile.TarFile):
    """An archive that refuses names and links that lead out of the folder it is unpacked into."""

    extraction_filter = staticmethod(getattr(tarfile, "data_filter", None))


overlay("fairseq.file_utils", "tarfile", open=ArchiveInside.open)


@patches("fairseq.file_utils", "load_archive_file")
def unpack_archives_inside_a_folder(original, archive_file):
    """Unpack ``archive_file`` as an `ArchiveInside`, and name it in errors.

    Raises ValueError for any archive before Python 3.11.4, which has no such filter. Without it:
    ``from_pretrained`` unpacks an archive wherever the names and links in it lead.
    """
    if os.path.isfile(archive_file) and not hasattr(tarfile, "data_filter"):
        raise ValueError(f"expected a folder, got {archive_file}: unpack it first")
    with naming(archive_file):
        return original(archive_file)


@patches("fairseq.models.fairseq_model.BaseFairseqModel", "load_state_dict")
def reject_integers_as_parameters(original, self, state_dict, *args, **kwargs):
    """Report integers in place of parameters among the errors of ``load_state_dict``.

    Without it: torch copies them into the parameters of a model silently.
    """

    def check(_, given, prefix, local_metadata, strict, missing, unexpected, errors):
        for name, parameter in self.named_parameters(remove_duplicate=False):
            value = given.get(name)
            integers = isinstance(value, torch.Tensor) and not value.is_floating_point()
            if integers and parameter.is_floating_point():
                errors.append(f"dtype mismatch for {name}: {value.dtype}, not {parameter.dtype}.")

    with self.register_load_state_dict_pre_hook(check):
        return original(self, state_dict, *args, **kwargs)


@patches("fairseq.checkpoint_utils", "_upgrade_state_dict")
def translate_published_options(original, state):
    """Translate the options of checkpoints of the published TaLK code; see models/released.py.

    Without it: fairseq drops options that it does not know from the Namespace of an old
    checkpoint, and the model silently gets the windows of our arch instead of its own.
    """
    return original(released.upgrade(state))


@patches("fairseq.checkpoint_utils", "torch_persistent_save")
def save_checkpoints_whole(original, obj, filename, async_write=False):
    """Write a checkpoint to disk before it gets its name; start each of three tries from scratch.

    Without it: fairseq tries three times to write into the same open file. After a full disk the
    file begins with the part that was written first, and nothing can read it. What iopath writes
    in the background is left to fairseq.
    """
    if async_write:
        return original(obj, filename, async_write)
    for pause in (2.5, 2.5, None):  # seconds, as in fairseq
        try:
            with whole_file(filename) as file:
                return torch.save(obj, file)
        except Exception:
            if pause is None:
                raise
            time.sleep(pause)


@patches("fairseq.file_io.PathManager", "copy")
def copy_checkpoints_whole(original, src_path, dst_path, overwrite=False):
    """Replace the last or the best checkpoint by a copy in one step, never in place.

    Without it: a run that is killed while it saves leaves part of ``checkpoint_last.pt``.
    """
    with open(src_path, "rb") as source, whole_file(dst_path) as file:
        shutil.copyfileobj(source, file, 1 << 24)
    return True


@patches("fairseq.checkpoint_utils", "verify_checkpoint_directory")
def remove_unfinished_checkpoints(original, save_dir):
    """Remove the ``*.pt.tmp`` files of a killed run when the next one begins.

    Without it: what the killed run was writing stays in its folder.
    """
    original(save_dir)
    for path in Path(save_dir).glob("*.pt.tmp"):
        path.unlink()
