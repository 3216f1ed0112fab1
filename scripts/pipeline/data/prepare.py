"""Prepare a benchmark of the papers: from published archives to a folder that fairseq trains on.

Called by ``scripts/prepare_<benchmark>.sh``, which say in ``--help`` what they take. What each
benchmark consists of, and how many lines that is, is the table BENCHMARKS below. The stages are

    plain -> tokenized -> pieces -> data-bin

Each reads the folder of the one before in ``OUTPUT.partial``, and its own appears there when it is
complete; so a run that was stopped goes on with the stage it was in. The last one becomes OUTPUT.
"""

import argparse
import fcntl
import functools
import hashlib
import json
import logging
import math
import os
import shutil
import struct
import sys
from concurrent.futures import BrokenExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tqdm import tqdm

from pipeline.common.paths import ROOT
from pipeline.data.archives import URL, download, gather, read_members, walk
from pipeline.data.text import (
    LONGEST_LINE,
    encode_pairs,
    in_parallel,
    is_kept,
    learn_pieces,
    lines_of,
    pairs_of,
    segments,
    story,
    tokenize_pairs,
    without_bpe,
    without_sentence_tags,
    without_tags,
)

SPLITS = ("train", "valid", "test")


# --- The benchmarks ---


@dataclass(frozen=True)
class Part:
    """Files that are read side by side into a split; `lines` are the published numbers of lines."""

    split: str
    files: tuple
    lines: tuple
    format: str = "text"  # or tags, segments, sentence tags
    tokens: int = 0  # published number of words and ends of line, of a language model's text


@dataclass(frozen=True)
class Archive:
    """Where files come from: those whose names start with one of `holds`."""

    url: str
    holds: tuple

    @property
    def name(self):
        return PurePosixPath(self.url).name


@dataclass(frozen=True)
class Benchmark:
    """A data set, and how the papers prepared it."""

    source_lang: str
    target_lang: str | None  # None: a language model's text, of words as they stand
    parts: tuple  # of alternatives; the first that is there is read
    archives: tuple
    elsewhere: str  # what to know about hosts that are gone
    vocabulary: int = 0  # words of a dictionary, fairseq's four special ones among them
    joined: bool = True  # one dictionary for both languages
    train_lines: int = 0  # published, after cleaning; another tokeniser moves it a little
    longest: float = math.inf
    ratio: float = math.inf
    clean: str = "tokens"  # what `longest` and `ratio` count: tokens or pieces
    valid_every: int = 0  # this many-th pair of the training data validates
    normalize: bool = False  # of the training data, see prepare_text.tokenize
    split_dashes: bool = False
    straight: bool = False  # of the other splits
    lowercase: bool = False
    moses: tuple = ()  # the languages by which to tokenise, if not the names of the sides
    learn_from: int = 4_000_000  # lines of both languages, half a kilobyte of memory each
    stories: tuple = ()  # archives of story files, which go with lists of addresses

    @property
    def languages(self):
        return tuple(filter(None, (self.source_lang, self.target_lang)))


def corpus(stem, source, target, *lines):
    """A training corpus of plain text."""
    return Part("train", (f"{stem}.{source}", f"{stem}.{target}"), lines)


def newstest(split, name, source, target, *lines):
    """A test set of WMT."""
    return (
        Part(split, (f"{name}-src.{source}.sgm", f"{name}-ref.{target}.sgm"), lines, "segments"),
    )


def iwslt(name, lines):
    """A test set of IWSLT."""
    files = (f"IWSLT14.{name}.de-en.de.xml", f"IWSLT14.{name}.de-en.en.xml")
    return (Part("test", files, (lines,), "segments"),)


def processed(split, name, *lines):
    """A split of CNN-DM in the form that most summarisation code exchanges."""
    return (Part(split, (f"{name}.txt.src", f"{name}.txt.tgt"), lines, "sentence tags"),)


def wiki(split, lines, tokens):
    """A split of WikiText."""
    return (Part(split, (f"wiki.{split}.tokens",), (lines,), tokens=tokens),)


