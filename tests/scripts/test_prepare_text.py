"""The rules by which text is read, tokenised and cleaned, by hand."""

import gzip
import os
import signal
import subprocess
import sys
import time
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from conftest import ROOT
from pipeline.data import corpus as corpora
from pipeline.data import text as prepare_text
from pipeline.data.benchmarks import BENCHMARKS, Benchmark


def write(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.mark.parametrize(
    "source, target, kept",
    [
        (1, 1, True),
        (0, 1, False),
        (1, 0, False),
        (0, 0, False),
        (175, 175, True),
        (176, 175, False),
        (175, 176, False),
        (3, 2, True),  # exactly 1.5
        (2, 3, True),
        (4, 2, False),
        (7, 11, False),
        (150, 101, True),
    ],
)
def test_cleaning(source, target, kept):
    pair = " ".join("a" * source), " ".join("b" * target)
    assert prepare_text.is_kept(*pair, longest=175, ratio=1.5) is kept


@pytest.mark.parametrize(
    "line, options, expected",
    [
        ("the self-made \"x\" & <b>.", {}, "the self-made &quot; x &quot; &amp; &lt; b &gt; ."),
        ("It\u2019s", {}, "It \u2019 s"),
        ("It\u2019s", {"straight": True}, "It &apos; s"),  # as German: English has &apos;s
        ("a self-made man", {"split_dashes": True}, "a self @-@ made man"),
        ("\u201eJa\u201c \u2013 so\u00ad", {"normalize": True}, "&quot; Ja &quot; - so"),
        ("Die Stra\u00dfe, GRO\u00df.", {"lowercase": True}, "die stra\u00dfe , gro\u00df ."),
        ("drei\u00a0Mann\u3000hoch", {}, "drei Mann hoch"),
        ("", {}, ""),
    ],
)  # fmt: skip
def test_tokenizing(line, options, expected):
    assert prepare_text.tokenize(line, "de", **options) == expected


def test_tags(tmp_path):
    text = ["<url>http://x</url>", "<keywords>a</keywords>", "<talkid>1</talkid>"]
    text += ["<title>A title</title>", "<description>TED: b</description>", "c < d", ""]
    path = write(tmp_path / "train.tags", text)
    assert list(prepare_text.without_tags(path)) == ["A title", "TED: b", "c < d", ""]


def test_segments(tmp_path):
    text = ['<refset trglang="de">', "<hl>", '<seg id="1">One &amp; two.</seg>', "</hl>"]
    text += ['<p><seg id="2"> Three </seg></p>', "<SEG ID=3></SEG>"]
    path = write(tmp_path / "x.sgm", text)
    assert list(prepare_text.segments(path)) == ["One &amp; two.", "Three", ""]


def test_tags_of_sentences(tmp_path):
    path = write(tmp_path / "x.tgt", ["<t> a b . </t> <t> c . </t>"])
    assert list(prepare_text.without_sentence_tags(path)) == ["a b . c ."]


def test_bpe_marks_go():
    assert prepare_text.without_bpe("un@@ ser H@@ aus a@b @@x") == "unser Haus a@b @@x"
    assert prepare_text.without_bpe("cut@@") == "cut"


def test_lines_end_at_line_feeds_only(tmp_path):
    # Each of these ends a line for some reader; in a corpus they would move one side.
    text = "\ufeffa\u2028b\x85c\rd\x0be\x1cf\r\nsecond\n\nlast"
    expected = ["a b c d e f", "second", "", "last"]
    (tmp_path / "text").write_bytes(text.encode())
    (tmp_path / "zipped").write_bytes(gzip.compress(text.encode()))
    assert list(prepare_text.lines_of(tmp_path / "text")) == expected
    assert list(prepare_text.lines_of(tmp_path / "zipped")) == expected
    (tmp_path / "text").write_bytes(b"caf\xe9\nfine\n")
    assert list(prepare_text.lines_of(tmp_path / "text")) == ["caf\ufffd", "fine"]
    (tmp_path / "zipped").write_bytes(gzip.compress(os.urandom(5000))[:3000])
    with pytest.raises(ValueError, match="zipped: expected a whole gzip file"):
        list(prepare_text.lines_of(tmp_path / "zipped"))


def test_sides_that_do_not_match(tmp_path):
    x, y, z = (write(tmp_path / name, lines) for name, lines in zip("xyz", ("ab", "cd", "abcde")))
    assert list(prepare_text.pairs_of([x, y])) == [("a", "c"), ("b", "d")]
    for paths in ([x, z], [z, x]):
        with pytest.raises(ValueError, match="as many lines in . as in ., got 2 in the shorter"):
            list(prepare_text.pairs_of(paths))


def test_in_parallel_keeps_the_order_and_reads_little_ahead(monkeypatch):
    monkeypatch.setattr(prepare_text, "CHUNK", 10)
    read = 0

    def items():
        nonlocal read
        while read < 1000:
            read += 1
            yield read

    results = prepare_text.in_parallel(squares, items(), workers=2)
    assert next(results) == (1, 1)
    assert read <= 60
    assert list(results) == [(number, number**2) for number in range(2, 1001)]
    assert list(prepare_text.in_parallel(squares, range(25), 1)) == [(n, n**2) for n in range(25)]


def test_workers_end_with_a_run_that_is_killed():
    code = """if True:
        import os, sys, time
        sys.path.insert(0, "scripts")
        from pipeline.data import text as prepare_text
        prepare_text.CHUNK = 1
        def pids(chunk):
            time.sleep(0.2)
            return [os.getpid()]
        for _, pid in prepare_text.in_parallel(pids, range(1000), 2):
            print(pid, flush=True)
    """
    run = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    workers = {int(run.stdout.readline()) for _ in range(4)}
    run.kill()
    run.wait()
    run.stdout.close()
    assert len(workers) == 2

    def alive(pid):
        try:
            return (Path("/proc") / str(pid) / "stat").read_text().split()[2] != "Z"
        except OSError:
            return False

    for _ in range(100):
        left = list(filter(alive, workers))
        if not left:
            break
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def squares(numbers):
    return [number**2 for number in numbers]


def test_a_sentence_that_is_too_long_is_named(tmp_path):
    lines = ["God said so.", "And it was.", "God said so. " * 600]
    corpus = {f"{split}.{language}": lines for split in corpora.SPLITS for language in ("en", "es")}
    with pytest.raises(ValueError, match=r"train.en: .* got \d+ in line 3; .*--cut-source N"):
        corpora.prepare(corpus, ["en", "es"], 40, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_sentence_is_its_words_with_one_space_between(tmp_path):
    text = "\ufeffGod \t said.\n And\u00a0it  was. \r\n"
    (tmp_path / "train.en").write_bytes(text.encode())
    assert corpora.read_sentences(tmp_path, "train.en") == ["God said.", "And it was."]


def test_pieces_are_learnt_of_the_training_text_of_both_languages(tmp_path):
    sides = {"en": "god", "es": "dijo"}
    corpus = {f"train.{language}": [word] * 50 for language, word in sides.items()}
    corpus |= {
        f"{split}.{language}": ["hvxk"] * 99 for split in ("valid", "test") for language in sides
    }
    corpora.prepare(corpus, list(sides), 24, tmp_path / "out")
    for language, word in sides.items():
        text = (tmp_path / f"out/pieces/train.{language}").read_text()
        assert text == f"\u2581{word}\n" * 50
    assert (tmp_path / "out/pieces/test.en").read_text() != "\u2581hvxk\n" * 99


def test_pieces_are_learnt_of_long_lines(tmp_path):
    """Of paragraphs and documents, which SentencePiece leaves out by default."""
    corpus = {"train.en": [" ".join(["abcd"] * 1000), *["x"] * 9]}
    corpus |= {"valid.en": ["x"], "test.en": ["abcd"]}
    corpora.prepare(corpus, ["en"], 24, tmp_path / "out")
    assert (tmp_path / "out/pieces/test.en").read_text() == "\u2581abcd\n"


WMT = {"longest": 250, "ratio": 1.5, "clean": "pieces", "straight": True}


@pytest.mark.parametrize(
    "name, expected",
    [
        (
            "iwslt14_de_en",
            {"vocabulary": 10_000, "joined": False, "longest": 175, "ratio": 1.5,
             "valid_every": 23, "straight": True, "lowercase": True},
        ),
        ("wmt16_en_de", WMT | {"vocabulary": 32_768}),
        ("wmt14_en_fr", WMT | {"vocabulary": 40_000, "normalize": True, "split_dashes": True}),
        ("cnn_dm", {"vocabulary": 30_000, "tokenizer": "none", "learn_from": 200_000}),
        ("wikitext103", {"tokenizer": "none"}),
    ],
)  # fmt: skip
def test_how_benchmarks_are_prepared(name, expected):
    defaults = {each.name: each.default for each in fields(Benchmark)}
    defaults = {key: value for key, value in defaults.items() if value not in (MISSING, "")}
    assert {key: getattr(BENCHMARKS[name], key) for key in defaults} == defaults | expected
