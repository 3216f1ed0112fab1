"""Probes of the patches in compat/models.py."""

import pytest

pytest.importorskip("fairseq")


import torch
from fairseq import utils
from fairseq.dataclass import initialize
from fairseq.modules.dynamic_convolution import DynamicConv1dTBC
from fairseq.modules.dynamic_convolution import DynamicConv_scripatable as DynamicConv
from fairseq.modules.dynamic_crf_layer import DynamicCRF
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


@breaks("has no attribute 'float'", since_numpy=(1, 24))
def a_dynamic_crf_has_a_loss(tmp_path):
    crf = DynamicCRF(num_embedding=8, low_rank=2, beam_size=4)
    found = crf(torch.randn(1, 3, 8), torch.tensor([[4, 5, 6]]), torch.ones(1, 3, dtype=torch.bool))
    assert torch.isfinite(found).all()


@breaks("AssertionError: other weights")
def short_sequences_are_convolved_as_in_steps(tmp_path):
    torch.manual_seed(0)
    conv = DynamicConv(4, kernel_size=7, padding_l=6, num_heads=2, weight_softmax=True)
    x, state = torch.randn(3, 2, 4), {}
    for length in (1, 3):
        steps = torch.cat([conv(step, incremental_state=state) for step in x[:length].split(1)])
        assert torch.allclose(conv(x[:length]), steps, atol=1e-6), "other weights"
        state = {}
    bands = DynamicConv1dTBC(4, kernel_size=7, padding_l=6, num_heads=2, weight_softmax=True)
    bands.weight_linear = conv.weight_linear
    assert torch.allclose(conv(x), bands(x), atol=1e-6)