EUROPARL = "https://www.statmt.org/wmt13/training-parallel-europarl-v7.tgz"
COMMON_CRAWL = "https://www.statmt.org/wmt13/training-parallel-commoncrawl.tgz"
NEWSTEST2014 = "https://www.statmt.org/wmt14/test-full.tgz"
STATMT = (
    "Where statmt.org does not answer, OPUS (opus.nlpl.eu) has Europarl and News Commentary, in "
    "other versions; the sacrebleu command prints the news test sets."
)
LISTS = {"train": "all_train.txt", "valid": "all_val.txt", "test": "all_test.txt"}

BENCHMARKS = {
    "iwslt14_de_en": Benchmark(
        source_lang="de",
        target_lang="en",
        parts=(
            (Part("train", ("train.tags.de-en.de", "train.tags.de-en.en"), (174_443,), "tags"),),
            iwslt("TED.dev2010", 887),
            iwslt("TEDX.dev2012", 1_165),
            iwslt("TED.tst2010", 1_565),
            iwslt("TED.tst2011", 1_433),
            iwslt("TED.tst2012", 1_700),
        ),
        archives=(
            Archive(
                "https://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz",
                ("train.tags.", "IWSLT14."),
            ),
        ),
        elsewhere="The original host, wit3.fbk.eu, is gone; in releases of all its languages, this "
        "archive is texts/de/en/de-en.tgz.",
        vocabulary=10_000,
        joined=False,
        train_lines=160_239,
        longest=175,
        ratio=1.5,
        valid_every=23,
        straight=True,
        lowercase=True,
    ),
    "wmt16_en_de": Benchmark(
        source_lang="en",
        target_lang="de",
        parts=(
            (corpus("europarl-v7.de-en", "en", "de", 1_920_209),),
            (corpus("commoncrawl.de-en", "en", "de", 2_399_123),),
            (
                corpus("news-commentary-v11.de-en", "en", "de", 242_770),
                corpus("news-commentary-v12.de-en", "en", "de", 270_769),
            ),
            newstest("valid", "newstest2013", "en", "de", 3_000),
            newstest("test", "newstest2014-deen", "en", "de", 3_003, 2_737),
        ),
        archives=(
            Archive(EUROPARL, ("europarl-v7.de-en",)),
            Archive(COMMON_CRAWL, ("commoncrawl.de-en",)),
            Archive(
                "https://data.statmt.org/wmt16/translation-task/training-parallel-nc-v11.tgz",
                ("news-commentary-v11.",),
            ),
            Archive(
                "https://data.statmt.org/wmt17/translation-task/training-parallel-nc-v12.tgz",
                ("news-commentary-v12.",),
            ),
            Archive("https://data.statmt.org/wmt17/translation-task/dev.tgz", ("newstest2013-",)),
            Archive(NEWSTEST2014, ("newstest2014-",)),
        ),
        elsewhere=STATMT,
        vocabulary=32_768,
        # The published 3,960,793 of 4,544,200 pairs, of the 4,562,102 here.
        train_lines=3_976_000,
        longest=250,
        ratio=1.5,
        clean="pieces",
        straight=True,
    ),
    "wmt14_en_fr": Benchmark(
        source_lang="en",
        target_lang="fr",
        parts=(
            (corpus("europarl-v7.fr-en", "en", "fr", 2_007_723),),
            (corpus("commoncrawl.fr-en", "en", "fr", 3_244_152),),
            (corpus("undoc.2000.fr-en", "en", "fr", 12_886_831),),
            (corpus("news-commentary-v9.fr-en", "en", "fr", 183_251),),
            (corpus("giga-fren.release2.fixed", "en", "fr", 22_520_376, 22_520_400),),
            newstest("valid", "newstest2012", "en", "fr", 3_003),
            newstest("valid", "newstest2013", "en", "fr", 3_000),
            newstest("test", "newstest2014-fren", "en", "fr", 3_003),
        ),
        archives=(
            Archive(EUROPARL, ("europarl-v7.fr-en",)),
            Archive(COMMON_CRAWL, ("commoncrawl.fr-en",)),
            Archive("https://www.statmt.org/wmt13/training-parallel-un.tgz", ("undoc.2000.fr-en",)),
            Archive(
                "https://www.statmt.org/wmt14/training-parallel-nc-v9.tgz", ("news-commentary-v9.",)
            ),
            Archive("https://www.statmt.org/wmt10/training-giga-fren.tar", ("giga-fren.",)),
            Archive("https://www.statmt.org/wmt14/dev.tgz", ("newstest2012-", "newstest2013-")),
            Archive(NEWSTEST2014, ("newstest2014-",)),
        ),
        elsewhere=STATMT,
        vocabulary=40_000,
        train_lines=35_789_000,
        longest=250,
        ratio=1.5,
        clean="pieces",
        normalize=True,
        split_dashes=True,
        straight=True,
    ),
    "cnn_dm": Benchmark(
        source_lang="source",
        target_lang="target",
        parts=(
            processed("train", "train", 287_227, 287_226, 287_113, 287_112),
            processed("valid", "val", 13_368),
            processed("test", "test", 11_490),
        ),
        archives=(
            Archive(
                "https://s3.amazonaws.com/opennmt-models/Summary/cnndm.tar.gz",
                ("train.txt.", "val.txt.", "test.txt."),
            ),
        ),
        elsewhere="The story archives, cnn_stories.tgz and dailymail_stories.tgz, are linked from "
        "cs.nyu.edu/~kcho/DMQA; the lists all_train.txt, all_val.txt and all_test.txt are in "
        "url_lists of github.com/abisee/cnn-dailymail.",
        vocabulary=30_000,
        train_lines=287_113,
        moses=("en", "en"),
        learn_from=200_000,
        stories=("cnn_stories.tgz", "dailymail_stories.tgz"),
    ),
    "wikitext103": Benchmark(
        source_lang="en",
        target_lang=None,
        parts=(
            wiki("train", 1_801_350, 103_227_021),
            wiki("valid", 3_760, 217_646),
            wiki("test", 4_358, 245_569),
        ),
        archives=(Archive("https://wikitext.smerity.com/wikitext-103-v1.zip", ("wiki.",)),),
        elsewhere="The original host, research.metamind.io on Amazon S3, is gone; take "
        "wikitext-103-v1.zip (not wikitext-103-raw-v1.zip) from a mirror.",
        train_lines=1_801_350,
    ),
}
PUBLISHED_STORIES = {"train": 287_227, "valid": 13_368, "test": 11_490}


