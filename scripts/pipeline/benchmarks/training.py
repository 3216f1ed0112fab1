"""Training steps through fairseq's own trainer: TaLK beside the Transformer and its relatives.

    benchmark_training.py                  translation at IWSLT's size, on a GPU where there is one
    benchmark_training.py --task lm        language models, in blocks of 3,072 tokens
    benchmark_training.py --precisions float32,medium --models talkconv,transformer
    benchmark_training.py --profile        where a step goes, by part of the model

A step is the `train_step` of fairseq's Trainer: forward, label-smoothed cross-entropy (language
models: cross-entropy), backward, Adam. The models have the same sizes, layers and dropouts and no
embeddings in common; the convolutions' kernels are as wide as TaLK's windows. Rows:

    talkconv            TaLK
    transformer         fairseq's Transformer, with as many layers
    transformer-arch    the same with one encoder layer less, as fairseq's archs have
    lightconv           fairseq's LightConv
    dynamicconv         fairseq's DynamicConv as its models run it: windows are unfolded
    dynamicconv-band    the same in fairseq's other form, band matrices

Translation trains on sentences of random words, batched by length as fairseq-train does it: source
lengths are log-normal (median 20 tokens), targets about as long. Each step runs over --batches of
these batches, spread over the lengths.

First checks TaLK's loss and gradients against those of the reference backend, and those of band
matrices against those of unfolded windows, without dropout; stops where they differ. Then runs the
models in turn, in one process: tokens per second are of the median turn, and "TaLK is" the median
over the turns of how many times faster TaLK was. Tokens are those of the target, without padding.

Precisions: float32; medium, which is float32 with matrix products in bfloat16
(TALK_MATMUL_PRECISION=medium); float16 and bfloat16, as --fp16 and --bf16 of fairseq-train.

Peak memory is what a step takes beyond model and optimizer, as in benchmark_decoding.py.

Writes a table, PREFIX.json (after each turn, so an interrupted run loses none) and PREFIX.png.
"""

import argparse
import contextlib
import io
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from pipeline.benchmarks import (
    decoding as decoding,  # first, as it mends fairseq and keeps its logging quiet
)
from pipeline.benchmarks.decoding import Sizes, Unavailable, show_progress
from pipeline.benchmarks.profile import print_profile, profile
from pipeline.common.files import write_whole

# isort: split
from fairseq import options
from fairseq.data import LanguagePairDataset
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.modules.dynamic_convolution import DynamicConv1dTBC
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.trainer import Trainer

MODELS = (
    "talkconv", "transformer", "transformer-arch", "lightconv", "dynamicconv", "dynamicconv-band",
)  # fmt: skip
# Flags of fairseq-train for each precision.
PRECISIONS = {"float32": [], "medium": [], "float16": ["--fp16"], "bfloat16": ["--bf16"]}
TOLERANCE = 1e-3  # of gradients, relative to the largest
BAND = 512  # longest sequences of fairseq's band matrices; longer ones it unfolds


# --- Timing ---


def training_speeds(steps, turns=5, seconds=0.0, report=None):
    """Time training steps in turn, so that a busy moment of the machine hits them all.

    Args:
        steps: {name: callable}; each call is one step, and should do the same work every time.
        turns: in each turn every step runs at least once, after one call of each to warm up.
        seconds: a step is called again within its turn until it has run this long.
        report: called with the result so far, after each turn.

    Returns:
        {name: [seconds a step, the mean of a turn's calls, one entry a turn]}.
    """

    def timed(step, least):
        calls = 0
        synchronize()
        start = time.perf_counter()
        while not calls or time.perf_counter() - start < least:
            step()
            calls += 1
            synchronize()
        return (time.perf_counter() - start) / calls

    for step in steps.values():
        step()
    speeds = {name: [] for name in steps}
    names = list(steps)
    for turn in range(turns):
        first = turn % len(names)  # so that none always follows the same other
        for name in names[first:] + names[:first]:
            speeds[name].append(timed(steps[name], seconds))
        if report is not None:
            report(speeds)
    return speeds


