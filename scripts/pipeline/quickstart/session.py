"""What the quick starts share: options, the folder of a run, and commands that are listed."""

import argparse
import hashlib
import json
import os
import signal
import time
from pathlib import Path

from pipeline.common import systems
from pipeline.common.command import BadInput, at_least, parser
from pipeline.common.fairseq import Commands, binarising, in_words
from pipeline.common.files import read_lines, write_lines
from pipeline.common.folder import Folder, show
from pipeline.common.paths import ROOT
from pipeline.data.corpus import read_corpus

MADE = (  # all that a quick start leaves in its folder
    *("corpus", "binarised", "training", "averaged.pt", "translations", "transformer_lm.pt"),
    *("transformer_lm.txt", "talkconv_lm.pt", "talkconv_lm.txt", "prompt.txt"),
    *("continuations.txt", "results.json", "commands.txt", "log.txt"),
)
KEPT_BACK = 90  # seconds, to load fairseq several times and for what comes after training


def options(name, description, out, each="", data="{train,valid,test}.{SOURCE,TARGET}"):
    """Return a parser of the options that both quick starts have.

    Args:
        name: the command in ``scripts/``.
        out: the folder where nothing else is asked for, in the project's root.
        each: "each " if several models are trained.
        data: the files of a corpus.
    """
    parse = parser(name, description)
    parse.usage = "%(prog)s [options]"
    for flag, metavar, kind, default, text in (
        ("--minutes", "N", at_least(2.0), 9.0, "time for all of it after set-up (default: 9)"),
        ("--updates", "N", at_least(1), None,
         f"train {each}for N updates, however long they take, instead of by the clock"),
        ("--out", "DIR", _from_here, Path(out),
         f"folder for everything it makes (default: {out}, in the project's root)"),
        ("--data", "DIR", _from_here, Path("data/bible-es-en"),
         f"another corpus: {data}, one sentence a line, also with .gz (default: "
         "data/bible-es-en)"),
    ):  # fmt: skip
        parse.add_argument(flag, metavar=metavar, type=kind, default=default, help=text)
    parse.add_argument("--cpu", action="store_true", help="do not use a GPU")
    parse.add_argument(
        "--restart",
        action="store_true",
        help="throw away what an earlier run left in that folder, and start over (without it, a "
        "run that was stopped, also by Ctrl-C, continues)",
    )
    return parse


def given(text):
    """Return the value of an option, which may not be empty."""
    if not text:
        raise argparse.ArgumentTypeError("expected a value, got an empty one")
    return text


def _from_here(text):
    return Path.cwd() / given(text)


