"""Training steps through fairseq's own trainer: TaLK beside the Transformer and its relatives.

    benchmark_training.py                  translation at IWSLT's size, on a GPU where there is one
    benchmark_training.py --task lm        language models (by default --ffn 2048, --heads 8)
    benchmark_training.py --precisions float32,bfloat16 --models talkconv,transformer
    benchmark_training.py --profile        then the operators that take most of a step

A step is the `train_step` of fairseq's Trainer: forward, label-smoothed cross-entropy (language
models: cross-entropy), backward, Adam. The models have the same sizes, layers and dropouts and no
embeddings in common; the convolutions' kernels are as wide as TaLK's windows, and have gates before
them in the language models alone. fairseq's DynamicConv unfolds its windows; `dynamicconv-band` has
band matrices, and `dynamicconv-following` the attention to the encoder of talkconv_plus. Sentences
are of random words, source lengths log-normal (median 20 tokens), targets about as long; a turn
runs over --batches of them, spread over the lengths.

First checks TaLK's operator against the reference. Then runs the models in turn and takes medians.
Tokens are those of the target, without padding. Peak memory is what a step takes beyond model and
optimizer. Prints tables, and writes PREFIX.json after each turn.
"""

import tempfile

import torch

from pipeline.benchmarks import harness, models, operator
from pipeline.benchmarks.harness import Unavailable
from pipeline.benchmarks.models import SIZES
from pipeline.common.command import at_least, one_of, several

from fairseq.data import LanguagePairDataset
from fairseq.data.monolingual_dataset import collate
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.trainer import Trainer

# Flags of fairseq-train for each precision.
PRECISIONS = {"float32": {}, "float16": {"fp16": True}, "bfloat16": {"bf16": True}}
TASKS = {  # the models of each, and the default of --batches
    "translation": {"sizes": SIZES, "windows": [1, 3, 7, 15], "dropout": 0.3, "batches": 4},
    "lm": {
        "sizes": SIZES | {"ffn": 2048, "heads": 8, "encoder_layers": 0},
        **{"windows": [3, 7, 15, 31], "dropout": 0.1, "batches": 1},
    },
}
ATTENTION_DROPOUT = 0.1  # of attention weights, kernels and offsets
BAND = 512  # longest sequences of fairseq's band matrices; longer ones it unfolds


def build_trainer(name, precision, args):
    """Return fairseq's Trainer of the model `name`, with random weights.

    Raises Unavailable where the form of the model does not exist.
    """
    lm, defaults = args.task == "lm", TASKS[args.task]
    band = name.endswith("-band")
    if band and lm and args.tokens > BAND:
        raise Unavailable(f"over {BAND} tokens fairseq unfolds")
    positions = args.tokens if lm else 1024
    given = {
        **models.model_options(name, args.sizes, defaults["windows"], lm, positions, lm),
        "dropout": defaults["dropout"],
        "attention-dropout": ATTENTION_DROPOUT,
        "optimizer": args.optimizer,
        "lr": 1e-5,
        "max-tokens": args.max_tokens,
        "save-dir": tempfile.gettempdir(),  # for what fairseq saves of a crash
        "distributed-world-size": 1,  # whatever GPUs there are
        "cpu": args.device == "cpu",
        **PRECISIONS[precision],
    }
    if name in models.TALK:
        given |= {"offset-dropout": ATTENTION_DROPOUT, "input-dropout": 0}
        given |= {"activation-fn": "relu"}  # as the others
    elif name != "transformer":
        given |= {"weight-dropout": ATTENTION_DROPOUT, "input-dropout": 0}
    if not lm:
        given |= {"criterion": "label_smoothed_cross_entropy", "label-smoothing": 0.1}
    elif name in (*models.TALK, "transformer"):
        given["decoder-normalize-before"] = True  # lightconv_lm has no other form
    cfg = models.configure(given, "language_modeling" if lm else "translation")
    task = models.build_task(args.sizes.vocabulary)
    task = LanguageModelingTask(cfg.task, task.source_dictionary) if lm else task
    sides = ("decoder",) if lm else ("encoder", "decoder")
    model = models.build(cfg, task, sides if band else ())
    return Trainer(cfg, task, model, task.build_criterion(cfg.criterion))