# --- A run ---


class Run:
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
        """`in_parallel` with a bar."""
        return tqdm(
            in_parallel(function, pairs, self.args.workers),
            desc=title,
            total=lines,
            unit=" lines",
            unit_scale=True,
            mininterval=0.5 if sys.stderr.isatty() else 60,
        )

    def languages_of(self, folder, prefix, split):
        """The paths of a split in a stage's folder, one a language."""
        return [folder / f"{prefix}{split}.{lang}" for lang in self.benchmark.languages]

    def pairs(self, folder, prefix, split):
        """Its lines, side by side."""
        paths = self.languages_of(folder, prefix, split)
        return pairs_of(*map(lines_of, paths), [path.name for path in paths])


class Writer:
    """Text files of one split, written side by side."""

    def __init__(self, paths):
        self.paths, self.lines = paths, 0

    def __enter__(self):
        self.files = [open(path, "w", encoding="utf-8", newline="\n") for path in self.paths]
        return self

    def write(self, lines):
        self.lines += 1
        for file, line in zip(self.files, lines):
            file.write(line + "\n")

    def __exit__(self, *error):
        for file in self.files:
            file.close()


def keep(run, previous, folder, *prefixes):
    """Hand on the references of an earlier stage: small files, for scoring."""
    for prefix in prefixes:
        for split in ("valid", "test"):
            for path in run.languages_of(previous, prefix, split):
                if path.exists():
                    shutil.copy(path, folder / path.name)


