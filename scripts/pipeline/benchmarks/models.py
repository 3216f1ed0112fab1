"""The models that training and decoding are measured with, and what both measure alike."""

import math
from argparse import Namespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import talk_fairseq  # noqa: F401 (first, as it patches fairseq and keeps its logging quiet)
from pipeline.benchmarks import harness
from pipeline.benchmarks.harness import Unavailable
from pipeline.common.command import at_least, one_of, several
from pipeline.common.models import build_model, parse_words
from pipeline.common.paths import CONFIGS
from pipeline.common.systems import words

from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.modules.dynamic_convolution import DynamicConv1dTBC
from fairseq.tasks.translation import TranslationConfig, TranslationTask

TALK = ("talkconv", "talkconv_plus")
DYNAMICCONV = ("dynamicconv", "dynamicconv-band", "dynamicconv-following")
MODELS = (*TALK, "transformer", "lightconv", *DYNAMICCONV)
# Of a model, the same on both sides but for the layers.
SIZES = dict(width=512, ffn=1024, heads=4, encoder_layers=7, decoder_layers=6, vocabulary=10_000)


def build_task(vocabulary):
    """Return a translation task with one dictionary of `vocabulary` entries for both sides."""
    dictionary = Dictionary()
    for index in range(vocabulary - len(dictionary)):
        dictionary.add_symbol(f"word{index}")
    return TranslationTask(TranslationConfig(), dictionary, dictionary)


def model_options(name, sizes, windows, glu, positions, language_model=False):
    """Return the options of fairseq-train, {name: value}, for the model `name` of MODELS.

    Args:
        windows: the largest window of each layer, the last one for all that follow. Convolutions
            with fixed windows get kernels as wide.
        glu: whether the convolutions have gates before them.
        positions: the most tokens that it takes.
        language_model: whether the model is a decoder alone.
    """
    arch = "lightconv" if name in DYNAMICCONV else name
    options = {"arch": arch + "_lm" * language_model}
    if name.endswith("-following"):
        if language_model:
            raise Unavailable("a language model attends to no encoder")
        options = {"arch": "lightconv_copying", "user-dir": CONFIGS / "models" / "copying"}
        options |= {"align-attention": True, "follow-attention": True}
    layers = {"encoder": sizes.encoder_layers, "decoder": sizes.decoder_layers}
    if language_model:
        del layers["encoder"]
        options["tokens-per-sample"] = positions
    else:
        options["max-source-positions"] = options["max-target-positions"] = positions
    for side, count in layers.items():
        largest = (windows + windows[-1:] * count)[:count]
        options[f"{side}-embed-dim"] = sizes.width
        options[f"{side}-ffn-embed-dim"] = sizes.ffn
        options[f"{side}-attention-heads"] = sizes.heads
        options[f"{side}-layers"] = count
        if name in TALK:
            options[f"{side}-max-left"] = ",".join(map(str, largest))
            options[f"{'' if glu else 'no-'}{side}-glu"] = True
        elif arch == "lightconv":
            sided = 2 if side == "encoder" else 1
            options[f"{side}-conv-type"] = "dynamic" if name in DYNAMICCONV else "lightweight"
            options[f"{side}-glu"] = str(glu)
            options[f"{side}-kernel-size-list"] = [sided * window + 1 for window in largest]
    return options


def configure(options, task="translation"):
    """Return fairseq's configuration of `options`; see systems.words."""
    given = ["", *words({"task": task, **options})]  # without data
    return convert_namespace_to_omegaconf(parse_words(given))


def build(cfg, task, band=()):
    """Return the model of a configuration, with random weights that are the same each time.

    The sides `band`, "encoder" or "decoder", get DynamicConv in fairseq's other form, band
    matrices, with the same weights.
    """
    torch.manual_seed(0)
    model = build_model(cfg.model, task)
    for layer in (layer for side in band for layer in getattr(model, side).layers):
        conv = layer.conv
        layer.conv = DynamicConv1dTBC(
            conv.input_size, conv.kernel_size, conv.padding_l, conv.num_heads,
            conv.weight_dropout_module.p, conv.weight_softmax,
        )  # fmt: skip
        layer.conv.weight_linear = conv.weight_linear
    return model


def measure(cell, prepare, amounts, args, report, enough=math.inf):
    """Measure each of ``args.models`` in turn: a cell of the `report`.

    All is as of Report.measure, but a step need not be warm.
    """

    def warmed_up(name, row):
        step = prepare(name, row)
        if (seconds := step()) > args.limit:
            raise Unavailable(f"too slow: about {seconds:.0f} s")
        row["memory"] = harness.peak_memory(step, args.device)
        return step

    steps = report.measure(cell, args.models, warmed_up, amounts, enough)
    for name, step in steps.items() if args.profile else ():
        with torch.profiler.profile() as profiler:
            step()
        with CountCalls() as calls:
            step()
        # PyTorch's table of the operators that take most.
        where = profiler.key_averages().table(f"self_{args.device}_time_total", row_limit=15)
        print(f"\n{harness.title(cell)}: {name}: {calls.count:,} calls", where, sep="\n")


class CountCalls(TorchDispatchMode):
    """Counts the calls of PyTorch's operators that compute: on a GPU most launch one kernel."""

    count = 0
    others = (  # which launch nothing
        *("empty", "new_empty", "_unsafe_view", "_local_scalar_dense", "promote_types"),
        *("is_same_size", "_record_function"),
    )

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.partition("::")[2]
        self.count += not (function.is_view or name.startswith(self.others))
        return function(*args, **(kwargs or {}))


def option_parser(name, description, turns, output):
    """Return harness.option_parser with the options that both benchmarks have."""
    parser = harness.option_parser(name, description, turns, 120, output)
    add, names = parser.add_argument, ",".join(MODELS)
    add("--models", type=several(one_of(MODELS)), default=MODELS, help=f"default: {names}")
    add("--profile", action="store_true", help="then print a step's calls and where it goes")
    for size, default in SIZES.items():
        option = "--" + size.replace("_", "-")
        least = 5 if size == "vocabulary" else 1  # 4 are fairseq's own
        add(option, type=at_least(least), help=f"default: {default}")
    return parser


def chosen_sizes(parser, args, default):
    """Return a Namespace of the sizes in the options; where there are none, of the `default`."""
    sizes = Namespace(**{name: getattr(args, name) or size for name, size in default.items()})
    if sizes.width % (2 * sizes.heads):
        parser.error(f"--width: expected a multiple of 2 x {sizes.heads} heads, got {sizes.width}")
    return sizes
