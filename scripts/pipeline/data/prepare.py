"""Prepare a benchmark of the papers: from published archives to a folder that fairseq trains on.

``scripts/prepare_BENCHMARK.sh`` runs this. What a benchmark consists of, and how many lines that
is, stands in benchmarks.py. The stages are

    plain -> tokenized -> pieces -> data-bin

Each reads the folder of the one before in ``OUTPUT.partial``, and its own appears there when it is
complete; so a run that was stopped goes on with the stage it was in. The last one becomes OUTPUT.
"""

import argparse
import functools
import logging
import math
import os
import shutil
import struct
import sys
from concurrent.futures import BrokenExecutor
from contextlib import ExitStack, closing
from pathlib import Path

from tqdm import tqdm

from pipeline.common import command
from pipeline.common.command import BadInput, Failed
from pipeline.common.files import read_json, remove, write_json
from pipeline.common.folder import Folder
from pipeline.common.paths import PLUGIN, ROOT
from pipeline.data.archives import URL
from pipeline.data.benchmarks import (
    BENCHMARKS,
    SPLITS,
    describe,
    how_to_get,
    missing,
    published_lines,
)
from pipeline.data.plain import write_plain
from pipeline.data.text import (
    Writer,
    encode_pairs,
    in_parallel,
    is_kept,
    learn_pieces,
    lines_of,
    pairs_of,
    tokenize_pairs,
    without_bpe,
)

EPILOG = """\
The folder appears once all of it is there. Run again, a preparation that was stopped goes on with
the stage it was in. Line counts that are not the published ones are an error, with both numbers.
"""


class Preparation:
    """What is asked for, and what every stage needs to know.

    `prepared` becomes ``prepared.json``; the stages hand it on, each with what it found out.
    """

    def __init__(self, name, args):
        self.name, self.args, self.benchmark = name, args, BENCHMARKS[name]
        self.vocabulary = args.vocabulary or self.benchmark.vocabulary
        self.longest = args.longest or self.benchmark.longest
        self.ratio = args.ratio or self.benchmark.ratio
        self.settings = {
            "data": args.data,
            "download": args.download,
            "pretokenized": args.pretokenized and str(Path(args.pretokenized).resolve()),
            "dict": args.dict and str(Path(args.dict).resolve()),
            "vocabulary": self.vocabulary,
            "longest": None if self.longest == math.inf else self.longest,
            "ratio": None if self.ratio == math.inf else self.ratio,
        }
        self.prepared = {
            "benchmark": name,
            "source_lang": self.benchmark.source_lang,
            "target_lang": self.benchmark.target_lang,
            "tokenizer": "moses" if self.benchmark.target_lang else "none",
            "lowercase": self.benchmark.lowercase,
            "subwords": "sentencepiece" if self.benchmark.target_lang else "none",
            "lines": {},
            "checks": [],
            "settings": self.settings,
        }

    def check(self, what, found, published, exact=True):
        """Note a number beside the published ones (none: nothing to compare it with).

        Raises ValueError where it is another, unless the data is meant to be other. A number that
        is not `exact` may differ by one in fifty, and more is a warning.
        """
        self.prepared["checks"].append({"what": what, "found": found, "published": published})
        if exact:
            fits = found in published
        else:
            fits = any(abs(found - number) <= number / 50 for number in published)
        if fits or not published:
            return
        numbers = " or ".join(f"{number:,}" for number in published)
        message = f"{what}: expected {'' if exact else 'about '}{numbers}, got {found:,}"
        if exact and not self.args.other_counts:
            raise ValueError(f"{message} (--other-counts, if the data is other on purpose)")
        print(f"warning: {message}", file=sys.stderr)

    def go_through(self, function, pairs, title, lines):
        """Return `in_parallel` of `lines` pairs with a progress bar."""
        return tqdm(
            in_parallel(function, pairs, self.args.workers),
            desc=title,
            total=lines,
            unit=" lines",
            unit_scale=True,
            mininterval=0.5 if sys.stderr.isatty() else 60,
        )

    def languages_of(self, folder, prefix, split):
        """Return the paths of a split in a stage's folder, one a language."""
        return [folder / f"{prefix}{split}.{lang}" for lang in self.benchmark.languages]

    def pairs(self, folder, prefix, split):
        """Yield the lines of a split, side by side."""
        paths = self.languages_of(folder, prefix, split)
        return pairs_of(*map(lines_of, paths), [path.name for path in paths])


def keep(prep, previous, folder, *prefixes):
    """Copy the references of an earlier stage: small files, for scoring."""
    for prefix in prefixes:
        for split in ("valid", "test"):
            for path in prep.languages_of(previous, prefix, split):
                if path.exists():
                    shutil.copy(path, folder / path.name)


