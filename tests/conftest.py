import copy
import functools
import gzip
import os
import re
import shutil
import sys
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pytest
import torch

import fairseq_commands
from talk_fairseq.ops import cpu_backend

LONG = False  # whether `--long` is given; also in a process of pytest-xdist
# Most models here are too small for threads; test_operator.py uses two.
torch.set_num_threads(1)


def write_dictionaries(folder, words):
    """The dictionaries of translation and of a language model, of as many words with specials."""
    for name in ("dict.es.txt", "dict.en.txt", "dict.txt"):
        (folder / name).write_text("".join(f"w{index} 1\n" for index in range(words - 4)))


def one_space(text):
    """The text with one space in place of several, so that a table's widths do not matter."""
    return re.sub(" +", " ", text)


def status_of(main, *arguments):
    """The exit status of a command that runs in this process."""
    try:
        return main([*map(str, arguments)])
    except SystemExit as stopped:  # of argparse
        return stopped.code


def refusal(capfd, main, *arguments):
    """The one line with which a command stops that cannot do what it is asked for."""
    capfd.readouterr()
    assert status_of(main, *arguments) == 2
    return capfd.readouterr().err.splitlines()[-1]


def lightness(colour):
    """CIE L* of a colour, 0 for black and 100 for white."""
    from matplotlib.colors import to_rgb

    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour))
    Y = 0.2126 * r + 0.7152 * g + 0.0722 * b
    return 116 * Y ** (1 / 3) - 16 if Y > 0.008856 else 903.3 * Y


def lightness_margin(colours):
    """The smallest difference between the lightnesses of some colours."""
    grey = sorted(map(lightness, colours))
    return min(b - a for a, b in zip(grey, grey[1:]))


def alone():
    """Whether no other process of pytest-xdist takes memory and cores from what is timed."""
    return "PYTEST_XDIST_WORKER" not in os.environ


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="also every row of the recipes: an hour")


def pytest_configure(config):
    """Sets `LONG` for the files of tests, which are imported later."""
    global LONG
    LONG = config.getoption("--long")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--long"):
        skip = pytest.mark.skip(reason="runs with --long")
        for item in items:
            if "long" in item.keywords:
                item.add_marker(skip)
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA GPU")
        for item in items:
            if "cuda" in item.keywords:
                item.add_marker(skip)


def pytest_runtest_setup():
    """Each test draws the same random numbers, in whatever order and process it runs."""
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def composed_once():
    """fairseq's options are composed once from the same flags: hydra takes half a second.

    It parses a flag that it has met before no second time, and its store, which hands out copies
    anyway, is not copied as a whole.
    """
    if "fairseq" not in sys.modules:
        yield
        return
    from fairseq.dataclass import utils
    from hydra.core.config_store import ConfigStore
    from hydra.core.override_parser.overrides_parser import OverridesParser

    known, original = {}, utils.compose
    parsed, parse = {}, OverridesParser.parse_rule

    def compose(name, overrides, **options):
        key = (name, *overrides, *sorted(options.items()))
        if key not in known:
            known[key] = original(name, overrides=overrides, **options)
        return copy.deepcopy(known[key])

    def parse_rule(parser, text, rule):
        if (text, rule) not in parsed:
            parsed[text, rule] = parse(parser, text, rule)
        return copy.deepcopy(parsed[text, rule])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "compose", compose)
        patch.setattr(OverridesParser, "parse_rule", parse_rule)
        patch.setattr(ConfigStore, "__deepcopy__", lambda store, memo: store, raising=False)
        yield


@pytest.fixture
def figure(record_property):
    """``figure(text)`` shows a line of what a test has measured when all tests have run."""
    return functools.partial(record_property, "figure")


