"""The TaLK-Conv encoder-decoder: fairseq's Transformer with TaLKConvUnit for self-attention."""

from fairseq.distributed import fsdp_wrap
from fairseq.models import register_model
from fairseq.models.transformer import (
    TransformerDecoderBase,
    TransformerEncoderBase,
    TransformerModelBase,
)
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.quant_noise import quant_noise
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)

from talk_fairseq.models import encoder_attention
from talk_fairseq.models.archs import TALKCONV, register_archs
from talk_fairseq.models.config import (
    TaLKConvConfig,
    TaLKConvUnitConfig,  # noqa: F401
    add_flags,
    keep_layers,
    nested_config,
    window_list,
)
from talk_fairseq.models.released import rename_parameters
from talk_fairseq.modules import TaLKConvUnit

<<<<<<< HEAD
# --- Configuration: flat, since a nested config works from YAML but not from flags ---

_NESTED = {"encoder": EncDecBaseConfig, "decoder": DecoderConfig, "quant_noise": QuantNoiseConfig}


def _flat_transformer_config():
    """A dataclass of every option of fairseq's Transformer: decoder.layers is decoder_layers."""
    options = []
    for option in fields(TransformerConfig):
        prefix = option.name + "_" if option.name in _NESTED else ""
        for inner in fields(_NESTED[option.name]) if prefix else [option]:
            if inner.name == "_name":
                continue
            kind, default = inner.type, inner.default
            if isinstance(default, str) and default.startswith("${"):
                kind, default = Optional[int], None  # the embedding size; see nested_config
            if inner.name == "layers_to_keep":
                kind = Optional[str]  # "0,2": fairseq declares a list, and then splits text
            metadata = dict(inner.metadata)
            options.append((prefix + inner.name, kind, field(default=default, metadata=metadata)))
    return make_dataclass("FlatTransformerConfig", options, bases=(FairseqDataclass,))


@dataclass
class TaLKConvUnitConfig:
    """What the unit adds to the options of a fairseq model with a decoder.

    Windows are one entry a layer, as text ("3,7,15,31x4": 31 four times) or as a YAML list.
    """

    activation_fn: str = field(default="swish", metadata={"help": "activation function"})
    decoder_max_left: Any = field(
        default="3,7,15,31x3", metadata={"help": "largest window to the left of each decoder layer"}
    )
    decoder_talk_heads: Optional[int] = field(
        default=None,
        metadata={"help": "heads of the decoder's windows (default: its attention heads)"},
    )
    decoder_conv_dim: Optional[int] = field(
        default=None,
        metadata={"help": "channels of the decoder's windows (default: its embedding dimension)"},
    )
    decoder_glu: bool = field(
        default=True, metadata={"help": "gate the first projection of the decoder's units"}
    )
    talk_normalize: bool = field(
        default=True, metadata={"help": "divide each window's sum by the largest window"}
    )
    spread_offsets: bool = field(
        default=False, metadata={"help": "begin with windows of all lengths, one a head"}
    )
    decoder_short_kernel: int = field(
        default=0,
        metadata={"help": "taps of a depthwise convolution before the decoder's windows (0: none)"},
    )
    offset_dropout: float = field(
        default=0.1, metadata={"help": "probability of dropping an offset"}
    )
    input_dropout: float = field(
        default=0.0, metadata={"help": "dropout probability of the input of each unit"}
    )


@dataclass
class TaLKConvConfig(TaLKConvUnitConfig, _flat_transformer_config()):
    """What `fairseq-train` takes as flags and a YAML takes as keys of `model`."""

    encoder_layers: int = field(default=7, metadata={"help": "number of encoder layers"})
    encoder_max_left: Any = field(
        default="3,7,15,31x4", metadata={"help": "largest window to the left of each encoder layer"}
    )
    encoder_max_right: Any = field(
        default=None,
        metadata={"help": "likewise to the right (default: as --encoder-max-left)"},
    )
    encoder_talk_heads: Optional[int] = field(
        default=None,
        metadata={"help": "heads of the encoder's windows (default: its attention heads)"},
    )
    encoder_conv_dim: Optional[int] = field(
        default=None,
        metadata={"help": "channels of the encoder's windows (default: its embedding dimension)"},
    )
    encoder_glu: bool = field(
        default=True, metadata={"help": "gate the first projection of the encoder's units"}
    )
    encoder_short_kernel: int = field(
        default=0,
        metadata={"help": "taps of a depthwise convolution before the encoder's windows (0: none)"},
    )


def add_flags(parser, config):
    """Add the flags of the dataclass `config`: each switch both ways, since an arch may set it."""
    for option in fields(config):
        if option.type is bool and option.default in (True, False):
            kwargs = {"default": argparse.SUPPRESS, "help": option.metadata.get("help")}
            name = option.name.replace("_", "-")
            if name.startswith("no-"):  # --no-… itself is added below
                kwargs.update(action="store_false", dest=option.name, help="the opposite")
                parser.add_argument("--" + name.removeprefix("no-"), **kwargs)
            else:
                kwargs["action"] = argparse.BooleanOptionalAction
                parser.add_argument("--" + name, **kwargs)
    # Defaults come last, from the arch and the dataclass.
    gen_parser_from_dataclass(parser, config(), delete_default=True)


