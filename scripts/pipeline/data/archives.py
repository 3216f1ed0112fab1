"""Files of a data set: downloaded, found in folders, or read out of untrusted archives.

No file gets a path that an archive chose: wanted files are copied under their base names, and an
archive is refused that holds a link, a name that leads out of it, or far more than its size.
"""

import filecmp
import gzip
import lzma
import os
import re
import shutil
import stat
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from urllib.parse import urlparse

URL = re.compile(r"(https?|ftp|file)://", re.IGNORECASE)
SUFFIXES = (".tgz", ".tar.gz", ".tar", ".zip")
# What reading a damaged archive raises; NotImplementedError: one of another compression.
DAMAGED = (EOFError, zlib.error, lzma.LZMAError, tarfile.TarError, struct.error)
DAMAGED += (zipfile.BadZipFile, NotImplementedError, RecursionError)  # headers of headers
EXPANDS = 100  # times at most: text is packed to a tenth at best, a bomb to a thousandth
SMALL = 1 << 24  # bytes that any file may hold
LONGEST_HEADER = 1 << 16  # bytes of what stands before a file; the longest path has 4,096
MOST_DEFAULTS = 100  # that headers set for all files after them


def most_unpacked(path):
    """Return how many bytes may come out of the packed file `path`."""
    return EXPANDS * os.path.getsize(path) + SMALL


class Bounded:
    """An open file that is read as long as it gives no more than `most` bytes."""

    def __init__(self, file, path, most):
        self.file, self.path, self.most, self.given = file, path, most, 0

    def read(self, size):
        data = self.file.read(size)
        self.given += len(data)
        if self.given > self.most:
            raise ValueError(f"{self.path}: refused: over {self.most:,} bytes are packed in it")
        return data


class Member(tarfile.TarInfo):
    """A header of a tar; refuses long ones, since tarfile reads them into memory whole."""

    @classmethod
    def frombuf(cls, buf, encoding, errors):
        member = super().frombuf(buf, encoding, errors)
        headers = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.SOLARIS_XHDTYPE)
        if member.type in (*headers, tarfile.XHDTYPE, tarfile.XGLTYPE):
            if member.size > LONGEST_HEADER:
                raise ValueError(f"a header of {member.size:,} bytes")
        return member


def download(url, folder):
    """Return the path of `url` under `folder`; fetch it with curl if it is not there yet.

    It has its name once it is whole: a download that was cut short goes on where it stopped.
    Raises ValueError if the host does not send it.
    """
    address = urlparse(url)
    parts = [part for part in PurePosixPath(address.path).parts if part not in ("/", "..")]
    if not parts:
        raise ValueError(f"{url}: expected the address of a file")
    path = folder / (address.netloc or "local") / Path(*parts)
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    print(f"downloading {url}", file=sys.stderr, flush=True)
    if not shutil.which("curl"):
        raise ValueError(f"{url}: expected the command curl, found none; get it by hand: --data")
    verbosity = ["--progress-bar"] if sys.stderr.isatty() else ["--silent"]
    command = ["curl", "--fail", "--location", "--retry", "3", "--show-error", *verbosity]
    command += ["--continue-at", "-", "--output", str(partial), url]
    resumed = partial.exists() and partial.stat().st_size > 0
    status = subprocess.run(command).returncode
    if status in (22, 33, 36) and resumed:  # the host cannot go on from there
        partial.unlink()
        status = subprocess.run(command).returncode
    if status:
        raise ValueError(f"{url}: could not be downloaded (curl: status {status})")
    partial.rename(path)
    return path


KINDS = {
    stat.S_IFLNK: "link",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
    stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket",
}


def kind_of(info):
    """Return what a member of a tar is, in words."""
    if info.issym() or info.islnk():
        return "link"
    if info.isdir():
        return "folder"
    if info.issparse():
        return "sparse file"
    return "file" if info.isfile() else "pipe" if info.isfifo() else "device"


