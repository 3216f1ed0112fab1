"""Files of a data set: downloaded, found in folders, or unpacked from archives."""

import fcntl
import filecmp
import lzma
import re
import subprocess
import sys
import tarfile
import zipfile
import zlib
from pathlib import PurePosixPath
from urllib.parse import urlparse

from pipeline.common.files import remove

URL = re.compile(r"(https?|ftp|file)://", re.IGNORECASE)
# What reading a damaged archive raises.
DAMAGED = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, lzma.LZMAError)
DAMAGED += (RuntimeError, OSError)  # of what zipfile cannot unpack; of gzip and bz2


def download(url, folder):
    """Return the path of `url` under `folder`; fetch it with curl if it is not there yet.

    It has its name once it is whole: a download that was cut short goes on where it stopped. One
    run at a time downloads into a folder. Raises ValueError if the host does not send it.
    """
    address = urlparse(url)
    query = f"{zlib.crc32(address.query.encode()):08x}" if address.query else ""  # may be long
    path = folder / (address.netloc or "local") / query / address.path.lstrip("/")
    if path.exists():  # perhaps in a folder that cannot be written
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            fetch(url, path, lock)
    return path


def fetch(url, path, lock):
    """Download `url` to `path` with curl, which holds the `lock` too: it may outlive this run."""
    partial = path.with_name(path.name + ".partial")
    print(f"downloading {url}", file=sys.stderr, flush=True)
    verbosity = ["--progress-bar"] if sys.stderr.isatty() else ["--silent", "--show-error"]
    command = ["curl", "--fail", "--location", "--retry", "3", *verbosity]
    command += ["--continue-at", "-", "--write-out", "%{response_code}", "--output", partial, url]
    options = {"stdout": subprocess.PIPE, "text": True, "pass_fds": [lock.fileno()]}
    done = subprocess.run(command, **options)
    cannot_go_on = done.returncode in (33, 36) or done.stdout.endswith("416")
    if cannot_go_on and partial.exists():
        partial.unlink()
        done = subprocess.run(command, **options)
    if done.returncode:
        raise ValueError(f"{url}: could not be downloaded (curl: status {done.returncode})")
    partial.rename(path)


def gather(wanted, locations, archives, folder):
    """Return ``{name: path}`` of those of the files `wanted` that are at `locations`.

    A file counts by its base name, with or without ``.gz``, in any folder; failing that, it is
    unpacked from an archive into `folder`. Raises ValueError if different files of one name are
    there, or an archive cannot be used.

    Args:
        archives: ``{name: starts}`` of the archives to look for in folders. Of these, files are
            only taken if their names start with one of `starts`, since some hold others too.
    """
    found, packed = {}, []

    def add(name, path):
        first = found.setdefault(name, path)
        if first != path and not filecmp.cmp(first, path, shallow=False):
            raise ValueError(f"{name}: expected one file, got {first} and {path}")

    for place in locations:
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            name = path.name.removesuffix(".gz")
            if path.name in archives or (path == place and name not in wanted):
                packed.append(path)
            elif name in wanted and path.is_file():
                plain = path.with_name(name)  # of which a .gz beside it is a copy
                add(name, plain if plain.is_file() else path)
    for number, archive in enumerate(packed):
        stat = archive.stat()  # another file in its place is read anew
        unpacked = folder / f"{number}_{stat.st_size}_{stat.st_mtime_ns}_{archive.name}"
        starts = archives.get(archive.name, "")
        names = {name for name in wanted if name.startswith(starts) and name not in found}
        if names and not unpacked.exists():
            unpack(archive, names, unpacked)
        for path in sorted(unpacked.rglob("*")):
            if path.is_file() and path.name.removesuffix(".gz") in names:
                add(path.name.removesuffix(".gz"), path)
    return found


def unpack(archive, names, folder):
    """Unpack files of an archive by their base names into the new `folder`, whole or not at all.

    Raises ValueError for what is no archive or not all of one, and for a file of a tar that would
    not be inside `folder`; one of a zip gets a name inside.
    """

    def is_wanted(path):
        return PurePosixPath(path).name.removesuffix(".gz") in names

    print(f"reading {archive}", file=sys.stderr, flush=True)
    partial = folder.with_name(folder.name + ".partial")
    remove(partial)
    partial.mkdir(parents=True)
    try:
        if archive.suffix == ".zip":
            with zipfile.ZipFile(archive) as file:
                file.extractall(partial, filter(is_wanted, file.namelist()))
        else:
            with tarfile.open(archive) as file:
                members = (member for member in file if is_wanted(member.name))
                file.extractall(partial, members, filter="data")
                while file.fileobj.read(1 << 20):  # to the checksum of the gzip
                    pass
    except DAMAGED as error:
        if getattr(error, "errno", None):
            raise  # of the disk
        reason = str(error).partition(":\n")[0]
        raise ValueError(f"{archive}: expected a whole tar or zip archive: {reason}") from None
    partial.rename(folder)