def register_archs(model, archs):
    """Register each arch of ``{name: {option: value}}``; flags and YAML keys override it."""

    def with_defaults(values):
        def set_defaults(cfg):
            for name, value in values.items():
                if name not in cfg:
                    # Both a Namespace of flags and a DictConfig of YAML keys take attributes.
                    setattr(cfg, name, value)

        return set_defaults

    for name, values in archs.items():
        register_model_architecture(model, name)(with_defaults(values))


def nested_config(cfg, config):
    """fairseq's nested TransformerConfig, with our options, of a flat DictConfig or Namespace.

    Raises ValueError for an option that does not exist or does not fit.
    """
    known = {option.name for option in fields(config)}
    if is_dataclass(cfg):  # fairseq makes one of a Namespace that names the model itself
        cfg = OmegaConf.structured(cfg)
    if isinstance(cfg, argparse.Namespace):  # the flags of everything
        given = {name: value for name, value in vars(cfg).items() if name in known}
    else:
        given = {name: value for name, value in cfg.items() if name not in ("_name", "arch")}
        for name in given:
            if name not in known:
                raise ValueError(
                    f"model.{name}: expected an option of the model, got an unknown one"
                )
    flat = OmegaConf.merge(OmegaConf.structured(config), given)
    if OmegaConf.is_config(cfg):
        flat._set_parent(cfg._get_parent())  # what defaults such as ${task.…} refer to

    # fairseq's default for a sub-config is its class, which all configs would share.
    nested = TransformerConfig(**{name: kind() for name, kind in _NESTED.items()})
    for name in known - {"_name"}:
        value = flat[name]
        setattr(nested, name, OmegaConf.to_object(value) if OmegaConf.is_config(value) else value)
    nested.decoder.input_dim = nested.decoder.input_dim or nested.decoder.embed_dim
    nested.decoder.output_dim = nested.decoder.output_dim or nested.decoder.embed_dim
    if nested.cross_self_attention:
        raise ValueError("cross_self_attention: expected False with windows, got True")
    return nested


def window_list(name, windows, layers):
    """``"3,7,31x2"`` or ``[3, 7, 31, 31]`` as a list of ints, one for each of `layers` layers.

    Raises ValueError, naming `name`, for text that is no such list and for a wrong length.
    """
    try:
        if isinstance(windows, str):
            given = []
            for entry in windows.split(","):
                window, times, count = entry.partition("x")
                given += [int(window)] * (_repeats(int(count)) if times else 1)
        else:
            given = [windows] if isinstance(windows, int) else list(windows)
            if not all(type(window) is int for window in given):
                raise TypeError
    except (TypeError, ValueError):
        raise ValueError(
            f"{name}: expected windows such as '3,7,31x2', one a layer, got {windows!r}"
        ) from None
    if len(given) != layers:
        raise ValueError(
            f"{name}: expected {layers} windows, one a layer, got {len(given)}: {given}"
        )
    if min(given, default=0) < 0:
        raise ValueError(f"{name}: expected windows of at least 0 tokens, got {given}")
    return given


def _repeats(count):
    if not 1 <= count <= 10_000:  # an untrusted checkpoint may state any
        raise ValueError
    return count


def keep_layers(side, name, *windows):
    """Leave the layers that `layers_to_keep` names, and their windows."""
    if side.layers_to_keep:
        kept = sorted(int(layer) for layer in side.layers_to_keep.split(","))
        for option in windows:
            if getattr(side, option) is not None:
                given = window_list(f"{name}_{option}", getattr(side, option), side.layers)
                setattr(side, option, [given[layer] for layer in kept])
        side.layers = len(kept)


# --- Model ---

=======
>>>>>>> d640018

def build_unit(cfg, side, heads, window):
    """The TaLKConvUnit of a layer of ``side`` (cfg.encoder or cfg.decoder)."""
    max_left, max_right = window
    unit = TaLKConvUnit(
        side.embed_dim,
        side.talk_heads or heads,
        max_left,
        max_right,
        glu=side.glu,
        input_dropout=cfg.input_dropout,
        offset_dropout=cfg.offset_dropout,
        normalize=cfg.talk_normalize,
        conv_channels=side.conv_dim,
        spread=cfg.spread_offsets,
        short_kernel=side.short_kernel,
    )
    for linear in (unit.linear1, unit.linear2):
        quant_noise(linear, cfg.quant_noise.pq, cfg.quant_noise.pq_block_size)
    return unit


def wrap_layer(layer, cfg):
    """Activation checkpointing and FSDP, as fairseq's Transformer applies them."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    return fsdp_wrap(
        layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap
    )


class TaLKConvEncoderLayer(TransformerEncoderLayerBase):
    """fairseq's encoder layer with a two-sided window ``(max_left, max_right)``."""

    def __init__(self, cfg, window, return_fc=False):
        self.window = window
        super().__init__(cfg, return_fc)

    def build_self_attention(self, embed_dim, cfg):
        return build_unit(cfg, cfg.encoder, cfg.encoder.attention_heads, self.window)


