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
models in turn, in one process: tokens per second are of the median turn, and "speed-up of TaLK" is
the median over the turns. Tokens are those of the target, without padding. Peak memory is what a
step takes beyond model and optimizer, as in benchmark_decoding.py.

Precisions: float32; medium, which is float32 with matrix products in bfloat16
(TALK_MATMUL_PRECISION=medium); float16 and bfloat16, as --fp16 and --bf16 of fairseq-train.

Writes a table, PREFIX.json (after each turn, so an interrupted run loses none) and PREFIX.png.
"""

import argparse
import contextlib
import os
import tempfile
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from pipeline.benchmarks import harness, models
from pipeline.benchmarks.harness import Unavailable, natural, naturals, show_progress, some_of
from pipeline.benchmarks.models import MODELS, Sizes
from pipeline.benchmarks.parts import print_profile, profile

# isort: split
from fairseq.data import LanguagePairDataset
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.trainer import Trainer

# Flags of fairseq-train for each precision.
PRECISIONS = {"float32": {}, "medium": {}, "float16": {"fp16": None}, "bfloat16": {"bf16": None}}
LM_SIZES = Sizes(ffn=2048, heads=8, encoder_layers=0)
TOLERANCE = 1e-3  # of gradients, relative to the largest
BAND = 512  # longest sequences of fairseq's band matrices; longer ones it unfolds


# --- Trainers and batches, as fairseq-train builds them ---


def build_trainer(name, sizes, precision, args):
    """Return fairseq's Trainer of the model `name`, with random weights.

    Raises Unavailable where the form of the model does not exist.
    """
    kind, _, form = name.partition("-")
    lm = args.task == "lm"
    if form == "band" and lm and args.tokens > BAND:
        raise Unavailable(f"over {BAND} tokens fairseq unfolds")
    given = {
        **models.model_options(name, sizes, args.windows, args.glu, lm),
        "dropout": args.dropout,
        "attention-dropout": args.attention_dropout,
        "optimizer": "adam",
        "lr": 1e-5,
        "max-tokens": args.max_tokens,
        "save-dir": tempfile.gettempdir(),  # for what fairseq saves of a crash
        **PRECISIONS[precision],
    }
    if args.device == "cpu":
        given["cpu"] = None
    if kind == "talkconv":
        given |= {"offset-dropout": args.attention_dropout, "input-dropout": 0}
        given["activation-fn"] = "relu"  # as the others
    elif kind in ("lightconv", "dynamicconv"):
        given |= {"weight-dropout": args.attention_dropout, "input-dropout": 0}
    if not lm:
        given |= {"criterion": "label_smoothed_cross_entropy", "label-smoothing": 0.1}
    elif kind in ("talkconv", "transformer"):
        given["decoder-normalize-before"] = None  # lightconv_lm has no other form
    cfg = models.configure(given, "language_modeling" if lm else "translation")
    task = models.build_task(sizes.vocabulary)
    if lm:
        task = LanguageModelingTask(cfg.task, task.source_dictionary)
    sides = ("decoder",) if lm else ("encoder", "decoder")
    model = models.build(cfg, task, sides if form == "band" else ())
    return Trainer(cfg, task, model, task.build_criterion(cfg.criterion))


def build_batches(task, args):
    """Return batches of random words, as fairseq's data sets collate them."""
    generator = torch.Generator().manual_seed(1)
    words = task.source_dictionary

    def sentence(length):
        tokens = torch.randint(words.nspecial, len(words), (length,), generator=generator)
        tokens[-1] = words.eos()
        return tokens

    def block_batch(blocks):
        """As many blocks of text, each token with the next one as its target."""
        text = torch.stack([sentence(args.tokens + 1) for _ in range(blocks)])
        source, lengths = text[:, :-1].contiguous(), torch.full((blocks,), args.tokens)
        batch = {"id": torch.arange(blocks), "nsentences": blocks, "ntokens": source.numel()}
        batch["net_input"] = {"src_tokens": source, "src_lengths": lengths}
        return batch | {"target": text[:, 1:].contiguous()}

    if args.task == "lm":
        blocks = max(1, args.max_tokens // args.tokens)
        return [block_batch(blocks) for _ in range(args.batches)]

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
    spread = (len(batches) * (2 * i + 1) // (2 * args.batches) for i in range(args.batches))
    return [pairs.collater([pairs[i] for i in batches[place]]) for place in spread]


def train_on(trainer, batches):
    """Make one update for each batch. Raises torch's OutOfMemoryError rather than skipping one."""
    for batch in batches:
        trainer.train_step([batch], raise_oom=True)


# --- Correctness first ---


def gradients(trainer, batch):
    """Return the loss of `batch` and {parameter: gradient}, without dropout."""
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


def check_all(args):
    """Call `check` for the models that have another form: in float32, with few tokens and words."""
    sizes = replace(args.sizes, vocabulary=min(1000, args.sizes.vocabulary))
    small = {"batches": 1, "max_tokens": min(200, args.max_tokens), "tokens": min(40, args.tokens)}
    small = SimpleNamespace(**{**vars(args), **small})
    for name, others in (("talkconv", ()), ("dynamicconv-band", ("dynamicconv",))):
        if name in args.models:
            show_progress(f"checking {name}")
            with contextlib.suppress(Unavailable):  # which the table will say
                trainers = {n: build_trainer(n, sizes, "float32", small) for n in (name, *others)}
                check(name, trainers, build_batches(trainers[name].task, small)[0])
    show_progress()


# --- A table of speeds for each precision ---


def measure(precision, args, results, save):
    """Fill `results`, {model: {"seconds": …, …} or {"error": why}}, calling `save` at each turn.

    Returns ``({model: trainer}, batches)`` of those that were measured.
    """
    trainers, batches = {}, []
    for name in args.models:
        show_progress(f"{precision}: building {name}")
        try:
            with harness.failures_as_unavailable():
                trainers[name] = build_trainer(name, args.sizes, precision, args)
        except Unavailable as error:
            results[name] = {"error": str(error)}
    for name, trainer in list(trainers.items()):
        show_progress(f"{precision}: {name}, warming up")
        batches = batches or build_batches(trainer.task, args)
        step = partial(train_on, trainer, batches)
        try:
            with harness.failures_as_unavailable():
                seconds, _ = harness.timed(step)  # also makes the optimizer's state
                if seconds > args.limit:
                    raise Unavailable(f"too slow: {seconds:.0f} s")
                with harness.PeakMemory(args.device) as peak:
                    step()
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
            results[name] |= harness.summary(turns, tokens=tokens)
            if "talkconv" in speeds:
                results[name]["talkconv_is"] = harness.times_faster(speeds, "talkconv", name)
        save()
        show_progress(f"{precision}: turn {len(turns)} of {args.turns}")

    if trainers:
        steps = {name: partial(train_on, trainer, batches) for name, trainer in trainers.items()}
        harness.training_speeds(steps, args.turns, args.seconds, report)
    return trainers, batches


def print_cell(cell):
    """Print parameters, tokens per second, TaLK's speed-up and memory of each model."""
    rows = {}
    for name in sorted(cell["results"], key=MODELS.index):
        row = cell["results"][name]
        rows[name] = row.get("error", "interrupted")
        if "seconds" in row:
            ratio = f"{row['talkconv_is']:.2f}x" if "talkconv_is" in row else ""
            speed = f"{row['tokens_per_second']:,.1f}"
            rows[name] = [f"{row['parameters']:,}", speed, ratio, harness.mebibytes(row["memory"])]
    headers = "parameters", "tokens/s", "speed-up of TaLK", "peak MiB"
    harness.print_table(f"{cell['task']}, {cell['precision']}", headers, rows)


def figure(cells):
    """Return a Figure of tokens per second, a panel for each precision; the turns as points."""
    from pipeline.plots.figures import bars_figure

    panels = {}
    for cell in cells:
        panels[f"{cell['task']}, {cell['precision']}", "training tokens per second"] = bars = {}
        for name in MODELS:
            row = cell["results"].get(name, {})
            if "seconds" in row:
                tokens = row["tokens_per_second"] * row["seconds"]
                bars[name] = row["tokens_per_second"], [tokens / turn for turn in row["turns"]]
    return bars_figure(panels)


def parse(arguments=None):
    """Return the options, with what depends on others filled in."""
    parser = harness.option_parser(__doc__)
    add = parser.add_argument
    add("--task", choices=("translation", "lm"), default="translation", help="default: translation")
    add("--models", type=some_of(MODELS), help=f"default: {','.join(MODELS)}; lm without -arch")
    add("--precisions", type=some_of(PRECISIONS),
        help="default: float32; on a GPU float16,bfloat16 too")  # fmt: skip
    add("--max-tokens", type=natural, help="of a batch, with padding (default: 4000; lm --tokens)")
    add("--tokens", type=natural, default=3072, help="of a language model's block (default: 3072)")
    add("--batches", type=natural, help="of a turn, spread over the lengths (default: 4; lm 1)")
    add("--turns", type=natural, default=5, help="turns that the medians are of (default: 5)")
    add("--seconds", type=float, default=0,
        help="a model runs for at least so long in a turn (default: once)")  # fmt: skip
    add("--limit", type=float, default=120, help="seconds the batches may take (default: 120)")
    add("--windows", type=naturals, help="the largest window of each layer, the last one for all "
        "that follow (default: 1,3,7,15; lm 3,7,15,31)")  # fmt: skip
    add("--glu", action=argparse.BooleanOptionalAction,
        help="gates before the convolutions (default: no, as the IWSLT archs; lm yes)")  # fmt: skip
    add("--dropout", type=float, help="default: 0.3; lm 0.1")
    add("--attention-dropout", type=float, default=0.1,
        help="of attention weights, kernels and offsets (default: 0.1)")  # fmt: skip
    add("--profile", action="store_true", help="then print where a step goes, model by model")
    add("--output", type=Path, metavar="PREFIX", help="default: results/training[_lm]")
    models.add_size_options(parser, LM_SIZES, "lm")
    args = parser.parse_args(arguments)

    lm = args.task == "lm"
    args.device = harness.device_of(args)
    default = ["float32"] + ["float16", "bfloat16"] * (args.device == "cuda")
    args.precisions = args.precisions or default
    args.models = args.models or [n for n in MODELS if not (lm and n == "transformer-arch")]
    args.max_tokens = args.max_tokens or (args.tokens if lm else 4000)
    args.batches = args.batches or (1 if lm else 4)
    args.windows = args.windows or ([3, 7, 15, 31] if lm else [1, 3, 7, 15])
    args.glu = lm if args.glu is None else args.glu
    args.dropout = (0.1 if lm else 0.3) if args.dropout is None else args.dropout
    args.output = args.output or Path("results/training" + "_lm" * lm)
    args.sizes = models.chosen_sizes(parser, args, LM_SIZES if lm else Sizes(), args.tokens * lm)
    if lm and "transformer-arch" in args.models:
        parser.error("--models: expected language models, got transformer-arch")
    if args.device == "cpu" and "float16" in args.precisions:
        parser.error("--precisions: expected a GPU for float16, got a CPU")
    return args


def main(arguments=None):
    """Run the command; `arguments` are those of the command line by default."""
    args = parse(arguments)
    check_all(args)
    facts = ("max_tokens", "tokens", "batches", "windows", "glu", "dropout", "attention_dropout")
    facts = {name: getattr(args, name) for name in facts}
    report = harness.Report(args.output, args.device, sizes=asdict(args.sizes), **facts)
    print(f"Losses and gradients agree. Measuring on {report.where}; {args.sizes}.", flush=True)
    before = torch.get_float32_matmul_precision()
    try:
        for precision in args.precisions:
            torch.set_float32_matmul_precision("medium" if precision == "medium" else "highest")
            cell = {"task": args.task, "precision": precision, "results": {}}
            report.cells.append(cell)
            try:
                trainers, batches = measure(precision, args, cell["results"], report.save)
            finally:
                print_cell(cell)
            for name, trainer in trainers.items() if args.profile else ():
                run, others = partial(train_on, trainer, batches), {"loss": trainer.criterion}
                rows = profile(run, len(batches), trainer.model, **others)
                cell["results"][name]["profile"] = rows
                print_profile(name, rows)
    finally:  # also of an interrupted run
        torch.set_float32_matmul_precision(before)
        report.finish(figure)
