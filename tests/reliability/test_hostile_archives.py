"""Untrusted archives through the prepare scripts and from_pretrained."""

import gzip
import hashlib
import io
import itertools
import os
import random
import stat
import tarfile
import tempfile
import warnings
import zipfile
from pathlib import Path

import pytest

from pipeline.data import archives as prepare_archives
from pipeline.data import prepare as prepare_benchmark
from pipeline.data.benchmarks import LISTS

pytest.importorskip("fairseq")


from hostile import MIB, forget_peak, peak, refusal, report

from talk_fairseq.models.talkconv import TaLKConvModel

pytest_plugins = ["hostile_doors"]


def tar(*members, mode="w:gz"):
    """Writes an archive of ``(name, content, changes of its TarInfo)``, and one that is wanted."""

    def make(path):
        with tarfile.open(path, mode) as archive:
            for name, content, changes in (("a/wanted", b"the word\n", {}), *members):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                for attribute, value in changes.items():
                    setattr(member, attribute, value)
                archive.addfile(member, io.BytesIO(content))

    return make


def zipped(*members):
    def make(path):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of duplicate names
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
                for name, content, mode in (("a/wanted", b"the word\n", 0), *members):
                    info = zipfile.ZipInfo(name)
                    info.external_attr = mode << 16
                    archive.writestr(info, content, zipfile.ZIP_DEFLATED)

    return make


def cut_off(make, share):
    def harm(path):
        make(path)
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * share)])

    return harm


def flipped(make, seed):
    def harm(path):
        make(path)
        content = bytearray(path.read_bytes())
        content[random.Random(seed).randrange(40, len(content) - 40)] ^= 0xFF
        path.write_bytes(content)

    return harm


def sparse(path):
    """A file of a terabyte without a byte, as GNU tar keeps it."""
    member = tarfile.TarInfo("a/holes")
    member.type = tarfile.GNUTYPE_SPARSE
    block = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    block[483:495] = tarfile.itn(1 << 40, 12, tarfile.GNU_FORMAT)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    path.write_bytes(bytes(block) + bytes(1024))


def long_name(path):
    """A name of 100 MB."""
    with gzip.open(path, "wb", compresslevel=1) as file:
        member = tarfile.TarInfo("././@LongLink")
        member.type, member.size = tarfile.GNUTYPE_LONGNAME, 100 * MIB
        file.write(member.tobuf(tarfile.GNU_FORMAT))
        for _ in range(100):
            file.write(bytes(MIB))


def headers(*headers):
    """An archive with these headers, as ``(type, content)``, before its file."""

    def make(path):
        with gzip.open(path, "wb", compresslevel=1) as file:
            for kind, content in headers:
                member = tarfile.TarInfo("header")
                member.type, member.size = kind, len(content)
                file.write(member.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % 512))
            member = tarfile.TarInfo("a/wanted")
            member.size = 9
            file.write(member.tobuf() + b"the word\n".ljust(512, b"\0") + bytes(1024))

    return make


def pax(name, value):
    """A line of a pax header; its length counts itself."""
    rest = f" {name}={value}\n".encode()
    length = next(n for n in itertools.count(len(rest)) if len(str(n)) + len(rest) == n)
    return str(length).encode() + rest


def zip_declares(path):
    zipped()(path)
    content = bytearray(path.read_bytes())
    entry = content.rindex(b"PK\x01\x02")
    content[entry + 24 : entry + 28] = b"\xf0\xff\xff\xff"
    path.write_bytes(content)


MANY = tar(*((f"a/{number}", os.urandom(999), {}) for number in range(9)))


MANY_ZIPPED = zipped(*((f"a/{number}", os.urandom(999), 0) for number in range(9)))


ZEROS = bytes(60 * MIB)


