"""The models that training and decoding are measured with, as fairseq builds them."""

import contextlib
import io
from dataclasses import asdict, dataclass, replace

import torch

import talk_fairseq  # noqa: F401 (first, as it patches fairseq and keeps its logging quiet)

# isort: split
from fairseq import options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.modules.dynamic_convolution import DynamicConv1dTBC
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from pipeline.benchmarks.harness import natural

MODELS = (
    "talkconv", "transformer", "transformer-arch", "lightconv", "dynamicconv", "dynamicconv-band",
)  # fmt: skip


@dataclass
class Sizes:
    """Of a model, the same on both sides but for the layers."""

    width: int = 512
    ffn: int = 1024
    heads: int = 4
    encoder_layers: int = 7
    decoder_layers: int = 6
    vocabulary: int = 10_000
    max_positions: int = 1024


def add_size_options(parser, other, when):
    """Add an option for each of the Sizes; `when` says when the defaults are those of `other`."""
    for name, default in asdict(Sizes()).items():
        if name != "max_positions":
            value = getattr(other, name)
            text = f"default: {default}" + (f"; {when} {value}" if value != default else "")
            parser.add_argument("--" + name.replace("_", "-"), type=natural, help=text)


def chosen_sizes(parser, args, default, longest):
    """Return the Sizes of the options, `default` without, with positions for `longest` tokens."""
    given = {name: getattr(args, name, None) for name in asdict(default)}
    sizes = replace(default, **{name: size for name, size in given.items() if size})
    if sizes.width % (2 * sizes.heads):
        parser.error(f"--width: expected a multiple of 2 x {sizes.heads} heads, got {sizes.width}")
    return replace(sizes, max_positions=max(sizes.max_positions, longest))


def build_task(vocabulary):
    """Return a translation task with one dictionary of `vocabulary` entries for both sides."""
    dictionary = Dictionary()
    for index in range(vocabulary - len(dictionary)):
        dictionary.add_symbol(f"word{index}")
    return TranslationTask(TranslationConfig(), dictionary, dictionary)


def model_options(name, sizes, windows, glu, language_model=False):
    """Return the options of fairseq-train, {name: value}, for the model `name` of MODELS.

    Args:
        windows: the largest window of each layer, the last one for all that follow. Convolutions
            with fixed windows get kernels as wide.
        glu: whether the convolutions have gates before them.
        language_model: whether the model is a decoder alone.
    """
    kind, _, form = name.partition("-")
    arch = "lightconv" if kind == "dynamicconv" else kind
    layers = {"encoder": sizes.encoder_layers - (form == "arch"), "decoder": sizes.decoder_layers}
    found = {"arch": arch + "_lm" * language_model}
    if language_model:
        del layers["encoder"]
        found["tokens-per-sample"] = sizes.max_positions
    else:
        found["max-source-positions"] = found["max-target-positions"] = sizes.max_positions
    for side, count in layers.items():
        largest = (windows + windows[-1:] * count)[:count]
        found[f"{side}-embed-dim"] = sizes.width
        found[f"{side}-ffn-embed-dim"] = sizes.ffn
        found[f"{side}-attention-heads"] = sizes.heads
        found[f"{side}-layers"] = count
        if kind == "talkconv":
            found[f"{side}-max-left"] = ",".join(map(str, largest))
            found[f"{'' if glu else 'no-'}{side}-glu"] = None
        elif arch == "lightconv":
            sided = 2 if side == "encoder" else 1
            found[f"{side}-conv-type"] = "dynamic" if kind == "dynamicconv" else "lightweight"
            found[f"{side}-glu"] = glu
            found[f"{side}-kernel-size-list"] = [sided * window + 1 for window in largest]
    return found


def configure(given, task="translation"):
    """Return fairseq's configuration of the options `given`; a value of None is that of a flag."""
    words = ["", "--task", task]  # without data
    for option, value in given.items():
        words += [f"--{option}"] if value is None else [f"--{option}", str(value)]
    args = options.parse_args_and_arch(options.get_training_parser(), words)
    return convert_namespace_to_omegaconf(args)


def build(cfg, task, band=()):
    """Return the model of a configuration, with random weights that are the same each time.

    The sides `band`, "encoder" or "decoder", get DynamicConv in fairseq's other form, band
    matrices, with the same weights.
    """
    # Where there is a GPU, fairseq's convolutions print that their CUDA extension is not built.
    with contextlib.redirect_stdout(io.StringIO()):
        torch.manual_seed(0)
        model = task.build_model(cfg.model)
        for layer in (layer for side in band for layer in getattr(model, side).layers):
            conv = layer.conv
            layer.conv = DynamicConv1dTBC(
                conv.input_size, conv.kernel_size, conv.padding_l, conv.num_heads,
                conv.weight_dropout_module.p, conv.weight_softmax,
            )  # fmt: skip
            layer.conv.weight_linear = conv.weight_linear
    return model
