"""Untrusted archives through the prepare scripts and from_pretrained."""

import gzip
import io
import os
import random
import tarfile
import tempfile
import warnings
import zipfile
from pathlib import Path

import pytest

from pipeline.data import archives as prepare_archives

pytest.importorskip("fairseq")


from hostile import refusal, report

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


MANY = tar(*((f"a/{number}", os.urandom(999), {}) for number in range(9)))


MANY_ZIPPED = zipped(*((f"a/{number}", os.urandom(999), 0) for number in range(9)))


def special(**changes):
    """An archive with a file of the wanted name that is none."""
    return tar(("b/wanted", b"", changes))


ARCHIVES = {
    "..": tar(("../wanted", b"x", {})),
    ".. inside": tar(("a/../../../wanted", b"x", {})),
    "a link": special(type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    "a link that leads out": special(type=tarfile.SYMTYPE, linkname="../../../x"),
    "a link, and a file below it": tar(
        ("wanted", b"", {"type": tarfile.SYMTYPE, "linkname": "/tmp"}), ("wanted/wanted", b"x", {})
    ),
    "a hard link": special(type=tarfile.LNKTYPE, linkname="/etc/passwd"),
    "a device": special(type=tarfile.CHRTYPE, devmajor=1, devminor=5),
    "a disk": special(type=tarfile.BLKTYPE, devmajor=8),
    "a pipe": special(type=tarfile.FIFOTYPE),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("<html>Not found</html>\n" * 99),
    "gzipped text": lambda path: path.write_bytes(gzip.compress(b"the word\n" * 99)),
    **{f"cut at {share}": cut_off(MANY, share) for share in (0.01, 0.2, 0.5, 0.9, 0.999)},
    **{f"damaged {seed}": flipped(MANY, seed) for seed in range(20)},
}


def test_archives(tmp_path, figure):
    taken = []
    for name, make in ARCHIVES.items():
        archive = tmp_path / "data" / "some.tgz"
        archive.parent.mkdir(exist_ok=True)
        make(archive)

        def gather(path):
            prepare_archives.gather({"wanted"}, [path], {}, tmp_path / "work" / "extracted")

        if refusal(gather, archive) is None:
            taken.append(name)
        extracted = list((tmp_path / "work/extracted").iterdir())
        assert all(path.suffix == ".partial" for path in extracted), name
        assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "work"], name
    assert not taken
    report(figure, "archives", len(ARCHIVES), len(ARCHIVES))


def test_a_zip_stays_in_its_folder_and_is_whole(tmp_path):
    path, names = tmp_path / "some.zip", {f"{number}" for number in range(9)} | {"wanted"}
    zipped(("../../../wanted", b"x", 0), ("/tmp/wanted", b"x", 0))(path)
    prepare_archives.unpack(path, names, tmp_path / "a/b/c")
    assert {path.name for path in tmp_path.iterdir()} == {"some.zip", "a"}
    assert not Path("/tmp/wanted").exists()
    for share in (0.01, 0.5, 0.9, 0.999):
        cut_off(MANY_ZIPPED, share)(path)
        assert refusal(lambda path: prepare_archives.unpack(path, names, tmp_path / "x"), path)
        assert not (tmp_path / "x").exists()
    for field, value in ((8, 0x01), (8, 0x20), (10, 9)):  # encrypted, patched, Deflate64
        MANY_ZIPPED(path)
        content = bytearray(path.read_bytes())
        content[content.index(b"PK\x01\x02") + field] = value
        path.write_bytes(content)
        assert refusal(lambda path: prepare_archives.unpack(path, names, tmp_path / "x"), path)


def test_a_model_in_an_archive_stays_in_its_folder(tmp_path):
    tar(("../outside", b"x", {}), mode="w:bz2")(tmp_path / "model.tar.bz2")
    line = refusal(
        lambda path: TaLKConvModel.from_pretrained(str(path)), tmp_path / "model.tar.bz2"
    )
    assert line and "outside" in line
    assert not (Path(tempfile.gettempdir()) / "outside").exists()
