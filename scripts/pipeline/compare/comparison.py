"""Train TaLK and its peers on the same text and compare them; see scripts/compare.sh --help."""

import argparse
import concurrent.futures
import contextlib
import fcntl
import hashlib
import importlib.metadata
import io
import json
import logging
import math
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.common.files import write_whole
from pipeline.common.paths import ROOT
from pipeline.data import corpus as prepare_corpus

# PyTorch and fairseq take seconds to import: what needs them does so where it runs.

VOCABULARY = 4000
REFERENCE = "talkconv"  # whose size the others are given, and which they are tested against
TOLERANCE = 0.05  # by which the largest may have more parameters than the smallest
BLOCK = {"cpu": 256, "gpu": 512}  # tokens that a language model sees at once
TITLES = {"mt": "sacreBLEU", "lm": "perplexity", "summ": "ROUGE-L"}
SCORES = {"mt": "bleu", "lm": "perplexity_per_token", "summ": "rouge_l"}
LEADS = (*range(3, 31), 40, 50, 75, 100)  # words that a lead baseline may have

DESCRIPTION = """\
Trains TaLK, Transformer, LightConv, DynamicConv and ConvS2S on the same text, cut into the same
pieces (a joint SentencePiece BPE of 4,000), with as many parameters (feed-forward layers are made
as wide as that takes), for the same updates on the same batches, with the same schedule and seeds.
Only the peak learning rate is each system's own: each is trained to the end at several, and the
best on the validation set counts; further seeds have that one. Averages the last checkpoints,
generates with the same beam, scores the test set, and measures speed and memory. Prints a table,
and writes it with all numbers and plots to the folder.

Quality comes from a number of updates, whatever else the machine does, and systems are trained side
by side. Speed is measured in a step of its own, in one process and in turn, on batches of this
text: a training step by fairseq's trainer, and generation by fairseq's generator, with the trained
models. The curves over time are validation losses over updates times measured seconds an update.

Beyond the paper are talkconv_plus (a convolution of 8 tokens before the windows, heads that begin
with windows of all lengths, and ReLU) and talkconv_plus_wide (the same with longer windows).

  --task mt     translation: sacreBLEU with a 95% interval, and p by sacreBLEU's paired bootstrap
                against TaLK (default)
  --task lm     language models of --target-lang: perplexity, beside that of a unigram
  --task summ   summaries: ROUGE, beside that of the first words of the source; needs --data, with
                {train,valid,test}.{source,target}

There is no ConvS2S for language models and summaries.

Run it again to go on where it stopped; add --systems or --seeds to the same folder to compare more.
"""
FOLDER = """\
the folder:
  compare.md, results.json           the table; every number, options, versions, machine
  validation.png, speed.png          validation over updates and time; the score over speed
  settings.json                      what all systems share; another run in the folder is refused
  corpus/, binarised/                the text, in pieces and as numbers
  systems.json                       options and parameters of each system, or why it cannot run
  SYSTEM/RATE/SEED/train.log, averaged.pt, generated/, averaged.txt (lm: perplexity)
  SYSTEM/RATE/SEED/checkpoints/      while it trains; diverged: there is nothing to average
  speeds.json                        seconds of each turn, tokens and sentences a second, memory

examples:
  scripts/compare.sh --preset cpu
  scripts/compare.sh --preset gpu --task lm --seeds 1
  scripts/compare.sh --task summ --data summaries --systems talkconv,transformer
"""


# --- What is compared ---


def both(options):
    """`options` for encoder and decoder: --@-layers is a flag of each."""
    return " ".join(options.replace("@", side) for side in ("encoder", "decoder"))


# One entry is one system: its options for fairseq-train. FFN is the width that is chosen so that
# it has as many parameters as REFERENCE (of ConvS2S, the channels of its convolutions). Kernels
# are as wide as TaLK's windows, and as many in a layer where fairseq can (its decoders have as many
# as attention has heads); ConvS2S has its own of 3, dense, in more layers.
_CPU = both("--@-layers 3 --@-embed-dim 256 --@-ffn-embed-dim FFN --@-attention-heads 4")
_CPU += " --share-all-embeddings --dropout 0.1 " + both("--@-normalize-before")
_CPU_KERNELS = "--encoder-kernel-size-list [3,7,15] --decoder-kernel-size-list [2,4,8]"
_CPU_KERNELS += " --encoder-attention-heads 16 --input-dropout 0"
_GPU = both("--@-ffn-embed-dim FFN") + " --share-all-embeddings --dropout 0.3"
_GPU += " --attention-dropout 0.1"
_GPU_KERNELS = "--encoder-kernel-size-list [3,7,15,31,31,31,31]"
_GPU_KERNELS += " --decoder-kernel-size-list [2,4,8,16,16,16]"
_CPU_LM = "--decoder-layers 4 --decoder-embed-dim 256 --decoder-input-dim 256"
_CPU_LM += " --decoder-output-dim 256 --decoder-ffn-embed-dim FFN --decoder-attention-heads 4"
_CPU_LM += " --decoder-normalize-before --share-decoder-input-output-embed --dropout 0"
_CPU_LM_KERNELS = "--decoder-kernel-size-list [2,4,8,16] --decoder-attention-heads 16"
_CPU_LM_KERNELS += " --input-dropout 0"
_GPU_LM = _CPU_LM.replace("256", "512").replace("-layers 4", "-layers 6")
_GPU_LM = _GPU_LM.replace("-heads 4", "-heads 8").replace("-dropout 0", "-dropout 0.3")
_GPU_LM += " --attention-dropout 0.1"
_GPU_LM_KERNELS = "--decoder-kernel-size-list [4,8,16,32,32,32] --input-dropout 0"
# fairseq's LightConv and DynamicConv have no norm after the last layer of a language model.
_NO_NORM = "--no-decoder-final-norm"
_LIGHT, _DYNAMIC = both("--@-conv-type lightweight"), both("--@-conv-type dynamic")
_LIGHT_LM, _DYNAMIC_LM = "--decoder-conv-type lightweight", "--decoder-conv-type dynamic"
SYSTEMS = {
    ("cpu", "seq2seq"): {
        "talkconv": f"--arch talkconv {_CPU} --offset-dropout 0 "
        + both("--@-max-left 1,3,7 --@-talk-heads 16"),
        "talkconv_plus": f"--arch talkconv_plus {_CPU} --offset-dropout 0 "
        + both("--@-max-left 1,3,7 --@-talk-heads 16"),
        "talkconv_plus_wide": f"--arch talkconv_plus {_CPU} --offset-dropout 0 "
        + both("--@-max-left 3,7,15 --@-talk-heads 16"),
        "transformer": f"--arch transformer {_CPU}",
        "lightconv": f"--arch lightconv {_CPU} {_CPU_KERNELS} {_LIGHT}",
        "dynamicconv": f"--arch lightconv {_CPU} {_CPU_KERNELS} {_DYNAMIC}",
        "convs2s": "--arch fconv --dropout 0.1 --share-input-output-embed "
        + both("--@-embed-dim 256")
        + " --decoder-out-embed-dim 256 --encoder-layers [(FFN,3)]*4 --decoder-layers [(FFN,3)]*3",
    },
    ("gpu", "seq2seq"): {
        "talkconv": f"--arch talkconv_iwslt_de_en {_GPU}",
        "talkconv_plus": f"--arch talkconv_plus_iwslt_de_en {_GPU}",
        "talkconv_plus_wide": f"--arch talkconv_plus_iwslt_de_en {_GPU}"
        " --encoder-max-left 3,7,15,31x4 --decoder-max-left 3,7,15,31x3",
        "transformer": f"--arch transformer_iwslt_de_en {_GPU}",
        "lightconv": f"--arch lightconv_iwslt_de_en {_GPU} {_GPU_KERNELS} {_LIGHT}",
        "dynamicconv": f"--arch lightconv_iwslt_de_en {_GPU} {_GPU_KERNELS} {_DYNAMIC}",
        "convs2s": "--arch fconv --dropout 0.2 --share-input-output-embed "
        + both("--@-embed-dim 512")
        + " --decoder-out-embed-dim 512 --encoder-layers [(FFN,3)]*7 --decoder-layers [(FFN,3)]*6",
    },
    ("cpu", "lm"): {
        "talkconv": f"--arch talkconv_lm {_CPU_LM} {_NO_NORM} --decoder-max-left 1,3,7,15"
        " --decoder-talk-heads 16 --offset-dropout 0",
        "talkconv_plus": f"--arch talkconv_plus_lm {_CPU_LM} {_NO_NORM} --decoder-max-left 1,3,7,15"
        " --decoder-talk-heads 16 --offset-dropout 0",
        "transformer": f"--arch transformer_lm {_CPU_LM} {_NO_NORM}",
        "lightconv": f"--arch lightconv_lm {_CPU_LM} {_CPU_LM_KERNELS} {_LIGHT_LM}",
        "dynamicconv": f"--arch lightconv_lm {_CPU_LM} {_CPU_LM_KERNELS} {_DYNAMIC_LM}",
    },
    ("gpu", "lm"): {
        "talkconv": f"--arch talkconv_lm {_GPU_LM} {_NO_NORM} --offset-dropout 0.1",
        "talkconv_plus": f"--arch talkconv_plus_lm {_GPU_LM} {_NO_NORM} --offset-dropout 0.1",
        "transformer": f"--arch transformer_lm {_GPU_LM} {_NO_NORM}",
        "lightconv": f"--arch lightconv_lm {_GPU_LM} {_GPU_LM_KERNELS} {_LIGHT_LM}",
        "dynamicconv": f"--arch lightconv_lm {_GPU_LM} {_GPU_LM_KERNELS} {_DYNAMIC_LM}",
    },
}
REFERENCE_FFN = {
    ("cpu", "seq2seq"): 512,
    ("gpu", "seq2seq"): 1024,
    ("cpu", "lm"): 1152,
    ("gpu", "lm"): 2048,
}


