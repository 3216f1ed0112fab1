"""The prepare scripts on tiny archives in the published layouts."""

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import tarfile
import zipfile
from types import SimpleNamespace

import archives
import pytest

import conftest
from conftest import ROOT

pytest.importorskip("fairseq")
from pipeline.data import archives as prepare_archives
from pipeline.data import prepare as prepare_benchmark
from pipeline.data import text as prepare_text
from pipeline.data.benchmarks import BENCHMARKS


def prepare(benchmark, *arguments):
    """Run the command in this process; its exit status."""
    return prepare_benchmark.main([benchmark, "--workers", "1", *map(str, arguments)])


def tiny(benchmark, folder, *arguments):
    """Prepare a tiny archive; returns the folder and its prepared.json."""
    data, output = folder / "data", folder / "out"
    vocabulary = [] if benchmark == "wikitext103" else ["--vocabulary", "400"]
    archives.MAKE[benchmark](data)
    status = prepare(
        benchmark, "--data", data, "--output", output, "--other-counts", *vocabulary, *arguments
    )
    assert status == 0
    assert not (folder / "out.partial").exists()
    return output, json.loads((output / "prepared.json").read_text())


def refusal(capfd, *arguments):
    return conftest.refusal(capfd, lambda words: prepare(*words), *arguments)


def lines(path):
    return path.read_text(encoding="utf-8").splitlines()


def dataset(folder, split, language=None, pair=None):
    """A binarised split as fairseq reads it: its sentences, in words."""
    from fairseq.data import Dictionary, data_utils

    words = Dictionary.load(str(folder / (f"dict.{language}.txt" if language else "dict.txt")))
    name = f"{split}.{pair}.{language}" if pair else split
    numbers = data_utils.load_indexed_dataset(str(folder / name), words)
    return [words.string(sentence) for sentence in numbers], words


def decode(output, sentences):
    pieces = prepare_text.pieces_of(output / "sentencepiece.model")
    return [pieces.decode(sentence.split()) for sentence in sentences]


# --- Whole preparations ---


def test_iwslt(tmp_path):
    output, prepared = tiny("iwslt14_de_en", tmp_path)
    assert prepared["lines"] == {"train": 284, "valid": 12, "test": 60}
    assert (prepared["tokenizer"], prepared["lowercase"]) == ("moses", True)
    assert (prepared["source_lang"], prepared["target_lang"]) == ("de", "en")
    for split, found, number in (("train", 284, 160239), ("valid", 12, 7283)):
        check = {"what": f"pairs of {split}", "found": found, "published": [number]}
        assert check | {"exact": False} in prepared["checks"]
    sets = [check["found"] for check in prepared["checks"] if "IWSLT14." in check["what"]]
    assert sets == [12] * 5  # each for itself

    # By hand from the archive: what is kept, every 23rd of it, and the order of the test sets.
    pairs = list(zip(archives.verses("es", 300), archives.verses("en", 300)))
    tokens = prepare_text.tokenize_pairs(pairs, ("de", "en"), lowercase=True)
    kept = [
        (plain, pair)
        for plain, pair in zip(pairs, tokens)
        if prepare_text.is_kept(*pair, longest=175, ratio=1.5)
    ]
    assert lines(output / "valid.de") == [plain[0] for plain, _ in kept[22::23]]
    assert lines(output / "tokenized.valid.en") == [pair[1] for _, pair in kept[22::23]]
    assert lines(output / "test.en") == archives.verses("en", 60, split="test")
    assert not any(line != line.lower() for line in lines(output / "tokenized.test.de"))
    assert not any("\u2019" in line for line in lines(output / "tokenized.test.en"))
    train, english = dataset(output, "train", "en", "de-en")
    _, german = dataset(output, "train", "de", "de-en")
    assert decode(output, train) == [
        pair[1] for number, (_, pair) in enumerate(kept, 1) if number % 23
    ]
    assert english.symbols != german.symbols

    from fairseq.tasks.translation import TranslationConfig, TranslationTask

    task = TranslationTask.setup_task(TranslationConfig(data=str(output), dataset_impl="mmap"))
    for split, count in prepared["lines"].items():
        task.load_dataset(split)
        assert len(task.datasets[split]) == count


