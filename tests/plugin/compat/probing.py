"""What the probes share: how they are registered, and small subjects for them."""

import argparse
import contextlib
import os
from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq")

import numpy as np
import torch
from fairseq import options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import DistributedFairseqModel
from fairseq.models.transformer import TransformerModel
from fairseq.tasks.translation import TranslationTask
from fairseq.trainer import Trainer

PROBES = {}  # {name: (probe, pattern of its error without the patch)}
WITHOUT_ERROR = set()  # probes that need no patch with this NumPy


def breaks(error, since_numpy=(1, 0)):
    """Register a probe, which takes a folder, with a pattern of its error without the patch.

    Before NumPy's version `since_numpy` there is no error.
    """

    def register(probe):
        PROBES[probe.__name__] = (probe, error)
        if tuple(map(int, np.__version__.split(".")[:2])) < since_numpy:
            WITHOUT_ERROR.add(probe.__name__)
        return probe

    return register


class Anything:
    """A type that is on no list."""


def dictionary():
    words = Dictionary()
    for number in range(20):
        words.add_symbol(f"w{number}")
    return words


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


def trainer_of(*flags):
    """fairseq's Trainer of a tiny Transformer on the CPU."""
    small = [f"--{side}-{what}=8" for side in ("encoder", "decoder")
             for what in ("embed-dim", "ffn-embed-dim")]  # fmt: skip
    words = ["data", "--arch=transformer", "--cpu", "--optimizer=adam", "--lr=0.1", *small, *flags]
    args = options.parse_args_and_arch(options.get_training_parser(), words)
    cfg = convert_namespace_to_omegaconf(args)
    task = TranslationTask(cfg.task, dictionary(), dictionary())
    torch.manual_seed(0)
    return Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))


def quiet_environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


@contextlib.contextmanager
def one_process_of_a_group(folder):
    """Yields a function that makes a model one that is trained in several processes."""
    store = torch.distributed.FileStore(str(folder / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield lambda model, ddp_backend: DistributedFairseqModel(
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