# --- Tokens ---


def write_tokenized(prep, previous, folder):
    """Write ``tokenized.{train,valid,test}.LANG``, and clean by tokens where that is asked."""
    benchmark = prep.benchmark
    languages = benchmark.moses or benchmark.languages
    keep(prep, previous, folder, "")
    with ExitStack() as stack:

        def open_split(prefix, split):
            return stack.enter_context(Writer(prep.languages_of(folder, prefix, split)))

        for split, lines in list(prep.prepared["lines"].items()):
            training = split == "train"
            counting = training and benchmark.clean == "tokens"
            validating = training and benchmark.valid_every
            tokens = without_double_spaces  # of what comes tokenised
            if prep.prepared["tokenizer"] == "moses":
                tokens = functools.partial(
                    tokenize_pairs,
                    languages=languages,
                    normalize=benchmark.normalize and training,
                    split_dashes=benchmark.split_dashes,
                    straight=benchmark.straight and not training,
                    lowercase=benchmark.lowercase,
                )
            writer = open_split("tokenized.", split)
            if validating:
                valid, plain = open_split("tokenized.", "valid"), open_split("", "valid")
            kept, pairs = 0, prep.pairs(previous, "", split)
            for pair, tokenized in prep.go_through(tokens, pairs, f"tokenising {split}", lines):
                if counting and not is_kept(*tokenized, prep.longest, prep.ratio):
                    continue
                kept += 1
                if validating and kept % validating == 0:
                    valid.write(tokenized)
                    plain.write(pair)
                else:
                    writer.write(tokenized)
            prep.prepared["lines"][split] = writer.lines
            if validating:
                prep.prepared["lines"]["valid"] = valid.lines
        if benchmark.clean == "tokens":
            check_cleaned(prep)


def without_double_spaces(pairs):
    """Return pairs of lines with single spaces."""
    return [tuple(" ".join(line.split()) for line in pair) for pair in pairs]


def check_cleaned(prep):
    """Check the training data after cleaning against the published number of pairs."""
    lines = prep.prepared["lines"]
    if lines["train"] == 0:
        raise ValueError("expected pairs to train on, got none after cleaning")
    published = published_lines(prep.benchmark)
    prep.check("pairs to train on", lines["train"], published["train"], exact=False)
    if prep.benchmark.valid_every:
        prep.check("pairs to validate", lines["valid"], published["valid"], exact=False)
    if prep.benchmark.valid_every and lines.get("valid", 0) == 0:
        raise ValueError(
            f"expected at least {prep.benchmark.valid_every} pairs, got {lines['train']}"
        )


# --- Pieces ---


def write_pieces(prep, previous, folder):
    """Write ``sentencepiece.model``, learnt of both languages, and all splits as ``pieces.…``."""
    keep(prep, previous, folder, "", "tokenized.")
    model = folder / "sentencepiece.model"
    print("learning the pieces", file=sys.stderr, flush=True)
    learn_pieces(
        (line for pair in prep.pairs(previous, "tokenized.", "train") for line in pair),
        prep.vocabulary - 3,  # fairseq adds four special words, of which one is among these
        model,
        bos_id=-1,
        eos_id=-1,
        character_coverage=0.9995,  # rarer characters stay whole, if the dictionary has room
        input_sentence_size=prep.benchmark.learn_from,
        shuffle_input_sentence=True,
        max_sentence_length=1_000_000,  # bytes; longer lines are not learnt from
    )
    for split, lines in list(prep.prepared["lines"].items()):
        cleaning = split == "train" and prep.benchmark.clean == "pieces"
        pairs = prep.pairs(previous, "tokenized.", split)
        encode = functools.partial(encode_pairs, model=model)
        with Writer(prep.languages_of(folder, "pieces.", split)) as writer:
            for _, pieces in prep.go_through(encode, pairs, f"cutting {split}", lines):
                if not cleaning or is_kept(*pieces, prep.longest, prep.ratio):
                    writer.write(pieces)
        prep.prepared["lines"][split] = writer.lines
    if prep.benchmark.clean == "pieces":
        check_cleaned(prep)