# --- Stage 1: plain text ---


def write_plain(run, _, folder):
    """``{train,valid,test}.LANG``, a sentence a line as it stands, out of the published files."""
    locations = locate(run)
    benchmark = run.benchmark
    wanted = {name for choices in benchmark.parts for part in choices for name in part.files}
    archives = {archive.name: archive.holds for archive in benchmark.archives}
    copied = folder.with_name("extracted")
    texts = [place for place in locations if place.name not in benchmark.stories]
    paths = gather(wanted, texts, archives, copied)
    if benchmark.stories and not any(name in paths for name in wanted):
        lists = gather(set(LISTS.values()), texts, {}, copied)
        if lists or not run.args.download:
            return write_stories(run, lists, locations, folder)
    if run.args.download:
        for archive in archives_of(missing(benchmark, paths), benchmark):
            texts.append(download(archive.url, Path(run.args.downloads)))
        paths = gather(wanted, texts, archives, copied)
    lacking = missing(benchmark, paths)
    if lacking:
        raise ValueError(how_to_get(lacking, benchmark))
    with ExitStack() as stack:
        writers = {}
        for choices in benchmark.parts:
            part = next(part for part in choices if paths.keys() >= set(part.files))
            if part.split not in writers:
                files = run.languages_of(folder, "", part.split)
                writers[part.split] = stack.enter_context(Writer(files))
            read_part(run, part, [paths[name] for name in part.files], writers[part.split])
        for split, writer in writers.items():
            run.prepared["lines"][split] = writer.lines
    if any(part.format == "sentence tags" for choices in benchmark.parts for part in choices):
        run.prepared["tokenizer"] = "none"  # these come tokenised


def locate(run):
    """The folders and files of ``--data``; an address is downloaded."""
    locations = []
    for place in run.args.data:
        if URL.match(place):
            locations.append(download(place, Path(run.args.downloads)))
        elif Path(place).exists():
            locations.append(Path(place))
        else:
            raise ValueError(f"--data: expected a folder, a file or an address, got {place}")
    return locations


def missing(benchmark, paths):
    """The files that are not among `paths`; of alternatives, those of the first one."""
    files = []
    for choices in benchmark.parts:
        if not any(paths.keys() >= set(part.files) for part in choices):
            files += [name for name in choices[0].files if name not in paths]
    return files


def archives_of(files, benchmark):
    return [
        archive
        for archive in benchmark.archives
        if any(name.startswith(archive.holds) for name in files)
    ]


def how_to_get(files, benchmark):
    """One line that says what is missing and where it may be had."""
    some = ", ".join(files[:4]) + (f" and {len(files) - 4} more" if len(files) > 4 else "")
    urls = ", ".join(archive.url for archive in archives_of(files, benchmark))
    return (
        f"missing {some}; give --data the folder or the archives, or --download them from {urls}. "
        f"{benchmark.elsewhere}"
    )


def read_part(run, part, paths, writer):
    """Append the lines of some files, and check how many they are."""
    before, tokens = writer.lines, 0
    readers = {
        "text": lines_of,
        "tags": lambda path: without_tags(lines_of(path)),
        "segments": lambda path: segments(lines_of(path), path),
        "sentence tags": lambda path: map(without_sentence_tags, lines_of(path)),
    }
    sides = [readers[part.format](path) for path in paths]
    name = part.files[0] if len(paths) == 1 else " and ".join(part.files)
    for lines in pairs_of(*sides, part.files) if len(sides) == 2 else zip(*sides):
        writer.write(lines)
        if part.tokens:
            tokens += len(lines[0].split()) + 1
    run.check(f"lines of {name}", writer.lines - before, part.lines)
    if part.tokens:
        run.check(f"words of {name}, ends of line among them", tokens, (part.tokens,))