def synchronize():
    """Wait for the GPU, where one is in use."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def times_faster(speeds, name, other):
    """How many times faster `name` is than `other`: the median over the turns."""
    return statistics.median(b / a for a, b in zip(speeds[name], speeds[other]))


# --- Models and batches, as fairseq-train builds them ---


def flags(name, sizes, args):
    """The command line of fairseq-train for the model `name`, but for the data."""
    kind, _, form = name.partition("-")
    language_model = args.task == "lm"
    layers = {"encoder": sizes.encoder_layers - (form == "arch"), "decoder": sizes.decoder_layers}
    sides = ("decoder",) if language_model else ("encoder", "decoder")
    windows = {side: (args.windows + args.windows[-1:] * n)[:n] for side, n in layers.items()}
    arch = "lightconv" if kind == "dynamicconv" else kind
    given = {
        "arch": arch + "_lm" * language_model,
        "dropout": args.dropout,
        "attention-dropout": args.attention_dropout,
        "optimizer": "adam",
        "lr": 1e-5,
        "max-tokens": args.max_tokens,
        "save-dir": tempfile.gettempdir(),  # for what fairseq saves of a crash
    }
    if not language_model:
        given.update({"criterion": "label_smoothed_cross_entropy", "label-smoothing": 0.1})
    switches = [] if args.device == "cuda" else ["cpu"]
    for side in sides:
        given[f"{side}-embed-dim"] = sizes.width
        given[f"{side}-ffn-embed-dim"] = sizes.ffn
        given[f"{side}-attention-heads"] = sizes.heads
        given[f"{side}-layers"] = layers[side]
        if kind == "talkconv":
            given[f"{side}-max-left"] = ",".join(map(str, windows[side]))
            switches.append(f"{'' if args.glu else 'no-'}{side}-glu")
        elif arch == "lightconv":
            given[f"{side}-conv-type"] = "dynamic" if kind == "dynamicconv" else "lightweight"
            given[f"{side}-glu"] = args.glu
            sided = 2 if side == "encoder" else 1
            given[f"{side}-kernel-size-list"] = [sided * window + 1 for window in windows[side]]
    if kind == "talkconv":
        given.update({"offset-dropout": args.attention_dropout, "input-dropout": 0})
        given["activation-fn"] = "relu"  # as the others
    elif arch == "lightconv":
        given.update({"weight-dropout": args.attention_dropout, "input-dropout": 0})
    if not language_model:
        given["max-source-positions"] = sizes.max_positions
        given["max-target-positions"] = sizes.max_positions
    else:
        given["tokens-per-sample"] = sizes.max_positions
        if arch != "lightconv":
            switches.append("decoder-normalize-before")  # lightconv_lm has no other form
    words = [word for option, value in given.items() for word in (f"--{option}", str(value))]
    task = "language_modeling" if language_model else "translation"
    return ["", "--task", task, *words, *(f"--{switch}" for switch in switches)]


def build_trainer(name, sizes, precision, args):
    """fairseq's Trainer of the model `name`, with random weights.

    Raises Unavailable where the form of the model does not exist.
    """
    if name.endswith("-band") and args.task == "lm" and args.tokens > BAND:
        raise Unavailable(f"over {BAND} tokens fairseq unfolds")
    words = [*flags(name, sizes, args), *PRECISIONS[precision]]
    parser = options.get_training_parser()
    with contextlib.redirect_stdout(io.StringIO()):  # what is said of CUDA extensions
        cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, words))
        task = decoding.build_task(sizes.vocabulary)
        if args.task == "lm":
            task = LanguageModelingTask(cfg.task, task.source_dictionary)
        torch.manual_seed(0)
        model = task.build_model(cfg.model)
        if name.endswith("-band"):
            use_band_matrices(model)
        return Trainer(cfg, task, model, task.build_criterion(cfg.criterion))


def use_band_matrices(model):
    """Replace the DynamicConvs of `model` by fairseq's other form, with the same weights."""
    for stack in (getattr(model, "encoder", None), model.decoder):
        for layer in stack.layers if stack else ():
            conv = layer.conv
            band = DynamicConv1dTBC(
                conv.input_size, conv.kernel_size, conv.padding_l, conv.num_heads,
                conv.weight_dropout_module.p, conv.weight_softmax,
            )  # fmt: skip
            band.weight_linear = conv.weight_linear
            layer.conv = band