def copy_pretokenized(prep, _, folder):
    """Write pieces of subword-nmt unchanged, and their tokens, in place of the earlier stages."""
    given = Path(prep.args.pretokenized)
    prep.prepared["subwords"] = "subword_nmt"
    published = published_lines(prep.benchmark)
    for split in SPLITS:
        paths = prep.languages_of(given, "", split)
        there = [path for path in paths if path.exists()]
        if not there and split != "test" and (split != "train" or dictionaries(prep)):
            continue
        if len(there) < len(paths):
            lacking = next(path for path in paths if path not in there)
            need = "" if split == "test" else " (training data, or its dictionaries: --dict)"
            raise ValueError(f"--pretokenized: expected the file {lacking}{need}, got none")
        with (
            Writer(prep.languages_of(folder, "pieces.", split)) as pieces,
            Writer(prep.languages_of(folder, "tokenized.", split)) as tokens,
        ):
            for pair in pairs_of(*map(lines_of, paths), [path.name for path in paths]):
                pieces.write(pair)
                if split != "train":
                    tokens.write(map(without_bpe, pair))
        if split == "train":
            for path in tokens.paths:
                path.unlink()
        prep.prepared["lines"][split] = pieces.lines
        prep.check(f"lines of {split}", pieces.lines, published[split], exact=split == "test")


def dictionaries(prep):
    """Return the dictionaries to use in place of new ones, one a language; or none."""
    if prep.args.dict:
        return [Path(prep.args.dict)] * len(prep.benchmark.languages)
    if prep.args.pretokenized:
        paths = [
            Path(prep.args.pretokenized) / f"dict.{lang}.txt" for lang in prep.benchmark.languages
        ]
        if all(path.exists() for path in paths):
            return paths
    return []


# --- Numbers ---


def binarize(prep, previous, folder):
    """Write what fairseq-preprocess makes, and the references."""
    console = logging.StreamHandler()
    console.addFilter(lambda record: isinstance(record.msg, str))  # not a screenful of options
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[console])
    from fairseq import options, utils
    from fairseq_cli import preprocess

    utils.import_user_module(argparse.Namespace(user_dir=str(PLUGIN)))
    benchmark, lines = prep.benchmark, prep.prepared["lines"]
    words = ["--destdir", folder, "--workers", prep.args.workers]
    if benchmark.target_lang:
        words += ["--source-lang", benchmark.source_lang, "--target-lang", benchmark.target_lang]
        words += [
            word for split in lines for word in (f"--{split}pref", previous / f"pieces.{split}")
        ]
        if given := dictionaries(prep):
            words += ["--srcdict", given[0], "--tgtdict", given[1]]
        elif benchmark.joined:
            words += ["--joined-dictionary"]
        if prep.prepared["subwords"] == "sentencepiece":
            words += ["--nwordssrc", prep.vocabulary, "--nwordstgt", prep.vocabulary]
        pair = "-".join(benchmark.languages)
        indices = {
            f"{split}.{pair}.{lang}.idx": split for split in lines for lang in benchmark.languages
        }
    else:
        words += ["--only-source"]
        for split in lines:
            words += [f"--{split}pref", previous / f"{split}.{benchmark.source_lang}"]
        indices = {f"{split}.idx": split for split in lines}
    preprocess.main(options.get_preprocessing_parser().parse_args([str(word) for word in words]))
    for name, split in indices.items():
        with open(folder / name, "rb") as file:
            _, _, _, written = struct.unpack("<9sQBQ", file.read(26))
        if written != lines[split]:
            raise ValueError(f"{name}: expected {lines[split]:,} lines, fairseq wrote {written:,}")
    keep(prep, previous, folder, "", "tokenized.")
    if (previous / "sentencepiece.model").exists():
        shutil.copy(previous / "sentencepiece.model", folder)


# --- The stages, one after the other ---


def stages_of(prep):
    """Return ``{name: function}``; a function reads the folder of the stage before its own."""
    if prep.args.pretokenized:
        return {"pieces": copy_pretokenized, "data-bin": binarize}
    if prep.benchmark.target_lang is None:
        return {"plain": write_plain, "data-bin": binarize}
    return {
        "plain": write_plain,
        "tokenized": write_tokenized,
        "pieces": write_pieces,
        "data-bin": binarize,
    }


def go_on(prep, folder):
    """Run the stages that are left to do in a `Folder`; return the path of the last one."""
    stages = stages_of(prep)
    paths = [folder.path / name for name in stages]
    done = max((n for n, path in enumerate(paths) if path.exists()), default=-1)
    for number, (name, write) in enumerate(stages.items()):
        previous = paths[number - 1] if number else None

        def make(partial, write=write, previous=previous):
            if previous:
                prep.prepared = read_json(previous / "prepared.json")
            partial.mkdir()
            write(prep, previous, partial)
            lines = prep.prepared["lines"]
            in_order = {split: lines[split] for split in SPLITS if split in lines}
            prep.prepared["lines"] = in_order
            write_json(partial / "prepared.json", prep.prepared)

        if number > done:
            folder.once(f"{prep.name}: {name}", paths[number], make)
        for path in (previous, folder.path / "extracted"):
            if path:
                remove(path)
    return paths[-1]


