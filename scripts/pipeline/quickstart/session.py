"""What the quick starts share: options, the folder of a run, and commands that are listed."""

import os
import re
import shlex
import signal
import time
from pathlib import Path

from pipeline.common.command import Failed, at_least, parser
from pipeline.common.fairseq import PRECISION, Commands, environment_of, resuming, training
from pipeline.common.files import read_lines, write_lines, write_whole
from pipeline.common.folder import show
from pipeline.common.machine import has_gpu
from pipeline.common.paths import ROOT
from pipeline.common.systems import read_systems, words
from pipeline.data.corpus import CorpusFolder

MADE = (  # all that a quick start leaves in its folder, beside what is made of the corpus
    *("training", "averaged.pt", "translations", "prompt.txt", "continuations.txt"),
    *("results.json", "commands.txt", "log.txt"),
)
LEAST = 20  # seconds of a training by the clock
KEPT_BACK = 90  # seconds, to load fairseq several times and for what comes after training


def place(text):
    """Return a path as commands in the project's root name it: relative to it, if inside."""
    path = Path(os.path.abspath(text))
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def options(name, description):
    """Return a parser of ``scripts/NAME.sh`` with the options that both quick starts have."""
    parse = parser(f"{name}.sh", description)
    parse.usage = "%(prog)s [options]"
    add = parse.add_argument
    add("--minutes", metavar="N", type=at_least(2, float), default=9.0,
        help="time for all of it after set-up (default: 9)")  # fmt: skip
    add("--updates", metavar="N", type=at_least(1), help="train each model for N updates, however "
        "long they take, instead of by the clock")  # fmt: skip
    add("--out", metavar="DIR", type=place, default=Path(name),
        help=f"folder for all that it makes (default: {name}, in the project's root)")  # fmt: skip
    add("--data", metavar="DIR", type=place, default=Path("data/bible-es-en"),
        help="another corpus: {train,valid,test}.LANG, one sentence a line, also with .gz "
        "(default: data/bible-es-en)")  # fmt: skip
    add("--cpu", action="store_true", help="do not use a GPU")
    add("--restart", action="store_true", help="throw away what an earlier run left in that "
        "folder, and start over (without it, a run that was stopped, also by Ctrl-C, continues)"
        )  # fmt: skip
    return parse