class TaLKConvEncoder(TransformerEncoderBase):
    def __init__(self, cfg, dictionary, embed_tokens, return_fc=False):
        left, right = cfg.encoder.max_left, cfg.encoder.max_right
        layers = cfg.encoder.layers
        left = window_list("encoder_max_left", left, layers)
        right = left if right is None else window_list("encoder_max_right", right, layers)
        self._windows = iter(list(zip(left, right)))
        super().__init__(cfg, dictionary, embed_tokens, return_fc)
        del self._windows

    def build_encoder_layer(self, cfg):
        return wrap_layer(TaLKConvEncoderLayer(cfg, next(self._windows), self.return_fc), cfg)

    def reorder_encoder_out(self, encoder_out, new_order):
        """Only notes the new order, under "rows": a TaLKConvDecoder needs no more."""
        return encoder_attention.reorder_encoder_out(encoder_out, new_order)

    def upgrade_state_dict_named(self, state_dict, name):
        rename_parameters(state_dict, name)
        return super().upgrade_state_dict_named(state_dict, name)


class TaLKConvDecoderLayer(TransformerDecoderLayerBase):
    """fairseq's decoder layer with a causal window of `max_left`."""

    def __init__(self, cfg, max_left, no_encoder_attn=False):
        self.window = (max_left, 0)
        super().__init__(cfg, no_encoder_attn)

    def build_self_attention(self, embed_dim, cfg, add_bias_kv=False, add_zero_attn=False):
        return build_unit(cfg, cfg.decoder, cfg.decoder.attention_heads, self.window)

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
            xformers_att_config=cfg.encoder.xformers_att_config,
        )

    def forward(
        self,
        x,
        encoder_out=None,
        encoder_padding_mask=None,
        incremental_state=None,
        *args,
        need_attn=False,
        need_head_weights=False,
        **kwargs,
    ):
        # fairseq's decoder asks its last layer for attention weights even where its generator
        # has said that nobody will read them.
        wanted = self.need_attn or incremental_state is None
        return super().forward(
            x,
            encoder_out,
            encoder_padding_mask,
            incremental_state,
            *args,
            need_attn=need_attn and wanted,
            need_head_weights=need_head_weights and wanted,
            **kwargs,
        )


class TaLKConvDecoder(TransformerDecoderBase):
    def __init__(self, cfg, dictionary, embed_tokens, no_encoder_attn=False, **kwargs):
        windows = window_list("decoder_max_left", cfg.decoder.max_left, cfg.decoder.layers)
        self._windows = iter(windows)
        super().__init__(cfg, dictionary, embed_tokens, no_encoder_attn, **kwargs)
        del self._windows

    def build_decoder_layer(self, cfg, no_encoder_attn=False):
        return wrap_layer(TaLKConvDecoderLayer(cfg, next(self._windows), no_encoder_attn), cfg)

    def upgrade_state_dict_named(self, state_dict, name):
        rename_parameters(state_dict, name)
        return super().upgrade_state_dict_named(state_dict, name)

    def extract_features(
        self, prev_output_tokens, encoder_out=None, incremental_state=None, **kwargs
    ):
        encoder_out = encoder_attention.encoder_out_of_rows(
            encoder_out, self._encoder_attentions(), incremental_state
        )
        return super().extract_features(
            prev_output_tokens, encoder_out, incremental_state, **kwargs
        )

    def reorder_incremental_state_scripting(self, incremental_state, new_order):
        """As fairseq's, but it need not search all modules, nor copy what hypotheses share."""
        for layer in self.layers.children():
            if hasattr(layer, "self_attn"):  # a BaseLayer has none
                layer.self_attn.reorder_incremental_state(incremental_state, new_order)
        encoder_attention.reorder(self._encoder_attentions(), incremental_state, new_order)

    def _encoder_attentions(self):
        for layer in self.layers.children():
            if getattr(layer, "encoder_attn", None) is not None:
                yield layer.encoder_attn

    def buffered_future_mask(self, tensor):
        """None: a causal window needs no (T, T) mask."""


@register_model("talkconv", dataclass=TaLKConvConfig)
class TaLKConvModel(TransformerModelBase):
    """TaLK-Conv encoder-decoder (Lioutas & Guo, ICML 2020)."""

    @classmethod
    def add_args(cls, parser):
        add_flags(parser, TaLKConvConfig)

    @classmethod
    def build_model(cls, cfg, task):
        cfg = nested_config(cfg, TaLKConvConfig)
        keep_layers(cfg.encoder, "encoder", "max_left", "max_right")
        keep_layers(cfg.decoder, "decoder", "max_left")
        return super().build_model(cfg, task)

    @classmethod
    def build_encoder(cls, cfg, src_dict, embed_tokens):
        return TaLKConvEncoder(cfg, src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, cfg, tgt_dict, embed_tokens):
        return TaLKConvDecoder(cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention)


register_archs("talkconv", TALKCONV)