def build_batches(task, args):
    """Batches as fairseq's data sets collate them, of random words."""
    generator = torch.Generator().manual_seed(1)
    words = task.source_dictionary

    def sentence(length):
        tokens = torch.randint(words.nspecial, len(words), (length,), generator=generator)
        tokens[-1] = words.eos()
        return tokens

    if args.task == "lm":
        blocks = max(1, args.max_tokens // args.tokens)
        return [language_model_batch(sentence, blocks, args.tokens) for _ in range(args.batches)]

    # As many sentences as fill the batches thirty times over, or rare lengths would fill them.
    count = 30 * args.batches * args.max_tokens // 20
    spread = torch.randn(2, count, generator=generator)
    source = (20 * (0.6 * spread[0]).exp()).clamp(2, min(175, args.max_tokens)).long()
    target = (source * (0.15 * spread[1]).exp()).clamp(2, min(175, args.max_tokens)).long()
    pairs = LanguagePairDataset(
        [sentence(n) for n in source], source.numpy(), words,
        [sentence(n) for n in target], target.numpy(), words,
        shuffle=False,
    )  # fmt: skip
    batches = pairs.batch_by_size(
        pairs.ordered_indices(), max_tokens=args.max_tokens, required_batch_size_multiple=8
    )
    chosen = [
        batches[len(batches) * (2 * i + 1) // (2 * args.batches)] for i in range(args.batches)
    ]
    return [pairs.collater([pairs[i] for i in batch]) for batch in chosen]


def language_model_batch(sentence, blocks, tokens):
    """`blocks` blocks of `tokens` tokens, each with the next token as its target."""
    text = torch.stack([sentence(tokens + 1) for _ in range(blocks)])
    net_input = {
        "src_tokens": text[:, :-1].contiguous(),
        "src_lengths": torch.full((blocks,), tokens),
    }
    return {
        "id": torch.arange(blocks),
        "nsentences": blocks,
        "ntokens": blocks * tokens,
        "net_input": net_input,
        "target": text[:, 1:].contiguous(),
    }


def train_on(trainer, batches):
    """One update for each batch. Raises torch's OutOfMemoryError rather than skipping one."""
    for batch in batches:
        trainer.train_step([batch], raise_oom=True)


# --- Correctness first ---


def gradients(trainer, batch):
    """The loss of `batch` and {parameter: gradient}, without dropout."""
    model, criterion = trainer.model.eval(), trainer.criterion.eval()
    sample, _ = trainer._prepare_sample(batch)
    model.zero_grad()
    loss, size, _ = criterion(model, sample)
    (loss / size).backward()
    found = {n: p.grad.float().clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return (loss / size).item(), found


def check(name, trainers, batch):
    """Raise SystemExit unless `name` trains as what it stands for does.

    That is for talkconv the reference backend, and for dynamicconv-band dynamicconv.
    """
    loss, found = gradients(trainers[name], batch)
    if name == "talkconv":
        with mock.patch.dict(os.environ, TALK_CONV_BACKEND="reference"):
            other, (wanted, expected) = "reference", gradients(trainers[name], batch)
    else:
        other, (wanted, expected) = "dynamicconv", gradients(trainers["dynamicconv"], batch)
    # torch's max keeps a NaN, Python's may not.
    largest = torch.stack([gradient.abs().max() for gradient in expected.values()]).max()
    error = torch.stack([(found[n] - expected[n]).abs().max() for n in expected]).max() / largest
    for what, off in (("loss", abs(loss / wanted - 1)), ("gradients", error.item())):
        if not off <= TOLERANCE:
            raise SystemExit(f"{name}: the {what} differ from {other} by {off:.2g}: not measured")


def check_all(sizes, args):
    """Hold the models that have another form to it: `check`, in float32, at the first sizes."""
    small = SimpleNamespace(**{**vars(args), "batches": 1, "max_tokens": min(200, args.max_tokens)})
    small.tokens = min(40, args.tokens)
    pairs = {"talkconv": [], "dynamicconv-band": ["dynamicconv"]}
    for name, others in pairs.items():
        if name in args.models:
            show_progress(f"checking {name}")
            with contextlib.suppress(Unavailable):  # which the table will say
                trainers = {n: build_trainer(n, sizes, "float32", small) for n in (name, *others)}
                check(name, trainers, build_batches(trainers[name].task, small)[0])


# --- A table of speeds for each precision ---


def build_trainers(sizes, precision, args):
    """``({name: trainer}, {name: {"error": why}})`` of the models that there are."""
    trainers, missing = {}, {}
    for name in args.models:
        show_progress(f"{precision}: building {name}")
        try:
            with decoding.failures_as_unavailable():
                trainers[name] = build_trainer(name, sizes, precision, args)
        except Unavailable as error:
            missing[name] = {"error": str(error)}
    return trainers, missing


def measure(sizes, precision, args, results, save):
    """Fill `results`, {model: {"seconds": …, …} or {"error": why}}, calling `save` at each turn."""
    trainers, missing = build_trainers(sizes, precision, args)
    results.update(missing)
    batches = {}
    for name, trainer in list(trainers.items()):
        show_progress(f"{precision}: {name}, warming up")
        batches = batches or build_batches(trainer.task, args)
        try:
            with decoding.failures_as_unavailable():
                start = time.perf_counter()
                train_on(trainer, batches)  # also makes the optimizer's state
                if time.perf_counter() - start > args.limit:
                    raise Unavailable(f"too slow: {time.perf_counter() - start:.0f} s")
                with decoding.PeakMemory(args.device) as peak:
                    train_on(trainer, batches)
        except Unavailable as error:
            results[name] = {"error": str(error)}
            del trainers[name]
        else:
            parameters = sum(p.numel() for p in trainer.model.parameters())
            results[name] = {"parameters": parameters, "memory": peak.bytes}
        save()
    tokens = sum(batch["ntokens"] for batch in batches)

    def report(speeds):
        for name, turns in speeds.items():
            median = statistics.median(turns)
            row = {"turns": turns, "seconds": median, "tokens_per_second": tokens / median}
            if "talkconv" in speeds:
                row["talkconv_is"] = times_faster(speeds, "talkconv", name)
            results[name].update(row)
        save()
        show_progress(f"{precision}: turn {len(turns)} of {args.turns}")

    if trainers:
        steps = {n: lambda trainer=t: train_on(trainer, batches) for n, t in trainers.items()}
        training_speeds(steps, args.turns, args.seconds, report)
    return trainers, batches


def print_cell(cell):
    """Tokens a second, how many times faster TaLK is, parameters and memory."""
    show_progress()
    print(f"\n{cell['task']}, {cell['precision']}")
    print(f"  {'':18} {'parameters':>12} {'tokens/s':>10} {'TaLK is':>9} {'peak MiB':>9}")
    for name in sorted(cell["results"], key=MODELS.index):
        row = cell["results"][name]
        if "seconds" not in row:
            print(f"  {name:18} {row.get('error', 'interrupted')}")
            continue
        ratio = f"{row['talkconv_is']:.2f}x" if "talkconv_is" in row else ""
        memory = "" if row["memory"] is None else f"{row['memory'] / 2**20:,.0f}"
        print(f"  {name:18} {row['parameters']:12,} {row['tokens_per_second']:10,.1f} {ratio:>9} "
              f"{memory:>9}")  # fmt: skip
    sys.stdout.flush()


def plot(record, path):
    """Bars of tokens a second, a panel for each precision; the turns as points."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cells = record["cells"]
    figure, axes = plt.subplots(1, len(cells), figsize=(6 * len(cells), 4), squeeze=False)
    for axis, cell in zip(axes.flat, cells):
        rows = {n: r for n, r in cell["results"].items() if "seconds" in r}
        names = sorted(rows, key=MODELS.index, reverse=True)
        axis.barh(
            names, [rows[name]["tokens_per_second"] for name in names],
            color=["C0" if name == "talkconv" else "0.75" for name in names],
        )  # fmt: skip
        for place, name in enumerate(names):
            tokens = rows[name]["tokens_per_second"] * rows[name]["seconds"]
            turns = rows[name]["turns"]
            axis.plot([tokens / t for t in turns], [place] * len(turns), "k.", markersize=4)
        axis.set(title=f"{cell['task']}, {cell['precision']}", xlabel="training tokens a second")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse(arguments=None):
    """The options, with what depends on others filled in."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def natural(text):
        if int(text) < 1:
            raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
        return int(text)

    def some_of(known):
        def names(text):
            for name in text.split(","):
                if name not in known:
                    expected = ", ".join(known)
                    raise argparse.ArgumentTypeError(f"expected some of {expected}, got {name}")
            return text.split(",")

        return names

    add = parser.add_argument
    add("--task", choices=("translation", "lm"), default="translation", help="default: translation")
    add("--models", type=some_of(MODELS), help=f"default: {','.join(MODELS)}; lm without -arch")
    add(
        "--precisions",
        type=some_of(PRECISIONS),
        help="default: float32; on a GPU float16,bfloat16 too",
    )
    add("--max-tokens", type=natural, help="of a batch, with padding (4000; lm: --tokens)")
    add("--tokens", type=natural, default=3072, help="of a block of a language model (3072)")
    add("--batches", type=natural, help="of a turn, spread over the lengths (4; lm 1)")
    add("--turns", type=natural, default=5, help="turns the medians are of (5)")
    add("--seconds", type=float, default=0, help="a model runs at least so long a turn (0: once)")
    add("--limit", type=float, default=120, help="seconds that the batches may take (120)")
    add("--windows", type=lambda text: [natural(word) for word in text.split(",")],
        help="of the layers, the last for all that follow (1,3,7,15; lm 3,7,15,31)")  # fmt: skip
    add("--glu", action=argparse.BooleanOptionalAction,
        help="gates before the convolutions (no, as the IWSLT archs; lm yes)")  # fmt: skip
    add("--dropout", type=float, help="default: 0.3; lm 0.1")
    add("--attention-dropout", type=float, default=0.1,
        help="of attention weights, kernels and offsets (0.1)")  # fmt: skip
    add("--profile", action="store_true", help="then print where a step goes, model by model")
    add("--cpu", action="store_true", help="measure the CPU where there is a GPU")
    add("--output", type=Path, metavar="PREFIX", help="default: results/training[_lm]")
    for name, default in asdict(Sizes()).items():
        if name != "max_positions":
            other = {"ffn": 2048, "heads": 8}.get(name, default)
            lm = f"; lm {other}" if other != default else ""
            add("--" + name.replace("_", "-"), type=natural, help=f"default: {default}{lm}")
    args = parser.parse_args(arguments)

    lm = args.task == "lm"
    args.device = "cuda" if torch.cuda.is_available() and not args.cpu else "cpu"
    default = ["float32"] + ["float16", "bfloat16"] * (args.device == "cuda")
    args.precisions = args.precisions or default
    args.models = args.models or [n for n in MODELS if not (lm and n == "transformer-arch")]
    args.max_tokens = args.max_tokens or (args.tokens if lm else 4000)
    args.batches = args.batches or (1 if lm else 4)
    args.windows = args.windows or ([3, 7, 15, 31] if lm else [1, 3, 7, 15])
    args.glu = lm if args.glu is None else args.glu
    args.dropout = (0.1 if lm else 0.3) if args.dropout is None else args.dropout
    args.output = args.output or Path("results/training" + "_lm" * lm)
    sizes = Sizes(ffn=2048, heads=8, encoder_layers=0) if lm else Sizes()
    given = {name: getattr(args, name, None) for name in asdict(sizes)}
    sizes = replace(sizes, **{name: size for name, size in given.items() if size})
    args.sizes = replace(sizes, max_positions=max(sizes.max_positions, args.tokens * lm))
    if lm and "transformer-arch" in args.models:
        parser.error("--models: expected language models, got transformer-arch")
    if sizes.width % (2 * sizes.heads):
        parser.error(f"--width: expected a multiple of 2 x {sizes.heads} heads, got {sizes.width}")
    if args.device == "cpu" and "float16" in args.precisions:
        parser.error("--precisions: expected a GPU for float16, got a CPU")
    return args


def main(arguments=None):
    """Run the command; `arguments` are those of the command line by default."""
    args = parse(arguments)
    sizes = args.sizes
    check_all(replace(sizes, vocabulary=min(1000, sizes.vocabulary)), args)
    show_progress()
    machine = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    if args.device == "cuda":
        machine = torch.cuda.get_device_name()
    print(f"Losses and gradients agree. Measuring on {machine}, torch {torch.__version__}; "
          f"{sizes}.", flush=True)  # fmt: skip
    record = {"machine": machine, "torch": torch.__version__, "sizes": asdict(sizes)}
    told = ("max_tokens", "tokens", "batches", "windows", "glu", "dropout", "attention_dropout")
    record.update({name: getattr(args, name) for name in told}, cells=[])
    json_path, png_path = (args.output.with_name(args.output.name + e) for e in (".json", ".png"))

    def save():
        json_path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(json_path, json.dumps(record, indent=1) + "\n")

    before = torch.get_float32_matmul_precision()
    try:
        for precision in args.precisions:
            torch.set_float32_matmul_precision("medium" if precision == "medium" else "highest")
            cell = {"task": args.task, "precision": precision, "results": {}}
            record["cells"].append(cell)
            try:
                trainers, batches = measure(sizes, precision, args, cell["results"], save)
            finally:
                print_cell(cell)
            for name, trainer in trainers.items() if args.profile else ():
                cell["results"][name]["profile"] = rows = profile(
                    partial(train_on, trainer, batches), len(batches),
                    trainer.model, loss=trainer.criterion,
                )  # fmt: skip
                print_profile(name, rows)
    finally:  # also of an interrupted run
        torch.set_float32_matmul_precision(before)
        save()
        if record["cells"]:
            plot(record, png_path)
        print(f"\nwritten: {json_path} and {png_path}")