@dataclass(frozen=True)
class Schedule:
    """How all systems of a preset are trained, and over what speed is measured."""

    updates: int
    seeds: int
    rates: tuple  # peak learning rates that each system tries
    warmup: int
    max_tokens: int  # of a batch
    checkpoints: int  # and validations of a run
    averaged: int  # of the last checkpoints
    batches: int  # of a turn of the speed measurement in training
    generated: int  # likewise in generation
    source: int = 1024  # tokens of a source that may be read; of summaries, where it is cut


LOW, HIGH = ("5e-4", "1e-3", "2e-3"), ("1e-3", "2e-3", "4e-3")
# A task's own schedule, or else that of its kind.
SCHEDULES = {
    ("cpu", "seq2seq"): Schedule(1600, 1, HIGH, 400, 800, 20, 3, 20, 8),
    ("cpu", "summ"): Schedule(2000, 1, ("1e-3", "2e-3"), 300, 2000, 20, 5, 20, 2, source=96),
    ("gpu", "seq2seq"): Schedule(2500, 3, LOW, 500, 8000, 25, 5, 40, 8),
    ("gpu", "summ"): Schedule(2500, 3, LOW, 500, 8000, 25, 5, 40, 8, source=400),
    ("cpu", "lm"): Schedule(1200, 1, ("2e-3", "4e-3", "8e-3"), 200, 1024, 20, 3, 20, 4),
    ("gpu", "lm"): Schedule(2500, 3, HIGH, 400, 8192, 25, 5, 40, 2),
}


class BadInput(Exception):
    """Something that the caller can mend; the message says what."""


class Failed(Exception):
    """A command of fairseq failed; the message has the end of its log."""


def kind_of(task):
    """Which models and schedule a task has."""
    return "lm" if task == "lm" else "seq2seq"