def test_wmt_en_de(tmp_path):
    output, prepared = tiny("wmt16_en_de", tmp_path)
    assert lines(output / "valid.en") == archives.verses("en", 12, 0, "test")
    assert lines(output / "test.de") == archives.verses("es", 12, 100, "test")
    assert "twenty-seven" in lines(output / "tokenized.valid.en")[0]  # dashes stay, to be split
    assert len(prepared["checks"]) == 7  # with that of the vocabulary

    # By hand: three corpora, one after the other, of which pairs of like numbers of pieces stay.
    pairs = []
    for start in (0, 1000, 2000):
        pairs += zip(archives.verses("en", 300, start), archives.verses("es", 300, start))
        pairs.append(("Amen.", "Amen, amen, y otra vez amen."))
    tokens = prepare_text.tokenize_pairs(pairs, ("en", "de"))
    pieces = prepare_text.encode_pairs(tokens, output / "sentencepiece.model")
    kept = [pair for pair in pieces if prepare_text.is_kept(*pair, longest=250, ratio=1.5)]
    assert 850 < len(kept) <= 900
    assert prepared["lines"] == {"train": len(kept), "valid": 12, "test": 12}
    german, words = dataset(output, "train", "de", "en-de")
    assert [len(line.split()) for line in german] == [len(line.split()) for _, line in kept]
    assert words.symbols == dataset(output, "train", "en", "en-de")[1].symbols
    assert len(words) == 400


def test_wmt_en_fr(tmp_path):
    output, prepared = tiny("wmt14_en_fr", tmp_path)
    assert 1400 < prepared["lines"].pop("train") <= 1500
    assert prepared["lines"] == {"valid": 24, "test": 12}
    first, second = (archives.verses("es", 12, start, "test") for start in (0, 50))
    assert lines(output / "valid.fr") == first + second  # newstest2012, then newstest2013
    assert "twenty @-@ seven" in lines(output / "tokenized.valid.en")[0]
    train, _ = dataset(output, "train", "en", "en-fr")
    assert not any(mark in line for line in train for mark in "“”’—")  # normalised


def test_cnn_dm(tmp_path):
    output, prepared = tiny("cnn_dm", tmp_path)
    assert prepared["lines"] == {"train": 59, "valid": 10, "test": 10}  # one has no article
    assert prepared["tokenizer"] == "none"
    verses = archives.verses("en", 6, 6 * 70)
    assert lines(output / "test.source")[0] == " ".join(verses[:4])
    assert lines(output / "tokenized.test.target")[0] == " ".join(
        f"{line.rstrip('.')} ." for line in verses[4:]
    )
    assert dataset(output, "train", "source", "source-target")[1].symbols == (
        dataset(output, "train", "target", "source-target")[1].symbols
    )


def test_wikitext(tmp_path):
    output, prepared = tiny("wikitext103", tmp_path)
    assert prepared["lines"] == {"train": 303, "valid": 15, "test": 15}
    assert (prepared["target_lang"], prepared["tokenizer"], prepared["subwords"]) == (
        None,
        "none",
        "none",
    )
    train, words = dataset(output, "train")
    assert train[1] == "= Verses =" and train[2] == ""
    assert train[3:] == [line.replace("God", "<unk>") for line in archives.verses("en", 300)]
    sentences = lines(output / "test.en")
    assert len(dataset(output, "test")[0]) == len(sentences)
    assert words.index("<unk>") == words.unk()


def test_another_vocabulary_is_not_the_recipe(tmp_path, capfd):
    output, prepared = tiny("iwslt14_de_en", tmp_path)
    check = {"what": "words of a dictionary", "found": 400, "published": [10_000]}
    assert check | {"exact": False} in prepared["checks"]
    arguments = ("iwslt14_de_en", "--data", tmp_path / "data", "--output", output)
    line = refusal(capfd, *arguments, "--vocabulary", 500)
    assert f"--vocabulary: expected 400 of {output}, got 500" in line
    assert prepare(*arguments, "--vocabulary", 400) == prepare(*arguments) == 0


