"""DynamicConv with the attention of talkconv_plus, a system of the comparison."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("fairseq")

from building import dictionary
from copying import CopyingLightConvModel
from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.models.lightconv import LightConvEncoder

WORDS = 30


@pytest.fixture(params=["copies", "aligns", "follows", "aligns and follows"])
def model(request):
    torch.manual_seed(0)
    options = {f"{name}_attention": f"{name}s" in request.param for name in ("align", "follow")}
    built = CopyingLightConvModel.build_model(arguments(**options), task()).eval()
    assert built.encoder.follows == options["follow_attention"]
    for layer in built.decoder.layers:
        q, k = layer.encoder_attn.q_proj.weight[0], layer.encoder_attn.k_proj.weight[0]
        assert torch.equal(q, k) == options["follow_attention"]
        if options["align_attention"]:
            torch.nn.init.normal_(layer.encoder_attn.slopes)
    return built


def task(**cfg):
    words, cfg = dictionary(WORDS), SimpleNamespace(**cfg)
    return SimpleNamespace(source_dictionary=words, target_dictionary=words, cfg=cfg)


def arguments(**options):
    args = Namespace(
        encoder_layers=2, decoder_layers=2, encoder_kernel_size_list=[3, 5],
        decoder_kernel_size_list=[2, 4], encoder_embed_dim=16, decoder_embed_dim=16,
        encoder_ffn_embed_dim=32, decoder_ffn_embed_dim=32, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_conv_type="dynamic", decoder_conv_type="dynamic",
        share_all_embeddings=True, dropout=0, attention_dropout=0, input_dropout=0,
        weight_softmax=True, max_source_positions=40, max_target_positions=40, **options,
    )  # fmt: skip
    ARCH_CONFIG_REGISTRY["lightconv_copying"](args)
    return args


def test_aligning_refuses_targets_that_are_padded_on_the_left():
    padded = task(left_pad_target=True)
    with pytest.raises(ValueError, match="left_pad_target: expected False with align_attention"):
        CopyingLightConvModel.build_model(arguments(align_attention=True), padded)
    CopyingLightConvModel.build_model(arguments(align_attention=False), padded)


@torch.no_grad()
@pytest.mark.parametrize("padded", [True, False])
def test_steps_equal_full_passes(model, padded):
    """Of two hypotheses per sentence, which a search repeats and reorders, then of one sentence."""
    source = torch.randint(4, WORDS, (2, 7))
    source[1, :3] = model.encoder.padding_idx if padded else 5
    encoder_out = model.encoder(source, torch.tensor([7, 4 if padded else 7]))
    assert encoder_out["encoder_out"][0].shape == (7, 2, 32)
    encoder_out = model.encoder.reorder_encoder_out(encoder_out, torch.tensor([0, 0, 1, 1]))
    target, state = torch.randint(4, WORDS, (4, 8)), {}
    for step in range(1, 9):
        if order := {3: [1, 0, 3, 3], 6: [3, 2]}.get(step):
            order = torch.tensor(order)
            target = target[order]
            encoder_out = model.encoder.reorder_encoder_out(encoder_out, order)
            model.decoder.reorder_incremental_state_scripting(state, order)
        out, _ = model.decoder(target[:, :step], encoder_out, incremental_state=state)
        full, _ = model.decoder(target, encoder_out)
        assert_close(out[:, -1], full[:, step - 1], rtol=0, atol=1e-5)


def test_the_decoder_reads_the_tokens_themselves(model, monkeypatch):
    """With outputs that are zero, what an encoder knows of its tokens still comes through."""
    source, target = torch.randint(4, WORDS, (2, 7)), torch.randint(4, WORDS, (2, 5))
    other = source + 1 - (source == WORDS - 1).int()
    zeros = {"encoder_out": [torch.zeros(7, 2, 16)]}
    monkeypatch.setattr(LightConvEncoder, "forward", lambda *_: zeros)
    outs = [model.decoder(target, model.encoder(tokens))[0] for tokens in (source, other)]
    assert not torch.allclose(*outs, rtol=0, atol=1e-3)