def parse(arguments=None):
    """The options, with what depends on others filled in. Raises BadInput."""
    parser = argparse.ArgumentParser(
        prog="scripts/compare.sh",
        description=DESCRIPTION,
        epilog=FOLDER,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--preset", choices=("cpu", "gpu"), default="cpu",
        help="cpu: small models, an hour to two on two cores; gpu: models of IWSLT's size and "
        "three seeds on one GPU (default: cpu)")  # fmt: skip
    add("--task", choices=TITLES, default="mt", help="see above (default: mt)")
    add("--data", type=Path, help="another corpus: {train,valid,test}.LANG, one sentence a line, "
        "also with .gz (default: data/bible-es-en)")  # fmt: skip
    add("--source-lang", metavar="NAME", help="how its source files end (default: es)")
    add("--target-lang", metavar="NAME", help="how its target files end (default: en)")
    add("--out", type=Path, help="folder for everything (default: compare/TASK_PRESET)")
    add("--systems", metavar="A,B", help="which to compare (default: all)")
    add("--seeds", type=int, metavar="N",
        help="runs of each system, with seeds 1 to N (default: 1; gpu: 3)")  # fmt: skip
    add("--updates", type=int, metavar="N",
        help="of each run (default: 1,600; lm: 1,200; summ: 2,000; gpu: 2,500)")  # fmt: skip
    add("--lr", metavar="A,B", help="peak learning rates to try (default: the preset's)")
    add("--jobs", type=int, metavar="N", help="trainings side by side (default: one per core, at "
        "most 4; gpu: 1)")  # fmt: skip
    add("--turns", type=int, metavar="N", default=5,
        help="turns of the speed measurement (default: 5)")  # fmt: skip
    add("--restart", action="store_true", help="throw away what an earlier comparison left there")
    args = parser.parse_args(arguments)

    args.kind = kind_of(args.task)
    own = args.preset, args.task
    args.schedule = SCHEDULES[own if own in SCHEDULES else (args.preset, args.kind)]
    affinity = getattr(os, "sched_getaffinity", None)  # of Linux alone
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    defaults = {"jobs": min(cores, 4) if args.preset == "cpu" else 1, **vars(args.schedule)}
    for name in ("seeds", "updates", "turns", "jobs"):
        if getattr(args, name) is None:
            setattr(args, name, defaults[name])
        if getattr(args, name) < 1:
            raise BadInput(f"--{name}: expected at least 1, got {getattr(args, name)}")
    args.threads = max(1, cores // args.jobs)
    args.rates = args.lr.split(",") if args.lr else list(args.schedule.rates)
    for rate in args.rates:
        try:
            valid = 0 < float(rate) < math.inf
        except ValueError:
            valid = False
        if not valid:
            raise BadInput(f"--lr: expected positive numbers, got {args.lr!r}")
    args.rates = list({float(rate): rate for rate in args.rates}.values())
    known = dict(SYSTEMS[args.preset, args.kind])
    if args.task == "summ":  # ConvS2S takes two tokens fewer than what sources are cut to
        known.pop("convs2s", None)
    args.systems = args.systems.split(",") if args.systems else list(known)
    for name in args.systems:
        if name not in known:
            raise BadInput(f"--systems: expected some of {', '.join(known)}, got {name!r}")
    args.systems = list(dict.fromkeys(args.systems))
    if args.task == "summ":
        if args.data is None:
            raise BadInput("--data: expected a folder with --task summ, got none")
        if args.source_lang or args.target_lang:
            raise BadInput("--source-lang, --target-lang: expected none with --task summ")
        args.languages = ["source", "target"]
    else:
        args.languages = [args.source_lang or "es", args.target_lang or "en"]
        if args.task == "lm":
            if args.source_lang:
                raise BadInput("--source-lang: expected none with --task lm")
            del args.languages[0]
    args.data = (args.data or ROOT / "data/bible-es-en").absolute()
    args.out = (args.out or ROOT / f"compare/{args.task}_{args.preset}").absolute()
    return args


def check_input(args):
    """The corpus, by its files. Raises BadInput for what cannot be used; makes nothing."""
    if args.out.exists() and not args.out.is_dir():
        raise BadInput(f"--out: expected a folder, got the file {args.out}")
    settings = args.out / "settings.json"
    if not settings.exists() and args.out.exists() and set(os.listdir(args.out)) - {"lock"}:
        raise BadInput(
            f"--out: {args.out} holds files that are not of a comparison; choose another folder"
        )
    try:
        corpus = prepare_corpus.read_corpus(args.data, args.languages)
    except ValueError as error:
        raise BadInput(str(error)) from None
    if args.preset == "gpu":
        import torch

        if not torch.cuda.is_available():
            raise BadInput("--preset: expected cpu on a machine without a GPU, got gpu")
    return corpus


# --- The options of fairseq ---


def data_options(args, data):
    """The task, and how its text is read and batched."""
    options = [str(data), "--user-dir", str(ROOT / "talk_fairseq")]
    if args.task == "lm":
        # A queue of batches that is open at the end aborts a run of a language model now and then.
        options += ["--task", "language_modeling", "--sample-break-mode", "none"]
        options += ["--tokens-per-sample", str(BLOCK[args.preset]), "--data-buffer-size", "0"]
    else:
        options += ["--source-lang", args.languages[0], "--target-lang", args.languages[1]]
        if args.task == "summ":
            options += ["--task", "talk_summarization"]
        options += ["--max-source-positions", str(args.schedule.source)]
        options += ["--max-target-positions", "1024"]
    return options + device_options(args)


def device_options(args):
    """Where to compute, and in what precision."""
    if args.preset == "gpu":
        return ["--fp16", "--num-workers", "2"]
    return ["--cpu", "--num-workers", "0"]


def training_options(args, data, system_options, rate=1):
    """The words after fairseq-train at a peak learning rate, without seed and --save-dir."""
    schedule, updates = args.schedule, args.updates
    interval = max(1, updates // schedule.checkpoints)
    if args.task == "lm":
        criterion = ["--criterion", "cross_entropy"]
    else:
        criterion = ["--criterion", "label_smoothed_cross_entropy", "--label-smoothing", "0.1"]
    return [
        *data_options(args, data), *system_options.split(), *criterion,
        "--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--clip-norm", "1.0",
        "--weight-decay", "1e-4" if args.preset == "gpu" else "0",
        "--lr", str(rate), "--lr-scheduler", "polynomial_decay",
        "--warmup-updates", str(min(schedule.warmup, max(1, updates // 4))),
        "--total-num-update", str(updates), "--max-update", str(updates),
        "--max-tokens", str(schedule.max_tokens),
        "--max-tokens-valid", str(4 * schedule.max_tokens),
        "--validate-interval", "1000000", "--validate-interval-updates", str(interval),
        "--save-interval", "1000000", "--save-interval-updates", str(interval),
        "--keep-interval-updates", str(schedule.averaged), "--no-epoch-checkpoints",
        "--log-format", "simple", "--log-interval", str(min(interval, 20)),
    ]  # fmt: skip


def generation_options(args):
    """The beam search, as keys of fairseq's group `generation`."""
    if args.task == "summ":
        return {"beam": 5, "lenpen": 1, "max_len_b": 100, "no_repeat_ngram_size": 3}
    return {"beam": 5, "lenpen": 1}


# --- Models of the same size ---


def with_width(options, width):
    """The options of a system with a number in place of FFN."""
    return re.sub(r"\bFFN\b", str(width), options)


def parse_words(words):
    """The words after fairseq-train as fairseq's Namespace. Raises ValueError with its message."""
    import talk_fairseq  # noqa: F401 (mends fairseq, and registers the archs)

    # isort: split
    from fairseq import options
    from fairseq.models import ARCH_MODEL_REGISTRY

    logging.getLogger("fairseq").setLevel(logging.WARNING)
    arch = words[words.index("--arch") + 1]
    if arch not in ARCH_MODEL_REGISTRY:
        raise ValueError(f"--arch: expected one that fairseq knows, got {arch}")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return options.parse_args_and_arch(options.get_training_parser(), words)
    except SystemExit:
        raise ValueError(said.getvalue().strip().rpartition("\n")[2]) from None


def configure(words):
    """``(config, task)`` of the words after fairseq-train. Raises ValueError with its message."""
    from fairseq import tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    cfg = convert_namespace_to_omegaconf(parse_words(words))
    return cfg, tasks.setup_task(cfg.task)


def build_model(options, task):
    """The model on the default device; what fairseq prints of CUDA extensions is left out."""
    with contextlib.redirect_stdout(io.StringIO()):
        return task.build_model(options)


def count_parameters(words):
    """The parameters of a model, which is not held in memory."""
    import torch
    from fairseq import tasks

    options = parse_words(words)  # which do for a model, without the second that a config takes
    with torch.device("meta"):
        model = build_model(options, tasks.setup_task(options))
    return sum(parameter.numel() for parameter in model.parameters())


def fit(args, data, name, target):
    """``(options, parameters)`` of the system `name`, with the FFN that comes closest to `target`.

    Widths are multiples of 8. Raises ValueError if that is not within the tolerance.
    """
    template = SYSTEMS[args.preset, args.kind][name]

    def count(width):
        return count_parameters(training_options(args, data, with_width(template, width)))

    # The number is a polynomial of the width, of degree 1, or 2 between two such layers.
    sampled = (8, 512, 1024)
    polynomial = np.polyfit(sampled, [count(width) for width in sampled], 2)
    width = min(range(8, 1 << 13, 8), key=lambda width: abs(np.polyval(polynomial, width) - target))
    parameters = count(width)
    if not 1 / (1 + TOLERANCE / 2) <= parameters / target <= 1 + TOLERANCE / 2:
        raise ValueError(
            f"parameters: expected {target:,} within {TOLERANCE / 2:.1%}, got {parameters:,}"
        )
    return with_width(template, width), parameters


def reference_size(args, data):
    """The parameters that all systems are to have."""
    key = args.preset, args.kind
    options = with_width(SYSTEMS[key][REFERENCE], REFERENCE_FFN[key])
    return count_parameters(training_options(args, data, options))


def try_step(words, device):
    """One forward and backward pass over a few sentences; raises what stops it."""
    cfg, task = configure(words)
    task.load_dataset(cfg.dataset.valid_subset)
    dataset = task.dataset(cfg.dataset.valid_subset)
    model, criterion = build_model(cfg.model, task), task.build_criterion(cfg.criterion)
    batch = dataset.collater([dataset[i] for i in range(min(4, len(dataset)))])
    if device == "gpu":
        from fairseq import utils

        model, batch = model.cuda().half(), utils.move_to_cuda(batch)
    criterion(model, batch)[0].backward()


# --- A run of the command ---


def show(text=""):
    print(text + "\n", end="", flush=True)  # in one piece, beside other threads


def write_json(path, value):
    write_whole(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def remove(path):
    """Remove a file or folder that may not be there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class Comparison:
    """The steps of a comparison in its folder, each done once."""

    def __init__(self, args, corpus):
        self.args, self.out = args, args.out
        self.corpus, self.data = self.out / "corpus", self.out / "binarised"
        runs = len(args.rates) + 2 * args.seeds - 1  # and their evaluations
        self.step, self.steps = 0, 4 + runs * len(args.systems)
        self.counting = threading.Lock()  # of the steps
        self.stopped, self.running = False, set()  # commands, to be stopped together
        self.systems = {}  # of systems.json
        self.rates = {}  # {system: {"chosen": rate, "validation": {rate: loss}}}
        self.failures = {}  # {(system, seed): why}
        self.open_folder(corpus)

    # The folder

    def open_folder(self, corpus):
        """Take hold of the folder. Raises BadInput if it is of other settings or in use."""
        args = self.args
        text = "\0".join(f"{name}\n" + "\n".join(lines) for name, lines in corpus.items())
        settings = {
            "task": args.task,
            "preset": args.preset,
            "data": str(args.data),
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "languages": args.languages,
            "updates": args.updates,
            "rates": args.rates,
            "vocabulary": VOCABULARY,
            "training": training_options(args, "DATA", "SYSTEM", "RATE"),
            "averaged": args.schedule.averaged,
            "generation": {} if args.task == "lm" else generation_options(args),
            "reference": with_width(
                SYSTEMS[args.preset, args.kind][REFERENCE], REFERENCE_FFN[args.preset, args.kind]
            ),
            "systems": {name: SYSTEMS[args.preset, args.kind][name] for name in args.systems},
        }
        path = self.out / "settings.json"
        if path.exists() and not args.restart:
            check_settings(path, settings, args)
        self.out.mkdir(parents=True, exist_ok=True)
        self.lock = open(self.out / "lock", "a")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadInput(
                f"--out: another comparison, or a training of one that was killed, is running in "
                f"{self.out}; wait for it or choose another folder"
            ) from None
        if args.restart:
            for made in self.everything():
                remove(made)
        write_json(path, settings)

    def everything(self):
        """What a comparison makes in its folder, but for the lock."""
        names = {name for systems in SYSTEMS.values() for name in systems}
        names |= {"corpus", "binarised", "systems.json", "speeds.json", "results.json"}
        names |= {"compare.md", "validation.png", "speed.png", "prepare.log"}
        yield from (self.out / (name + end) for name in sorted(names) for end in ("", ".partial"))
        yield self.out / "settings.json"

    def run_folder(self, name, seed, rate=None):
        """Of a run at a peak learning rate, by default the system's chosen one."""
        return self.out / name / (rate or self.rates[name]["chosen"]) / str(seed)

    def able(self):
        """The systems that can run."""
        return [name for name in self.args.systems if "error" not in self.systems[name]]

    def runs(self):
        """``(system, seed)`` of those, seeds first."""
        return [(name, seed) for seed in range(1, self.args.seeds + 1) for name in self.able()]

    # Steps

    def once(self, title, made, make):
        """Run ``make(partial)`` unless `made` is there; it gets its name when it is whole."""
        with self.counting:
            self.step += 1
            step = self.step
        if made.exists():
            return
        show(f"\n== {step} of {self.steps}: {title}")
        partial = made.with_name(made.name + ".partial")
        remove(partial)
        made.parent.mkdir(parents=True, exist_ok=True)
        make(partial)
        partial.rename(made)

    def run(self, command, log, watch=None):
        """Run a command of this environment; what it says is appended to the file `log`.

        `watch` is called with each line. Raises Failed.
        """
        environment = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1"}
        if self.args.preset == "cpu":
            # Matrix products in bfloat16 on processors that have them in hardware.
            environment["TALK_MATMUL_PRECISION"] = "medium"
            environment.setdefault("OMP_NUM_THREADS", str(self.args.threads))
        log.parent.mkdir(parents=True, exist_ok=True)
        # A command that outlives a killed comparison holds the folder's lock until it ends.
        with open(log, "a", encoding="utf-8") as file, subprocess.Popen(
            [str(word) for word in command],
            cwd=ROOT, env=environment, pass_fds=[self.lock.fileno()],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        ) as process:  # fmt: skip
            self.running.add(process)
            try:
                if self.stopped:  # while it started
                    process.terminate()
                for line in process.stdout:
                    file.write(line)
                    file.flush()
                    if watch:
                        watch(line)
            except BaseException:
                process.terminate()
                raise
            finally:
                self.running.discard(process)
        if process.returncode:
            tail = log.read_text(encoding="utf-8").splitlines()[-15:]
            signalled = f"was killed by signal {-process.returncode}"
            how = signalled if process.returncode < 0 else "failed"
            name = Path(command[0]).name
            raise Failed(f"{name} {how}; {log} ends with\n" + "\n".join(tail))

    def prepare(self):
        """Plain text, a SentencePiece model, the pieces, and their numbers."""
        args, languages = self.args, self.args.languages
        target = ["--target-lang", languages[1]] if len(languages) == 2 else []
        sides = ["--source-lang", languages[0], *target]
        # The task of summaries cuts sources anyway.
        cut_source = ["--cut-source", prepare_corpus.LONGEST] if args.task == "summ" else []

        def cut(partial):
            self.run(
                [sys.executable, ROOT / "scripts/prepare_corpus.py", "--data", args.data, *sides,
                 *cut_source, "--vocabulary", VOCABULARY, "--output", partial],
                self.out / "prepare.log",
            )  # fmt: skip

        def binarise(partial):
            end = "" if target else f".{languages[0]}"
            pieces = self.corpus / "pieces"
            prefixes = [
                word
                for split in prepare_corpus.SPLITS
                for word in (f"--{split}pref", f"{pieces / split}{end}")
            ]
            form = [*sides, "--joined-dictionary"] if target else ["--only-source"]
            self.run(
                [command("fairseq-preprocess"), *form, *prefixes, "--workers", "2",
                 "--destdir", partial],
                self.out / "prepare.log",
            )  # fmt: skip

        self.once("cutting the corpus into pieces", self.corpus, cut)
        self.once("binarising", self.data, binarise)

    def check_systems(self):
        """Options and parameters of each system, in systems.json, after a step of each.

        One that cannot run is tried again the next time. Raises ValueError if sizes differ.
        """
        path = self.out / "systems.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        known = {name: system for name, system in known.items() if "error" not in system}
        self.step += 1
        missing = [name for name in self.args.systems if name not in known]
        if missing:
            show(f"\n== {self.step} of {self.steps}: fitting sizes, and a step of each system")
            target = reference_size(self.args, self.data)
        for name in missing:
            try:
                options, parameters = fit(self.args, self.data, name, target)
                try_step(training_options(self.args, self.data, options), self.args.preset)
                known[name] = {"options": options, "parameters": parameters}
                show(f"{name}: {parameters:,} parameters")
            except Exception as error:  # whatever it is, the others can be compared
                why = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
                known[name] = {"error": why}
                show(f"{name}: cannot run: {why}")
        check_sizes({n: s["parameters"] for n, s in known.items() if "error" not in s})
        write_json(path, known)
        self.systems = {name: known[name] for name in self.args.systems}

    def side_by_side(self, work, items):
        """``work(*item)`` of each item, some at a time; what stops one stops all."""

        def unless_stopped(*item):
            if self.stopped:
                return
            try:
                work(*item)
            except BaseException:
                self.stopped = True
                raise

        pool = concurrent.futures.ThreadPoolExecutor(self.args.jobs)
        try:
            futures = [pool.submit(unless_stopped, *item) for item in items]
            ended = concurrent.futures.wait(futures, return_when="FIRST_EXCEPTION").done
            for future in ended:
                future.result()
        except BaseException:
            self.stopped = True
            for process in list(self.running):
                process.terminate()
            raise
        finally:
            pool.shutdown()

    def train(self, name, seed, rate):
        """The average of the last checkpoints of a run. Goes on from its last checkpoint.

        A run that diverges is out, not to be tried again; `diverged` in its folder says so.
        """
        folder, title = self.run_folder(name, seed, rate), f"{name}, seed {seed}, at {rate}"
        checkpoints, log = folder / "checkpoints", folder / "train.log"
        made, diverged = folder / "averaged.pt", folder / "diverged"
        words = training_options(self.args, self.data, self.systems[name]["options"], rate)

        def make(partial):
            if not (checkpoints / "done").exists():
                newest = numbered(checkpoints)[-1:]
                if not newest:  # nothing to go on from
                    remove(checkpoints)
                    remove(log)
                restore = ["--restore-file", newest[0]] if newest else []
                self.run(
                    [command("fairseq-train"), *words, "--seed", seed,
                     "--save-dir", checkpoints, *restore],
                    log,
                    watch=Progress(self.args.updates, "" if self.args.jobs == 1 else f"{title}: "),
                )  # fmt: skip
                (checkpoints / "done").touch()
            average(last_checkpoints(checkpoints, self.args), partial)

        try:
            self.once(f"training {title}", diverged if diverged.exists() else made, make)
        except Failed as error:
            if "FloatingPointError" not in str(error):  # as fairseq stops for NaN
                self.fail(name, seed, error, title)
                return
            show(f"{title}: diverged")
            diverged.touch()
        remove(checkpoints)

    def choose_rates(self):
        """Of each system, that of its first seed's runs which has the best validation loss."""
        for name in self.able():
            losses = {}
            for rate in self.args.rates:
                trained = (self.run_folder(name, 1, rate) / "averaged.pt").exists()
                loss = self.validation(name, 1, rate)[-1]["loss"] if trained else math.nan
                losses[rate] = loss if math.isfinite(loss) else None
            trained = {rate: loss for rate, loss in losses.items() if loss is not None}
            if trained:
                chosen = min(trained, key=trained.get)
                self.rates[name] = {"chosen": chosen, "validation": losses}
            else:
                self.failures.setdefault((name, 1), "diverged at every learning rate")

    def fail(self, name, seed, error, title):
        """Note why there is no run, so that the others go on. Raises `error` if all are stopped."""
        if self.stopped:
            raise error
        show(f"compare.sh: {title}: {error}")
        self.failures[name, seed] = str(error).partition(";")[0]

    def evaluate(self, name, seed):
        """What the model makes of the test set, with the log of fairseq."""
        folder = self.run_folder(name, seed)
        if (name, seed) in self.failures or (folder / "diverged").exists():
            return
        if self.args.task == "lm":
            made = folder / "averaged.txt"

            def make(partial):
                self.run(
                    [command("fairseq-eval-lm"), *data_options(self.args, self.data),
                     "--path", folder / "averaged.pt", "--gen-subset", "test",
                     "--max-tokens", 4 * self.args.schedule.max_tokens],
                    partial,
                )  # fmt: skip
        else:
            made = folder / "generated"
            search = [
                word
                for key, value in generation_options(self.args).items()
                for word in ("--" + key.replace("_", "-"), value)
            ]

            def make(partial):
                # fairseq-generate has its own say about positions, which are the checkpoint's.
                self.run(
                    [command("fairseq-generate"), *data_options(self.args, self.data),
                     "--path", folder / "averaged.pt", "--gen-subset", "test", *search,
                     "--remove-bpe", "sentencepiece", "--results-path", partial,
                     "--max-tokens", generation_tokens(self.args)],
                    folder / "generate.log",
                )  # fmt: skip

        title = f"{name}, seed {seed}"
        try:
            self.once(f"evaluating {title}", made, make)
        except Failed as error:
            self.fail(name, seed, error, title)

    def measure(self):
        """speeds.json, for the systems that have been trained."""
        path = self.out / "speeds.json"
        checkpoints = {}  # of the first seed that was trained
        for name, seed in self.runs():
            if not {(name, 1), (name, seed)} & self.failures.keys():
                checkpoints.setdefault(name, self.run_folder(name, seed) / "averaged.pt")
        wanted = {name: (self.args.turns, self.rates[name]["chosen"]) for name in checkpoints}
        if path.exists():
            there = read_json(path)
            turns = {
                name: (len(r["training"]["turns"]), r.get("rate")) for name, r in there.items()
            }
            if turns != wanted:
                path.unlink()  # ratios are of one measurement

        def make(partial):
            words = {
                name: training_options(
                    self.args, self.data, self.systems[name]["options"], self.rates[name]["chosen"]
                )
                for name in checkpoints
            }
            rows = measure_speeds(self.args, words, checkpoints)
            for name, row in rows.items():
                row["rate"] = self.rates[name]["chosen"]
            write_json(partial, rows)

        if not checkpoints:
            return {}
        try:
            self.once("measuring speed and memory, in turn", path, make)
        except Exception as error:  # the scores are not lost for it
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            show(f"compare.sh: speeds: {why}")
            self.failures["speeds", "any"] = why
            return {}
        return read_json(path)

    def go(self):
        """All of it; returns the results."""
        # fairseq and Hydra tell much of what they set up, and call much that is deprecated.
        logging.disable(logging.INFO)
        warnings.filterwarnings("ignore")
        self.prepare()
        self.check_systems()
        first = [(name, 1, rate) for name in self.able() for rate in self.args.rates]
        self.side_by_side(self.train, first)
        self.choose_rates()
        known = [run for run in self.runs() if (run[0], 1) not in self.failures]
        others = [(name, seed, self.rates[name]["chosen"]) for name, seed in known if seed > 1]
        self.side_by_side(self.train, others)
        self.side_by_side(self.evaluate, known)
        speeds = self.measure()
        return self.results(speeds)

    # Results

    def results(self, speeds):
        """Everything, as it is written to results.json."""
        args = self.args
        systems = {}
        for name in args.systems:
            row = systems[name] = {**self.systems[name], "seeds": {}}
            row["rates"] = self.rates.get(name)
            seeds = [seed for other, seed in self.runs() if other == name]
            for seed in seeds:
                if (name, seed) in self.failures:
                    row.setdefault("error", f"seed {seed}: {self.failures[name, seed]}")
                elif (name, 1) in self.failures:
                    pass
                elif (self.run_folder(name, seed) / "diverged").exists():
                    row.setdefault("diverged", []).append(seed)
                else:
                    row["seeds"][str(seed)] = {"validation": self.validation(name, seed)}
            row["speed"] = speeds.get(name)
        results = {
            "task": args.task,
            "preset": args.preset,
            "updates": args.updates,
            "settings": json.loads((self.out / "settings.json").read_text()),
            "versions": versions(),
            "machine": machine(args.preset),
            "systems": systems,
        }
        {"mt": score_translations, "lm": score_models, "summ": score_summaries}[args.task](
            self, results
        )
        for row in systems.values():
            scores = [seed[SCORES[args.task]] for seed in row["seeds"].values()]
            if scores:
                row["score"] = statistics.mean(scores)
        return results

    def validation(self, name, seed, rate=None):
        """``[{"updates", "loss", "ppl"}, …]`` of a run, as fairseq logged them."""
        from pipeline.common.logs import read_log

        entries = read_log(self.run_folder(name, seed, rate) / "train.log")["valid"]
        return [{key: entry[key] for key in ("updates", "loss", "ppl")} for entry in entries]


def check_settings(path, settings, args):
    """Raise BadInput, naming what differs, unless `path` holds these settings.

    Systems may come and go, but one that is there keeps its options.
    """
    before = {"systems": {}, **json.loads(path.read_text(encoding="utf-8"))}
    pairs = [(key, before.get(key), settings[key]) for key in settings if key != "systems"]
    pairs += [
        (name, before["systems"][name], template)
        for name, template in settings["systems"].items()
        if name in before["systems"]
    ]
    for key, old, new in pairs:
        if old != new:
            raise BadInput(
                f"--out: {args.out} holds a comparison with other settings ({key}: "
                f"{str(old)[:80]}, not {str(new)[:80]}); choose another folder, or --restart to "
                "replace it"
            )
    settings["systems"] = before["systems"] | settings["systems"]


def check_sizes(parameters):
    """Raise ValueError unless ``{name: parameters}`` are within the tolerance of each other."""
    if parameters and max(parameters.values()) > (1 + TOLERANCE) * min(parameters.values()):
        counts = ", ".join(f"{name} {count:,}" for name, count in parameters.items())
        raise ValueError(f"parameters: expected sizes within {TOLERANCE:.0%}, got {counts}")


def command(name):
    """The path of a command of this environment."""
    return Path(sys.executable).parent / name


def numbered(folder):
    """The checkpoints of a run that have a number of updates, the newest last."""
    return sorted(folder.glob("checkpoint_*_*.pt"), key=updates_of)


def updates_of(path):
    return int(path.stem.rpartition("_")[2])


def last_checkpoints(folder, args):
    """The checkpoints to average. The last update's has no number if it ends an epoch."""
    paths = numbered(folder)
    if not paths or updates_of(paths[-1]) != args.updates:
        paths.append(folder / "checkpoint_last.pt")
    return paths[-args.schedule.averaged :]


def average(paths, output):
    """Write the average of some checkpoints."""
    from pipeline.recipes import average as average_checkpoints

    average_checkpoints.save(average_checkpoints.average_checkpoints(paths), output)


class Progress:
    """Shows fairseq's log of a training as a line that is replaced, or one each tenth.

    The latter where it is not a terminal, and where `name` says that there are others beside it.
    """

    def __init__(self, updates, name=""):
        self.updates, self.name, self.told = updates, name, -1

    def __call__(self, line):
        match = re.search(r" loss=([\d.]+),.* ppl=([\d.]+),.* num_updates=(\d+)", line)
        if not match:
            return
        updates = int(match[3])
        text = f"{self.name}update {updates:,} of {self.updates:,}, "
        text += f"loss {match[1]}, perplexity {match[2]}"
        if sys.stdout.isatty() and not self.name:
            print(f"\r\033[K{text}", end="" if updates < self.updates else "\n", flush=True)
        elif 10 * updates // self.updates > self.told:
            self.told = 10 * updates // self.updates
            show(text)


# --- Speed ---


def generation_tokens(args):
    """The most tokens of a batch that is generated."""
    return 2 * args.schedule.max_tokens


def measure_speeds(args, words, checkpoints):
    """``{system: {"training_tokens_per_second": …, …}}`` of trained models, measured in turn.

    Args:
        words: {system: the words after fairseq-train}.
        checkpoints: {system: its averaged checkpoint}.
    """
    import torch

    from pipeline.benchmarks.harness import PeakMemory, training_speeds

    if args.preset == "cpu":
        torch.set_float32_matmul_precision("medium")
    device = "cuda" if args.preset == "gpu" else "cpu"
    trainers, generators, counts, peaks = {}, {}, {}, {}
    for name in words:
        trainers[name], generators[name] = build_measured(args, words[name], checkpoints[name])
    task = next(iter(trainers.values())).task
    batches = training_batches(args, task)
    samples = test_batches(args, task)

    def train(name, batch):
        trainers[name].train_step([batch], raise_oom=True)
        return batch["ntokens"]

    def generate(name, batch):
        return generators[name](batch)

    rows = {}
    for what, step, work in (("training", train, batches), ("generation", generate, samples)):
        for name in words:
            show(f"{what}: {name}, warming up")
            for batch in work:  # all, so that what is allocated once is there
                step(name, batch)
            with PeakMemory(device) as peak:
                counts[what, name] = sum(step(name, batch) for batch in work)
            peaks[what, name] = peak.bytes
        # Batch by batch in turn, as other work on the machine comes and goes within seconds.
        speeds = training_speeds(
            {
                (name, i): lambda step=step, name=name, batch=batch: step(name, batch)
                for i, batch in enumerate(work)
                for name in words
            },
            args.turns,
            report=lambda so_far, what=what: show(
                f"{what}: turn {len(next(iter(so_far.values())))} of {args.turns}"
            ),
        )
        for name in words:
            turns = [sum(turn) for turn in zip(*(speeds[name, i] for i in range(len(work))))]
            rows.setdefault(name, {})[what] = {
                "turns": turns,
                "seconds": statistics.median(turns),
                "tokens": counts[what, name],
                "memory": peaks[what, name],
            }
    sentences = sum(sample["id"].numel() for sample in samples)
    for row in rows.values():
        training, generation = row["training"], row["generation"]
        row["seconds_per_update"] = training["seconds"] / len(batches)
        row["training_tokens_per_second"] = training["tokens"] / training["seconds"]
        row["generated_sentences_per_second"] = sentences / generation["seconds"]
        row["generated_tokens_per_second"] = generation["tokens"] / generation["seconds"]
    return rows


def build_measured(args, words, checkpoint):
    """``(trainer, generate(batch))`` of a trained model; each has a copy of it."""
    from fairseq import utils
    from fairseq.dataclass.configs import GenerationConfig
    from fairseq.trainer import Trainer
    from omegaconf import OmegaConf

    from talk_fairseq.checkpoint_files import read_checkpoint

    cfg, task = configure(words)
    trained = read_checkpoint(checkpoint)["model"]
    model, copy = (build_model(cfg.model, task) for _ in range(2))
    for each in (model, copy):
        each.load_state_dict(trained, model_cfg=cfg.model)
    trainer = Trainer(cfg, task, model, task.build_criterion(cfg.criterion))
    search = GenerationConfig(**generation_options(args))
    if args.task == "lm":
        # Continuations of a forced length, as an end is seldom learnt.
        search = GenerationConfig(beam=5, min_len=64, max_len_b=64)
    copy.eval().prepare_for_inference_(
        OmegaConf.create({"generation": OmegaConf.structured(search)})
    )
    if args.preset == "gpu":
        copy.half().cuda()
    generator = task.build_generator([copy], search)

    def generate(sample):
        if args.preset == "gpu":
            sample = utils.move_to_cuda(sample)
        hypotheses = task.inference_step(generator, [copy], sample)
        return sum(len(beam[0]["tokens"]) for beam in hypotheses)

    return trainer, generate


def training_batches(args, task):
    """The first batches of training, the same for every system."""
    task.load_dataset("train")
    batches = task.get_batch_iterator(
        task.dataset("train"),
        max_tokens=args.schedule.max_tokens,
        # As fairseq-train, which leaves out what fills more than a batch.
        max_positions=None if args.task == "lm" else (args.schedule.max_tokens,) * 2,
        ignore_invalid_inputs=True,
        seed=1,
    ).next_epoch_itr(shuffle=True)
    return [batch for batch, _ in zip(batches, range(args.schedule.batches))]


def test_batches(args, task):
    """Batches of the test set, spread over the lengths; of a language model, beginnings."""
    task.load_dataset("test")
    batches = list(
        task.get_batch_iterator(
            task.dataset("test"), max_tokens=generation_tokens(args)
        ).next_epoch_itr(shuffle=False)
    )
    count = min(args.schedule.generated, len(batches))
    chosen = [batches[len(batches) * (2 * i + 1) // (2 * count)] for i in range(count)]
    if args.task == "lm":
        for batch in chosen:
            tokens = batch["net_input"]["src_tokens"][:, :16]
            words = task.target_dictionary
            tokens = tokens.masked_fill(tokens.eq(words.eos()), words.unk())  # none ends here
            lengths = tokens.new_full((len(tokens),), tokens.shape[1])
            batch["net_input"] = {"src_tokens": tokens, "src_lengths": lengths}
    return chosen


# --- Scores ---


def read_lines(path):
    """The lines of a text file."""
    return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")


def hypotheses_of(comparison, name, seed, count):
    """What was generated for the test set, in its order. Raises ValueError if one is missing."""
    from pipeline.recipes import rouge as score_rouge

    folder = comparison.run_folder(name, seed) / "generated"
    hypotheses, _ = score_rouge.read_hypotheses(folder)
    if len(hypotheses) != count:
        raise ValueError(f"{folder}: expected {count:,} hypotheses, got {len(hypotheses):,}")
    return hypotheses


def score_translations(comparison, results):
    """sacreBLEU of each run, with interval and p of the paired bootstrap of its seed."""
    from sacrebleu.metrics import BLEU
    from sacrebleu.significance import PairedTest

    references = read_lines(comparison.corpus / f"test.{comparison.args.languages[1]}")
    results["test"] = {"sentences": len(references)}
    systems = results["systems"]
    for seed in range(1, comparison.args.seeds + 1):
        names = [name for name, row in systems.items() if str(seed) in row["seeds"]]
        names.sort(key=lambda name: name != REFERENCE)  # which the test takes first
        if not names:
            continue
        named = [(name, hypotheses_of(comparison, name, seed, len(references))) for name in names]
        bleu = BLEU(references=[references])
        signatures, scores = PairedTest(named, {"BLEU": bleu}, None, test_type="bs")()
        results["signature"] = str(signatures["BLEU"])
        tested = names[0] == REFERENCE
        if tested:
            results["baseline"] = REFERENCE
        for name, result in zip(scores["System"], scores["BLEU"]):
            systems[name]["seeds"][str(seed)].update(
                bleu=result.score,
                interval=[result.mean - result.ci, result.mean + result.ci],
                p=result.p_value if tested else None,
            )
    for row in systems.values():
        seeds = list(row["seeds"].values())
        if seeds:
            row["interval"] = [statistics.mean(s["interval"][i] for s in seeds) for i in (0, 1)]
            tested = [s["p"] for s in seeds if s["p"] is not None]
            row["p"] = max(tested, default=None)


def score_models(comparison, results):
    """Perplexity per token and per word of each run, and of the unigram."""
    from pipeline.quickstart import perplexities as lm

    language = comparison.args.languages[0]
    train, test = (
        lm.read_tokens(comparison.corpus / "pieces" / f"{split}.{language}")
        for split in ("train", "test")
    )
    sentences = test.count(lm.END)
    words = len((comparison.corpus / f"test.{language}").read_text(encoding="utf-8").split())
    results["test"] = {"sentences": sentences, "words": words, "tokens": len(test)}

    def perplexities(loss):
        by_word = 2 ** (loss * len(test) / (words + sentences))
        return {"perplexity_per_token": 2**loss, "perplexity_per_word": by_word}

    for name, row in results["systems"].items():
        for seed, scores in row["seeds"].items():
            checkpoint = comparison.run_folder(name, seed) / "averaged.pt"
            scores.update(perplexities(lm.read_model(checkpoint, len(test))[1]))
        if row["seeds"]:
            row["perplexity_per_word"] = statistics.mean(
                scores["perplexity_per_word"] for scores in row["seeds"].values()
            )
    results["unigram"] = perplexities(lm.unigram_loss(train, test))


def score_summaries(comparison, results):
    """ROUGE of each run, and of the first words of the sources."""
    from talk_fairseq.rouge import KINDS, rouge, version

    text = {
        (split, side): read_lines(comparison.corpus / f"{split}.{side}")
        for split in ("valid", "test")
        for side in ("source", "target")
    }
    references = text["test", "target"]
    results["test"] = {"summaries": len(references)}
    results["signature"] = f"rouge-score {version()}, F-measure, stemming"
    for name, row in results["systems"].items():
        for seed, scores in row["seeds"].items():
            scores.update(rouge(hypotheses_of(comparison, name, seed, len(references)), references))
        if row["seeds"]:
            for kind in KINDS:
                row[kind] = statistics.mean(scores[kind] for scores in row["seeds"].values())

    def lead(split, words):
        sources = text[split, "source"]
        return [" ".join(source.split()[:words]) for source in sources]

    validation = {n: rouge(lead("valid", n), text["valid", "target"])["rouge_l"] for n in LEADS}
    best = max(validation, key=validation.get)
    results["lead"] = {"words": best, **rouge(lead("test", best), references)}


def versions():
    """Of what the numbers depend on."""
    names = ["torch", "numpy", "sacrebleu", "sentencepiece", "rouge-score"]
    names += ["ve-fairseq", "fairseq-fixed", "cupy-cuda12x", "cupy-cuda13x"]
    found = {"python": platform.python_version()}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def machine(preset):
    """The processor, or the GPU, in words."""
    import torch

    if preset == "gpu":
        return torch.cuda.get_device_name()
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        name = re.search(r"model name\s*: (.*)", text)[1] if "model name" in text else name
    return f"{name}, {torch.get_num_threads()} threads"


# --- Output ---


def table(results):
    """The lines of the table, in Markdown, and what it stands on."""
    task, systems = results["task"], results["systems"]
    header = ["system", "parameters", *score_header(task)]
    header += ["training tokens/s", "TaLK is", f"generation {unit(task)}/s", "TaLK is", "peak MiB"]
    base = systems.get(REFERENCE, {}).get("speed")
    lines = [header, ["---"] + ["---:"] * (len(header) - 1)]
    for name, row in systems.items():
        if "score" not in row or "error" in row:
            lines.append([name, row.get("error", "not trained")] + [""] * (len(header) - 2))
            continue
        cells = [name, f"{row['parameters']:,}", *score_cells(task, row)]
        speed = row["speed"]
        for key, part in (
            ("training_tokens_per_second", "training"),
            ("generated_sentences_per_second", "generation"),
        ):
            if speed is None:
                cells += ["not measured", ""]
                continue
            cells.append(f"{speed[key]:,.0f}" if part == "training" else f"{speed[key]:,.2f}")
            ratio = faster(base, speed, part) if base and name != REFERENCE else None
            cells.append("" if ratio is None else f"{ratio:.2f}x")
        memory = speed and speed["training"]["memory"]
        cells.append("" if memory is None else f"{memory / 2**20:,.0f}")
        lines.append(cells)
    for name, cells in baseline_rows(results):
        cells = [name, "", *cells]
        lines.append(cells + [""] * (len(header) - len(cells)))
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for number, (first, *others) in enumerate(lines):
        if number == 1:
            cells = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
        else:
            cells = [first.ljust(widths[0])]
            cells += [cell.rjust(width) for cell, width in zip(others, widths[1:])]
        yield "| " + " | ".join(cells) + " |"
    yield ""
    yield from notes(results)


def faster(base, other, part):
    """How many times faster the first is: the median over the turns."""
    pairs = zip(base[part]["turns"], other[part]["turns"])
    return statistics.median(theirs / its for its, theirs in pairs)


def unit(task):
    """What a generation speed counts."""
    return "continuations" if task == "lm" else "sentences"


def score_header(task):
    """The columns of the scores."""
    return {
        "mt": ["sacreBLEU", "95% interval", "p"],
        "lm": ["ppl/token", "ppl/word"],
        "summ": ["ROUGE-1", "ROUGE-2", "ROUGE-L"],
    }[task]


def score_cells(task, row):
    """The cells of the scores of a system."""
    seeds = [seed[SCORES[task]] for seed in row["seeds"].values()]
    spread = f" ± {statistics.stdev(seeds):.2f}" if len(seeds) > 1 else ""
    if task == "mt":
        low, high = row["interval"]
        p = "" if row["p"] is None else f"{row['p']:.3f}"
        return [f"{row['score']:.2f}{spread}", f"{low:.2f} to {high:.2f}", p]
    if task == "lm":
        return [f"{row['score']:,.2f}{spread}", f"{row['perplexity_per_word']:,.1f}"]
    return [f"{row[kind]:.2f}" for kind in ("rouge_1", "rouge_2")] + [f"{row['score']:.2f}{spread}"]


def baseline_rows(results):
    """``(name, cells of the scores)`` of what needs no training."""
    if "unigram" in results:
        unigram = results["unigram"]
        tokens, words = unigram["perplexity_per_token"], unigram["perplexity_per_word"]
        yield "unigram", [f"{tokens:,.2f}", f"{words:,.1f}"]
    if "lead" in results:
        lead = results["lead"]
        cells = [f"{lead[kind]:.2f}" for kind in ("rouge_1", "rouge_2", "rouge_l")]
        yield f"first {lead['words']} words", cells


def notes(results):
    """What the numbers of the table are."""
    count = max((len(row["seeds"]) for row in results["systems"].values()), default=0)
    test = ", ".join(f"{value:,} {name}" for name, value in results["test"].items())
    seeds = "1 seed" if count == 1 else f"{count} seeds (means ± standard deviations)"
    yield f"{results['updates']:,} updates, {seeds}; test set: {test}; {results['machine']}."
    if results["task"] == "mt":
        yield f"sacreBLEU {results['signature']}"
        if results.get("baseline"):
            yield (
                f"p: paired bootstrap against {results['baseline']}"
                + ("" if count == 1 else ", the largest of the seeds'; intervals are their means")
                + "."
            )
    elif results["task"] == "summ":
        yield f"{results['signature']}."
    else:
        yield "Tokens are pieces and ends of lines; words are separated by spaces; ends are words."
        yield "Continuations: of 64 tokens, of which the test set gives 16; beam 5."
    rates = {name: row["rates"] for name, row in results["systems"].items() if row.get("rates")}
    if rates:
        tried = list(next(iter(rates.values()))["validation"])
        chosen = ", ".join(f"{name} {row['chosen']}" for name, row in rates.items())
        if len(tried) == 1:
            yield f"Peak learning rate: {tried[0]}."
        else:
            yield f"Peak learning rates, of {', '.join(tried)} the best in validation: {chosen}."
        for name, row in rates.items():
            diverged = [rate for rate, loss in row["validation"].items() if loss is None]
            if diverged:
                yield f"{name} diverged at {', '.join(diverged)}."
    for name, row in results["systems"].items():
        for seed in row.get("diverged", []):
            yield f"{name} diverged with seed {seed}, which does not count."
    yield "Speeds: medians of turns in one process; peak memory: of a training step."
    if results["preset"] == "cpu":
        yield "Float32; matrix products in bfloat16 where the processor has it."
    else:
        yield "Float16."


def validation_runs(results):
    """The runs as plot_training.py draws them: validation, at the measured seconds an update."""
    runs = {}
    for name, row in results["systems"].items():
        if "score" in row and row["speed"]:
            pace = row["speed"]["seconds_per_update"]
            runs[name] = [
                {"train": [], "valid": [{**e, "seconds": e["updates"] * pace} for e in validation]}
                for validation in (seed["validation"] for seed in row["seeds"].values())
            ]
    return runs


def validation_figure(results):
    """Validation over updates and over time, a line for each seed."""
    from pipeline.plots.curves import curves_figure

    figure = curves_figure(validation_runs(results), ["loss", "ppl"])
    for axis in figure.axes:
        axis.set_ylabel(axis.get_ylabel() and f"validation {axis.get_ylabel()}")
        if axis.get_xlabel().startswith("wall-clock"):
            unit = axis.get_xlabel().rpartition(" ")[2]
            axis.set_xlabel(f"{unit}: updates x measured seconds an update")
    return figure


def speed_figure(results):
    """The score of each system over its speed in training and in generation."""
    from matplotlib.figure import Figure

    from pipeline.plots.figures import MARKERS, colours

    task, systems = results["task"], results["systems"]
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for number, ((name, row), colour) in enumerate(zip(systems.items(), colours(len(systems)))):
        if "score" not in row or not row["speed"]:
            continue
        for axis, speed in zip(axes, ("training_tokens", "generated_sentences")):
            axis.plot(
                row["speed"][f"{speed}_per_second"], row["score"], linestyle="none", label=name,
                color=colour, marker=MARKERS[number % len(MARKERS)], markersize=10,
            )  # fmt: skip
    lower = " (lower is better)" if task == "lm" else ""
    axes[0].set(xlabel="training tokens a second", ylabel=TITLES[task] + lower)
    axes[1].set(xlabel=f"generated {unit(task)} a second")
    for axis in axes:
        axis.margins(0.15)
        axis.grid(alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    return figure


def write_results(out, results):
    """Print the table; write it with all numbers and the plots to the folder `out`."""
    lines = "\n".join(table(results)) + "\n"
    write_json(out / "results.json", results)
    write_whole(out / "compare.md", lines)
    figures = {"validation.png": validation_figure, "speed.png": speed_figure}
    measured = any("score" in row and row["speed"] for row in results["systems"].values())
    for name, figure in figures.items():
        if measured:
            from pipeline.plots.figures import save_figure

            save_figure(figure(results), out / name)
        else:
            remove(out / name)  # of an earlier run
    show(f"\n{lines}\nEverything is in {out}")


def main(arguments=None):
    """Run the command; status 2 for bad input, 1 where something failed."""
    try:
        args = parse(arguments)
        if arguments is None:  # this process is the command's own
            # fairseq takes every GPU that it sees.
            seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
            os.environ["CUDA_VISIBLE_DEVICES"] = seen if args.preset == "gpu" else ""
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # it stops what it started
        comparison = Comparison(args, check_input(args))
    except BadInput as error:
        print(f"compare.sh: {error}", file=sys.stderr)
        return 2
    try:
        results = comparison.go()
        write_results(args.out, results)
    except (Failed, OSError, ValueError) as error:
        print(f"compare.sh: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("compare.sh: interrupted; run it again to go on", file=sys.stderr)
        return 130
    finally:
        comparison.lock.close()
    if comparison.failures:
        failed = ", ".join(f"{name} (seed {seed})" for name, seed in comparison.failures)
        print(f"compare.sh: failed: {failed}", file=sys.stderr)
        return 1
    return 0
