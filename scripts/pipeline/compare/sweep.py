"""Trains TaLK, Transformer, LightConv, DynamicConv and ConvS2S on the same text, cut into the same
pieces, with as many parameters, for the same updates on the same batches, with the same schedule
and seeds. Only the peak learning rate is each system's own, the best of several on the
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
import glob
import itertools
import logging
import math
import re
import signal
from pathlib import Path
from types import SimpleNamespace

from pipeline.common.command import BadInput, Failed, at_least, parser, positive, run, several
from pipeline.common.fairseq import (
    Commands,
    generation,
    last_checkpoints,
    numbered,
    resuming,
    set_environment,
    training,
)
from pipeline.common.files import read_json, remove, write_json
from pipeline.common.folder import show
from pipeline.common.logs import read_runs
from pipeline.common.machine import cores, has_gpu, machine, versions
from pipeline.common.paths import ROOT
from pipeline.common.systems import read_systems
from pipeline.compare.flags import evaluation_words, search, training_flags, training_words
from pipeline.compare.report import TITLES, write_results
from pipeline.compare.scores import score
from pipeline.compare.speed import measure_speeds
from pipeline.data.corpus import LONGEST, CorpusFolder

VOCABULARY = 4000
WIDENED = 4  # rates, or warm-ups, that a system tries at most beyond those that are listed
AXES = ("rate", "warmup")  # what is each system's own
LANGUAGES = {"mt": ["es", "en"], "lm": ["en"], "summ": ["source", "target"]}

MADE = ("speeds.json", "prepare.log", "compare.md", "results.json", "validation.png", "speed.png")


def learning_rates(text):
    """Return the learning rates in ``--lr``, as they are spelt there; of equal ones the last."""
    if text == "best":
        return text
    with contextlib.suppress(argparse.ArgumentTypeError):
        return list({positive(rate): rate.strip() for rate in text.split(",")}.values())
    raise argparse.ArgumentTypeError(f"expected positive numbers or best, got {text!r}")


def times(rate, factor):
    """Return a multiple of a rate, spelt like ``4e-3``."""
    digits, exponent = f"{float(rate) * factor:e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def parse(arguments=None):
    """Return the options, with what depends on others filled in. Raises BadInput."""
    options = parser("compare.sh", __doc__)
    add = options.add_argument
    add("--preset", choices=("cpu", "cpu_long", "cpu_small", "gpu"), default="cpu",
        help="cpu: small models, 4 to 10 minutes for each rate of a system on two cores; cpu_long: "
        "these models with five times as many updates and more dropout, not for summaries; "
        "cpu_small: the best systems at 1M parameters with three seeds, not for summaries; "
        "gpu: models of IWSLT's size and three seeds on one GPU (default: cpu)")  # fmt: skip
    add("--task", choices=TITLES, default="mt", help="see above (default: mt)")
    add("--data", type=Path, help="another corpus: {train,valid,test}.LANG, one sentence a line, "
        "also with .gz (default: data/bible-es-en)")  # fmt: skip
    add("--source-lang", metavar="NAME", help="how its source files end (default: es)")
    add("--target-lang", metavar="NAME", help="how its target files end (default: en)")
    add("--out", type=Path, help="folder for everything (default: compare/TASK_PRESET)")
    add("--systems", type=several(str), metavar="A,B", help="which to compare (default: all)")
    add("--seeds", type=at_least(1), metavar="N",
        help="runs of each system, with seeds 1 to N (default: 1; cpu_small, gpu: 3)")  # fmt: skip
    add("--updates", type=at_least(1), metavar="N",
        help="of each run (default: 1,600; lm: 1,200; summ: 2,000; cpu_long: 8,000, lm 6,000; "
        "gpu: 1,600, lm 2,500)")  # fmt: skip
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
    args = options.parse_args(arguments)

    device, _, kind = args.preset.partition("_")
    preset = read_systems(f"{device}_{'lm' if args.task == 'lm' else 'seq2seq'}")
    schedule = preset["schedules"].get(f"{args.task}_{kind}".strip("_"))
    if schedule is None:
        expected = f"{device} with --task {args.task}"
        raise BadInput(f"--preset: expected {expected}, got {args.preset}")
    args.device = "cuda" if device == "gpu" else "cpu"
    args.commands, args.training = preset["commands"], preset["training"]
    args.training |= schedule.pop("training", {})
    known = preset["systems"]
    if sizes := schedule.pop("systems", None):  # of the preset's own
        known = {name: {**known[name], **flags} for name, flags in sizes.items()}
    args.schedule = SimpleNamespace(**schedule)
    if args.tokens:
        if args.task != "lm":
            raise BadInput("--tokens: expected none without --task lm")
        if args.tokens > (most := args.schedule.max_tokens):
            raise BadInput(f"--tokens: expected at most a batch of {most}, got {args.tokens}")
        args.schedule.flags["tokens-per-sample"] = args.tokens
    args.seeds = args.seeds or args.schedule.seeds
    args.updates = args.updates or args.schedule.updates
    args.lr = args.lr or args.schedule.rates
    if args.warmup and (longest := max(args.warmup)) >= args.updates:
        raise BadInput(f"--warmup: expected less than {args.updates} updates, got {longest}")
    args.jobs = args.jobs or (min(cores(), 4) if args.device == "cpu" else 1)
    args.reference = preset["reference"]
    args.systems = choose_systems(args, known)
    args.rates = {name: rates_of(name, args) for name in args.systems}
    *source, target = LANGUAGES[args.task]
    if args.source_lang and not source:
        raise BadInput("--source-lang: expected none with --task lm")
    if args.task == "summ" and (args.source_lang or args.target_lang):
        raise BadInput("--source-lang, --target-lang: expected none with --task summ")
    args.languages = [args.source_lang or name for name in source] + [args.target_lang or target]
    if args.task == "summ" and args.data is None:
        raise BadInput("--data: expected a folder with --task summ, got none")
    args.data = (args.data or ROOT / "data/bible-es-en").absolute()
    args.out = (args.out or ROOT / f"compare/{args.task}_{args.preset}").absolute()
    return args


def rates_of(name, args):
    """Return the rates that a system tries. Raises BadInput."""
    if args.lr != "best":
        return list(map(str, args.lr))
    if (best := getattr(args.schedule, "best", {}).get(name)) is None:
        raise BadInput(f"--lr: expected numbers for {name}, whose best rate is not known, got best")
    return [str(best)]


def choose_systems(args, known):
    """Return ``{name: flags}`` of the systems to compare. Raises BadInput."""
    if args.task == "summ":  # ConvS2S takes two tokens fewer than what sources are cut to
        known = {name: flags for name, flags in known.items() if flags.get("arch") != "fconv"}
    chosen = args.systems or list(known)
    for name in chosen:
        if name not in known:
            raise BadInput(f"--systems: expected some of {', '.join(known)}, got {name!r}")
    return {name: dict(known[name]) for name in chosen}


class Comparison:
    """The steps of a comparison in its folder, each done once.

    Making one, of what `parse` returns, checks the input and makes nothing. Raises BadInput.

    Attributes:
        points: ``{system: point}``, the best so far: its rate, or ``RATE_WARMUP``.
        losses: ``{system: {point: loss}}`` in validation, of seed 1; None if it diverged.
        failures: ``{(system, seed): why}``; a system that failed in the search has no point.
    """

    def __init__(self, args):
        self.args = args
        self.folder = CorpusFolder(args.out, "comparison", MADE, args.data, args.languages)
        earlier = read_json(self.folder.settings, {}).get("systems", {})
        self.folder.made += map(glob.escape, earlier)
        if args.device == "cuda" and not has_gpu():
            raise BadInput("--preset: expected cpu on a machine without a GPU, got gpu")
        tried = sum(map(len, args.rates.values()))
        others = len(args.systems) * (2 * args.seeds - 1)  # with evaluations of all
        self.steps, self.numbers = 3 + tried + others, itertools.count(1)
        self.points = {name: rates[0] for name, rates in args.rates.items()}
        self.losses, self.failures = {name: {} for name in args.systems}, {}

    def open_folder(self):
        """Lock the folder. Raises BadInput if it is of other settings or in use."""
        args = self.args
        settings = {
            **self.folder.facts,
            "task": args.task,
            "preset": args.preset,
            "updates": args.updates,
            "rates": args.lr,
            **({"warmups": args.warmup} if args.warmup else {}),
            "vocabulary": VOCABULARY,
            "training": training_flags(args, {}, "RATE"),
            "averaged": args.schedule.averaged,
            "generation": {} if args.task == "lm" else search(args),
            "systems": args.systems,
        }
        self.folder.open(settings, args.restart, growing=["systems"])
        on_cpu = args.device == "cpu"
        threads = max(1, cores() // args.jobs) if on_cpu else None
        self.commands = Commands(on_cpu, threads, self.folder.lock)

    def run_folder(self, name, seed, point=None):
        """Return the folder of a run at a point, by default the system's chosen one."""
        return self.args.out / name / (point or self.points[name]) / str(seed)

    def runs(self, first=1):
        """Return ``(system, seed)`` of the systems that have a point, seeds first."""
        return [(name, seed) for seed in range(first, self.args.seeds + 1) for name in self.points]

    def go(self):
        """Make all steps; return the results."""
        logging.disable(logging.INFO)  # fairseq and Hydra say much about what they set up
        side_by_side, jobs = self.commands.side_by_side, self.args.jobs
        self.prepare()
        self.search()
        others = [(name, seed, self.points[name]) for name, seed in self.runs(2)]
        side_by_side(self.train, others, jobs)
        side_by_side(self.evaluate, self.runs(), jobs)
        return self.results(self.measure())

    def once(self, title, made, make):
        """Make a step, which has a number, unless it is done; see `Folder.once`."""
        self.folder.once(f"{next(self.numbers)} of {self.steps}: {title}", made, make)

    def prepare(self):
        """Write plain text, a SentencePiece model, the pieces, and their numbers."""
        # The task of summaries cuts sources anyway.
        cut_source = LONGEST if self.args.task == "summ" else None
        for title, made, words in self.folder.preparation(VOCABULARY, cut_source):

            def make(partial, made=made, words=words):
                words = [partial if word == made else word for word in words]
                self.commands.run(words, self.args.out / "prepare.log")

            self.once(title, made, make)

    def words(self, name, point):
        """Return the words after fairseq-train of a system at a point."""
        at, system = self.split(name, point), self.args.systems[name]
        system = system | {"warmup-updates": int(at["warmup"])}
        return training_words(self.args, self.folder.binarised, system, at["rate"])

    def train(self, name, seed, point):
        """Train a run, from its last checkpoint if there is one, and average its last checkpoints.

        A run that diverges is not tried again; the file `diverged` in its folder says so.
        """
        args, folder = self.args, self.run_folder(name, seed, point)
        title = f"{name}, seed {seed}, at {point.replace('_', ', warm-up ')}"
        checkpoints = folder / "checkpoints"
        made, diverged, done = folder / "averaged.pt", folder / "diverged", checkpoints / "done"

        def make(partial):
            if not done.exists():
                if not numbered(checkpoints):  # nothing to go on from
                    remove(checkpoints)
                    remove(folder / "train.log")
                words = ["fairseq-train", *self.words(name, point), "--seed", seed]
                read = training(lambda updates: updates / args.updates)
                words += resuming(checkpoints)
                self.commands.run(words, folder / "train.log", read, title if args.jobs > 1 else "")
                done.touch()
            from pipeline.recipes import average

            last = last_checkpoints(checkpoints, args.updates, args.schedule.averaged)
            average.save(average.average_checkpoints(last), partial)

        try:
            self.once(f"training {title}", diverged if diverged.exists() else made, make)
        except Failed as error:
            if "FloatingPointError" not in str(error):  # as fairseq stops for NaN
                self.fail(name, seed, error, title)
                return
            show(f"{title}: diverged")
            diverged.touch()
        remove(checkpoints)

    def listed(self, name, axis):
        """Return the rates that a system tries, or its warm-ups, of which the preset's is first."""
        if axis == "rate":
            return self.args.rates[name]
        flags = training_flags(self.args, self.args.systems[name], "RATE")
        return list(map(str, dict.fromkeys([flags["warmup-updates"], *self.args.warmup])))

    def split(self, name, point):
        """Return ``{"rate": rate, "warmup": warm-up}`` of a point."""
        rate, _, warmup = point.partition("_")
        return {"rate": rate, "warmup": warmup or self.listed(name, "warmup")[0]}

    def beside(self, name, axis, value):
        """Return the point with another rate, or warm-up, than the best so far of a system."""
        at = self.split(name, self.points[name]) | {axis: value}
        presets = at["warmup"] == self.listed(name, "warmup")[0]
        return at["rate"] if presets else f"{at['rate']}_{at['warmup']}"

    def search(self):
        """Choose each system's rate, and with ``--warmup`` its warm-up, in turn until both stay."""
        self.choose("rate", list(self.points))
        moving, axes = list(self.points) if self.args.warmup else [], itertools.cycle(AXES[::-1])
        while moving:
            axis, before = next(axes), dict(self.points)
            self.steps += sum(len(self.untried(name, axis)) for name in moving)
            self.choose(axis, moving)
            moving = [name for name in self.points if self.points[name] != before[name]]

    def untried(self, name, axis):
        """Return the rates, or warm-ups, that a system has still to try beside the other.

        Those are the listed ones and, of those that it had elsewhere, the ones in between.
        """
        listed, here = self.listed(name, axis), self.split(name, self.points[name])[axis]
        ends = [float(value) for value in (*listed, here)]
        had = [self.split(name, point)[axis] for point in self.losses[name]]
        had = [value for value in had if min(ends) <= float(value) <= max(ends)]
        values = dict.fromkeys([*listed, *had])
        return [v for v in values if self.beside(name, axis, v) not in self.losses[name]]

    def choose(self, axis, names):
        """Train systems at each rate, or with each warm-up, and go to the best in validation.

        Where the best of several is at an edge, twice or half of it is tried too.
        """
        waiting = {name: self.untried(name, axis) for name in names}
        while waiting:
            pairs = [(name, value) for name, values in waiting.items() for value in values]
            runs = [(name, 1, self.beside(name, axis, value)) for name, value in pairs]
            self.commands.side_by_side(self.train, runs, self.args.jobs)
            for name, seed, point in runs:
                there = (self.run_folder(name, seed, point) / "averaged.pt").exists()
                loss = self.validation(name, seed, point)[-1]["loss"] if there else math.nan
                if there or (name, seed) not in self.failures:  # a failure is not divergence
                    self.losses[name][point] = loss if math.isfinite(loss) else None
            beyond = {name: self.settle(name, axis) for name in waiting}
            waiting = {name: [value] for name, value in beyond.items() if value}
            self.steps += len(waiting)

    def tried(self, name, axis):
        """Return ``{rate: loss}`` with the best warm-up so far, or the other way round."""
        (other,) = {*AXES} - {axis}
        best = self.split(name, self.points[name])[other]
        points = [(self.split(name, point), loss) for point, loss in self.losses[name].items()]
        found = {at[axis]: loss for at, loss in points if at[other] == best}
        return {value: found[value] for value in sorted(found, key=float)}

    def settle(self, name, axis):
        """Go to the best of the rates, or warm-ups, of a system; drop it if there can be none.

        Returns a value that has to be tried before that is settled, or None.
        """
        if (name, 1) in self.failures:
            del self.points[name]
            return None
        losses = self.tried(name, axis)
        tried, finite = list(losses), [value for value in losses if losses[value] is not None]
        chosen = min(finite, key=losses.get) if finite else tried[0]
        self.points[name] = self.beside(name, axis, chosen)
        most = len(self.listed(name, axis)) + WIDENED
        if chosen in (tried[0], tried[-1]) and 1 < len(tried) < most:
            factor = 0.5 if chosen == tried[0] else 2
            if axis == "rate":
                return times(chosen, factor)
            if 1 <= (updates := int(int(chosen) * factor)) < self.args.updates:
                return str(updates)
        if not finite:
            self.failures[name, 1] = "diverged at every learning rate"
            del self.points[name]
        return None

    def fail(self, name, seed, error, title):
        """Note why there is no run, so that the others go on. Raises `error` if all are stopped."""
        if self.commands.stopped:
            raise error
        kind = "" if isinstance(error, Failed) else f"{type(error).__name__}: "
        show(f"compare.sh: {title}: {kind}{error}")
        what, *log = str(error).strip().splitlines() or [""]
        reason = [what.partition(";")[0], *log[-1:]]  # the last line of a log says why
        self.failures[name, seed] = (kind + ": ".join(reason))[:200]

    def is_trained(self, name, seed):
        """Return whether there is a model of a run."""
        trained = (self.run_folder(name, seed) / "averaged.pt").exists()
        return trained and (name, seed) not in self.failures

    def evaluate(self, name, seed):
        """Write what the model makes of the test set, with the log of fairseq."""
        folder, title = self.run_folder(name, seed), f"{name}, seed {seed}"
        if not self.is_trained(name, seed):
            return
        lm = self.args.task == "lm"

        def make(partial):
            system, model = self.args.systems[name], folder / "averaged.pt"
            words = evaluation_words(self.args, self.folder.binarised, system, model, partial)
            log, beside = partial if lm else folder / "generate.log", self.args.jobs > 1
            self.commands.run(words, log, generation, title if beside else "")

        try:
            self.once(f"evaluating {title}", folder / ("averaged.txt" if lm else "generated"), make)
        except Failed as error:
            self.fail(name, seed, error, title)

    def measure(self):
        """Return what speeds.json holds, of the systems that have been trained."""
        path = self.args.out / "speeds.json"
        checkpoints = {}  # of the first seed that was trained
        for name, seed in self.runs():
            if self.is_trained(name, seed):
                checkpoints.setdefault(name, self.run_folder(name, seed) / "averaged.pt")
        where = machine(self.args.device)
        facts = {name: {"rate": self.points[name], "machine": where} for name in checkpoints}
        there = {  # ratios are of one measurement
            name: (len(row["training"]["turns"]), row["rate"], row.get("machine"))
            for name, row in read_json(path, {}).items()
        }
        if there != {name: (self.args.turns, *of.values()) for name, of in facts.items()}:
            remove(path)

        def make(partial):
            words = {name: self.words(name, self.points[name]) for name in checkpoints}
            rows = measure_speeds(self.args, words, checkpoints)
            write_json(partial, {name: row | facts[name] for name, row in rows.items()})

        if not checkpoints:
            return {}
        try:
            self.once("measuring speed and memory, in turn", path, make)
        except Exception as error:  # the scores are not lost for it
            self.fail("speeds", "any", error, "speeds")
            return {}
        return read_json(path)

    def results(self, speeds):
        """Return everything, as it is written to results.json."""
        args = self.args
        systems = {}
        for name in args.systems:
            row = systems[name] = {"options": args.systems[name], "seeds": {}}
            row["points"] = self.losses[name]
            if name in self.points:
                at = self.split(name, self.points[name])
                for axis in AXES if args.warmup else AXES[:1]:
                    row[f"{axis}s"] = {"chosen": at[axis], "validation": self.tried(name, axis)}
            row["speed"] = speeds.get(name)
            for (failed, seed), why in self.failures.items():
                if failed == name:
                    row.setdefault("error", f"seed {seed}: {why}")
        for name, seed in self.runs():
            if (self.run_folder(name, seed) / "diverged").exists():
                systems[name].setdefault("diverged", []).append(seed)
            elif self.is_trained(name, seed):
                systems[name]["seeds"][str(seed)] = {"validation": self.validation(name, seed)}
                log = (self.run_folder(name, seed) / "train.log").read_text(encoding="utf-8")
                count = re.search(r"num\. shared model params: ([\d,]+)", log)[1]
                systems[name]["parameters"] = int(count.replace(",", ""))
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
        score(results, self.folder.corpus, args.languages, self.run_folder)
        return results

    def validation(self, name, seed, point=None):
        """Return ``[{"updates", "loss", "ppl"}, …]`` of a run, as fairseq logged them."""
        (run,) = read_runs(self.run_folder(name, seed, point) / "train.log").values()
        return [{key: entry[key] for key in ("updates", "loss", "ppl")} for entry in run["valid"]]


def compare(arguments=None):
    """Run a comparison. Raises BadInput for bad options, and Failed if a part of it failed."""
    args = parse(arguments)
    if arguments is None:  # this process is the command's own
        set_environment(args.device)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # it stops what it started
    comparison = Comparison(args)
    with contextlib.closing(comparison.folder):
        comparison.open_folder()
        write_results(args.out, comparison.go())
    if comparison.failures:
        failed = ", ".join(f"{name} (seed {seed})" for name, seed in comparison.failures)
        raise Failed(f"failed: {failed}")


def main(arguments=None):
    """Run the command; return its exit status."""
    return run("compare.sh", lambda: compare(arguments), resumes=True)
