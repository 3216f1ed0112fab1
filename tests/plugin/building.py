"""Encoder-decoders of tests, built as fairseq builds them."""

import textwrap
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq import options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import build_model
from omegaconf import OmegaConf

import talk_fairseq  # noqa: F401  registers the models


def dictionary(size):
    words = Dictionary()
    for index in range(size - len(words)):
        words.add_symbol(f"w{index}")
    return words


def task(source_words=20, target_words=None):
    """What a model reads of its task; one joint dictionary unless `target_words` is given."""
    source = dictionary(source_words)
    target = dictionary(target_words) if target_words else source
    return SimpleNamespace(source_dictionary=source, target_dictionary=target)


def configured(parser, *flags):
    """The configuration of a command of fairseq, given its parser and what follows its name."""
    args = options.parse_args_and_arch(parser, [*map(str, flags)])
    return convert_namespace_to_omegaconf(args)


def from_flags(*flags):
    return configured(options.get_training_parser(), "data", *flags).model


def from_yaml(text):
    return OmegaConf.create(textwrap.dedent(text))


def build(cfg, *words):
    with torch.device("meta"):
        return build_model(cfg, task(*words))


def units(model, side):
    return [layer.self_attn for layer in getattr(model, side).layers]
