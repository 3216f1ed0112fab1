"""The steps of scripts/compare.sh in its folder; options.py says what it compares."""

import contextlib
import itertools
import logging
import math
import os
import re
import signal

from pipeline.common import fairseq
from pipeline.common.command import BadInput, Failed, run
from pipeline.common.files import read_json, remove, write_json
from pipeline.common.folder import show
from pipeline.common.logs import read_runs
from pipeline.common.machine import cores, has_gpu, machine, versions
from pipeline.compare.flags import beam_search, evaluation_words, training_flags, training_words
from pipeline.compare.options import parse
from pipeline.compare.report import write_results
from pipeline.compare.scores import score
from pipeline.compare.search import Point, Search
from pipeline.compare.speed import measure_speeds
from pipeline.data.corpus import LONGEST, CorpusFolder

VOCABULARY = 4000
MADE = ("speeds.json", "prepare.log", "compare.md", "results.json", "validation.png", "speed.png")


class Comparison:
    """The steps of a comparison in its folder, each done once.

    Making one, of what `parse` returns, checks the input and makes nothing. Raises BadInput.

    Attributes:
        searches: ``{system: Search}`` for the points at which systems train.
        points: ``{system: point}``, the best; a system that failed in the search has none.
        planned: ``{(system, point), …}`` of the first seed's trainings that are known so far.
        failures: ``{(system, seed): why}``.
    """

    def __init__(self, args):
        self.args = args
        self.folder = CorpusFolder(args.out, "comparison", MADE, args.data, args.languages)
        if args.device == "cuda" and not has_gpu():
            raise BadInput("--preset: expected cpu on a machine without a GPU, got gpu")
        self.searches, self.points, self.planned, self.failures = {}, {}, set(), {}
        for name, rates in args.rates.items():
            usual = training_flags(args, args.systems[name], "RATE")["warmup-updates"]
            warmups = [str(updates) for updates in dict.fromkeys([usual, *args.warmup])]
            self.searches[name] = Search(rates, warmups, args.updates)
            self.planned.update((name, Point(rate, warmups[0])) for rate in rates)
        self.numbers = itertools.count(1)

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
            "precision": os.environ.get(fairseq.PRECISION),  # None: the usual one
            "training": training_flags(args, {}, "RATE"),
            "averaged": args.schedule.averaged,
            "generation": {} if args.task == "lm" else beam_search(args),
            "systems": args.systems,
        }
        self.folder.open(settings, args.restart, growing=["systems"])
        threads = max(1, cores() // args.jobs) if args.device == "cpu" else None
        self.commands = fairseq.Commands(args.device, args.jobs, threads, self.folder.lock)

    def label(self, name, point):
        """Return the name of a point: its rate, and with another warm-up RATE_UPDATES."""
        usual = self.searches[name].listed["warmup"][0]
        return point.rate if point.warmup == usual else f"{point.rate}_{point.warmup}"

    def run_folder(self, name, seed, point=None):
        """Return the folder of a run at a point, by default the system's chosen one."""
        return self.args.out / name / self.label(name, point or self.points[name]) / str(seed)

    def runs(self):
        """Return ``(system, seed)`` of the systems that have a point, seeds first."""
        return [(name, seed) for seed in range(1, self.args.seeds + 1) for name in self.points]

    def go(self):
        """Make all steps; return the results."""
        logging.disable(logging.INFO)  # fairseq and Hydra say much about what they set up
        self.prepare()
        self.search()
        others = [(name, seed, self.points[name]) for name, seed in self.runs() if seed > 1]
        self.commands.side_by_side(self.train, others)
        self.commands.side_by_side(self.evaluate, self.runs())
        return self.results(self.measure())

    def once(self, title, made, make):
        """Make a step, which has a number, unless it is done; see `Folder.once`."""
        # Beside the first seed's trainings: those of the others, all evaluations, and three steps.
        others = len(self.args.systems) * (2 * self.args.seeds - 1) + 3
        title = f"{next(self.numbers)} of {len(self.planned) + others}: {title}"
        self.folder.once(title, made, make)

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
        system = self.args.systems[name] | {"warmup-updates": int(point.warmup)}
        return training_words(self.args, self.folder.binarised, system, point.rate)

    def train(self, name, seed, point):
        """Train a run, from its last checkpoint if there is one, and average its last checkpoints.

        A run that diverges is not tried again; the file `diverged` in its folder says so.
        """
        args, folder = self.args, self.run_folder(name, seed, point)
        title = f"{name}, seed {seed}, at {self.label(name, point).replace('_', ', warm-up ')}"
        checkpoints = folder / "checkpoints"
        made, diverged = folder / "averaged.pt", folder / "diverged"

        def make(partial):
            if not (checkpoints / "checkpoint_last.pt").exists():  # nothing to go on from
                remove(checkpoints)
                remove(folder / "train.log")
            words = ["fairseq-train", *self.words(name, point), "--seed", seed]
            read = fairseq.training(lambda updates: updates / args.updates)
            words += fairseq.resuming(checkpoints)
            self.commands.run(words, folder / "train.log", read, title)
            from pipeline.recipes import average

            last = fairseq.last_checkpoints(checkpoints, args.updates, args.schedule.averaged)
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

    def search(self):
        """Train the first seed of each system until its best point is found, all side by side."""
        searching = {name: search.rounds() for name, search in self.searches.items()}
        while searching:
            waiting = {name: next(rounds, None) for name, rounds in searching.items()}
            runs = [(name, 1, point) for name, points in waiting.items() for point in points or ()]
            self.planned.update((name, point) for name, _, point in runs)
            self.commands.side_by_side(self.train, runs)
            for name, seed, point in runs:
                trained = (self.run_folder(name, seed, point) / "averaged.pt").exists()
                loss = self.validation(name, seed, point)[-1]["loss"] if trained else math.nan
                if trained or (name, seed) not in self.failures:  # a failure is no divergence
                    self.searches[name].losses[point] = loss if math.isfinite(loss) else None
            for name, points in waiting.items():
                if points is None or (name, 1) in self.failures:
                    del searching[name]
        for name, search in self.searches.items():
            if (name, 1) in self.failures:
                continue
            if search.losses[search.best] is None:
                self.failures[name, 1] = "diverged at every learning rate"
            else:
                self.points[name] = search.best

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
        if not self.is_trained(name, seed):
            return
        folder, title = self.run_folder(name, seed), f"{name}, seed {seed}"
        lm = self.args.task == "lm"

        def make(partial):
            system, model = self.args.systems[name], folder / "averaged.pt"
            words = evaluation_words(self.args, self.folder.binarised, system, model, partial)
            log = partial if lm else folder / "generate.log"
            self.commands.run(words, log, fairseq.generation, title)

        try:
            self.once(f"evaluating {title}", folder / ("averaged.txt" if lm else "generated"), make)
        except Failed as error:
            self.fail(name, seed, error, title)

    def measure(self):
        """Return what speeds.json holds, of the systems that have been trained."""
        path, where = self.args.out / "speeds.json", machine(self.args.device)
        checkpoints = {}  # of the first seed that was trained
        for name, seed in self.runs():
            if self.is_trained(name, seed):
                checkpoints.setdefault(name, self.run_folder(name, seed) / "averaged.pt")
        if not checkpoints:
            return {}
        labels = {name: self.label(name, self.points[name]) for name in checkpoints}
        there = {  # ratios are of one measurement
            name: (row["rate"], row.get("machine"), len(row["training"]["turns"]))
            for name, row in read_json(path, {}).items()
        }
        if there != {name: (label, where, self.args.turns) for name, label in labels.items()}:
            remove(path)

        def make(partial):
            words = {name: self.words(name, self.points[name]) for name in checkpoints}
            rows = measure_speeds(self.args, words, checkpoints)
            for name, row in rows.items():
                row |= {"rate": labels[name], "machine": where}
            write_json(partial, rows)

        try:
            self.once("measuring speed and memory, in turn", path, make)
        except Exception as error:  # the scores are not lost for it
            self.fail("speeds", None, error, "speeds")
            return {}
        return read_json(path)

    def results(self, speeds):
        """Return everything, as it is written to results.json."""
        args = self.args
        systems = {}
        for name in args.systems:
            row = systems[name] = {"options": args.systems[name], "seeds": {}}
            search = self.searches[name]
            row["points"] = {self.label(name, at): loss for at, loss in search.losses.items()}
            if name in self.points:
                for axis in Point._fields if args.warmup else ["rate"]:
                    tried = search.tried(axis)
                    row[f"{axis}s"] = {"chosen": getattr(search.best, axis), "validation": tried}
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
        fairseq.set_environment(args.device)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # it stops what it started
    comparison = Comparison(args)
    with contextlib.closing(comparison.folder):
        comparison.open_folder()
        write_results(args.out, comparison.go())
    if comparison.failures:
        failed = [f"{name} (seed {seed})" if seed else name for name, seed in comparison.failures]
        raise Failed(f"failed: {', '.join(failed)}")


def main(arguments=None):
    """Run the command; return its exit status."""
    return run("compare.sh", lambda: compare(arguments), resumes=True)
