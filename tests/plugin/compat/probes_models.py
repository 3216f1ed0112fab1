"""Probes of the patches in compat/models.py."""

import pytest

pytest.importorskip("fairseq")


import torch
from fairseq import utils
from fairseq.dataclass import initialize
from omegaconf import OmegaConf
from probing import breaks, tiny_transformer


@breaks("SiLU")
def swish_is_silu(tmp_path):
    x = torch.randn(5)
    assert torch.equal(utils.get_activation_fn("swish")(x), torch.nn.functional.silu(x))
    assert utils.get_activation_fn("relu") is torch.nn.functional.relu


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