def read_members(path, take):
    """Call ``take(name, stream)`` for every file in a tar (also gzipped) or zip archive, in order.

    Reads it to its end, checksums included. Raises ValueError for what is no archive or not all of
    one, for an archive that holds a link, a device or a name that leads out of it, and for one
    that holds `EXPANDS` times its size.
    """
    most = most_unpacked(path)

    def member(name, kind, open_member):
        shown = name if name.isprintable() else ascii(name)
        if kind not in ("file", "folder"):
            raise ValueError(f"{path}: refused: {shown} in it is a {kind}")
        if name.startswith(("/", "\\")) or ".." in re.split(r"[/\\]", name):
            raise ValueError(f"{path}: refused: {shown} in it leads out of the archive")
        if kind == "file":
            with open_member() as stream:
                take(name, stream)

    with open(path, "rb") as file:
        magic = file.read(4)
    try:
        if magic == b"PK\x03\x04":
            with zipfile.ZipFile(path) as archive:
                if sum(info.file_size for info in archive.infolist()) > most:
                    raise ValueError(f"{path}: refused: over {most:,} bytes are packed in it")
                for info in archive.infolist():
                    if info.flag_bits & 1:
                        raise ValueError(f"{path}: refused: {info.filename!r} in it is encrypted")
                    mode = info.external_attr >> 16  # of Unix; 0 from elsewhere
                    kind = "folder" if info.is_dir() else KINDS.get(stat.S_IFMT(mode), "file")
                    member(info.filename, kind, lambda info=info: archive.open(info))
            return
        opened = gzip.open if magic[:2] == b"\x1f\x8b" else open
        with opened(path, "rb") as unpacked:
            file = Bounded(unpacked, path, most)
            with tarfile.open(fileobj=file, mode="r|", tarinfo=Member) as archive:
                for info in iter(archive.next, None):
                    archive.members.clear()  # which tarfile would keep
                    if len(archive.pax_headers) > MOST_DEFAULTS:
                        raise ValueError(f"over {MOST_DEFAULTS} headers for all files")
                    member(info.name, kind_of(info), lambda info=info: archive.extractfile(info))
            while file.read(1 << 20):  # to the checksum of the gzip
                pass
    except (*DAMAGED, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk, not of the archive
        raise ValueError(
            f"{path}: expected a whole tar or zip archive, got {error}; get it again"
        ) from None
    except ValueError as error:  # of ours, and what tarfile raises for headers it cannot read
        if str(path) in str(error):
            raise
        raise ValueError(f"{path}: refused: {error}") from None


def walk(locations, archives):
    """Return ``(files, archives)`` of the folders and files `locations`, as paths.

    In a folder, only files with one of the names `archives` count as archives.
    """
    files, found = [], []
    for location in locations:
        if not location.is_dir():
            (found if location.name.endswith(SUFFIXES) else files).append(location)
            continue
        for folder, folders, names in os.walk(location):
            folders.sort()
            for name in sorted(names):
                (found if name in archives else files).append(Path(folder, name))
    return files, found


def gather(wanted, locations, archives, folder):
    """Return ``{name: path}`` of those of the files `wanted` that are at `locations`.

    A file counts by its base name, with or without ``.gz``, in any folder; failing that, it is
    copied from an archive into `folder`. Raises ValueError if different files of one name are
    there, or an archive cannot be used.

    Args:
        archives: ``{name: starts}`` of the archives to look for in folders. Of these, files are
            only taken if their names start with one of `starts`, since some hold others too.
    """
    found = {}
    files, to_read = walk(locations, archives)
    for path in files:
        if path.name.removesuffix(".gz") in wanted:
            found.setdefault(path.name.removesuffix(".gz"), []).append(path)
    in_folders = set(found)
    for number, archive in enumerate(to_read if len(found) < len(wanted) else []):
        starts = archives.get(archive.name, ("",))
        copied = folder / f"{number}_{archive.name}"
        if not copied.exists():
            copy_members(archive, {name for name in wanted if name.startswith(starts)}, copied)
        for path in sorted(copied.iterdir()):
            if path.name not in in_folders:
                found.setdefault(path.name, []).append(path)
    return {name: only(name, paths, archives) for name, paths in found.items()}


def only(name, paths, archives):
    """Return the one of several files of a name, which must be the same.

    Where some are in a folder with the name of the archive from which they should come, the others
    do not count.
    """
    homes = [
        archive.split(".")[0] for archive, starts in archives.items() if name.startswith(starts)
    ]
    paths = [path for path in paths if set(homes) & set(path.parts)] or paths
    for path in paths[1:]:
        if not filecmp.cmp(paths[0], path, shallow=False):
            raise ValueError(f"{name}: expected one file, got {paths[0]} and {path}; leave one")
    return paths[0]


def copy_members(archive, wanted, folder):
    """Copy the files `wanted` of an archive into the new `folder`, whole or not at all."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)

    def take(name, stream):
        name = PurePosixPath(name).name.removesuffix(".gz")
        if name in wanted:
            if (partial / name).exists():
                raise ValueError(f"{archive}: expected {name} in it once, found it twice")
            with open(partial / name, "wb") as copy:
                shutil.copyfileobj(stream, copy, 1 << 20)

    print(f"reading {archive}", file=sys.stderr, flush=True)
    read_members(archive, take)
    partial.rename(folder)
