"""The options of the models, as flags of fairseq-train and keys of a YAML file.

They are flat, since a nested config works from YAML but not from flags.
"""

import argparse
import ast
import re
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

from talk_fairseq.models.pruning import kept_layers
from talk_fairseq.ops.state import whole_number

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
            value = field(default=default, metadata=dict(inner.metadata))
            options.append((prefix + inner.name, kind, value))
    return make_dataclass("FlatTransformerConfig", options, bases=(FairseqDataclass,))


def option(default, text, **metadata):
    """Return the field of a dataclass: an option with its `default` and the `text` of its help."""
    return field(default=default, metadata={"help": text, **metadata})


@dataclass
class TaLKConvUnitConfig:
    """What the unit adds to the options of a fairseq model with a decoder.

    Windows are one entry per layer, as text ("3,7,15,31x4": 31 four times) or as a YAML list.
    """

    activation_fn: str = option("swish", "activation function")
    decoder_max_left: Any = option("3,7,15,31x3", "each layer's largest window to the left")
    decoder_talk_heads: Optional[int] = option(None, "window heads (default: attention heads)")
    decoder_conv_dim: Optional[int] = option(
        None, "channels of the decoder's windows (default: of its embedding)"
    )
    decoder_glu: bool = option(True, "gate the first projection of the decoder's units")
    decoder_short_kernel: int = option(
        0, "taps of a depthwise convolution before the decoder's windows (0: none)"
    )
    talk_normalize: bool = option(True, "divide by the tokens of the largest window")
    spread_offsets: bool = option(False, "begin with windows of all lengths, one per head")
    slow_offsets: bool = option(
        False, "begin with windows alike for all tokens, and learn slowly to differ"
    )
    spread_windows: bool = option(
        False, "heads have largest windows of their own, from 2 tokens to the layer's"
    )
    root_normalize: bool = option(
        False, "divide each window's sum by the square root of the window's length"
    )
    offset_dropout: float = option(0.1, "probability of dropping an offset")
    input_dropout: float = option(0.0, "dropout probability of the input of each unit")


@dataclass
class TaLKConvConfig(TaLKConvUnitConfig, _flat_transformer_config()):
    """What `fairseq-train` takes as flags and a YAML takes as keys of `model`."""

    encoder_layers: int = option(7, "number of encoder layers")
    encoder_max_left: Any = option("3,7,15,31x4", "each layer's largest window to the left")
    encoder_max_right: Any = option(None, "largest to the right (default: as --encoder-max-left)")
    encoder_talk_heads: Optional[int] = option(None, "window heads (default: attention heads)")
    encoder_conv_dim: Optional[int] = option(
        None, "channels of the encoder's windows (default: of its embedding)"
    )
    encoder_glu: bool = option(True, "gate the first projection of the encoder's units")
    encoder_short_kernel: int = option(
        0, "taps of a depthwise convolution before the encoder's windows (0: none)"
    )
    copy_attention: bool = option(
        False, "the attention to the encoder reads its tokens too, and begins as a copy of them"
    )
    align_attention: bool = option(
        False, "the attention to the encoder has a learned penalty on distances between positions"
    )
    follow_attention: bool = option(False, "with --copy-attention, begin at what follows a copy")


def add_flags(parser, config):
    """Add the flags of the dataclass `config`: each switch both ways, since an arch may set it."""
    for flag in fields(config):
        if flag.type is bool and flag.default in (True, False):
            kwargs = {"default": argparse.SUPPRESS, "help": flag.metadata.get("help")}
            name = flag.name.replace("_", "-")
            if name.startswith("no-"):  # --no-… itself is added below
                kwargs.update(action="store_false", dest=flag.name, help="the opposite")
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

    values = OmegaConf.to_container(flat, resolve=True)
    nested = TransformerConfig.from_namespace(argparse.Namespace(**values))
    nested.decoder.input_dim = nested.decoder.input_dim or nested.decoder.embed_dim
    nested.decoder.output_dim = nested.decoder.output_dim or nested.decoder.embed_dim
    if nested.cross_self_attention:
        raise ValueError("cross_self_attention: expected False with windows, got True")
    for name in ("encoder", "decoder"):
        if (given := getattr(nested, name).xformers_att_config) is not None:
            raise ValueError(f"{name}_xformers_att_config: expected None, got {given!r}")
    return nested