class Session:
    """A run of a quick start: its folder, its clock and its commands.

    Commands run in the project's root, and are shown and listed as a reader can paste them there.

    Args:
        args: of a parser as `options` returns it.
        languages: one or two, the suffixes of the corpus's files.
        config: the name of a YAML file in ``configs/verses``, of which `settings` becomes the
            section for this device and these minutes.

    Raises BadInput for a folder or a corpus that cannot be used.
    """

    def __init__(self, args, languages, config):
        os.chdir(ROOT)
        self.args, self.out = args, args.out
        self.log, self.listed = self.out / "log.txt", self.out / "commands.txt"
        self.folder = CorpusFolder(self.out, "quick start", MADE, args.data, languages)
        self.corpus, self.binarised = self.folder.corpus, self.folder.binarised
        self.on_gpu = not args.cpu and has_gpu()
        section = "gpu" if self.on_gpu else "cpu_long" if args.minutes >= 30 else "cpu"
        self.settings = read_systems(config)[section]
        self.on_device = words(self.settings["commands"])
        self.started = time.monotonic()  # nothing has taken time yet

    def open(self, **trainings):
        """Take hold of the folder for these trainings, ``{name: words of a command}``."""
        args = self.args
        settings = {
            **self.folder.facts,
            "device": "gpu" if self.on_gpu else "cpu",
            "length": f"{args.updates} updates" if args.updates else f"{args.minutes:g} minutes",
            **{name: shlex.join(map(str, command)) for name, command in trainings.items()},
        }
        self.count = len(trainings)
        self.folder.made += [f"{name}.{kind}" for name in trainings for kind in ("pt", "txt")]
        self.folder.open(settings, args.restart)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # it stops what it started
        self.commands = Commands("cuda" if self.on_gpu else "cpu", lock=self.folder.lock)
        if not self.on_gpu:
            # Only training may compute in bfloat16; its command says so.
            self.commands.environment[PRECISION] = "highest"

    def seconds(self):
        """Return how many seconds each training may take, as the first run found that asked."""
        path = self.out / "training/seconds"
        if not path.exists():
            elapsed = time.monotonic() - self.started
            left = int(60 * self.args.minutes - elapsed) - KEPT_BACK
            write_whole(path, f"{left // self.count}\n")
        return int(path.read_text())

    def training(self, model=None):
        """Return the words of fairseq-train with the settings of all models and those of one."""
        on_cpu = ["env", f"{PRECISION}={environment_of('cpu')[PRECISION]}"]
        flags = self.settings["training"] | self.settings["commands"] | (model or {})
        command = ["fairseq-train", self.binarised, "--user-dir", "talk_fairseq", *words(flags)]
        return command if self.on_gpu else on_cpu + command

    def show(self, command):
        """Show a command, and note it for the list at the end."""
        line = shlex.join(map(str, command))
        show(f"$ {line}")
        noted = read_lines(self.listed) if self.listed.exists() else []
        if line not in noted:
            write_lines(self.listed, [*noted, line])

    def run(self, command, read=None, log=None):
        """Show and run a command; what it prints goes to the `log`, by default the session's.

        `read` finds the progress in that; see `Bar`.
        """
        self.show(command)
        self.commands.run(command, log or self.log, read)

    def once(self, title, made, command, read=None):
        """Announce, show and run a command that writes the path `made`, unless that is there.

        Where the path is none of the words, it is what the command prints. Returns whether it ran.
        """

        def make(partial):
            self.show(command)
            log = self.log if made in command else partial
            self.commands.run([partial if word == made else word for word in command], log, read)

        return self.folder.once(title, made, make)

    def prepare(self):
        """Write plain text, a SentencePiece model, and the sentences in pieces and as numbers."""
        pieces, numbers = self.folder.preparation(self.settings["vocabulary"])
        if self.once(*pieces):
            show("\n".join(read_lines(self.log)[-3 * len(self.folder.languages) :]))  # its counts
        self.once(*numbers)

    def train(self, title, folder, words, keep):
        """Train a model, unless that is done, and return how many updates it has had.

        Without --updates, it trains by the clock, in two legs. In the first the learning
        rate stays up, for a third of the time. Its updates tell how many this machine will make in
        the rest, over which the rate falls to zero in the second. If the machine turns slower, the
        second leg still stops in time. A training that was stopped goes on where it was.

        Args:
            title: what is trained, in words.
            folder: for its checkpoints; the final ones are in ``falling``.
            words: fairseq-train with its options, but for the schedule and the checkpoints.
            keep: how many of the last checkpoints, beside ``checkpoint_last.pt``.
        """
        updates, warmup = self.args.updates, self.settings["warmup"]
        if updates:
            start, end, left, stop = 0, updates, None, []
            title = f"{title} for {updates} updates"
        else:
            seconds = max(LEAST, self.seconds())
            first, left = seconds // 3, seconds - seconds // 3
            start = self.leg(f"{title}, first leg: {first} seconds", folder / "steady", "plan", [
                *words, "--stop-time-hours", f"{first / 3600:.4f}", "--warmup-updates", warmup,
                "--total-num-update", 10**9, "--save-interval-updates", 100,
                "--keep-interval-updates", 1,
            ], first)  # fmt: skip
            end = start + start * 19 // 10  # in twice the time, of which a little is spared
            title += f", second leg: updates {start} to {end}, at most {left} seconds"
            stop = ["--stop-time-hours", f"{seconds / 3600:.4f}"]  # of both legs
        return self.leg(title, folder / "falling", "done", [
            *words, *stop, "--warmup-updates", start or min(warmup, end // 4),
            "--total-num-update", end, "--max-update", end,
            "--save-interval-updates", max(1, (end - start) // 40),
            "--keep-interval-updates", keep,
        ], left, origin=folder / "steady/checkpoint_last.pt")  # fmt: skip

    def leg(self, title, folder, done, words, seconds, origin=None):
        """Train, unless that is done, and return how many updates there were.

        That number is in the file named `done`, beside the `folder` of the checkpoints. It takes so
        many `seconds`, or the updates of --updates (None), and may begin at a checkpoint `origin`.
        """
        log, done = folder.parent / "train.log", folder.parent / done

        def make(partial):
            share = by_the_clock(seconds) if seconds else lambda so_far: so_far / self.args.updates
            self.run([*words, *resuming(folder, origin)], training(share), log)
            text = log.read_text(encoding="utf-8", errors="replace")
            if not (saved_or_loaded := re.findall(r"@ (\d+) updates", text)):
                raise Failed(f"{log}: expected checkpoints of a training, got none")
            write_lines(partial, saved_or_loaded[-1:])

        self.folder.once(title, done, make)
        return int(done.read_text().split()[0])

    def finish(self):
        """Show the list of the commands, and how long it took."""
        show("\n== the commands, in order")
        show("\n".join(read_lines(self.listed)))
        minutes, seconds = divmod(int(time.monotonic() - self.started), 60)
        show(f"\n== done in {minutes} min {seconds} s; everything is in {self.out}")


def by_the_clock(seconds):
    """Return a function that tells which share of so many seconds from now is over."""
    began = time.monotonic()
    return lambda _: (time.monotonic() - began) / seconds