def test_pretokenized_data_is_taken_as_it_is(tmp_path, capfd):
    given, output = tmp_path / "given", tmp_path / "out"
    given.mkdir()
    for split, start in (("train", 0), ("valid", 50), ("test", 70)):
        for language, ours in (("de", "es"), ("en", "en")):
            verses = archives.text(archives.verses(ours, 20, start))
            (given / f"{split}.{language}").write_text(re.sub(r"\b(\w{3})\B", r"\1@@ ", verses))
    arguments = ("iwslt14_de_en", "--pretokenized", given, "--output", output)
    assert "lines of test: expected 6,750, got 20" in refusal(capfd, *arguments)
    assert prepare(*arguments, "--other-counts") == 0
    prepared = json.loads((output / "prepared.json").read_text())
    assert prepared["subwords"] == "subword_nmt"
    assert prepared["lines"] == {"train": 20, "valid": 20, "test": 20}
    assert lines(output / "tokenized.test.en") == archives.verses("en", 20, 70)
    assert not (output / "test.en").exists()  # there is no plain text
    test = zip(dataset(output, "test", "de", "de-en")[0], lines(given / "test.de"), strict=True)
    words = [pair for pair in test for pair in zip(*map(str.split, pair), strict=True)]
    assert {ours for ours, word in words if ours != word} == {"<unk>"} and len(words) > 100
    assert dataset(output, "train", "de", "de-en")[0] == lines(given / "train.de")

    # With the dictionary of a released checkpoint, a test set is enough.
    for split in ("train", "valid"):
        for language in ("de", "en"):
            (given / f"{split}.{language}").unlink()
    assert "No such file or directory: " in refusal(
        capfd, *arguments, "--other-counts", "--restart"
    )
    for language in ("de", "en"):
        shutil.copy(output / f"dict.{language}.txt", given)
    assert prepare(*arguments, "--other-counts", "--restart") == 0
    assert json.loads((output / "prepared.json").read_text())["lines"] == {"test": 20}
    assert (output / "dict.en.txt").read_text() == (given / "dict.en.txt").read_text()

    # Other text is not taken for this one.
    other = ("iwslt14_de_en", "--pretokenized", tmp_path, "--output", output)
    assert f"--pretokenized: expected {given} of {output}" in refusal(capfd, *other)
    other = ("iwslt14_de_en", "--data", tmp_path, "--output", output)
    assert f"--pretokenized: expected {given} of {output}, got none;" in refusal(capfd, *other)


def tokenized(name, folder, **splits):
    """What is made of plain text, ``{split: pairs}``; also the preparation, as far as that."""
    prep = prepare_benchmark.Preparation(name, SimpleNamespace(
        vocabulary=None, data=[], download=False, pretokenized=None, output=folder / name,
        other_counts=True, workers=1,
    ))  # fmt: skip
    prep.folder.mkdir(parents=True)
    for split, pairs in splits.items():
        for path, side in zip(prep.paths("", split), zip(*pairs)):
            path.write_text(archives.text(side), encoding="utf-8")
        prep.prepared["lines"][split] = len(pairs)
    prepare_benchmark.write_tokenized(prep)
    paths = (prep.paths("tokenized.", split) for split in splits)
    return {split: list(zip(*map(lines, of))) for split, of in zip(splits, paths)}, prep


def test_what_is_done_to_training_text_alone_and_to_the_rest_alone(tmp_path):
    """Cleaned and normalised is what is learnt from; apostrophes get straight in what is scored."""
    pair, uneven = ("It’s “so” here.", "L’eau « là » dort."), ("a", "b c d")
    found, _ = tokenized("wmt14_en_fr", tmp_path, train=[pair], valid=[pair], test=[pair])
    normal = "It &apos;s &quot; so &quot; here .", "L&apos; eau &quot; là &quot; dort ."
    other = "It &apos;s “ so ” here .", "L&apos; eau « là » dort ."
    assert found == {"train": [normal], "valid": [other], "test": [other]}
    # Each language by its own rules; of pairs whose lengths differ, those to learn from go.
    pair = ("it’s", "it’s")
    found, _ = tokenized("iwslt14_de_en", tmp_path, train=[pair, uneven], test=[pair, uneven])
    assert found["train"] == [("it ’ s", "it ’ s")]
    assert found["test"] == [("it &apos; s", "it &apos;s"), uneven]


