"""Train TaLK and its peers on the same text and compare them; see scripts/compare.sh --help."""

import contextlib
import glob
import hashlib
import logging
import math
import signal
import threading
import warnings
from pathlib import Path

from pipeline.common.command import BadInput, Failed, at_least, parser, run
from pipeline.common.fairseq import (
    BatchBar,
    Commands,
    TrainingBar,
    binarising,
    last_checkpoints,
    numbered,
    set_environment,
)
from pipeline.common.files import read_json, remove, write_json
from pipeline.common.folder import Folder, show
from pipeline.common.logs import read_log
from pipeline.common.machine import cores, machine, versions
from pipeline.common.paths import ROOT
from pipeline.common.systems import read_preset, with_width
from pipeline.compare.flags import evaluation_words, search, training_flags, training_words
from pipeline.compare.report import TITLES, write_results
from pipeline.compare.scores import score
from pipeline.compare.sizes import check_sizes, fit, reference_size, try_step
from pipeline.compare.speed import measure_speeds
from pipeline.data.corpus import LONGEST, prepare, read_corpus

# PyTorch and fairseq take seconds to import: what needs them does so where it runs.

VOCABULARY = 4000

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
models. The curves over time are validation losses over updates times measured seconds per update.

Systems and schedules are in configs/verses/PRESET_seq2seq.yaml and PRESET_lm.yaml; --systems takes
what you add there. Beyond the paper are talkconv_plus (a convolution of 8 tokens before the
windows, heads that begin with windows of all lengths, and ReLU) and talkconv_plus_wide (the same
with longer windows; in language models heads also have largest windows of their own, and sums are
divided by the root of each window's length).

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
  speeds.json                        seconds of each turn, tokens and sentences per second, memory

examples:
  scripts/compare.sh --preset cpu
  scripts/compare.sh --preset gpu --task lm --seeds 1
  scripts/compare.sh --task summ --data summaries --systems talkconv,transformer
  scripts/compare.sh --updates 20 --systems talkconv,dynamicconv --lr 1e-3 --turns 1 \\
      --out compare/smoke            only to see that all steps run
"""
MADE = (
    *("corpus", "binarised", "systems.json", "speeds.json", "prepare.log", "compare.md"),
    *("results.json", "validation.png", "speed.png"),
)


def parse(arguments=None):
    """Return the options, with what depends on others filled in. Raises BadInput."""
    options = parser("compare.sh", DESCRIPTION, FOLDER)
    add = options.add_argument
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
    add("--seeds", type=at_least(1), metavar="N",
        help="runs of each system, with seeds 1 to N (default: 1; gpu: 3)")  # fmt: skip
    add("--updates", type=at_least(1), metavar="N",
        help="of each run (default: 1,600; lm: 1,200; summ: 2,000; gpu: 2,500)")  # fmt: skip
    add("--lr", metavar="A,B", help="peak learning rates to try (default: the preset's)")
    add("--jobs", type=at_least(1), metavar="N",
        help="trainings side by side (default: one per core, at most 4; gpu: 1)")  # fmt: skip
    add("--turns", type=at_least(1), metavar="N", default=5,
        help="turns of the speed measurement (default: 5)")  # fmt: skip
    add("--restart", action="store_true", help="throw away what an earlier comparison left there")
    args = options.parse_args(arguments)

    preset = read_preset(f"{args.preset}_{'lm' if args.task == 'lm' else 'seq2seq'}")
    args.device = "cuda" if args.preset == "gpu" else "cpu"
    args.schedule = preset.schedules[args.task]
    args.reference = preset.reference
    args.reference_flags = with_width(preset.systems[preset.reference], preset.reference_ffn)
    defaults = {
        "seeds": args.schedule.seeds,
        "updates": args.schedule.updates,
        "jobs": min(cores(), 4) if args.device == "cpu" else 1,
    }
    for name in defaults:
        if getattr(args, name) is None:
            setattr(args, name, defaults[name])
    args.rates = parse_rates(args.lr) if args.lr else list(args.schedule.rates)
    args.systems = choose_systems(args, preset.systems)
    args.languages = choose_languages(args)
    args.data = (args.data or ROOT / "data/bible-es-en").absolute()
    args.out = (args.out or ROOT / f"compare/{args.task}_{args.preset}").absolute()
    return args


def parse_rates(text):
    """Return the learning rates in ``--lr``, as they are spelt there. Raises BadInput."""
    rates = {}
    for rate in text.split(","):
        with contextlib.suppress(ValueError):
            rates[float(rate)] = rate
            if 0 < float(rate) < math.inf:
                continue
        raise BadInput(f"--lr: expected positive numbers, got {text!r}")
    return list(rates.values())


def choose_systems(args, known):
    """Return ``{name: flags}`` of the systems to compare. Raises BadInput."""
    if args.task == "summ":  # ConvS2S takes two tokens fewer than what sources are cut to
        known = {name: flags for name, flags in known.items() if flags.get("arch") != "fconv"}
    chosen = args.systems.split(",") if args.systems else list(known)
    for name in chosen:
        if name not in known:
            raise BadInput(f"--systems: expected some of {', '.join(known)}, got {name!r}")
    return {name: known[name] for name in chosen}


def choose_languages(args):
    """Return how the corpus's files end, the target's last. Raises BadInput."""
    if args.task == "summ":
        if args.data is None:
            raise BadInput("--data: expected a folder with --task summ, got none")
        if args.source_lang or args.target_lang:
            raise BadInput("--source-lang, --target-lang: expected none with --task summ")
        return ["source", "target"]
    if args.task == "lm":
        if args.source_lang:
            raise BadInput("--source-lang: expected none with --task lm")
        return [args.target_lang or "en"]
    return [args.source_lang or "es", args.target_lang or "en"]


class Comparison:
    """The steps of a comparison in its folder, each done once.

    Making one checks the input and makes nothing. Raises BadInput.

    Args:
        args: as `parse` returns them.

    Attributes:
        systems: of systems.json.
        rates: ``{system: {"chosen": rate, "validation": {rate: loss}}}``.
        failures: ``{(system, seed): why}``.
    """

    def __init__(self, args):
        self.args, self.out = args, args.out
        self.corpus, self.data = self.out / "corpus", self.out / "binarised"
        self.folder = Folder(args.out, "comparison", MADE)
        self.folder.check()
        if self.folder.settings.exists():
            earlier = read_json(self.folder.settings).get("systems", {})
            self.folder.made = (*MADE, *map(glob.escape, earlier))
        try:
            self.text = read_corpus(args.data, args.languages)
        except ValueError as error:
            raise BadInput(str(error)) from None
        if args.device == "cuda":
            import torch

            if not torch.cuda.is_available():
                raise BadInput("--preset: expected cpu on a machine without a GPU, got gpu")
        runs = len(args.rates) + 2 * args.seeds - 1  # and their evaluations
        self.step, self.steps = 0, 4 + runs * len(args.systems)
        self.counting = threading.Lock()  # of the steps
        self.systems, self.rates, self.failures = {}, {}, {}

    # The folder

    def open_folder(self):
        """Lock the folder. Raises BadInput if it is of other settings or in use."""
        args = self.args
        text = "\0".join(f"{name}\n" + "\n".join(lines) for name, lines in self.text.items())
        settings = {
            "task": args.task,
            "preset": args.preset,
            "data": str(args.data),
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "languages": args.languages,
            "updates": args.updates,
            "rates": args.rates,
            "vocabulary": VOCABULARY,
            "training": training_flags(args, {}, "RATE"),
            "averaged": args.schedule.averaged,
            "generation": {} if args.task == "lm" else search(args),
            "reference": args.reference_flags,
            "systems": args.systems,
        }
        self.folder.open(settings, args.restart, growing=["systems"])
        threads = max(1, cores() // args.jobs)
        on_cpu = args.device == "cpu"
        self.commands = Commands(on_cpu, threads if on_cpu else None, self.folder.lock)

    def run_folder(self, name, seed, rate=None):
        """Return the folder of a run at a rate, by default the system's chosen one."""
        return self.out / name / (rate or self.rates[name]["chosen"]) / str(seed)

    def able(self):
        """Return the systems that can run."""
        return [name for name in self.args.systems if "error" not in self.systems[name]]

    def runs(self):
        """Return ``(system, seed)`` of those, seeds first."""
        return [(name, seed) for seed in range(1, self.args.seeds + 1) for name in self.able()]

    # Steps

    def go(self):
        """Make all steps; return the results."""
        # fairseq and Hydra tell much of what they set up, and call much that is deprecated.
        logging.disable(logging.INFO)
        warnings.filterwarnings("ignore")
        jobs = self.args.jobs
        self.prepare()
        self.check_systems()
        first = [(name, 1, rate) for name in self.able() for rate in self.args.rates]
        self.commands.side_by_side(self.train, first, jobs)
        self.choose_rates()
        known = [run for run in self.runs() if (run[0], 1) not in self.failures]
        others = [(name, seed, self.rates[name]["chosen"]) for name, seed in known if seed > 1]
        self.commands.side_by_side(self.train, others, jobs)
        self.commands.side_by_side(self.evaluate, known, jobs)
        return self.results(self.measure())

    def count(self, title):
        """Return the title of the next step, with its number."""
        with self.counting:
            self.step += 1
            return f"{self.step} of {self.steps}: {title}"

    def once(self, title, made, make):
        """Make a step unless it is done; see `Folder.once`."""
        self.folder.once(self.count(title), made, make)

    def prepare(self):
        """Write plain text, a SentencePiece model, the pieces, and their numbers."""
        # The task of summaries cuts sources anyway.
        cut_source = LONGEST if self.args.task == "summ" else None

        def cut(partial):
            prepare(self.text, self.args.languages, VOCABULARY, partial, cut_source)

        def binarise(partial):
            words = binarising(self.corpus, self.args.languages, partial)
            self.commands.run(words, self.out / "prepare.log")

        self.once("cutting the corpus into pieces", self.corpus, cut)
        self.once("binarising", self.data, binarise)

    def check_systems(self):
        """Write flags and parameters of each system to systems.json, after a step of each.

        One that cannot run is tried again the next time. Raises ValueError if sizes differ.
        """
        args, path = self.args, self.out / "systems.json"
        known = read_json(path) if path.exists() else {}
        known = {name: system for name, system in known.items() if "error" not in system}
        title = self.count("fitting sizes, and a step of each system")
        missing = [name for name in args.systems if name not in known]
        if missing:
            show(f"\n== {title}")
            target = reference_size(args, self.data)
        for name in missing:
            try:
                flags, parameters = fit(args, self.data, name, target)
                try_step(training_words(args, self.data, flags), args.device)
                known[name] = {"options": flags, "parameters": parameters}
                show(f"{name}: {parameters:,} parameters")
            except Exception as error:  # whatever it is, the others can be compared
                why = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
                known[name] = {"error": why}
                show(f"{name}: cannot run: {why}")
        check_sizes({n: s["parameters"] for n, s in known.items() if "error" not in s})
        write_json(path, known)
        self.systems = {name: known[name] for name in args.systems}

    def words(self, name, rate):
        """Return the words after fairseq-train of a system at a rate, with its fitted width."""
        return training_words(self.args, self.data, self.systems[name]["options"], rate)

    def watched(self, bar, words, log):
        """Run a command whose log the progress `bar` reads."""
        with contextlib.closing(bar):
            self.commands.run(words, log, watch=bar)

    def train(self, name, seed, rate):
        """Write the average of a run's last checkpoints. Goes on from its last checkpoint.

        A run that diverges is out, not to be tried again; `diverged` in its folder says so.
        """
        folder, title = self.run_folder(name, seed, rate), f"{name}, seed {seed}, at {rate}"
        checkpoints, log = folder / "checkpoints", folder / "train.log"
        made, diverged = folder / "averaged.pt", folder / "diverged"

        def make(partial):
            if not (checkpoints / "done").exists():
                newest = numbered(checkpoints)[-1:]
                if not newest:  # nothing to go on from
                    remove(checkpoints)
                    remove(log)
                words = [*self.words(name, rate), "--seed", seed, "--save-dir", checkpoints]
                words += ["--restore-file", newest[0]] if newest else []
                bar = TrainingBar(self.args.updates, title if self.args.jobs > 1 else "")
                self.watched(bar, ["fairseq-train", *words], log)
                (checkpoints / "done").touch()
            paths = last_checkpoints(checkpoints, self.args.updates, self.args.schedule.averaged)
            average(paths, partial)

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
        """Choose of each system the rate of the first seed's run with the best validation loss."""
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
        if self.commands.stopped:
            raise error
        show(f"compare.sh: {title}: {error}")
        self.failures[name, seed] = str(error).partition(";")[0]

    def evaluate(self, name, seed):
        """Write what the model makes of the test set, with the log of fairseq."""
        folder, title = self.run_folder(name, seed), f"{name}, seed {seed}"
        if (name, seed) in self.failures or (folder / "diverged").exists():
            return
        lm = self.args.task == "lm"

        def make(partial):
            words = evaluation_words(self.args, self.data, folder / "averaged.pt", partial)
            bar = BatchBar(title if self.args.jobs > 1 else "")
            self.watched(bar, words, partial if lm else folder / "generate.log")

        try:
            self.once(f"evaluating {title}", folder / ("averaged.txt" if lm else "generated"), make)
        except Failed as error:
            self.fail(name, seed, error, title)

    def measure(self):
        """Return what speeds.json holds, of the systems that have been trained."""
        path = self.out / "speeds.json"
        checkpoints = {}  # of the first seed that was trained
        for name, seed in self.runs():
            if not {(name, 1), (name, seed)} & self.failures.keys():
                checkpoints.setdefault(name, self.run_folder(name, seed) / "averaged.pt")
        rates = {name: self.rates[name]["chosen"] for name in checkpoints}
        if path.exists():
            there = {
                name: (len(row["training"]["turns"]), row.get("rate"))
                for name, row in read_json(path).items()
            }
            if there != {name: (self.args.turns, rate) for name, rate in rates.items()}:
                path.unlink()  # ratios are of one measurement

        def make(partial):
            words = {name: self.words(name, rate) for name, rate in rates.items()}
            rows = measure_speeds(self.args, words, checkpoints)
            write_json(partial, {name: {**row, "rate": rates[name]} for name, row in rows.items()})

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

    def results(self, speeds):
        """Return everything, as it is written to results.json."""
        args = self.args
        systems = {}
        for name in args.systems:
            row = systems[name] = {**self.systems[name], "seeds": {}}
            row["rates"] = self.rates.get(name)
            for seed in [seed for other, seed in self.runs() if other == name]:
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
            "reference": args.reference,
            "settings": read_json(self.folder.settings),
            "versions": versions(),
            "machine": machine(args.device),
            "systems": systems,
        }
        score(results, self.corpus, args.languages, self.run_folder)
        return results

    def validation(self, name, seed, rate=None):
        """Return ``[{"updates", "loss", "ppl"}, …]`` of a run, as fairseq logged them."""
        entries = read_log(self.run_folder(name, seed, rate) / "train.log")["valid"]
        return [{key: entry[key] for key in ("updates", "loss", "ppl")} for entry in entries]


def average(paths, output):
    """Write the average of some checkpoints."""
    from pipeline.recipes.average import average_checkpoints, save

    save(average_checkpoints(paths), output)


# --- The command ---


def compare(arguments=None):
    """Run a comparison; return 1 if some of it failed. Raises as `pipeline.common.command.run`."""
    args = parse(arguments)
    if arguments is None:  # this process is the command's own
        set_environment(args.device)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # it stops what it started
    comparison = Comparison(args)
    comparison.open_folder()
    try:
        write_results(args.out, comparison.go())
    finally:
        comparison.folder.close()
    if comparison.failures:
        failed = ", ".join(f"{name} (seed {seed})" for name, seed in comparison.failures)
        raise Failed(f"failed: {failed}")


def main(arguments=None):
    """Run the command; return its exit status."""
    return run("compare.sh", lambda: compare(arguments))