def set_windows(side, name):
    """Set the windows and the layers to keep in `side`, the config of the side `name`.

    ``windows`` iterates over ``(max_left, max_right)``: each layer that is built takes the next.
    ``layers`` becomes the number of kept layers. With ``layers_to_keep``, ``kept`` lists them and
    ``unpruned`` is the number before; else both are None. ValueError for what does not fit.
    """
    left = window_list(f"{name}_max_left", side.max_left, side.layers)
    right = left
    if name == "decoder":
        right = [0] * side.layers
    elif side.max_right is not None:
        right = window_list("encoder_max_right", side.max_right, side.layers)
    kept = kept_layers(name, side.layers_to_keep, side.layers)
    side.kept, side.unpruned = (kept, side.layers) if side.layers_to_keep else (None, None)
    side.layers = len(kept)
    side.windows = iter([(left[layer], right[layer]) for layer in kept])


def window_list(name, windows, layers):
    """Return ``"3,7,31x2"`` or ``[3, 7, 31, 31]`` as a list of ints, one for each layer.

    Raises ValueError, naming `name`, for text that is no such list and for a wrong length.
    """
    given = [windows] if isinstance(windows, int) else windows
    if isinstance(windows, str):
        entry = re.compile(r"\s*(-?\d+)\s*(?:x\s*([1-9]\d{0,3}))?\s*")
        entries = [entry.fullmatch(text) for text in windows.split(",")]
        if all(entries):
            given = [int(found[1]) for found in entries for _ in range(int(found[2] or 1))]
    if not isinstance(given, (list, tuple)) or any(type(window) is not int for window in given):
        raise ValueError(
            f"{name}: expected windows such as '3,7,31x2', one per layer, got {windows!r}"
        )
    given = [whole_number(name, window) for window in given]
    if len(given) != layers:
        raise ValueError(
            f"{name}: expected {layers} windows, one per layer, got {len(given)}: {given}"
        )
    return list(given)


def set_cutoffs(cfg, part, dim, words):
    """Make ``adaptive_PART_cutoff`` of `cfg` what `cutoff_list` returns (input or softmax)."""
    name, factor = f"adaptive_{part}_cutoff", getattr(cfg, f"adaptive_{part}_factor")
    setattr(cfg, name, cutoff_list(name, getattr(cfg, name), dim, factor, words))


def cutoff_list(name, cutoff, dim, factor, words):
    """Return ``"20000,60000"`` or ``[20000, 60000]`` as ints; None for None and ``""``.

    Raises ValueError, naming `name`, unless the cutoffs rise, end within the dictionary of
    `words` words, and leave at least one of `dim` dimensions to the last band.
    """
    if cutoff is None or cutoff == "":  # a flag cannot say None to an arch
        return None
    try:
        given = ast.literal_eval(f"[{cutoff}]") if isinstance(cutoff, str) else list(cutoff)
    except (SyntaxError, TypeError, ValueError):
        given = []
    if (
        not given
        or any(type(point) is not int for point in given)
        or [0, *given] != sorted({0, *given})
        or given[-1] > words
    ):
        raise ValueError(
            f"{name}: expected rising cutoffs such as '200,600', "
            f"at most the {words} words of the dictionary, got {cutoff!r}"
        )
    bands = len(given) + (given[-1] < words)
    if factor <= 0 or dim // factor ** (bands - 1) < 1:
        raise ValueError(
            f"{name}: expected at least one dimension for the last of {bands} bands, "
            f"got {dim} // {factor:g} ** {bands - 1}"
        )
    return given