def test_pieces_are_learnt_of_long_lines_of_both_sides(tmp_path):
    """Of articles, which SentencePiece leaves out by default; and of nothing but training text."""
    train = [("abcd " * 2000, "efgh")] + [("x", "efgh")] * 50
    _, prep = tokenized("cnn_dm", tmp_path, train=train, test=[("ijkl", "ijkl")] * 500)
    prep.vocabulary = 24
    prepare_benchmark.write_pieces(prep)
    assert lines(prep.folder / "pieces.train.source")[0].split() == ["▁abcd"] * 2000
    assert lines(prep.folder / "pieces.train.target")[0] == "▁efgh"
    assert lines(prep.folder / "pieces.test.target")[0] != "▁ijkl"


def test_a_token_of_letters_and_marks_may_be_a_piece(tmp_path):
    pair = ("it &apos;s u.s. -lrb- 1990s", "l&apos; Donaudampfschifffahrt")
    _, prep = tokenized("cnn_dm", tmp_path, train=[pair] * 99, test=[pair])
    prep.vocabulary = 90
    prepare_benchmark.write_pieces(prep)
    pieces = lines(prep.folder / "pieces.test.source") + lines(prep.folder / "pieces.test.target")
    assert " ".join(pieces) == "▁it ▁&apos;s ▁u.s. ▁-lrb- ▁1990s ▁l&apos; ▁Donaudampfschifffahrt"


# --- Stopping, going on, and running again ---


def test_a_killed_run_goes_on_with_the_stage_it_was_in(tmp_path, monkeypatch, capfd):
    data, output, work = (tmp_path / name for name in ("data", "out", "out.partial/made"))
    archives.iwslt14_de_en(data)
    arguments = ["iwslt14_de_en", "--data", data, "--output", output]
    arguments += ["--vocabulary", "400", "--other-counts"]
    child = os.fork()
    if child == 0:  # killed with half of a stage written
        try:
            encode = prepare_text.encode_pairs
            monkeypatch.setattr(
                prepare_text,
                "encode_pairs",
                lambda pairs, model: (
                    os.kill(os.getpid(), signal.SIGKILL)
                    if len(pairs) < 100
                    else encode(pairs, model)
                ),
            )
            prepare(*arguments)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not output.exists()
    assert (work / "tokenized.train.de").exists() and (work / "pieces.train.de").exists()
    assert not (work / "train.de").exists()  # what is done with is not kept

    # Not with other settings, which would not fit what is there.
    assert "other settings (data: [" in refusal(capfd, *arguments, "--data", tmp_path)
    message = refusal(capfd, *arguments[:-2], "500")
    assert "out.partial holds a preparation with other settings" in message
    assert "--restart" in message

    def again(*_):
        raise AssertionError("an earlier stage was done again")

    monkeypatch.setattr(prepare_benchmark, "write_plain", again)
    monkeypatch.setattr(prepare_benchmark, "write_tokenized", again)
    assert prepare(*arguments) == 0
    assert not work.parent.exists()
    assert json.loads((output / "prepared.json").read_text())["lines"]["train"] == 284

    # The second time there is nothing to do, and other files are not written over.
    before = {path: path.stat().st_mtime_ns for path in output.iterdir()}
    assert prepare(*arguments) == 0
    assert "is ready" in capfd.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in output.iterdir()} == before
    (output / "prepared.json").unlink()
    assert "which holds other things" in refusal(capfd, *arguments, "--restart")