def write_stories(run, lists, locations, folder):
    """CNN-DM's plain text out of its story files, in the order of the lists of addresses.

    A story's file is named by the SHA-1 of its address. The stories of all lists go to one file
    first, as they come, since an archive can only be read in its own order.
    """
    absent = [name for name in LISTS.values() if name not in lists]
    if absent:
        files = [name for choices in run.benchmark.parts for part in choices for name in part.files]
        raise ValueError(f"missing {', '.join(absent)}; or {how_to_get(files, run.benchmark)}")
    names = {}
    for split, name in LISTS.items():
        addresses = [line for line in lines_of(lists[name]) if line]
        run.check(f"lines of {name}", len(addresses), (PUBLISHED_STORIES[split],))
        names[split] = [hashlib.sha1(line.encode()).hexdigest() for line in addresses]
    listed = set().union(*names.values())
    places = {}  # of each story in the file: where it starts, and its length

    def take(name, stream):
        name = PurePosixPath(name)
        if name.suffix == ".story" and name.stem in listed and name.stem not in places:
            text = stream.read(LONGEST_LINE + 1)  # a story becomes a line
            if len(text) > LONGEST_LINE:
                raise ValueError(f"{name.name}: expected at most {LONGEST_LINE:,} bytes")
            places[name.stem] = (spool.tell(), len(text))
            spool.write(text)

    files, archives = walk(locations, run.benchmark.stories)
    spooled = folder / "stories"
    with open(spooled, "wb+") as spool:
        for path in tqdm(files, desc="story files", mininterval=10, disable=not files):
            if path.suffix == ".story":
                with open(path, "rb") as stream:
                    take(path.name, stream)
        for archive in archives:
            print(f"reading {archive}", file=sys.stderr, flush=True)
            read_members(archive, take)
        for split, hashes in names.items():
            there = [name for name in hashes if name in places]
            if not there:
                raise ValueError(f"no story of {LISTS[split]} is there. {run.benchmark.elsewhere}")
            run.check(f"stories of {LISTS[split]}", len(there), (len(hashes),))
            with Writer(run.languages_of(folder, "", split)) as writer:
                for name in there:
                    spool.seek(places[name][0])
                    text = spool.read(places[name][1])
                    try:
                        writer.write(story(text.decode("utf-8")))
                    except UnicodeDecodeError as error:
                        raise ValueError(f"{name}.story: expected UTF-8, got {error}") from None
            run.prepared["lines"][split] = writer.lines
    spooled.unlink()


# --- Stage 2: tokens ---


def write_tokenized(run, previous, folder):
    """``tokenized.{train,valid,test}.LANG``; the training data cleaned, if tokens are to count."""
    benchmark = run.benchmark
    languages = benchmark.moses or benchmark.languages
    clean = run.prepared["tokenizer"] == "moses"
    keep(run, previous, folder, "")
    with ExitStack() as stack:

        def open_split(prefix, split):
            return stack.enter_context(Writer(run.languages_of(folder, prefix, split)))

        for split, lines in list(run.prepared["lines"].items()):
            training = split == "train"
            if clean:
                tokens = functools.partial(
                    tokenize_pairs,
                    languages=languages,
                    normalize=benchmark.normalize and training,
                    split_dashes=benchmark.split_dashes,
                    straight=benchmark.straight and not training,
                    lowercase=benchmark.lowercase,
                )
            else:
                tokens = without_double_spaces
            writer = open_split("tokenized.", split)
            counting = training and benchmark.clean == "tokens"
            if training and benchmark.valid_every:
                valid, plain = open_split("tokenized.", "valid"), open_split("", "valid")
            kept = 0
            pairs = run.pairs(previous, "", split)
            for pair, tokenized in run.go_through(tokens, pairs, f"tokenising {split}", lines):
                if counting and not is_kept(*tokenized, run.longest, run.ratio):
                    continue
                kept += 1
                if training and benchmark.valid_every and kept % benchmark.valid_every == 0:
                    valid.write(tokenized)
                    plain.write(pair)
                else:
                    writer.write(tokenized)
            run.prepared["lines"][split] = writer.lines
            if training and benchmark.valid_every:
                run.prepared["lines"]["valid"] = valid.lines
        if benchmark.clean == "tokens":
            check_cleaned(run)


