"""Trains TaLK, Transformer, LightConv, DynamicConv and ConvS2S on the same text, cut into the same
pieces, with about as many parameters, for the same updates on the same batches, with the same
schedule and seeds. Only the peak learning rate is each system's own, the best of several on the
validation set; with --warmup the warm-up is chosen too. Averages the last checkpoints, scores the
test set, and measures speed and memory of all systems in turn. Systems and schedules are in
configs/verses/; --systems takes what you add there. docs/compare.md says how rates and warm-ups are
chosen, and what is in the folder; docs/results.md has what was measured.

  --task mt     translation: sacreBLEU with a 95% interval, and p by sacreBLEU's paired bootstrap
                against TaLK (default)
  --task lm     language models of --target-lang: perplexity, beside that of a unigram
  --task summ   summaries: ROUGE, beside that of the first words of the source; needs --data, with
                {train,valid,test}.{source,target}

Run it again to go on where it stopped. More --seeds and other --systems are added to the folder;
the table has the systems that --systems names.
"""

import argparse
import contextlib
from pathlib import Path
from types import SimpleNamespace

from pipeline.common.command import BadInput, at_least, parser, positive, several
from pipeline.common.machine import cores
from pipeline.common.paths import ROOT
from pipeline.common.systems import read_systems

LANGUAGES = {"mt": ["es", "en"], "lm": ["en"], "summ": ["source", "target"]}  # the target last


def learning_rates(text):
    """Return the learning rates in ``--lr``, as they are spelt there; of equal ones the last."""
    if text == "best":
        return text
    with contextlib.suppress(argparse.ArgumentTypeError):
        return list({positive(rate): rate.strip() for rate in text.split(",")}.values())
    raise argparse.ArgumentTypeError(f"expected positive numbers or best, got {text!r}")


def option_parser():
    """Return the parser of the options."""
    options = parser("compare.sh", __doc__)
    add = options.add_argument
    add("--preset", choices=("cpu", "cpu_long", "cpu_small", "gpu"), default="cpu",
        help="cpu: small models, 4 to 10 minutes for each rate of a system on two cores; cpu_long: "
        "these models with five times as many updates and more dropout, not for summaries; "
        "cpu_small: the best systems at 1M parameters with three seeds, not for summaries; "
        "gpu: models of IWSLT's size and three seeds on one GPU (default: cpu)")  # fmt: skip
    add("--task", choices=LANGUAGES, default="mt", help="see above (default: mt)")
    add("--data", type=Path, help="another corpus: {train,valid,test}.LANG, one sentence a line, "
        "also with .gz (default: data/bible-es-en)")  # fmt: skip
    add("--source-lang", metavar="NAME", help="how its source files end (default: es)")
    add("--target-lang", metavar="NAME", help="how its target files end (default: en)")
    add("--out", type=Path, help="folder for everything (default: compare/TASK_PRESET)")
    add("--systems", type=several(str), metavar="A,B", help="(default: all but ablations)")
    add("--seeds", type=at_least(1), metavar="N",
        help="runs of each system, with seeds 1 to N (default: 1; cpu_small, gpu: 3)")  # fmt: skip
    add("--updates", type=at_least(1), metavar="N",
        help="of each run (default: 1,600; lm: 1,200; summ: 2,000; cpu_long: 8,000, lm 6,000; "
        "gpu: 1,600, lm 1,000)")  # fmt: skip
    add("--tokens", type=at_least(65), metavar="N",  # speed is of 64 tokens
        help="of the blocks that a language model sees (default: 256; gpu: 512)")  # fmt: skip
    add("--lr", type=learning_rates, metavar="A,B",
        help="peak learning rates to try (default: the preset's); best: each system's best one "
        "in configs/verses/")  # fmt: skip
    add("--warmup", type=several(at_least(1)), metavar="A,B", default=[],
        help="updates of the warm-up to try, beside the preset's (default: none)")  # fmt: skip
    add("--jobs", type=at_least(1), metavar="N", help="trainings side by side (default: one per "
        "core, at most 4; gpu: 1)")  # fmt: skip
    add("--turns", type=at_least(1), metavar="N", default=5,
        help="turns of the speed measurement (default: 5)")  # fmt: skip
    add("--restart", action="store_true", help="throw away what an earlier comparison left there")
    return options


