"""The options of the models, as flags of fairseq-train and keys of a YAML file.

They are flat, since a nested config works from YAML but not from flags.
"""

import argparse
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from typing import Any, Optional

from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer.transformer_config import (
    DecoderConfig,
    EncDecBaseConfig,
    QuantNoiseConfig,
)
from omegaconf import OmegaConf

_NESTED = {"encoder": EncDecBaseConfig, "decoder": DecoderConfig, "quant_noise": QuantNoiseConfig}


def _flat_transformer_config():
    """Make a dataclass of fairseq's Transformer options: decoder.layers is decoder_layers."""
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
    spread_windows: bool = field(
        default=False,
        metadata={"help": "heads have largest windows of their own, from 2 tokens to the layer's"},
    )
    root_normalize: bool = field(
        default=False,
        metadata={"help": "divide each window's sum by the square root of the window's length"},
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


def nested_config(cfg, config):
    """Return fairseq's nested TransformerConfig, with our options, from a flat config `cfg`.

    `cfg` is a DictConfig or the Namespace of all flags, and `config` the dataclass of the model.

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
    """Return ``"3,7,31x2"`` or ``[3, 7, 31, 31]`` as a list of ints, one for each layer.

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
    if not 1 <= count <= 10_000:  # more is a mistake
        raise ValueError
    return count
