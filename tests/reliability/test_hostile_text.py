"""Untrusted text through the readers, fairseq-preprocess and fairseq-interactive."""

import argparse

import pytest

from conftest import ROOT, fairseq
from pipeline.data import corpus as corpora
from pipeline.data import text as prepare_text

pytest.importorskip("fairseq")


from fairseq.binarizer import FileBinarizer, VocabularyDatasetBinarizer
from fairseq.data import Dictionary, data_utils

from talk_fairseq import compat

pytest_plugins = ["hostile_doors"]


CONTROLS = "\r\v\f\x1c\x1d\x1e\x1f\x85\u2028\u2029"  # each ends a line for some reader


LINES = [
    "the word",
    "",
    "the " * 50,
    "a" + "b" * 100_000,  # one word that nobody knows
    *(f"the{control}word" for control in CONTROLS),
    "\x00 \x01 \x07 \x1b[31m the \x7f",
    "\u202eת\u202c \u200f\u200e \u2066x\u2069",  # right-to-left marks and letters
    "\ufeffthe word",
    "\U0010ffff \U0001f600 e\u0301 \ufffd \u00a0\u3000 \u200b",
    " \t ",
    "</s> <pad> <unk> <s> the",
    "H-0\t-1.0\tthe",
    "the word\r",
    "last",
]


def write_lines(path, lines=LINES, opening=b""):
    path.write_bytes(opening + "".join(line + "\n" for line in lines).encode())
    assert path.read_bytes().count(b"\n") == len(lines)
    return path


def test_one_hypothesis_a_line(corpus, trained, tmp_path):
    text = write_lines(tmp_path / "text.es", opening=b"\xef\xbb\xbf")
    out = fairseq(
        "interactive", corpus, "--path", trained, "--input", text, "--buffer-size", 8,
        "--max-tokens", 3000, "--beam", 1, "--max-len-b", 5,
    )  # fmt: skip
    for kind in "SHDP":
        rows = [line for line in out.split("\n") if line.startswith(f"{kind}-")]
        assert [int(row.split("\t")[0][2:]) for row in rows] == list(range(len(LINES))), kind
    sources = [line.split("\t")[1] for line in out.split("\n") if line.startswith("S-")]
    assert sources[0] == sources[-2] and sources[1] == "" == sources[LINES.index(" \t ")]


@pytest.mark.slow
@pytest.mark.long
def test_bytes_that_are_not_utf_8_at_the_commands(corpus, trained, tmp_path):
    bad = write_lines(tmp_path / "bad.es")
    bad.write_bytes(bad.read_bytes() + b"the \xff word\n")
    out = fairseq("interactive", corpus, "--path", trained, "--input", bad, check=False)
    last = out.rstrip("\n").split("\n")[-1]
    assert f"{bad}: line {len(LINES) + 1}: expected UTF-8, got byte 0xff at column 5" in last
    assert "H-0" not in out
    out = fairseq(
        "preprocess", "--only-source", "--source-lang", "es", "--trainpref", tmp_path / "bad",
        "--destdir", tmp_path / "bin", "--user-dir", ROOT / "talk_fairseq", check=False,
    )  # fmt: skip
    assert f"{bad}: line {len(LINES) + 1}: expected UTF-8" in out.rstrip("\n").split("\n")[-1]
    assert not list(tmp_path.glob("bin/*.bin"))


@pytest.mark.parametrize("workers", [1, 3])
def test_binarised_lines_are_those_of_the_file(workers, tmp_path):
    text = write_lines(tmp_path / "text", LINES * 5)
    words = Dictionary()
    words.add_symbol("the")
    FileBinarizer.multiprocess_dataset(
        str(text), "mmap", VocabularyDatasetBinarizer(words), str(tmp_path / "bin"), len(words),
        num_workers=workers,
    )  # fmt: skip
    found = data_utils.load_indexed_dataset(str(tmp_path / "bin"), words)
    assert [len(line) - 1 for line in found] == [len(line.split()) for line in LINES * 5]


@pytest.mark.parametrize(
    "bad", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80"]
)
def test_bytes_that_are_not_utf_8(bad, tmp_path):
    text = write_lines(tmp_path / "train.es")
    text.write_bytes(text.read_bytes() + b"ab" + bad + b"\nmore\n")
    expected = f"{text}: line {len(LINES) + 1}: expected UTF-8, got byte 0x{bad[0]:02x} at column 3"
    with pytest.raises(ValueError) as refused:
        next(compat.text.read_lines_of_input(None, str(text), 1))  # before the first is translated
    assert str(refused.value) == expected
    args = argparse.Namespace(
        source_lang="es", target_lang=None, only_source=True, trainpref=str(tmp_path / "train"),
        dict_only=False, validpref=None, testpref=None,
    )  # fmt: skip
    with pytest.raises(ValueError) as refused:
        compat.text.check_corpora_first(lambda args: pytest.fail("it went on"), args)
    assert str(refused.value) == expected
    with pytest.raises(ValueError, match=f"train.es: not .* line {len(LINES) + 1}: 'utf-8' codec"):
        corpora.read_sentences(tmp_path, "train.es")


def test_published_text_keeps_its_lines(tmp_path):
    text = write_lines(tmp_path / "text", opening=b"\xef\xbb\xbf")
    text.write_bytes(text.read_bytes() + b"ab\xff\n")
    read = list(prepare_text.lines_of(text))
    assert len(read) == len(LINES) + 1 and read[0] == LINES[0] and read[-1] == "ab\ufffd"
    assert all(len(line.splitlines()) <= 1 for line in read)


def test_a_corpus_keeps_its_lines(tmp_path):
    lines = [line for line in LINES if line.strip() and len(line) < 9999] * 9
    for split in ("train", "valid", "test"):
        for language in ("es", "en"):
            write_lines(tmp_path / f"{split}.{language}", lines)
    corpus = corpora.read_corpus(tmp_path, ["es", "en"])
    corpora.prepare(corpus, ["es", "en"], 200, tmp_path / "out")
    written = [path for path in (tmp_path / "out").rglob("*.e[sn]")]
    assert len(written) == 12
    for path in written:
        text = path.read_bytes().decode()
        assert text.count("\n") == len(lines) == len(text.splitlines()), path


def test_a_line_too_long_to_translate_is_named(tmp_path):
    sentences = {"train.es": ["a b"] * 50, "valid.es": ["a"], "test.es": ["ab " * 33_000]}
    corpus = {**sentences, **{name[:-2] + "en": text for name, text in sentences.items()}}
    with pytest.raises(ValueError, match="test.es: expected at most 1000 pieces per sentence, got"):
        corpora.prepare(corpus, ["es", "en"], 50, tmp_path / "out")
    assert not (tmp_path / "out").exists()
