"""The TaLK-Conv language model: the decoder of talkconv.py by itself."""

import ast
from dataclasses import dataclass
from typing import Any, Optional

from fairseq.models import FairseqLanguageModel, register_model
from fairseq.models.transformer import Embedding
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from fairseq.modules import AdaptiveInput, CharacterTokenEmbedder

from talk_fairseq.models.archs import TALKCONV_LM, register_archs
from talk_fairseq.models.config import (
    TaLKConvUnitConfig,
    nested_config,
    option,
    set_cutoffs,
    set_windows,
)
from talk_fairseq.models.talkconv import TaLKConvDecoder, TaLKConvModelBase


@dataclass
class TaLKConvLanguageModelConfig(TaLKConvUnitConfig, TransformerLanguageModelConfig):
    """What `fairseq-train` takes as flags and a YAML takes as keys of `model`.

    Lists are text, as fairseq has them, or YAML lists.
    """

    decoder_normalize_before: bool = option(True, "apply layernorm before each decoder block")
    decoder_input_dim: Optional[int] = option(None, "input width (default: --decoder-embed-dim)")
    decoder_output_dim: Optional[int] = option(None, "output width (default: --decoder-embed-dim)")
    adaptive_input_cutoff: Any = option(None, "where bands of the input end, as 20000,60000")
    adaptive_softmax_cutoff: Any = option(None, "the same for the softmax of adaptive_loss")
    character_filters: Any = option(
        "[(1, 64), (2, 128), (3, 192), (4, 256), (5, 256), (6, 256), (7, 256)]",
        "width and channels of each convolution over the characters of a word",
    )


# --- Embeddings: plain, adaptive (Baevski & Auli, 2019) or of characters ---


def filter_list(filters):
    """Return ``"[(1, 64), (2, 128)]"`` or a list of such pairs as a list of pairs of ints.

    Raises ValueError for anything else.
    """
    try:
        given = ast.literal_eval(filters) if isinstance(filters, str) else filters
        given = [(width, channels) for width, channels in given]
        if not given or any(type(n) is not int or n < 1 for pair in given for n in pair):
            raise ValueError
    except (SyntaxError, TypeError, ValueError):
        raise ValueError(
            "character_filters: expected pairs of a width and channels such as "
            f"'[(1, 64), (2, 128)]', got {filters!r}"
        ) from None
    return given


def check_embeddings(cfg, source_words, target_words):
    """Raise ValueError for options of the embeddings that do not fit each other."""
    needs = {
        "adaptive_input": {"character_embeddings": False},
        "tie_adaptive_weights": {
            "adaptive_input": True,
            "adaptive_softmax_cutoff": cfg.adaptive_input_cutoff,
            "adaptive_softmax_factor": cfg.adaptive_input_factor,
            "decoder_input_dim": cfg.decoder_embed_dim,
            "decoder_output_dim": cfg.decoder_embed_dim,
        },
        "tie_adaptive_proj": {"tie_adaptive_weights": True},
        "share_decoder_input_output_embed": {
            "adaptive_input": False,
            "adaptive_softmax_cutoff": None,
            "character_embeddings": False,
            "decoder_output_dim": cfg.decoder_input_dim,
        },
    }
    for asked, others in needs.items():
        if getattr(cfg, asked):
            for name, wanted in others.items():
                if (got := getattr(cfg, name)) != wanted:
                    raise ValueError(f"{name}: expected {wanted} with {asked}, got {got}")
    if cfg.adaptive_input and cfg.adaptive_input_cutoff is None:
        raise ValueError("adaptive_input_cutoff: expected cutoffs with adaptive_input, got None")
    shared = cfg.tie_adaptive_weights or cfg.share_decoder_input_output_embed
    if shared and source_words != target_words:
        raise ValueError(
            "output_dictionary_size: expected all words where input and output share weights, "
            f"got {target_words} of {source_words}"
        )


def build_embeddings(cfg, dictionary):
    """Return the module from tokens to embeddings that `cfg` asks for."""
    if cfg.character_embeddings:
        embedder = CharacterTokenEmbedder(
            dictionary,
            filter_list(cfg.character_filters),
            cfg.character_embedding_dim,
            cfg.decoder.embed_dim,
            cfg.char_embedder_highway_layers,
        )
        # fairseq leaves the table on the CPU, and looks there in each step of a model on a GPU.
        table = vars(embedder).pop("word_to_char")
        embedder.register_buffer("word_to_char", table, persistent=False)
        return embedder
    if cfg.adaptive_input:
        return AdaptiveInput(
            len(dictionary),
            dictionary.pad(),
            cfg.decoder.input_dim,
            cfg.adaptive_input_factor,
            cfg.decoder.embed_dim,
            cfg.adaptive_input_cutoff,
            cfg.quant_noise.pq,
            cfg.quant_noise.pq_block_size,
        )
    return Embedding(len(dictionary), cfg.decoder.input_dim, dictionary.pad())


# --- Model ---


@register_model("talkconv_lm", dataclass=TaLKConvLanguageModelConfig)
class TaLKConvLanguageModel(TaLKConvModelBase, FairseqLanguageModel):
    """TaLK-Conv language model, on fairseq's task language_modeling."""

    @classmethod
    def build_model(cls, cfg, task):
        cfg = nested_config(cfg, TaLKConvLanguageModelConfig)
        cfg.unit = cls.unit
        set_windows(cfg.decoder, "decoder")
        cfg.checkpoint_activations |= cfg.offload_activations
        if cfg.max_target_positions is None:
            cfg.max_target_positions = cfg.tokens_per_sample

        words = len(task.source_dictionary), len(task.target_dictionary)
        if not cfg.adaptive_input:
            cfg.adaptive_input_cutoff = None
        set_cutoffs(cfg, "input", cfg.decoder.input_dim, words[0])
        set_cutoffs(cfg, "softmax", cfg.decoder.output_dim, words[1])
        check_embeddings(cfg, *words)
        embed_tokens = build_embeddings(cfg, task.source_dictionary)
        decoder = TaLKConvDecoder(cfg, task.target_dictionary, embed_tokens, no_encoder_attn=True)
        return cls(decoder)


register_archs("talkconv_lm", TALKCONV_LM)
