"""The benchmarks of the papers: their files, their published sizes, and how they are prepared."""

import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.data.text import lines_of, segments, without_sentence_tags, without_tags

SPLITS = ("train", "valid", "test")


class Part(NamedTuple):
    """Files that are read side by side into a split, and their published numbers of lines."""

    split: str
    files: tuple
    lines: tuple
    read: Callable = lines_of  # yields the lines of a file


@dataclass(frozen=True)
class Benchmark:
    """A data set, and how the papers prepared it."""

    text: str  # for --help
    languages: tuple  # source and target; of a language model's text one, whose words stay
    parts: tuple
    archives: dict  # {address: how the names of its files start}
    lines: dict  # {split: published numbers}; another tokeniser moves that of train a little
    elsewhere: str = ""  # what to know about hosts that do not answer
    vocabulary: int = 0  # words of a dictionary, fairseq's four special ones among them
    joined: bool = True  # one dictionary for both languages
    tokenizer: str = "moses"  # or none, of text that comes tokenised
    longest: float = math.inf
    ratio: float = math.inf
    clean: str = "tokens"  # what `longest` and `ratio` count: tokens or pieces
    valid_every: int = 0  # this many-th pair of the training data validates
    normalize: bool = False  # of the training data, see text.tokenize
    split_dashes: bool = False
    straight: bool = False  # of the other splits
    lowercase: bool = False
    learn_from: int = 4_000_000  # lines of both languages, half a kilobyte of memory each

    @property
    def files(self):
        """Return the names of all files."""
        return [name for part in self.parts for name in part.files]


def corpus(stem, source, target, *lines):
    """Return a training corpus of plain text."""
    return Part("train", (f"{stem}.{source}", f"{stem}.{target}"), lines)


def newstest(split, name, source, target, *lines):
    """Return a test set of WMT."""
    return Part(split, (f"{name}-src.{source}.sgm", f"{name}-ref.{target}.sgm"), lines, segments)


def iwslt(name, lines):
    """Return a test set of IWSLT."""
    files = (f"IWSLT14.{name}.de-en.de.xml", f"IWSLT14.{name}.de-en.en.xml")
    return Part("test", files, (lines,), segments)


def processed(split, name, *lines):
    """Return a split of CNN-DM in the form that most summarisation code exchanges."""
    return Part(split, (f"{name}.txt.src", f"{name}.txt.tgt"), lines, without_sentence_tags)


IWSLT14 = "https://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz"
IWSLT_TRAIN = ("train.tags.de-en.de", "train.tags.de-en.en")
WMT13 = "https://www.statmt.org/wmt13"
WMT14 = "https://www.statmt.org/wmt14"
STATMT = (
    "Where statmt.org does not answer, OPUS (opus.nlpl.eu) has Europarl and News Commentary, in "
    "other versions; the sacrebleu command prints the news test sets."
)