def without_double_spaces(pairs):
    """Pairs that come tokenised."""
    return [tuple(" ".join(line.split()) for line in pair) for pair in pairs]


def check_cleaned(run):
    """The training data after cleaning, beside the published number of pairs."""
    lines = run.prepared["lines"]
    if lines["train"] == 0:
        raise ValueError("expected pairs to train on, got none after cleaning")
    published = published_lines(run.benchmark)
    run.check("pairs to train on", lines["train"], published["train"], exact=False)
    if run.benchmark.valid_every:
        run.check("pairs to validate", lines["valid"], published["valid"], exact=False)
    if run.benchmark.valid_every and lines.get("valid", 0) == 0:
        raise ValueError(
            f"expected at least {run.benchmark.valid_every} pairs, got {lines['train']}"
        )


# --- Stage 3: pieces ---


def write_pieces(run, previous, folder):
    """``sentencepiece.model``, learnt of both languages, and all splits as ``pieces.…``."""
    keep(run, previous, folder, "", "tokenized.")
    model = folder / "sentencepiece.model"
    print("learning the pieces", file=sys.stderr, flush=True)
    training = (line for pair in run.pairs(previous, "tokenized.", "train") for line in pair)
    size = run.vocabulary - 4  # fairseq adds four special words
    learn_pieces(training, size, model, run.benchmark.learn_from)
    for split, lines in list(run.prepared["lines"].items()):
        cleaning = split == "train" and run.benchmark.clean == "pieces"
        pairs = run.pairs(previous, "tokenized.", split)
        encode = functools.partial(encode_pairs, model=model)
        with Writer(run.languages_of(folder, "pieces.", split)) as writer:
            for _, pieces in run.go_through(encode, pairs, f"cutting {split}", lines):
                if not cleaning or is_kept(*pieces, run.longest, run.ratio):
                    writer.write(pieces)
        run.prepared["lines"][split] = writer.lines
    if run.benchmark.clean == "pieces":
        check_cleaned(run)


def copy_pretokenized(run, _, folder):
    """Pieces of subword-nmt as they are, and the tokens they stand for, in place of all stages."""
    given = Path(run.args.pretokenized)
    run.prepared["subwords"] = "subword_nmt"
    published = published_lines(run.benchmark)
    for split in SPLITS:
        paths = run.languages_of(given, "", split)
        there = [path for path in paths if path.exists()]
        if not there and split != "test" and (split != "train" or dictionaries(run)):
            continue
        if len(there) < len(paths):
            lacking = next(path for path in paths if path not in there)
            need = "" if split == "test" else " (training data, or its dictionaries: --dict)"
            raise ValueError(f"--pretokenized: expected the file {lacking}{need}, got none")
        with (
            Writer(run.languages_of(folder, "pieces.", split)) as pieces,
            Writer(run.languages_of(folder, "tokenized.", split)) as tokens,
        ):
            for pair in pairs_of(*map(lines_of, paths), [path.name for path in paths]):
                pieces.write(pair)
                if split != "train":
                    tokens.write(map(without_bpe, pair))
        if split == "train":
            for path in tokens.paths:
                path.unlink()
        run.prepared["lines"][split] = pieces.lines
        run.check(f"lines of {split}", pieces.lines, published[split], exact=split == "test")


