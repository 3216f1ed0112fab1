"""The TaLK-Conv encoder-decoder: fairseq's Transformer with TaLKConvUnit for self-attention."""

import os
from pathlib import Path

from fairseq.distributed import fsdp_wrap
from fairseq.models import register_model, transformer
from fairseq.modules import transformer_layer
from fairseq.modules.checkpoint_activations import checkpoint_wrapper, unwrap_checkpoint
from fairseq.modules.quant_noise import quant_noise

from talk_fairseq.models import encoder_attention
from talk_fairseq.models.archs import TALKCONV, register_archs
from talk_fairseq.models.config import (
    TaLKConvConfig,
    add_flags,
    nested_config,
    set_cutoffs,
    set_windows,
)
from talk_fairseq.models.pruning import prune_parameters
from talk_fairseq.models.released import rename_parameters
from talk_fairseq.modules import TaLKConvUnit


def build_unit(cfg, side):
    """Return the ``cfg.unit`` of the next layer of ``side`` (cfg.encoder or cfg.decoder)."""
    max_left, max_right = next(side.windows)  # fairseq builds layers in order, without numbers
    heads = side.attention_heads if side.talk_heads is None else side.talk_heads
    if getattr(cfg, "scale_heads", False) and heads > 0 and side.embed_dim % heads:
        raise ValueError(f"scale_heads: expected heads that divide {side.embed_dim}, got {heads}")
    unit = cfg.unit(
        side.embed_dim,
        heads,
        max_left,
        max_right,
        glu=side.glu,
        input_dropout=cfg.input_dropout,
        offset_dropout=cfg.offset_dropout,
        normalize=cfg.talk_normalize,
        conv_channels=side.conv_dim,
        spread=cfg.spread_offsets,
        slow=cfg.slow_offsets,
        spread_windows=cfg.spread_windows,
        root_normalize=cfg.root_normalize,
        short_kernel=side.short_kernel,
    )
    for linear in (unit.linear1, unit.linear2):
        quant_noise(linear, cfg.quant_noise.pq, cfg.quant_noise.pq_block_size)
    return unit


def wrap_layer(layer, cfg):
    """Apply activation checkpointing and FSDP as fairseq's Transformer does."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    least = 0 if cfg.checkpoint_activations else cfg.min_params_to_wrap
    return fsdp_wrap(layer, min_num_params=least)


class TaLKConvEncoderLayer(transformer_layer.TransformerEncoderLayerBase):
    """fairseq's encoder layer with a two-sided window."""

    def build_self_attention(self, embed_dim, cfg):
        return build_unit(cfg, cfg.encoder)


class TaLKConvEncoder(encoder_attention.SharingEncoder, transformer.TransformerEncoderBase):
    def build_encoder_layer(self, cfg):
        return wrap_layer(TaLKConvEncoderLayer(cfg, self.return_fc), cfg)

    def forward_scriptable(self, *args, **kwargs):
        out = super().forward_scriptable(*args, **kwargs)
        if not self.cfg.copy_attention or self.cfg.no_cross_attention:
            return out
        tokens = out["encoder_embedding"][0].transpose(0, 1)
        return encoder_attention.with_tokens(out, tokens, self.cfg.follow_attention)


class TaLKConvDecoderLayer(transformer_layer.TransformerDecoderLayerBase):
    """fairseq's decoder layer with a causal window."""

    def build_self_attention(self, embed_dim, cfg, add_bias_kv=False, add_zero_attn=False):
        return build_unit(cfg, cfg.decoder)

    def build_encoder_attention(self, embed_dim, cfg):
        return encoder_attention.EncoderAttention(
            embed_dim,
            cfg.decoder.attention_heads,
            kdim=cfg.encoder.embed_dim,
            vdim=cfg.encoder.embed_dim,
            dropout=cfg.attention_dropout,
            encoder_decoder_attention=True,
            q_noise=self.quant_noise,
            qn_block_size=self.quant_noise_block_size,
            copies=cfg.copy_attention,
            aligns=cfg.align_attention,
            follows=cfg.follow_attention,
        )


class TaLKConvDecoder(encoder_attention.SharingDecoder, transformer.TransformerDecoderBase):
    def build_decoder_layer(self, cfg, no_encoder_attn=False):
        return wrap_layer(TaLKConvDecoderLayer(cfg, no_encoder_attn), cfg)

    def extract_features(
        self, prev_output_tokens, encoder_out=None, incremental_state=None, **kwargs
    ):
        T = prev_output_tokens.shape[1]
        encoder_out = self.shared_encoder_out(encoder_out, incremental_state, T)
        return super().extract_features(
            prev_output_tokens, encoder_out, incremental_state, **kwargs
        )

    def buffered_future_mask(self, tensor):
        """Return None: a causal window needs no (T, T) mask."""