ARCHIVES = {
    "..": tar(("../wanted", b"x", {})),
    ".. inside": tar(("a/../../../wanted", b"x", {})),
    "..\\": tar(("a\\..\\..\\wanted", b"x", {})),
    "absolute": tar(("/tmp/wanted", b"x", {})),
    "an absolute folder": tar(("/tmp/wanted", b"", {"type": tarfile.DIRTYPE})),
    "a link": tar(("a/link", b"", {"type": tarfile.SYMTYPE, "linkname": "/etc"})),
    "a link, and a file below it": tar(
        ("a/link", b"", {"type": tarfile.SYMTYPE, "linkname": "/tmp"}), ("a/link/wanted", b"x", {})
    ),
    "a link inside": tar(("a/other", b"", {"type": tarfile.SYMTYPE, "linkname": "wanted"})),
    "a hard link": tar(("wanted", b"", {"type": tarfile.LNKTYPE, "linkname": "/etc/passwd"})),
    "a hard link inside": tar(("b/wanted", b"", {"type": tarfile.LNKTYPE, "linkname": "a/wanted"})),
    "a device": tar(("a/zero", b"", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 5})),
    "a disk": tar(("a/disk", b"", {"type": tarfile.BLKTYPE, "devmajor": 8})),
    "a pipe": tar(("a/pipe", b"", {"type": tarfile.FIFOTYPE})),
    "twice": tar(("b/wanted", b"another\n", {})),
    "holes": sparse,
    "a bomb": tar(("a/zeros", ZEROS, {})),
    "a wanted bomb": tar(("b/zeros/wanted.gz", ZEROS, {})),
    "a long name": long_name,
    "a name of 8 MB": headers((tarfile.GNUTYPE_LONGNAME, b"a/" * (4 * MIB))),
    "a header of 8 MB": headers((tarfile.XHDTYPE, pax("comment", "a" * 8 * MIB))),
    "headers of headers": headers(*[(tarfile.XHDTYPE, pax("comment", "a"))] * 2000),
    "headers for all files": headers(
        (tarfile.XGLTYPE, b"".join(pax(f"a{number}", "a") for number in range(500)))
    ),
    "a map of holes": headers((tarfile.XHDTYPE, pax("GNU.sparse.map", "x"))),
    "terminal codes": tar(("../\x1b[2J\n", b"x", {})),
    "zip: ..": zipped(("../wanted", b"x", 0)),
    "zip: ..\\": zipped(("a\\..\\wanted", b"x", 0)),
    "zip: absolute": zipped(("/tmp/wanted", b"x", 0)),
    "zip: a link": zipped(("a/link", b"/etc/passwd", stat.S_IFLNK | 0o777)),
    "zip: a device": zipped(("a/zero", b"", stat.S_IFCHR | 0o666)),
    "zip: a pipe": zipped(("a/pipe", b"", stat.S_IFIFO | 0o666)),
    "zip: twice": zipped(("b/wanted", b"another\n", 0)),
    "zip: the same name twice": zipped(("a/wanted", b"another\n", 0)),
    "zip: a bomb": zipped(("a/zeros", ZEROS, 0)),
    "zip: 4 GB declared": zip_declares,
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("<html>Not found</html>\n" * 99),
    "gzipped text": lambda path: path.write_bytes(gzip.compress(b"the word\n" * 99)),
    **{f"cut at {share}": cut_off(MANY, share) for share in (0.01, 0.2, 0.5, 0.9, 0.999)},
    **{f"zip cut at {share}": cut_off(MANY_ZIPPED, share) for share in (0.01, 0.5, 0.9, 0.999)},
    **{f"damaged {seed}": flipped(MANY, seed) for seed in range(20)},
}  # fmt: skip


def test_archives(tmp_path, figure):
    refused, taken = 0, []
    forget_peak()
    before = peak()
    for name, make in ARCHIVES.items():
        archive = tmp_path / "data" / "some.tgz"
        archive.parent.mkdir(exist_ok=True)
        make(archive)

        def gather(path):
            prepare_archives.gather({"wanted"}, [path], {}, tmp_path / "work" / "extracted")

        line = refusal(gather, archive)
        extracted = list((tmp_path / "work/extracted").iterdir())
        assert all(path.suffix == ".partial" for path in extracted), name
        assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "work"], name
        if line is None:
            taken.append(name)
        else:
            refused += 1
    assert not taken
    assert not Path("/tmp/wanted").exists() and peak() - before < 250 * MIB
    report(figure, "archives", refused, len(ARCHIVES))


def test_a_story_that_never_ends(tmp_path, capsys):
    for number, name in enumerate(LISTS.values()):
        (tmp_path / name).write_text(f"address {number}\n")
    archive = tmp_path / "cnn_stories.tgz"
    story = hashlib.sha1(b"address 0").hexdigest() + ".story"
    tar((f"a/{story}", bytes(12 * MIB), {}))(archive)
    arguments = ["--data", str(tmp_path), "--other-counts", "--output", str(tmp_path / "out")]
    assert prepare_benchmark.main(["cnn_dm", *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"{archive}: refused: {story}: expected at most 10,000,000 bytes" in error


def test_damage_to_a_zip_is_refused_or_does_no_harm(tmp_path):
    path = tmp_path / "some.zip"
    for seed in range(40):
        flipped(MANY_ZIPPED, seed)(path)
        held = {}

        def read(path):
            prepare_archives.read_members(
                path,
                lambda name, stream: held.update({name: stream.read()}),  # noqa: B023
            )

        if refusal(read, path) is None:  # a date or a mode
            assert held["a/wanted"] == b"the word\n" and len(held) == 10


def test_a_model_in_an_archive_stays_in_its_folder(tmp_path):
    tar(("../outside", b"x", {}), mode="w:bz2")(tmp_path / "model.tar.bz2")
    line = refusal(
        lambda path: TaLKConvModel.from_pretrained(str(path)), tmp_path / "model.tar.bz2"
    )
    assert line and "outside" in line
    assert not (Path(tempfile.gettempdir()) / "outside").exists()