def parse(arguments=None):
    """Return the options, with the preset's and what follows from others. Raises BadInput."""
    args = option_parser().parse_args(arguments)
    device, _, kind = args.preset.partition("_")
    preset = read_systems(f"{device}_{'lm' if args.task == 'lm' else 'seq2seq'}")
    schedule = preset["schedules"].get(f"{args.task}_{kind}".strip("_"))
    if schedule is None:
        raise BadInput(f"--preset: expected {device} with --task {args.task}, got {args.preset}")
    args.device = "cuda" if device == "gpu" else "cpu"
    args.reference, args.commands = preset["reference"], preset["commands"]
    args.training = preset["training"] | schedule.get("training", {})
    args.schedule = SimpleNamespace(**schedule)
    args.seeds = args.seeds or schedule["seeds"]
    args.updates = args.updates or schedule["updates"]
    args.lr = args.lr or schedule["rates"]
    args.jobs = args.jobs or (min(cores(), 4) if args.device == "cpu" else 1)
    if args.warmup and (longest := max(args.warmup)) >= args.updates:
        raise BadInput(f"--warmup: expected less than {args.updates} updates, got {longest}")
    if args.tokens and args.task != "lm":
        raise BadInput("--tokens: expected none without --task lm")
    if args.tokens and args.tokens > (most := args.schedule.max_tokens):
        raise BadInput(f"--tokens: expected at most a batch of {most}, got {args.tokens}")
    if args.tokens:
        args.schedule.flags["tokens-per-sample"] = args.tokens
    args.systems = choose_systems(args, preset["systems"], preset.get("ablations", {}))
    args.rates = {name: rates_of(name, args) for name in args.systems}
    args.languages = languages_of(args)
    if args.task == "summ" and args.data is None:
        raise BadInput("--data: expected a folder with --task summ, got none")
    args.data = (args.data or ROOT / "data/bible-es-en").absolute()
    args.out = (args.out or ROOT / f"compare/{args.task}_{args.preset}").absolute()
    return args


def choose_systems(args, systems, ablations):
    """Return ``{name: flags}`` of the systems to compare, of those of the preset's file."""
    known = systems | ablations
    if sizes := getattr(args.schedule, "systems", None):  # of the preset's own
        known = {name: known[name] | flags for name, flags in sizes.items()}
    if args.task == "summ":  # ConvS2S takes two tokens fewer than what sources are cut to
        known = {name: flags for name, flags in known.items() if flags.get("arch") != "fconv"}
    chosen = args.systems or [name for name in known if name not in ablations]
    for name in chosen:
        if name not in known:
            raise BadInput(f"--systems: expected some of {', '.join(known)}, got {name!r}")
    return {name: known[name] for name in chosen}


def rates_of(name, args):
    """Return the rates that a system tries. Raises BadInput."""
    if args.lr != "best":
        return list(map(str, args.lr))
    if (best := getattr(args.schedule, "best", {}).get(name)) is None:
        raise BadInput(f"--lr: expected numbers for {name}, whose best rate is not known, got best")
    return [str(best)]


def languages_of(args):
    """Return the suffixes of the corpus's files, the target's last. Raises BadInput."""
    *source, target = LANGUAGES[args.task]
    if args.source_lang and not source:
        raise BadInput("--source-lang: expected none with --task lm")
    if args.task == "summ" and (args.source_lang or args.target_lang):
        raise BadInput("--source-lang, --target-lang: expected none with --task summ")
    return [args.source_lang or name for name in source] + [args.target_lang or target]
