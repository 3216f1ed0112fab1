"""Tiny archives in the layouts in which the benchmarks are published, made of verses.

    folder = MAKE["iwslt14_de_en"](tmp_path)   # give it to prepare_iwslt14_de_en.sh as --data

Spanish stands for German and French. The numbers of lines are those of LINES, so that preparing
them takes ``--other-counts`` and ``--vocabulary 400``.
"""

import gzip
import io
import tarfile
import zipfile
from itertools import islice
from pathlib import Path

VERSES = Path(__file__).resolve().parents[2] / "data/bible-es-en"
TRAIN = 300  # pairs of a training corpus
SET = 12  # segments of a test set


def verses(language, lines, start=0, split="train"):
    """Some verses; those of one start are the same in both languages."""
    with gzip.open(VERSES / f"{split}.{language}.gz", "rt", encoding="utf-8") as text:
        return [line.rstrip("\n") for line in islice(text, start, start + lines)]


def text(lines):
    return "".join(line + "\n" for line in lines)


def archive(path, files):
    """Write ``{name: text or bytes}`` as a zip or a tar, gzipped but for .tar and .bz2."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files = {
        name: content.encode() if isinstance(content, str) else content
        for name, content in files.items()
    }
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            for name, content in files.items():
                file.writestr(name, content)
        return path
    compression = {".tar": "", ".bz2": "bz2"}.get(path.suffix, "gz")
    with tarfile.open(path, f"w:{compression}") as file:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return path


def iwslt14_de_en(folder):
    """``de-en.tgz``: tagged training text of two talks, five test sets in XML."""
    files = {"de-en/README": "TED talks\n"}
    for language, ours in (("de", "es"), ("en", "en")):
        lines = verses(ours, TRAIN)
        talk = [
            "<url>http://www.ted.com/talks/verses</url>",
            "<keywords>talks, verses</keywords>",
            "<talkid>1</talkid>",
            f"<title>{lines[0]}</title>",
            f"<description>{lines[1]}</description>",
        ]
        half = TRAIN // 2
        files[f"de-en/train.tags.de-en.{language}"] = text(
            [*talk, *lines[2:half], *talk[:3], *lines[half:]]
        )
        sets = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
        for number, name in enumerate(sets):
            segments = verses(ours, SET, number * SET, "test")
            files[f"de-en/IWSLT14.{name}.de-en.{language}.xml"] = xml(language, segments)
    archive(folder / "de-en.tgz", files)
    return folder


def xml(language, segments):
    lines = [f'<seg id="{number}"> {line} </seg>' for number, line in enumerate(segments, 1)]
    return text(
        [
            '<?xml version="1.0" encoding="UTF-8"?>',
            f'<mteval><refset setid="iwslt" srclang="de" trglang="{language}">',
            '<doc docid="1" genre="lectures">',
            "<title>Verses</title>",
            *lines,
            "</doc></refset></mteval>",
        ]
    )


def newstest(name, pair, target, start):
    """The SGML of a WMT test set, ``{name: text}``; `pair` is as in newstest2014-deen, or empty."""
    files = {}
    for side, language, ours in (("src", "en", "en"), ("ref", target, "es")):
        lines = [
            f'<seg id="{number}">{line}</seg>'
            for number, line in enumerate(verses(ours, SET, start, "test"), 1)
        ]
        files[f"{name}{pair}-{side}.{language}.sgm"] = text(
            [f'<{side}set setid="{name}" srclang="any">', '<doc docid="1">', "<p>", *lines, "</p>"]
            + ["</doc>", f"</{side}set>"]
        )
    return files


def corpus(stem, target, start):
    """Both sides of a training corpus, ``{name: text}``, with one pair that cleaning drops."""
    return {
        f"{stem}.en": text([*verses("en", TRAIN, start), "Amen."]),
        f"{stem}.{target}": text([*verses("es", TRAIN, start), "Amen, amen, y otra vez amen."]),
    }


def inside(folder, files):
    return {f"{folder}/{name}": content for name, content in files.items()}


def wmt16_en_de(folder):
    """The five archives of WMT En-De."""
    parts = {
        "training-parallel-europarl-v7.tgz": inside(
            "training", corpus("europarl-v7.de-en", "de", 0)
        ),
        "training-parallel-commoncrawl.tgz": {
            **corpus("commoncrawl.de-en", "de", 1000),
            "commoncrawl.de-en.annotation": "http://example.org\n",
        },
        "training-parallel-nc-v11.tgz": inside(
            "training-parallel-nc-v11", corpus("news-commentary-v11.de-en", "de", 2000)
        ),
        # The published one has other forms of later sets too, which are not meant.
        "dev.tgz": inside(
            "dev",
            newstest("newstest2013", "", "de", 0) | newstest("newstest2014", "-deen", "de", 200),
        ),
        "test-full.tgz": inside("test-full", newstest("newstest2014", "-deen", "de", 100)),
    }
    for name, files in parts.items():
        archive(folder / name, files)
    return folder


def wmt14_en_fr(folder):
    """The seven archives of WMT En-Fr; one is not gzipped and holds gzipped files."""
    giga = corpus("giga-fren.release2.fixed", "fr", 4000)
    parts = {
        "training-parallel-europarl-v7.tgz": inside(
            "training", corpus("europarl-v7.fr-en", "fr", 0)
        ),
        "training-parallel-commoncrawl.tgz": corpus("commoncrawl.fr-en", "fr", 1000),
        "training-parallel-un.tgz": inside("un", corpus("undoc.2000.fr-en", "fr", 2000)),
        "training-parallel-nc-v9.tgz": inside(
            "training", corpus("news-commentary-v9.fr-en", "fr", 3000)
        ),
        "training-giga-fren.tar": {
            f"{name}.gz": gzip.compress(content.encode()) for name, content in giga.items()
        },
        "dev.tgz": inside(
            "dev",
            newstest("newstest2012", "", "fr", 0) | newstest("newstest2013", "", "fr", 50),
        ),
        "test-full.tgz": inside("test-full", newstest("newstest2014", "-fren", "fr", 100)),
    }
    for name, files in parts.items():
        archive(folder / name, files)
    return folder


def cnn_dm(folder):
    """``cnndm.tar.gz``: articles and tagged summaries, one per line; one article is empty."""
    files, start = {}, 0
    for split, count in (("train", 60), ("val", 10), ("test", 10)):
        articles, summaries = [], []
        for number in range(count):
            lines = verses("en", 6, start)
            start += 6
            articles.append("" if (split, number) == ("train", 3) else " ".join(lines[:4]))
            summaries.append(" ".join(f"<t> {line.rstrip('.')} . </t>" for line in lines[4:]))
        files |= {f"{split}.txt.src": text(articles), f"{split}.txt.tgt.tagged": text(summaries)}
    archive(folder / "cnndm.tar.gz", files)
    return folder


def wikitext103(folder):
    """``wikitext-103-v1.zip``: headings, empty lines, tokens with <unk> among them."""
    files = {}
    for split, count in (("train", TRAIN), ("valid", SET), ("test", SET)):
        lines = [" \n", " = Verses = \n", " \n"]
        lines += [f" {line.replace('God', '<unk>')} \n" for line in verses("en", count, 0, split)]
        files[f"wikitext-103/wiki.{split}.tokens"] = "".join(lines)
    archive(folder / "wikitext-103-v1.zip", files)
    return folder


MAKE = {
    "iwslt14_de_en": iwslt14_de_en,
    "wmt16_en_de": wmt16_en_de,
    "wmt14_en_fr": wmt14_en_fr,
    "cnn_dm": cnn_dm,
    "wikitext103": wikitext103,
}