def prepare(prep, output):
    """Prepare the folder `output`, whole or not at all, unless it is there already."""
    ready, restart = output / "prepared.json", prep.args.restart
    if output.exists() and not ready.exists() and (not output.is_dir() or any(output.iterdir())):
        raise BadInput(f"--output: expected a new folder, got {output}, which holds other things")
    work = output.with_name(output.name + ".partial")
    if ready.exists() and not restart:
        if read_json(ready)["settings"] != prep.settings:
            raise BadInput(
                f"--output: {output} was prepared with other settings (see prepared.json in it); "
                "--restart replaces it"
            )
        remove(work)
        print(f"{output} is ready; --restart prepares it again")
        return
    made = ["extracted", *(f"{name}*" for name in ("plain", "tokenized", "pieces", "data-bin"))]
    with closing(Folder(work, "preparation", made, "--output")) as folder:
        folder.open(prep.settings, restart)
        finished = go_on(prep, folder)
        remove(output)
        finished.rename(output)
        remove(work)
    lines = ", ".join(f"{split} {n:,}" for split, n in prep.prepared["lines"].items())
    print(f"{output} is ready: {lines} lines")


# --- The command ---


def parse(name, arguments):
    """Return the options of ``scripts/prepare_NAME.sh``. Raises BadInput."""
    benchmark = BENCHMARKS[name]
    parser = command.parser(f"prepare_{name}.sh", describe(benchmark), EPILOG)
    add = parser.add_argument
    add("--data", action="append", default=[], metavar="PATH|URL", help="a folder, an archive or "
        "the address of one; may be given several times")  # fmt: skip
    add("--download", action="store_true", help="get what --data lacks from its published hosts")
    add("--downloads", default=str(ROOT / "data-bin/downloads"), metavar="DIR", help="where "
        "downloads are kept, each under its address (default: data-bin/downloads)")  # fmt: skip
    add("--output", metavar="DIR", help=f"the folder to write (default: data-bin/{name})")
    add("--workers", type=command.positive(int), default=len(os.sched_getaffinity(0)), metavar="N",
        help="processes (default: as many as there are cores)")  # fmt: skip
    add("--other-counts", action="store_true", help="the data differs from the published data on "
        "purpose: only report line counts")  # fmt: skip
    add("--restart", action="store_true", help="remove what an earlier run left, and prepare again")

    def of_subwords(text):
        return text if benchmark.target_lang else argparse.SUPPRESS

    add("--vocabulary", type=command.positive(int), metavar="N",
        help=of_subwords("words of a dictionary, for other data than the published"))  # fmt: skip
    add("--longest", type=command.positive(int), metavar="N",
        help=of_subwords("clean the training data by another longest sentence"))  # fmt: skip
    add("--ratio", type=command.positive(float), metavar="X",
        help=of_subwords("clean the training data by another ratio of lengths"))  # fmt: skip
    add("--pretokenized", metavar="DIR", help=of_subwords("in place of --data: take {train,valid,"
        "test}.LANG, tokenised and cut by subword-nmt, unchanged; train and valid may be missing "
        "where the dictionaries are given"))  # fmt: skip
    add("--dict", metavar="FILE", help=of_subwords("with --pretokenized: the dictionary of both "
        "languages (default: DIR/dict.LANG.txt, otherwise new ones)"))  # fmt: skip
    args = parser.parse_args(arguments)
    args.data = [place if URL.match(place) else str(Path(place).resolve()) for place in args.data]
    if args.pretokenized and (args.data or args.download or args.vocabulary):
        raise BadInput("--pretokenized: expected no --data, --download or --vocabulary beside it")
    if args.pretokenized and benchmark.target_lang is None:
        raise BadInput(f"--pretokenized: {name} has no subwords; use --data")
    if args.dict and not args.pretokenized:
        raise BadInput("--dict: expected --pretokenized beside it")
    if args.dict and not Path(args.dict).is_file():
        raise BadInput(f"--dict: expected a file, got {args.dict}")
    if not (args.data or args.download or args.pretokenized):
        raise BadInput(how_to_get(missing(benchmark, {}), benchmark))
    return args


def main(arguments=None):
    """Run ``prepare_NAME.sh`` with ``[NAME, argument, …]`` and return its exit status."""
    name, *rest = sys.argv[1:] if arguments is None else arguments

    def body():
        args = parse(name, rest)
        output = Path(args.output or ROOT / "data-bin" / name).resolve()
        try:
            prepare(Preparation(name, args), output)
        except BrokenExecutor:
            raise Failed("a process was killed; try fewer --workers") from None

    return command.run(f"prepare_{name}.sh", body, (BadInput, OSError, ValueError))