def published_lines(benchmark):
    """``{split: numbers}`` of the splits as published."""
    lines = {"train": (benchmark.train_lines,)}
    if benchmark.valid_every:
        lines["valid"] = (benchmark.train_lines // (benchmark.valid_every - 1),)
    for split in ("valid", "test"):
        parts = [choices[0] for choices in benchmark.parts if choices[0].split == split]
        if len(parts) == 1:
            lines[split] = parts[0].lines
        elif parts:
            lines[split] = (sum(part.lines[0] for part in parts),)
    return lines


def dictionaries(run):
    """The dictionaries to use in place of new ones, one a language; or none."""
    if run.args.dict:
        return [Path(run.args.dict)] * len(run.benchmark.languages)
    if run.args.pretokenized:
        paths = [
            Path(run.args.pretokenized) / f"dict.{lang}.txt" for lang in run.benchmark.languages
        ]
        if all(path.exists() for path in paths):
            return paths
    return []


# --- Stage 4: numbers ---


def binarize(run, previous, folder):
    """What fairseq-preprocess makes, the references, and ``prepared.json``."""
    console = logging.StreamHandler()
    console.addFilter(lambda record: isinstance(record.msg, str))  # not a screenful of options
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[console])
    from fairseq import options, utils
    from fairseq_cli import preprocess

    utils.import_user_module(argparse.Namespace(user_dir=str(ROOT / "talk_fairseq")))
    prefix, lines = "pieces.", run.prepared["lines"]
    if run.benchmark.target_lang:
        command = ["--source-lang", run.benchmark.source_lang]
        command += ["--target-lang", run.benchmark.target_lang]
        given = dictionaries(run)
        if given:
            command += ["--srcdict", str(given[0]), "--tgtdict", str(given[1])]
        elif run.benchmark.joined:
            command += ["--joined-dictionary"]
        if run.prepared["subwords"] == "sentencepiece":
            command += ["--nwordssrc", str(run.vocabulary), "--nwordstgt", str(run.vocabulary)]
    else:
        prefix, suffix = "", f".{run.benchmark.source_lang}"
        command = ["--only-source"]
    for split in lines:
        path = str(previous / f"{prefix}{split}")
        command += [f"--{split}pref", path if run.benchmark.target_lang else path + suffix]
    command += ["--destdir", str(folder), "--workers", str(run.args.workers)]
    preprocess.main(options.get_preprocessing_parser().parse_args(command))
    pair = "-".join(run.benchmark.languages)
    for split, count in lines.items():
        for lang in run.benchmark.languages:
            name = f"{split}.{pair}.{lang}.idx" if run.benchmark.target_lang else f"{split}.idx"
            with open(folder / name, "rb") as file:
                _, _, _, written = struct.unpack("<9sQBQ", file.read(26))
            if written != count:
                raise ValueError(f"{name}: expected {count:,} lines, fairseq wrote {written:,}")
    keep(run, previous, folder, "", "tokenized.")
    if (previous / "sentencepiece.model").exists():
        shutil.copy(previous / "sentencepiece.model", folder)


# --- The stages, one after the other ---


def stages_of(run):
    """``[(name, function), …]``; a function reads the folder before its own."""
    if run.args.pretokenized:
        return [("pieces", copy_pretokenized), ("data-bin", binarize)]
    if run.benchmark.target_lang is None:
        return [("plain", write_plain), ("data-bin", binarize)]
    return [
        ("plain", write_plain),
        ("tokenized", write_tokenized),
        ("pieces", write_pieces),
        ("data-bin", binarize),
    ]


