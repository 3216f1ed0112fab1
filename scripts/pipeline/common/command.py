"""How the commands stop: one line on the standard error, and an exit status."""

import argparse
import contextlib
import math
import os
import shlex
import subprocess
import sys

from pipeline.common.paths import ROOT


class BadInput(Exception):
    """Input that the caller can change; the message says what was expected."""


class Failed(Exception):
    """A step that did not do what it should; the message says which and why."""


def run(name, body, unusable=BadInput, resumes=False):
    """Run ``body()`` as the command `name`, such as ``"compare.sh"``, and return its exit status.

    That is what `body` returns (None is 0); 2 for input that cannot be used, which the exceptions
    `unusable` say in one line; 1 for what failed on the way; 130 for Ctrl-C. Messages begin with
    the name. After Ctrl-C, one says to run the command again if it `resumes`.
    """
    try:
        return body() or 0
    except unusable as error:
        status, said = 2, str(error).replace("\n", " ")
    except (Failed, OSError, ValueError) as error:
        status, said = 1, error
    except KeyboardInterrupt:
        status, said = 130, "interrupted; run it again to go on" if resumes else "interrupted"
    print(f"{name}: {said}", file=sys.stderr)
    return status


def run_module(name, *arguments, lock=None):
    """Run a module of the pipeline, such as ``"recipes.train"``, and return its exit status.

    The process inherits the open file `lock`, so that a folder stays locked while it lives.
    """
    words = [str(word) for word in (sys.executable, ROOT / "scripts/run.py", name, *arguments)]
    return subprocess.run(words, pass_fds=[lock.fileno()] if lock else []).returncode


def check_path(option, path):
    """Raise BadInput for a path that fairseq would take for several."""
    if os.pathsep in str(path):
        raise BadInput(f"{option}: expected a path without {os.pathsep!r}, got {path}")


def in_shell(script, *words):
    """Return a command of ``scripts/SCRIPT.sh`` as a line that a shell takes."""
    return shlex.join([f"scripts/{script}.sh", *map(str, words)])


class Parser(argparse.ArgumentParser):
    """A parser that stops as `run` does: with one line and status 2."""

    def error(self, message):
        message = message.removeprefix("argument ")
        message = message.replace("expected one argument", "expected a value")
        name = self.prog.removeprefix("scripts/")
        self.exit(2, f"{name}: {message} (see --help)\n")


def parser(name, description):
    """Return a `Parser` for ``scripts/NAME`` that keeps the lines of its texts."""
    return Parser(
        prog=f"scripts/{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def at_least(least, kind=int):
    """Return a type for argparse: a finite number of `kind` that is not below `least`."""

    wanted = f"a {'whole number' if kind is int else 'number'} of at least {least}"

    def parse(text):
        with contextlib.suppress(ValueError):
            if least <= kind(text) < math.inf:
                return kind(text)
        raise argparse.ArgumentTypeError(f"expected {wanted}, got {text}")

    return parse


def positive(text):
    """Return the finite number above 0 that the text of an option is."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")


def several(kind):
    """Return the type of an option that lists different values of `kind`, separated by commas."""

    def parse(text):
        values = [kind(word) for word in text.split(",")]
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"expected different values, got {text}")
        return values

    return parse


def one_of(known):
    """Return the type of an option that is one of the names `known`."""

    def name(text):
        if text not in known:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {text}")
        return text

    return name