BENCHMARKS = {
    "iwslt14_de_en": Benchmark(
        text="Prepares IWSLT 2014 De-En out of de-en.tgz, or of the folder in it.",
        languages=("de", "en"),
        parts=(
            Part("train", IWSLT_TRAIN, (174_443,), without_tags),
            iwslt("TED.dev2010", 887),
            iwslt("TEDX.dev2012", 1_165),
            iwslt("TED.tst2010", 1_565),
            iwslt("TED.tst2011", 1_433),
            iwslt("TED.tst2012", 1_700),
        ),
        archives={IWSLT14: ("train.tags.", "IWSLT14.")},
        elsewhere="The original host, wit3.fbk.eu, is gone; in releases of all its languages, this "
        "archive is texts/de/en/de-en.tgz.",
        lines={"train": (160_239,), "valid": (7_283,), "test": (6_750,)},
        vocabulary=10_000,
        joined=False,
        longest=175,
        ratio=1.5,
        valid_every=23,
        straight=True,
        lowercase=True,
    ),
    "wmt16_en_de": Benchmark(
        text="Prepares WMT 2016 En-De out of Europarl v7, Common Crawl and News Commentary v11. "
        "The papers trained on a set of 4.5M pairs that was cleaned less and that its host no "
        "longer serves. Takes about 10 GB while it runs.",
        languages=("en", "de"),
        parts=(
            corpus("europarl-v7.de-en", "en", "de", 1_920_209),
            corpus("commoncrawl.de-en", "en", "de", 2_399_123),
            corpus("news-commentary-v11.de-en", "en", "de", 242_770),
            newstest("valid", "newstest2013", "en", "de", 3_000),
            newstest("test", "newstest2014-deen", "en", "de", 3_003, 2_737),
        ),
        archives={
            f"{WMT13}/training-parallel-europarl-v7.tgz": "europarl-v7.de-en",
            f"{WMT13}/training-parallel-commoncrawl.tgz": "commoncrawl.de-en",
            "https://data.statmt.org/wmt16/translation-task/training-parallel-nc-v11.tgz": (
                "news-commentary-v11."
            ),
            "https://data.statmt.org/wmt17/translation-task/dev.tgz": "newstest2013-",
            f"{WMT14}/test-full.tgz": "newstest2014-",
        },
        elsewhere=STATMT,
        # The published 3,960,793 of 4,544,200 pairs, of the 4,562,102 here.
        lines={"train": (3_976_000,), "valid": (3_000,), "test": (3_003, 2_737)},
        vocabulary=32_768,
        longest=250,
        ratio=1.5,
        clean="pieces",
        straight=True,
    ),
    "wmt14_en_fr": Benchmark(
        text="Prepares WMT 2014 En-Fr out of Europarl v7, Common Crawl, UN, News Commentary v9 and "
        "Giga-FrEn. Takes about 60 GB while it runs, and hours: it tokenises about 4,000 "
        "sentences per second on a processor.",
        languages=("en", "fr"),
        parts=(
            corpus("europarl-v7.fr-en", "en", "fr", 2_007_723),
            corpus("commoncrawl.fr-en", "en", "fr", 3_244_152),
            corpus("undoc.2000.fr-en", "en", "fr", 12_886_831),
            corpus("news-commentary-v9.fr-en", "en", "fr", 183_251),
            corpus("giga-fren.release2.fixed", "en", "fr", 22_520_376, 22_520_400),
            newstest("valid", "newstest2012", "en", "fr", 3_003),
            newstest("valid", "newstest2013", "en", "fr", 3_000),
            newstest("test", "newstest2014-fren", "en", "fr", 3_003),
        ),
        archives={
            f"{WMT13}/training-parallel-europarl-v7.tgz": "europarl-v7.fr-en",
            f"{WMT13}/training-parallel-commoncrawl.tgz": "commoncrawl.fr-en",
            f"{WMT13}/training-parallel-un.tgz": "undoc.2000.fr-en",
            f"{WMT14}/training-parallel-nc-v9.tgz": "news-commentary-v9.",
            "https://www.statmt.org/wmt10/training-giga-fren.tar": "giga-fren.",
            f"{WMT14}/dev.tgz": ("newstest2012-", "newstest2013-"),
            f"{WMT14}/test-full.tgz": "newstest2014-",
        },
        elsewhere=STATMT,
        lines={"train": (35_789_000,), "valid": (6_003,), "test": (3_003,)},
        vocabulary=40_000,
        longest=250,
        ratio=1.5,
        clean="pieces",
        normalize=True,
        split_dashes=True,
        straight=True,
    ),
    "cnn_dm": Benchmark(
        text="Prepares CNN-DM out of cnndm.tar.gz or the files in it, which are tokenised already. "
        "Articles are not cut: the task does it.",
        languages=("source", "target"),
        parts=(
            processed("train", "train", 287_227, 287_226, 287_113, 287_112),
            processed("valid", "val", 13_368),
            processed("test", "test", 11_490),
        ),
        archives={"https://s3.amazonaws.com/opennmt-models/Summary/cnndm.tar.gz": ""},
        lines={"train": (287_113,), "valid": (13_368,), "test": (11_490,)},
        vocabulary=30_000,
        tokenizer="none",
        learn_from=200_000,
    ),
    "wikitext103": Benchmark(
        text="Prepares WikiText-103 out of wikitext-103-v1.zip, or of the folder in it: every word "
        "as it stands.",
        languages=("en",),
        parts=(
            Part("train", ("wiki.train.tokens",), (1_801_350,)),
            Part("valid", ("wiki.valid.tokens",), (3_760,)),
            Part("test", ("wiki.test.tokens",), (4_358,)),
        ),
        archives={"https://wikitext.smerity.com/wikitext-103-v1.zip": "wiki."},
        elsewhere="The original host, research.metamind.io on Amazon S3, is gone; take "
        "wikitext-103-v1.zip (not wikitext-103-raw-v1.zip) from a mirror.",
        lines={"train": (1_801_350,), "valid": (3_760,), "test": (4_358,)},
        tokenizer="none",
    ),
}


def describe(benchmark):
    """Return what is prepared out of what, how many lines that is, and where to get it."""
    sizes = ", ".join(f"{split} {counts[0]:,}" for split, counts in benchmark.lines.items())
    text = f"{benchmark.text} Published lines: {sizes}. {benchmark.elsewhere}"
    hosts = "\n  ".join(["--download takes the archives from", *benchmark.archives])
    return textwrap.fill(text, 100, break_on_hyphens=False) + "\n\n" + hosts


def archives_of(files, benchmark):
    """Return the addresses of the archives that hold `files`."""
    return [
        address
        for address, starts in benchmark.archives.items()
        if any(name.startswith(starts) for name in files)
    ]


def how_to_get(files, benchmark):
    """Return one line that says which files are missing and where to get them."""
    return (
        f"missing {', '.join(files)}; give --data the folder or the archives, or --download them "
        f"from {', '.join(archives_of(files, benchmark))}. {benchmark.elsewhere}"
    )