def pytest_terminal_summary(terminalreporter):
    """Shows the figures, which have no other way out of a process of pytest-xdist."""
    reports = chain.from_iterable(terminalreporter.stats.values())
    figures = [
        text
        for report in reports
        if getattr(report, "when", None) == "teardown"  # the last of a test, with all it recorded
        for name, text in report.user_properties
        if name == "figure"
    ]
    if figures:
        terminalreporter.section("figures")
        terminalreporter.write_line("\n".join(figures))


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Fresh memory holds NaN, so that an element that nobody wrote shows."""

    def empty(shape, dtype=float):
        return np.full(shape, np.nan, dtype)

    monkeypatch.setattr(cpu_backend, "_empty", empty)
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


ROOT = Path(__file__).resolve().parents[1]
PLUGIN = ROOT / "talk_fairseq"
SMALL = (  # a model that trains in seconds, with odd windows
    "--arch talkconv --encoder-layers 2 --decoder-layers 2 --encoder-max-left 3,9 "
    "--encoder-max-right 5,2 --decoder-max-left 3x2 --encoder-embed-dim 32 --decoder-embed-dim 32 "
    "--encoder-ffn-embed-dim 64 --decoder-ffn-embed-dim 64 --encoder-attention-heads 4 "
    "--decoder-attention-heads 4 --share-all-embeddings"
).split()


def fairseq(command, *arguments, plugin=PLUGIN, check=True, **options):
    """Run ``fairseq-<command>`` with the plugin in its own process; returns what it printed.

    Args:
        check: fail unless the command succeeds.
        options: of `fairseq_commands.run`.
    """
    user_dir = [] if command in ("preprocess", "hydra-train") else ["--user-dir", plugin]
    # PyTorch waits 5 seconds for a process that loads data: there is none unless it is asked for.
    workers = ["--num-workers", 0] if command in ("eval-lm", "generate", "train") else []
    name = command.replace("-", "_")
    status, printed = fairseq_commands.run(name, *workers, *arguments, *user_dir, **options)
    assert status == 0 or not check, printed[-5000:]
    return printed


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A binarised corpus of verses: 200 to train on, 50 valid and 43 test, short and long."""
    folder = tmp_path_factory.mktemp("corpus")
    for split, lines in (("train", 200), ("valid", 50), ("test", 43)):
        for language in ("es", "en"):
            with gzip.open(ROOT / f"data/bible-es-en/{split}.{language}.gz", "rt") as text:
                (folder / f"{split}.{language}").write_text("".join(islice(text, lines)))
    fairseq(
        "preprocess", "--source-lang", "es", "--target-lang", "en", "--joined-dictionary",
        "--trainpref", folder / "train", "--validpref", folder / "valid", "--testpref",
        folder / "test", "--destdir", folder / "bin", "--nwordssrc", 800,
    )  # fmt: skip
    return folder / "bin"


@pytest.fixture(scope="session")
def trained(corpus, tmp_path_factory):
    """The checkpoint of a small model after two dozen updates."""
    return train_a_little(tmp_path_factory.mktemp("trained"), corpus, SMALL, max_tokens=2000)


def train_a_little(folder, corpus, model, max_tokens):
    """The last checkpoint of two dozen updates, in `folder`."""
    fairseq(
        "train", corpus, *model, "--optimizer", "adam", "--lr", 0.01, "--max-tokens", max_tokens,
        "--max-update", 24, "--save-dir", folder, "--no-epoch-checkpoints", "--log-format", "none",
    )  # fmt: skip
    return folder / "checkpoint_last.pt"


SMALL_LM = (
    "--task language_modeling --tokens-per-sample 64 --arch talkconv_lm --decoder-layers 2 "
    "--decoder-max-left 3,9 --decoder-embed-dim 32 --decoder-ffn-embed-dim 64 "
    "--decoder-attention-heads 4 --share-decoder-input-output-embed"
).split()


@pytest.fixture(scope="session")
def lm_corpus(corpus, tmp_path_factory):
    """The English side of `corpus`, as the task language_modeling names its files."""
    folder = tmp_path_factory.mktemp("lm_corpus")
    shutil.copy(corpus / "dict.en.txt", folder / "dict.txt")
    for path in corpus.glob("*.es-en.en.*"):
        shutil.copy(path, folder / path.name.replace(".es-en.en", ""))
    return folder


@pytest.fixture(scope="session")
def trained_lm(lm_corpus, tmp_path_factory):
    """The checkpoint of a small language model after two dozen updates."""
    folder = tmp_path_factory.mktemp("trained_lm")
    return train_a_little(folder, lm_corpus, SMALL_LM, max_tokens=1000)