def prepare(run, work):
    """Do what is left to do in the folder `work`; return the finished folder in it."""
    stages = stages_of(run)
    done = [number for number, (name, _) in enumerate(stages) if (work / name).exists()]
    first = max(done) + 1 if done else 0
    for number, (name, write) in enumerate(stages):
        previous = work / stages[number - 1][0] if number else None
        if number >= first:
            if previous:
                run.prepared = json.loads((previous / "prepared.json").read_text())
            print(f"== {run.name}: {name}", flush=True)
            partial = work / f"{name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            write(run, previous, partial)
            lines = run.prepared["lines"]
            run.prepared["lines"] = {split: lines[split] for split in SPLITS if split in lines}
            write_json(partial / "prepared.json", run.prepared)
            partial.rename(work / name)
        if previous:
            shutil.rmtree(previous, ignore_errors=True)
        shutil.rmtree(work / "extracted", ignore_errors=True)
    return work / stages[-1][0]


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def run_in(run, output):
    """Prepare the folder `output`, whole or not at all, unless it is there already."""
    work = output.with_name(output.name + ".partial")
    ready = output / "prepared.json"
    if output.exists() and not ready.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"--output: expected a new folder, got {output}, which holds other things")
    if ready.exists() and not run.args.restart:
        if json.loads(ready.read_text())["settings"] != run.settings:
            raise ValueError(
                f"--output: {output} was prepared with other settings (see prepared.json in it); "
                "--restart replaces it"
            )
        shutil.rmtree(work, ignore_errors=True)
        print(f"{output} is ready; --restart prepares it again")
        return
    work.mkdir(parents=True, exist_ok=True)
    with open(work / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another run is preparing {output}; wait for it") from None
        settings = work / "settings.json"
        if run.args.restart:
            for path in work.iterdir():
                if path.name != "lock":
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not settings.exists():
            write_json(settings, run.settings)
        elif json.loads(settings.read_text()) != run.settings:
            raise ValueError(
                f"--output: {work} is unfinished work with other settings; --restart replaces it"
            )
        finished = prepare(run, work)
        if output.exists():
            shutil.rmtree(output)
        finished.rename(output)
        shutil.rmtree(work)
    lines = ", ".join(f"{split} {count:,}" for split, count in run.prepared["lines"].items())
    print(f"{output} is ready: {lines} lines")


def positive(kind):
    """A number above 0, for argparse."""

    def parse(text):
        value = kind(text)
        if not value > 0:
            raise ValueError
        return value

    parse.__name__ = f"positive {kind.__name__}"
    return parse


class Parser(argparse.ArgumentParser):
    """One line for options that cannot be used."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def main(arguments=None):
    """Run the command; one line and status 2 for input that cannot be used."""
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("benchmark", choices=BENCHMARKS)
    parser.add_argument("--data", action="append", default=[])
    parser.add_argument("--download", action="store_true")
    parser.add_argument("--downloads", default=str(ROOT / "data-bin/downloads"))
    parser.add_argument("--pretokenized")
    parser.add_argument("--dict")
    parser.add_argument("--output")
    parser.add_argument("--workers", type=positive(int), default=len(os.sched_getaffinity(0)))
    parser.add_argument("--vocabulary", type=positive(int))
    parser.add_argument("--longest", type=positive(int))
    parser.add_argument("--ratio", type=positive(float))
    parser.add_argument("--other-counts", action="store_true")
    parser.add_argument("--restart", action="store_true")
    args = parser.parse_args(arguments)
    parser.prog = f"prepare_{args.benchmark}.sh"
    args.data = [place if URL.match(place) else str(Path(place).resolve()) for place in args.data]
    run = Run(args.benchmark, args)
    output = Path(args.output or ROOT / "data-bin" / args.benchmark).resolve()
    try:
        if args.pretokenized and (args.data or args.download or args.vocabulary):
            raise ValueError(
                "--pretokenized: expected no --data, --download or --vocabulary beside it"
            )
        if args.pretokenized and run.benchmark.target_lang is None:
            raise ValueError(f"--pretokenized: {args.benchmark} has no subwords; use --data")
        if args.dict and not args.pretokenized:
            raise ValueError("--dict: expected --pretokenized beside it")
        if args.dict and not Path(args.dict).is_file():
            raise ValueError(f"--dict: expected a file, got {args.dict}")
        if not (args.data or args.download or args.pretokenized):
            files = missing(run.benchmark, {})
            raise ValueError(how_to_get(files, run.benchmark))
        run_in(run, output)
    except (OSError, ValueError) as error:
        message = str(error).replace("\n", " ")
        print(f"{parser.prog}: {message}", file=sys.stderr)
        sys.exit(2)
    except BrokenExecutor:
        print(f"{parser.prog}: a process was killed; try fewer --workers", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print(f"{parser.prog}: stopped; run it again to go on", file=sys.stderr)
        sys.exit(130)