class Session:
    """A run of a quick start: its folder, its clock and its commands.

    Commands run in the project's root, and are shown and listed as a reader can paste them there.

    Args:
        args: of a parser as `options` returns it.
        languages: one or two, by which the files of the corpus end.
        config: the name of a YAML file in ``configs/verses``, of which `settings` becomes the
            section for this device and these minutes.

    Raises BadInput for a folder or a corpus that cannot be used.
    """

    def __init__(self, args, languages, config):
        os.chdir(ROOT)
        self.args, self.languages, self.out = args, languages, args.out
        self.log, self.listed = self.out / "log.txt", self.out / "commands.txt"
        self.corpus, self.binarised = self.out / "corpus", self.out / "binarised"
        made = [pattern for name in MADE for pattern in (name, f"{name}.*partial*")]
        self.folder = Folder(self.out, "quick start", made)
        self.folder.check()
        try:
            text = json.dumps(read_corpus(args.data, languages))
        except (OSError, ValueError) as error:
            raise BadInput(error) from None
        self.sha256 = hashlib.sha256(text.encode()).hexdigest()
        self.on_gpu = not args.cpu and _has_gpu()
        section = "gpu" if self.on_gpu else "cpu_long" if args.minutes >= 30 else "cpu"
        self.settings = systems.read_yaml(config)[section]
        self.on_device = systems.words(self.settings["commands"])
        self.started = time.monotonic()  # nothing has taken time yet

    def open(self, **trainings):
        """Take hold of the folder for these trainings, ``{name: words of a command}``."""
        args = self.args
        settings = {
            "data": str(args.data),
            "sha256": self.sha256,
            "languages": self.languages,
            "device": "gpu" if self.on_gpu else "cpu",
            "length": f"{args.updates} updates" if args.updates else f"{args.minutes:g} minutes",
            **{name: in_words(words) for name, words in trainings.items()},
        }
        self.folder.open(settings, args.restart)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # it stops what it started
        self.commands = Commands(not self.on_gpu, lock=self.folder.lock)
        if not self.on_gpu:
            # Only training computes in bfloat16; its command says so.
            self.commands.environment["TALK_MATMUL_PRECISION"] = "highest"

    def seconds_left(self):
        """Return the seconds that are left for training."""
        elapsed = time.monotonic() - self.started
        return int(60 * self.args.minutes - elapsed) - KEPT_BACK

    def training(self, model=()):
        """Return the words of fairseq-train with the settings of all models and those of one."""
        precision = [] if self.on_gpu else ["env", "TALK_MATMUL_PRECISION=medium"]
        flags = {**self.settings["training"], **self.settings["commands"], **dict(model)}
        plugin = ["--user-dir", "talk_fairseq"]
        return [*precision, "fairseq-train", self.binarised, *plugin, *systems.words(flags)]

    # Commands

    def show(self, words):
        """Show a command, and note it for the list at the end."""
        line = in_words(words)
        show(f"$ {line}")
        noted = read_lines(self.listed) if self.listed.exists() else []
        if line not in noted:
            write_lines(self.listed, [*noted, line])

    def run(self, words, bar=None, made=None, partial=None):
        """Show and run a command, with a bar; what it prints goes to the log.

        Where `words` have the path `made`, the command is given `partial` for it.
        """
        self.show(words)
        words = [partial if made and word == made else word for word in words]
        try:
            self.commands.run([*words, *(bar.options if bar else ())], self.log, bar)
        finally:
            if bar:
                bar.close()

    def once(self, title, made, words, bar=None):
        """Announce and run a command that writes the path `made`, unless that is there.

        Until it is whole it has another name than in `words`. Returns whether the command ran.
        """
        return self.folder.once(title, made, lambda partial: self.run(words, bar, made, partial))

    def keep(self, title, made, words):
        """The same for a command that prints what becomes the file `made`."""

        def make(partial):
            lines = []
            self.show(words)
            self.commands.run(words, self.log, lines.append)
            partial.write_text("".join(lines), encoding="utf-8")

        self.folder.once(title, made, make)

    # Steps of both

    def prepare(self):
        """Write plain text, a SentencePiece model, and the sentences in pieces and as numbers."""
        sides = systems.words(dict(zip(("source-lang", "target-lang"), self.languages)))
        words = ["python", "scripts/prepare_corpus.py", "--data", self.args.data, *sides,
                 "--vocabulary", self.settings["vocabulary"], "--output", self.corpus]  # fmt: skip
        if self.once("preparing the corpus", self.corpus, words):
            show("\n".join(read_lines(self.log)[-3:]))
        words = binarising(self.corpus, self.languages, self.binarised)
        self.once("binarising", self.binarised, words)

    def finish(self):
        """Show the list of the commands, and how long it took."""
        announce("the commands, in order")
        show("\n".join(read_lines(self.listed)))
        minutes, seconds = divmod(int(time.monotonic() - self.started), 60)
        announce(f"done in {minutes} min {seconds} s; everything is in {self.out}")


def announce(title):
    """Show the title of a step."""
    show(f"\n== {title}")


def _has_gpu():
    import torch

    return torch.cuda.is_available() and torch.version.cuda is not None
