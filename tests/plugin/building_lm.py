"""Language models of tests, built as fairseq builds them."""

import textwrap
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("fairseq")

from building import configured, dictionary
from fairseq import options
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.dataclass import initialize
from fairseq.models import build_model
from omegaconf import OmegaConf

import talk_fairseq  # noqa: F401  registers the models


def task(words=60, output_words=None):
    """What a model and a criterion read of their task."""
    source, target = dictionary(words), dictionary(output_words or words)
    return SimpleNamespace(source_dictionary=source, target_dictionary=target)


def from_flags(*flags):
    flags = ["data", "--task", "language_modeling", "--tokens-per-sample", "48", *flags]
    return configured(options.get_training_parser(), *flags).model


def from_yaml(model):
    """`model` (text or a dictionary) as fairseq-hydra-train reads it, beside a task."""
    if isinstance(model, str):
        model = OmegaConf.create(textwrap.dedent(model))
    root = {"task": {"_name": "language_modeling", "tokens_per_sample": 48}, "model": model}
    root = OmegaConf.create({**root, "common": {"tpu": False}})
    initialize.add_defaults(root)
    return root.model


def build(cfg, *words):
    with torch.device("meta"):
        return build_model(cfg, task(*words))


def windows(model):
    return [layer.self_attn.conv.max_left for layer in model.decoder.layers]


ADAPTIVE = "--adaptive-input --adaptive-input-cutoff 20,40 --adaptive-softmax-cutoff 20,40"


TIED = f"{ADAPTIVE} --tie-adaptive-weights --tie-adaptive-proj"


CHARACTERS = "--character-embeddings --character-filters [(1,8),(2,4)]"


SHARED = "--share-decoder-input-output-embed"


TINY = (
    "--decoder-layers 2 --decoder-max-left 3,9 --decoder-embed-dim 32 --decoder-ffn-embed-dim 64 "
    "--decoder-attention-heads 4"
)


def tiny(flags="", seed=0):
    torch.manual_seed(seed)
    return build_model(from_flags("--arch", "talkconv_lm", *TINY.split(), *flags.split()), task())


def loss_of(model, tokens):
    """The mean loss of `tokens` (B, T) by fairseq's criterion for the model's softmax."""
    adaptive = model.decoder.adaptive_softmax is not None
    criterion = (AdaptiveLoss if adaptive else CrossEntropyCriterion)(task(), False)
    inputs = torch.cat([torch.full_like(tokens[:, :1], 2), tokens[:, :-1]], dim=1)
    lengths = torch.full((len(tokens),), tokens.shape[1])
    net_input = {"src_tokens": inputs, "src_lengths": lengths}
    sample = {"net_input": net_input, "target": tokens, "ntokens": tokens.numel()}
    return criterion(model, sample)[0] / tokens.numel()