def test_what_was_unpacked_is_kept_while_no_stage_is_done(tmp_path, capfd):
    data = archives.iwslt14_de_en(tmp_path / "data")
    arguments = ["iwslt14_de_en", "--data", data, "--output", tmp_path / "out"]
    assert "expected 174,443, got 300" in refusal(capfd, *arguments)
    (extracted,) = (tmp_path / "out.partial/made/extracted").iterdir()
    (extracted / "kept").touch()
    assert "expected 174,443, got 300" in refusal(capfd, *arguments)
    assert (extracted / "kept").exists()
    refusal(capfd, *arguments, "--vocabulary", 400)
    assert extracted.exists() and not (extracted / "kept").exists()
    (tmp_path / "out.partial/settings.json").write_text("{")
    assert prepare(*arguments, "--other-counts", "--vocabulary", 400, "--restart") == 0


def test_a_host_that_is_gone(tmp_path, capfd):
    gone = f"file://{tmp_path}/gone/de-en.tgz"
    kept = tmp_path / "downloads"
    message = refusal(
        capfd, "iwslt14_de_en", "--data", gone, "--downloads", kept, "--output", tmp_path / "out"
    )
    assert message.startswith(f"prepare_iwslt14_de_en.sh: {gone}: could not be downloaded")
    assert [path.name for path in kept.rglob("*") if path.is_file()] == ["lock"]
    assert not (tmp_path / "out").exists()


# --- What is refused ---


def test_wrong_counts_say_both_numbers(tmp_path, capfd):
    data = archives.iwslt14_de_en(tmp_path / "data")
    message = refusal(capfd, "iwslt14_de_en", "--data", data, "--output", tmp_path / "out")
    assert "train.tags.de-en.de and train.tags.de-en.en: expected 174,443, got 300 " in message
    assert not (tmp_path / "out").exists()


def test_published_counts_pass_in_silence(capfd):
    run = prepare_benchmark.Preparation("wmt16_en_de", SimpleNamespace(
        vocabulary=None, data=[], download=False, pretokenized=None, output="x",
        other_counts=False,
    ))  # fmt: skip
    run.check("test", 3003, (3003, 2737))
    run.check("test", 2737, (3003, 2737))
    run.check("train", 3_960_000, (3_976_000,), exact=False)
    assert capfd.readouterr().err == ""
    run.check("train", 4_500_000, (3_976_000,), exact=False)
    assert capfd.readouterr().err == "warning: train: expected about 3,976,000, got 4,500,000\n"
    run.check("train", 3_890_000, (3_976_000,), exact=False)  # more than one in fifty
    assert "warning: train: " in capfd.readouterr().err
    with pytest.raises(ValueError, match="test: expected 3,003 or 2,737, got 3,002"):
        run.check("test", 3002, (3003, 2737))
    assert [check["found"] for check in run.prepared["checks"]][-1] == 3002


@pytest.mark.parametrize(
    "benchmark, expected",
    [
        ("iwslt14_de_en", "dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz. The original"),
        ("wmt16_en_de", "training-parallel-nc-v11.tgz"),
        ("wmt14_en_fr", "training-giga-fren.tar"),
        ("cnn_dm", "opennmt-models/Summary/cnndm.tar.gz"),
        ("wikitext103", "The original host, research.metamind.io on Amazon S3, is gone"),
    ],
)
def test_missing_files_and_where_they_are(tmp_path, capfd, benchmark, expected):
    for data in ([], ["--data", tmp_path]):
        message = refusal(capfd, benchmark, *data, "--output", tmp_path / "out")
        assert message.startswith(f"prepare_{benchmark}.sh: missing ") and expected in message


def test_one_archive_of_several_is_missing(tmp_path, capfd):
    data = archives.wmt16_en_de(tmp_path / "data")
    (data / "training-parallel-commoncrawl.tgz").unlink()
    message = refusal(capfd, "wmt16_en_de", "--data", data, "--output", tmp_path / "out")
    assert "missing commoncrawl.de-en.en, commoncrawl.de-en.de; give" in message
    assert "training-parallel-commoncrawl.tgz" in message and "europarl" not in message


