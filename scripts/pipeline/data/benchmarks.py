"""The benchmarks of the papers: their files, their published sizes, and how they are prepared."""

import math
import textwrap
from dataclasses import dataclass

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Part:
    """Files that are read side by side into a split; `lines` are the published numbers of lines."""

    split: str
    files: tuple
    lines: tuple
    format: str = "text"  # or tags, segments, sentence tags
    tokens: int = 0  # published number of words and ends of line, of a language model's text


@dataclass(frozen=True)
class Benchmark:
    """A data set, and how the papers prepared it."""

    text: str  # for --help; its fields in braces are those of this class
    source_lang: str
    target_lang: str | None  # None: a language model's text, whose words stay as they are
    parts: tuple  # of alternatives; the first that is there is read
    archives: dict  # {address: how the names of its files start}
    elsewhere: str  # what to know about hosts that do not answer
    vocabulary: int = 0  # words of a dictionary, fairseq's four special ones among them
    joined: bool = True  # one dictionary for both languages
    train_lines: int = 0  # published, after cleaning; another tokeniser moves it a little
    longest: float = math.inf
    ratio: float = math.inf
    clean: str = "tokens"  # what `longest` and `ratio` count: tokens or pieces
    valid_every: int = 0  # this many-th pair of the training data validates
    normalize: bool = False  # of the training data, see text.tokenize
    split_dashes: bool = False
    straight: bool = False  # of the other splits
    lowercase: bool = False
    moses: tuple = ()  # the languages by which to tokenise, if not the names of the sides
    learn_from: int = 4_000_000  # lines of both languages, half a kilobyte of memory each
    stories: tuple = ()  # archives of story files, which go with lists of addresses

    @property
    def languages(self):
        return tuple(filter(None, (self.source_lang, self.target_lang)))

    @property
    def files(self):
        """Return all file names, with the alternatives."""
        return [name for choices in self.parts for part in choices for name in part.files]


def corpus(stem, source, target, *lines):
    """Return a training corpus of plain text."""
    return Part("train", (f"{stem}.{source}", f"{stem}.{target}"), lines)


def newstest(split, name, source, target, *lines):
    """Return a test set of WMT."""
    return (
        Part(split, (f"{name}-src.{source}.sgm", f"{name}-ref.{target}.sgm"), lines, "segments"),
    )


def iwslt(name, lines):
    """Return a test set of IWSLT."""
    files = (f"IWSLT14.{name}.de-en.de.xml", f"IWSLT14.{name}.de-en.en.xml")
    return (Part("test", files, (lines,), "segments"),)


def processed(split, name, *lines):
    """Return a split of CNN-DM in the form that most summarisation code exchanges."""
    return (Part(split, (f"{name}.txt.src", f"{name}.txt.tgt"), lines, "sentence tags"),)


def wiki(split, lines, tokens):
    """Return a split of WikiText."""
    return (Part(split, (f"wiki.{split}.tokens",), (lines,), tokens=tokens),)


IWSLT14 = "https://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz"
WMT13 = "https://www.statmt.org/wmt13"
WMT14 = "https://www.statmt.org/wmt14"
WMT16 = "https://data.statmt.org/wmt16/translation-task"
WMT17 = "https://data.statmt.org/wmt17/translation-task"
CNN_DM = "https://s3.amazonaws.com/opennmt-models/Summary/cnndm.tar.gz"
STATMT = (
    "Where statmt.org does not answer, OPUS (opus.nlpl.eu) has Europarl and News Commentary, in "
    "other versions; the sacrebleu command prints the news test sets."
)
LISTS = {"train": "all_train.txt", "valid": "all_val.txt", "test": "all_test.txt"}

