"""Text and JSON files; what is written is written whole or not at all."""

import contextlib
import json
import os
import shutil


@contextlib.contextmanager
def whole(path):
    """Give, as a context, a path to write, which becomes `path` at its end: whole or not at all.

    Makes its folder. Several may write it at once, also on several nodes; the last one stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}.partial")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_whole(path, text):
    """Write `text` to `path`, whole or not at all."""
    with whole(path) as part:
        part.write_text(text, encoding="utf-8", newline="\n")


def write_json(path, value):
    """Write `value` to `path` as JSON, whole or not at all."""
    write_whole(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path, missing=None):
    """Return what a JSON file holds, or `missing` for no file. ValueError names a bad file."""
    if missing is not None and not path.exists():
        return missing
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, got {error}") from None


def read_lines(path):
    """Return the lines of a text file; only a line feed ends one. ValueError if it is not UTF-8."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8 text, got {error}") from None
    return text.removesuffix("\n").split("\n") if text else []


def write_lines(path, lines):
    """Write `lines` to `path`, each with a line feed at its end, whole or not at all."""
    write_whole(path, "".join(f"{line}\n" for line in lines))


def is_taken(path):
    """Return whether there is something at `path` other than an empty folder."""
    return path.exists() and (not path.is_dir() or any(path.iterdir()))


def remove(path):
    """Remove a file or a folder that may not be there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