def test_what_data_lacks_is_downloaded(tmp_path, monkeypatch, capfd):
    """And what it has is used, though the archive has it too; what neither has is named."""
    host = archives.wikitext103(tmp_path / "host")
    asked = []

    def download(url, folder):
        asked.append(url)
        return host / url.rpartition("/")[2]

    monkeypatch.setattr(prepare_benchmark, "download", download)
    data, output = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    (data / "wiki.train.tokens").write_text("my own words\n" * 9)
    arguments = ("wikitext103", "--data", data, "--download", "--output", output)
    assert prepare(*arguments, "--other-counts") == 0
    assert asked == list(BENCHMARKS["wikitext103"].archives)
    prepared = json.loads((output / "prepared.json").read_text())
    assert prepared["lines"] == {"train": 9, "valid": 15, "test": 15}
    archives.archive(host / "wikitext-103-v1.zip", {"wiki.valid.tokens": "of another release\n"})
    message = refusal(capfd, *arguments, "--other-counts", "--restart")
    assert "missing wiki.test.tokens; give --data" in message


def test_data_that_was_wrong_may_be_put_right(tmp_path, capfd):
    archives.wikitext103(tmp_path / "right")
    (tmp_path / "wrong").mkdir()
    arguments = ["wikitext103", "--output", tmp_path / "out", "--other-counts", "--data"]
    assert "missing wiki.train.tokens" in refusal(capfd, *arguments, tmp_path / "wrong")
    assert prepare(*arguments, tmp_path / "right") == 0


def test_an_archive_that_is_named_may_be_of_any_kind(tmp_path):
    path = tmp_path / "words.tar.xz"
    (tmp_path / "train.txt").write_text("some words")
    with tarfile.open(path, "w:xz") as archive:
        archive.add(tmp_path / "train.txt", "data/train.txt")
    files = prepare_archives.gather(["train.txt"], [path], {}, tmp_path / "extracted")
    assert files["train.txt"].read_text() == "some words"
    with pytest.raises(ValueError, match="notes: expected a whole tar or zip archive"):
        (tmp_path / "notes").write_text("words")
        prepare_archives.gather(["train.txt"], [tmp_path / "notes"], {}, tmp_path / "extracted")


def test_an_archive_that_is_replaced_is_read_anew(tmp_path):
    path, found = tmp_path / "data/words.zip", []
    path.parent.mkdir()
    for text in ("wrong", "right words"):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("train.txt", text)
        files = prepare_archives.gather(["train.txt"], [path], {}, tmp_path / "extracted")
        found.append(files["train.txt"].read_text())
    assert found == ["wrong", "right words"]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-2000])


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def replace(path, **changes):
    """Put a member into an archive that must not be there."""
    with tarfile.open(path, "w:gz") as file:
        member = tarfile.TarInfo("de-en/train.tags.de-en.de")
        for name, value in changes.items():
            setattr(member, name, value)
        file.addfile(member)


@pytest.mark.parametrize(
    "harm, expected",
    [
        (truncate, "expected a whole tar or zip archive"),
        (damage, "expected a whole tar or zip archive"),
        (lambda path: path.write_text("<html>Not found</html>"), "expected a whole tar or zip"),
        (lambda path: path.write_bytes(b""), "expected a whole tar or zip"),
        (lambda path: replace(path, name="../train.tags.de-en.de"), "outside the destination"),
        (lambda path: replace(path, type=tarfile.SYMTYPE, linkname="/etc/passwd"), "link"),
    ],
)
def test_archives_that_cannot_be_used(tmp_path, capfd, harm, expected):
    data = archives.iwslt14_de_en(tmp_path / "data")
    harm(data / "de-en.tgz")
    message = refusal(
        capfd, "iwslt14_de_en", "--data", data, "--output", tmp_path / "out", "--other-counts"
    )
    assert expected in message and "de-en.tgz" in message
    assert not (tmp_path / "out").exists()
    extracted = tmp_path / "out.partial/made/extracted"
    assert not [path for path in extracted.glob("*") if path.suffix != ".partial"]


@pytest.mark.parametrize("name", ["some.zip", "some.tar.bz2"])
def test_an_archive_that_is_damaged(tmp_path, name):
    path = archives.archive(tmp_path / name, {"wiki.test.tokens": "= A =\n" * 1000})
    content = bytearray(path.read_bytes())
    content[50] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(ValueError, match="expected a whole tar or zip archive"):
        prepare_archives.unpack(path, {"wiki.test.tokens"}, tmp_path / "extracted")
    assert not (tmp_path / "extracted").exists()


