"""The benchmarks of the papers: their files, their published sizes, and how they are prepared."""

import math
import textwrap
from dataclasses import dataclass
from types import SimpleNamespace

import yaml

from pipeline.common.paths import ROOT
from pipeline.data import text

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Benchmark:
    """A data set, and how the papers prepared it."""

    text: str  # for --help
    languages: list  # source and target; of a language model's text one, whose words stay
    parts: list  # files that are read side by side into a split, and their published lines
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


def read_benchmarks():
    """Return ``{name: Benchmark}`` of ``data/benchmarks.yaml``."""
    read = yaml.safe_load((ROOT / "data/benchmarks.yaml").read_text(encoding="utf-8"))
    for given in read.values():
        given["archives"] = {url: tuple(starts) for url, starts in given["archives"].items()}
        for part in given["parts"]:
            part["read"] = getattr(text, part["read"])  # yields the lines of a file
        given["parts"] = [SimpleNamespace(**part) for part in given["parts"]]
    return {name: Benchmark(**given) for name, given in read.items()}


BENCHMARKS = read_benchmarks()


def fits(check):
    """Return whether a check of prepared.json found a published number; not exactly: within 2%."""
    margin = 0 if check.get("exact") else 1 / 50
    return any(abs(check["found"] - number) <= margin * number for number in check["published"])


def describe(benchmark):
    """Return what is prepared out of what, how many lines that is, and where to get it."""
    sizes = ", ".join(f"{split} {counts[0]:,}" for split, counts in benchmark.lines.items())
    what = f"{benchmark.text} Published lines: {sizes}. {benchmark.elsewhere}"
    hosts = "\n  ".join(["--download takes the archives from", *benchmark.archives])
    return textwrap.fill(what, 100, break_on_hyphens=False) + "\n\n" + hosts


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
