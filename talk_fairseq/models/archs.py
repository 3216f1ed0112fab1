"""The named architectures: the papers' sizes, and ours."""

import functools

from fairseq.models import register_model_architecture


def register_archs(model, archs):
    """Register each arch of ``{name: {option: value}}``; flags and YAML keys override it."""
    for name, values in archs.items():
        register_model_architecture(model, name)(functools.partial(_set_defaults, values))


def _set_defaults(values, cfg):
    for name, value in values.items():
        if name not in cfg:
            # Both a Namespace of flags and a DictConfig of YAML keys take attributes.
            setattr(cfg, name, value)


# --- Beyond the paper ---

_PLUS_LM = {"activation_fn": "relu", "spread_offsets": True, "decoder_short_kernel": 8}
_ATTENTION = {"copy_attention": True, "align_attention": True, "follow_attention": True}
_PLUS = {**_PLUS_LM, "encoder_short_kernel": 7, **_ATTENTION}

# --- The paper's models (appendix A); all of them post-norm, with Swish ---


def _sizes(embed_dim, ffn_embed_dim, heads):
    """Return options with the same sizes on both sides."""
    sizes = {"embed_dim": embed_dim, "ffn_embed_dim": ffn_embed_dim, "attention_heads": heads}
    return {
        f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()
    }


_DROPOUTS = {"dropout": 0.3, "attention_dropout": 0.1, "offset_dropout": 0.1, "input_dropout": 0.1}
_IWSLT = {
    **_sizes(512, 1024, 4),
    **_DROPOUTS,
    "input_dropout": 0.0,
    "encoder_max_left": "1,3,7,15x4",
    "decoder_max_left": "1,3,7,15x3",
    "encoder_glu": False,
    "decoder_glu": False,
}
_BIG = {**_sizes(1024, 4096, 16), **_DROPOUTS}
_ONE_LAYER = {"decoder_layers": 1, "decoder_max_left": "31"}
_THREE_LAYERS = {"decoder_layers": 3, "decoder_max_left": "7,15,31"}
_CNN_DM = {**_sizes(512, 2048, 8), **_DROPOUTS}

TALKCONV = {
    "talkconv_iwslt_de_en": _IWSLT,
    "talkconv_plus": _PLUS,
    "talkconv_plus_iwslt_de_en": {**_IWSLT, **_PLUS},
    "talkconv_plus_wmt_en_de_big": {**_BIG, **_PLUS},
    "talkconv_wmt_en_de_big": _BIG,
    # Small decoders, for speed.
    "talkconv_wmt_en_de_big_1_decoder_layer": {**_BIG, **_ONE_LAYER},
    "talkconv_wmt_en_de_big_3_decoder_layers": {**_BIG, **_THREE_LAYERS},
    "talkconv_wmt_en_fr_big": {**_BIG, "dropout": 0.1},
    "talkconv_cnndm_std": _CNN_DM,
    "talkconv_cnndm_deep": {
        **_CNN_DM,
        "encoder_layers": 10,
        "decoder_layers": 10,
        "encoder_max_left": "3,7,15,31x7",
        "decoder_max_left": "3,7,31x8",
    },
}

# --- Language models ---

_BIG_LM = {"decoder_embed_dim": 1024, "decoder_ffn_embed_dim": 4096, "decoder_attention_heads": 16}

TALKCONV_LM = {
    # Beyond the paper.
    "talkconv_plus_lm": _PLUS_LM,
    "talkconv_plus_wide_lm": {  # as many parameters, more of them in the units
        **_PLUS_LM,
        "decoder_conv_dim": 1536,
        "decoder_talk_heads": 32,
        "decoder_ffn_embed_dim": 512,
        "decoder_max_left": "3,15,63,127x3",
        "spread_windows": True,
        "root_normalize": True,
    },
    "talkconv_lm_big": {**_BIG_LM, "decoder_layers": 12, "decoder_max_left": "3,7,15,31x9"},
    # The paper's model (appendix A) with the released heads and windows (the paper has 8 heads,
    # and one window fewer than layers): no final norm, and everything tied that can be.
    "talkconv_lm_wiki103": {
        **_BIG_LM,
        "decoder_layers": 17,
        "decoder_max_left": "3,5,7,15,31,63x12",
        "dropout": 0.3,
        "attention_dropout": 0.1,
        "activation_dropout": 0.1,
        "offset_dropout": 0.2,
        "input_dropout": 0.1,
        "no_decoder_final_norm": True,
        "adaptive_input": True,
        "adaptive_input_cutoff": "20000,60000",
        "adaptive_softmax_cutoff": "20000,60000",
        "adaptive_softmax_dropout": 0.2,
        "tie_adaptive_weights": True,
        "tie_adaptive_proj": True,
    },
}