def build_batches(args):
    """Return batches of random words, as fairseq's data sets collate them."""
    generator = torch.Generator().manual_seed(1)
    words = models.build_task(args.sizes.vocabulary).source_dictionary

    def sentence(length):
        tokens = torch.randint(words.nspecial, len(words), (length,), generator=generator)
        tokens[-1] = words.eos()
        return tokens

    if args.task == "lm":
        blocks = max(1, args.max_tokens // args.tokens)
        text = [sentence(args.tokens + 1) for _ in range(blocks * args.batches)]
        # Each token has the next one as its target.
        pairs = [{"id": i, "source": t[:-1], "target": t[1:]} for i, t in enumerate(text)]
        batches = (pairs[i : i + blocks] for i in range(0, len(pairs), blocks))
        return [collate(batch, words.pad(), words.eos()) for batch in batches]

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
    places = (len(batches) * (2 * i + 1) // (2 * args.batches) for i in range(args.batches))
    return [pairs.collater([pairs[i] for i in batches[place]]) for place in places]


def measure(precision, batches, args, report):
    """Measure training steps over the `batches` in a precision."""

    def prepare(name, row):
        trainer = build_trainer(name, precision, args)

        def train():
            for batch in batches:  # raises rather than skipping one
                trainer.train_step([batch], raise_oom=True)
            trainer.zero_grad()  # else the next step would free what counts as its own

        row["parameters"] = sum(p.numel() for p in trainer.model.parameters())
        return lambda: harness.timed(train)

    tokens = sum(batch["ntokens"] for batch in batches)
    cell = {"task": args.task, "precision": precision}
    models.measure(cell, prepare, {"tokens": tokens}, args, report)


def parse(arguments=None):
    """Return the options, with what depends on others filled in."""
    parser = models.option_parser("benchmark_training.py", __doc__, 5, "results/training")
    add, number = parser.add_argument, at_least(1)
    add("--task", choices=TASKS, default="translation", help="default: translation")
    add("--precisions", type=several(one_of(PRECISIONS)),
        help="default: float32; on a GPU float16,bfloat16 too")  # fmt: skip
    add("--optimizer", choices=("fused_adam", "adam"), default="fused_adam", help="of all systems")
    add("--max-tokens", type=number, help="of a batch, with padding (default: 4000; lm --tokens)")
    add("--tokens", type=number, default=3072, help="of a language model's block (default: 3072)")
    add("--batches", type=number, help="of a turn, spread over the lengths (default: 4; lm 1)")
    args = parser.parse_args(arguments)

    lm = args.task == "lm"
    if args.device == "cpu" and "float16" in (args.precisions or ()):
        parser.error("--precisions: expected a GPU for float16, got a CPU")
    on_gpu = ["float16", "bfloat16"] if args.device == "cuda" else []
    args.precisions = args.precisions or ["float32", *on_gpu]
    args.max_tokens = args.max_tokens or (args.tokens if lm else 4000)
    args.batches = args.batches or TASKS[args.task]["batches"]
    if lm and args.max_tokens < args.tokens:
        least, got = args.tokens, args.max_tokens
        parser.error(f"--max-tokens: expected at least a block of {least}, got {got}")
    if lm and args.output is parser.get_default("output"):  # not a path that was given
        args.output = args.output.with_name("training_lm")
    args.sizes = models.chosen_sizes(parser, args, TASKS[args.task]["sizes"])
    return args


def main(arguments=None):
    """Run the command; `arguments` are those of the command line by default."""
    args = parse(arguments)
    operator.check(args.precisions, args.device)
    facts = {name: getattr(args, name) for name in ("optimizer", "max_tokens", "batches")}
    facts |= {"tokens": args.tokens} if args.task == "lm" else {}
    report = harness.Report(args, "talkconv", sizes=vars(args.sizes), **facts)
    batches = build_batches(args)
    for precision in args.precisions:
        measure(precision, batches, args, report)
    print(f"\nwritten: {report.path}")