BENCHMARKS = {
    "iwslt14_de_en": Benchmark(
        text="Prepares IWSLT 2014 De-En out of de-en.tgz, or of the folder in it: Moses tokens, "
        "lower-cased, 1 to {longest} a sentence and at most {ratio} times as many on one side as "
        "on the other; every {valid_every}rd pair validates; dev2010, dev2012, tst2010, tst2011 "
        "and tst2012 are the test set; a BPE of both languages, and a dictionary of {vocabulary:,} "
        "words each.",
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
        archives={IWSLT14: ("train.tags.", "IWSLT14.")},
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
        text="Prepares WMT 2016 En-De out of Europarl v7, Common Crawl and News Commentary v11 or "
        "v12, with newstest2013 to validate and newstest2014 to test: Moses tokens, a BPE of "
        "{vocabulary:,} pieces of both languages, 1 to {longest} pieces a sentence and at most "
        "{ratio} times as many on one side as on the other. The papers trained on a set of 4.5M "
        "pairs that was cleaned less (80 tokens, ratio 9) and that its host no longer serves; "
        "--longest and --ratio set other limits. Takes about 10 GB while it runs.",
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
        archives={
            f"{WMT13}/training-parallel-europarl-v7.tgz": ("europarl-v7.de-en",),
            f"{WMT13}/training-parallel-commoncrawl.tgz": ("commoncrawl.de-en",),
            f"{WMT16}/training-parallel-nc-v11.tgz": ("news-commentary-v11.",),
            f"{WMT17}/training-parallel-nc-v12.tgz": ("news-commentary-v12.",),
            f"{WMT17}/dev.tgz": ("newstest2013-",),
            f"{WMT14}/test-full.tgz": ("newstest2014-",),
        },
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
        text="Prepares WMT 2014 En-Fr out of Europarl v7, Common Crawl, UN, News Commentary v9 and "
        "Giga-FrEn, with newstest2012 and newstest2013 to validate and newstest2014 to test: "
        "punctuation normalised, Moses tokens with dashes split, a BPE of {vocabulary:,} pieces of "
        "both languages, 1 to {longest} pieces a sentence and at most {ratio} times as many on one "
        "side as on the other. Takes about 60 GB while it runs, and hours: it tokenises about "
        "4,000 sentences per second on a processor.",
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
        archives={
            f"{WMT13}/training-parallel-europarl-v7.tgz": ("europarl-v7.fr-en",),
            f"{WMT13}/training-parallel-commoncrawl.tgz": ("commoncrawl.fr-en",),
            f"{WMT13}/training-parallel-un.tgz": ("undoc.2000.fr-en",),
            f"{WMT14}/training-parallel-nc-v9.tgz": ("news-commentary-v9.",),
            "https://www.statmt.org/wmt10/training-giga-fren.tar": ("giga-fren.",),
            f"{WMT14}/dev.tgz": ("newstest2012-", "newstest2013-"),
            f"{WMT14}/test-full.tgz": ("newstest2014-",),
        },
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
        text="Prepares CNN-DM, with one dictionary of a BPE of {vocabulary:,} pieces. It reads "
        "either cnn_stories.tgz and dailymail_stories.tgz, or the folders of their *.story files, "
        "with the lists all_train.txt, all_val.txt and all_test.txt: what follows @highlight is "
        "the summary, and stories without an article are left out; or {{train,val,test}}.txt."
        "{{src,tgt}}, or their archive cnndm.tar.gz, which are tokenised already and which "
        "--download takes. Articles are not cut: the task does it.",
        source_lang="source",
        target_lang="target",
        parts=(
            processed("train", "train", 287_227, 287_226, 287_113, 287_112),
            processed("valid", "val", 13_368),
            processed("test", "test", 11_490),
        ),
        archives={CNN_DM: ("train.txt.", "val.txt.", "test.txt.")},
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
        text="Prepares WikiText-103 out of wikitext-103-v1.zip, or of the folder in it with the "
        "files wiki.{{train,valid,test}}.tokens: every word as it stands.",
        source_lang="en",
        target_lang=None,
        parts=(
            wiki("train", 1_801_350, 103_227_021),
            wiki("valid", 3_760, 217_646),
            wiki("test", 4_358, 245_569),
        ),
        archives={"https://wikitext.smerity.com/wikitext-103-v1.zip": ("wiki.",)},
        elsewhere="The original host, research.metamind.io on Amazon S3, is gone; take "
        "wikitext-103-v1.zip (not wikitext-103-raw-v1.zip) from a mirror.",
        train_lines=1_801_350,
    ),
}
PUBLISHED_STORIES = {"train": 287_227, "valid": 13_368, "test": 11_490}


def describe(benchmark):
    """Return what is prepared out of what, how many lines that is, and where to get it."""
    sizes = [f"{split} {lines[0]:,}" for split, lines in published_lines(benchmark).items()]
    training = [choices[0] for choices in benchmark.parts if choices[0].split == "train"]
    before = sum(part.lines[0] for part in training)
    sizes = "Published lines: " + ", ".join(sizes)
    sizes += f"; train {before:,} before cleaning." if before != benchmark.train_lines else "."
    if words := [f"{choices[0].tokens:,}" for choices in benchmark.parts if choices[0].tokens]:
        sizes += f" Words, with ends of line: {', '.join(words)}."
    paragraphs = (benchmark.text.format(**vars(benchmark)), sizes, benchmark.elsewhere)
    filled = [textwrap.fill(text, 100, break_on_hyphens=False) for text in paragraphs]
    hosts = [f"  {address}" for address in benchmark.archives]
    return "\n\n".join([*filled, "\n".join(["--download takes the archives from", *hosts])])


def published_lines(benchmark):
    """Return ``{split: numbers}`` of the splits as published."""
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


def missing(benchmark, paths):
    """Return the files that are not among `paths`; of alternatives, those of the first one."""
    files = []
    for choices in benchmark.parts:
        if not any(paths.keys() >= set(part.files) for part in choices):
            files += [name for name in choices[0].files if name not in paths]
    return files


def archives_of(files, benchmark):
    """Return the addresses of the archives that hold `files`."""
    return [
        address
        for address, starts in benchmark.archives.items()
        if any(name.startswith(starts) for name in files)
    ]


def how_to_get(files, benchmark):
    """Return one line that says which files are missing and where to get them."""
    some = ", ".join(files[:4]) + (f" and {len(files) - 4} more" if len(files) > 4 else "")
    urls = ", ".join(archives_of(files, benchmark))
    return (
        f"missing {some}; give --data the folder or the archives, or --download them from {urls}. "
        f"{benchmark.elsewhere}"
    )