def test_what_is_there_twice(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "wiki.test.tokens").write_text(name)
    with pytest.raises(ValueError, match="wiki.test.tokens: expected one file, got .*a/wiki"):
        prepare_archives.gather({"wiki.test.tokens"}, [tmp_path], {}, tmp_path / "extracted")
    for name in ("a", "b"):  # also where size and time are the same
        os.utime(tmp_path / name / "wiki.test.tokens", (0, 0))
    with pytest.raises(ValueError, match="wiki.test.tokens: expected one file, got .*a/wiki"):
        prepare_archives.gather({"wiki.test.tokens"}, [tmp_path], {}, tmp_path / "extracted")
    # An archive that has two of them, in two folders.
    archives.archive(tmp_path / "two.zip", {"x/wiki.test.tokens": "1", "y/wiki.test.tokens": "2"})
    with pytest.raises(ValueError, match="wiki.test.tokens: expected one file, got .*x/wiki"):
        found = [tmp_path / "two.zip"]
        prepare_archives.gather({"wiki.test.tokens"}, found, {}, tmp_path / "two")
    (tmp_path / "two.zip").unlink()
    shutil.rmtree(tmp_path / "two")
    # Copies of one file do no harm, nor does what it was unpacked from.
    (tmp_path / "b/wiki.test.tokens").write_text("a")
    (tmp_path / "b/wiki.test.tokens.gz").write_bytes(gzip.compress(b"a"))
    prepare_archives.gather({"wiki.test.tokens"}, [tmp_path], {}, tmp_path / "extracted")
    # A folder unpacked beside its archive is read in place of it.
    shutil.rmtree(tmp_path / "b")
    archives.archive(tmp_path / "wiki.zip", {"wiki.test.tokens": "= B =\n", "wiki.x": "x"})
    wanted = {"wiki.test.tokens", "wiki.x"}
    found = prepare_archives.gather(wanted, [tmp_path], {"wiki.zip": ("wiki.",)}, tmp_path / "x")
    assert found["wiki.test.tokens"] == tmp_path / "a/wiki.test.tokens"
    assert found["wiki.x"].read_text() == "x"


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--data", "/no/such"], "--data: expected a folder, a file or an address, got /no/such"),
        (["--workers", "0"], "--workers: expected a whole number of at least 1, got 0"),
        (["--pretokenized", "d", "--data", "e"], "--pretokenized: expected no --data"),
        (["--pretokenized", "d", "--vocabulary", "9"], "--download or --vocabulary"),
        (["--pretokenized", "/no/such"], "No such file or directory: '/no/such/train.de'"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_options_that_cannot_be_used(tmp_path, capfd, arguments, expected):
    message = refusal(capfd, "iwslt14_de_en", *arguments, "--output", tmp_path / "out")
    assert expected in message


# --- The scripts ---


@pytest.mark.parametrize("benchmark", archives.MAKE)
def test_help(benchmark):
    done = subprocess.run(
        [ROOT / f"scripts/prepare_{benchmark}.sh", "--data", "x", "--help"],
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith(f"usage: scripts/prepare_{benchmark}.sh")
    assert "--other-counts" in done.stdout
    assert ("--pretokenized" in done.stdout) == (benchmark != "wikitext103")
    for counts in BENCHMARKS[benchmark].lines.values():
        assert f"{counts[0]:,}" in done.stdout


@pytest.mark.slow
def test_the_script_itself(tmp_path):
    """From another folder, with relative paths and an address, in two processes."""
    archives.wikitext103(tmp_path / "host")
    done = subprocess.run(
        [
            ROOT / "scripts/prepare_wikitext103.sh", "--data",
            f"file://{tmp_path}/host/wikitext-103-v1.zip", "--downloads", "downloads",
            "--output", "made/wiki", "--workers", "2", "--other-counts",
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("made/wiki is ready: train 303, valid 15, test 15 lines\n")
    assert dataset(tmp_path / "made/wiki", "test")[0][1] == "= Verses ="