class TaLKConvModelBase:
    """What the encoder-decoder and the language model share; it comes before fairseq's base class.

    Attributes:
        unit: the class of what replaces self-attention in each layer, TaLKConvUnit or a subclass
            of it.
    """

    unit = TaLKConvUnit

    @classmethod
    def add_args(cls, parser):
        # As register_model names it; a variant may be registered without one of its own.
        registered = (vars(base).get("__dataclass") for base in cls.__mro__)
        add_flags(parser, next(filter(None, registered)))

    @classmethod
    def from_pretrained(
        cls, model_name_or_path, checkpoint_file="model.pt", data_name_or_path=".", **kwargs
    ):
        """Load a model as fairseq does, and return its hub interface.

        A ``data_name_or_path`` that begins with ``.`` is relative to the folder of the model.
        Raises ValueError that names it where it is not a folder with dictionaries, unless a keyword
        says where these are.
        """
        here = model_name_or_path if str(data_name_or_path).startswith(".") else "."
        folder = Path(here, data_name_or_path)
        unpacked = os.path.isdir(model_name_or_path) and not folder.is_file()
        elsewhere = any(map(kwargs.get, ("fixed_dictionary", "source_dict", "target_dict")))
        if unpacked and not elsewhere and not any(folder.glob("dict*.txt")):
            raise ValueError(
                f"data_name_or_path: expected a folder with dictionaries (dict*.txt), got {folder}"
            )
        hub = super().from_pretrained(
            model_name_or_path, checkpoint_file, str(data_name_or_path), **kwargs
        )
        for module in hub.modules():
            if isinstance(module, encoder_attention.EncoderAttention):
                module.need_attn = True  # each call may ask for alignments
        return hub

    def make_generation_fast_(self, name="", **kwargs):
        """Prepare as fairseq does, without what ``--checkpoint-activations`` wraps layers in."""
        unwrap_checkpoint(self)
        super().make_generation_fast_(**kwargs)

    def upgrade_state_dict_named(self, state_dict, name):
        """Give parameters of old checkpoints, published ones among them, their names of today."""
        rename_parameters(state_dict)
        return super().upgrade_state_dict_named(state_dict, name)

    def load_state_dict(self, state_dict, strict=True, model_cfg=None, args=None):
        """Load `state_dict`, of which `prune_parameters` leaves out layers.

        fairseq's own pruning, from `model_cfg`, would leave out layers of a pruned model again.
        """
        for name in ("encoder", "decoder"):
            side = getattr(self.decoder.cfg, name)
            if getattr(side, "kept", None) is not None:
                state_dict = prune_parameters(state_dict, name, side.kept, side.unpruned)
        return super().load_state_dict(state_dict, strict)


@register_model("talkconv", dataclass=TaLKConvConfig)
class TaLKConvModel(TaLKConvModelBase, transformer.TransformerModelBase):
    """TaLK-Conv encoder-decoder (Lioutas & Guo, ICML 2020)."""

    @classmethod
    def build_model(cls, cfg, task):
        cfg = nested_config(cfg, TaLKConvConfig)
        if cfg.align_attention:
            encoder_attention.check_padding_of_targets(task)
        set_cutoffs(cfg, "softmax", cfg.decoder.output_dim, len(task.target_dictionary))
        for name in ("share_all_embeddings", "share_decoder_input_output_embed",
                     "merge_src_tgt_embed", "tie_adaptive_weights"):  # fmt: skip
            if cfg.adaptive_softmax_cutoff is not None and getattr(cfg, name):
                raise ValueError(f"{name}: expected False with adaptive_softmax_cutoff, got True")
        shared = cfg.share_all_embeddings or cfg.share_decoder_input_output_embed
        if shared and cfg.decoder.output_dim != cfg.decoder.embed_dim:
            wanted = f"{cfg.decoder.embed_dim} with shared embeddings"
            raise ValueError(f"decoder_output_dim: expected {wanted}, got {cfg.decoder.output_dim}")
        cfg.unit = cls.unit
        set_windows(cfg.encoder, "encoder")
        set_windows(cfg.decoder, "decoder")
        return super().build_model(cfg, task)

    @classmethod
    def build_encoder(cls, cfg, src_dict, embed_tokens):
        return TaLKConvEncoder(cfg, src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, cfg, tgt_dict, embed_tokens):
        return TaLKConvDecoder(cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention)


register_archs("talkconv", TALKCONV)
