"""Run fairseq's own tests with the plugin loaded: scripts/test.sh --fairseq-tests DIR.

This file is the program and the plugin of pytest that it names: the plugin imports each command of
fairseq and then talk_fairseq, whose patches thereby apply to all tests, and expects the known
failures of the table beside it, fairseq_suite.txt, to fail.
"""

import importlib
import os
import pkgutil
import sys
from pathlib import Path

import pytest

TABLE = Path(__file__).resolve().with_suffix(".txt")


def read_table(path):
    """Return what is run, and ``{test: reason}`` of the known failures, of a table.

    Each line is a file of tests, with ``::test`` or without, which is run; or, with ``|`` and a
    reason after it, a test of those that is known to fail.
    """
    lines = [line.strip() for line in path.read_text().splitlines()]
    rows = [line.partition("|") for line in lines if line and not line.startswith("#")]
    run = [name.strip() for name, bar, _ in rows if not bar]
    return run, {name.strip(): reason.strip() for name, bar, reason in rows if bar}


# --- The plugin of pytest ---


def pytest_configure(config):
    """Import the fairseq that is installed, before the source tree can hide it."""
    import fairseq_cli

    for command in pkgutil.iter_modules(fairseq_cli.__path__):
        importlib.import_module(f"fairseq_cli.{command.name}")
    importlib.import_module("talk_fairseq")


def pytest_collection_modifyitems(items):
    _, known = read_table(TABLE)
    for item in items:
        for name, reason in known.items():
            if f"{item.nodeid}::".startswith(f"{name}::"):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=False))


# --- The program ---


def main(folder, *for_pytest):
    if not Path(folder, "tests/utils.py").is_file():
        sys.exit(f"--fairseq-tests: expected a source tree of fairseq with its tests, got {folder}")
    os.chdir(folder)
    run, _ = read_table(TABLE)
    options = ["-c", os.devnull, "--rootdir", ".", "-p", TABLE.stem, "-p", "no:cacheprovider"]
    options += ["-q", "--tb", "short", "-W", "ignore", "-r", "fExX"]
    return pytest.main([*options, *for_pytest, *run])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
