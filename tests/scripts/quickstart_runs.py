"""What the tests of both quick starts share: a small corpus, and running the script on it."""

import contextlib
import gzip
import io
import os
import signal
import subprocess
import time
from itertools import islice
from unittest import mock

from conftest import ROOT, status_of
from pipeline.common.fairseq import Commands

TEST_VERSES = 11


def write_verses(folder, languages):
    """Make a folder with a corpus of a few verses; one file of it is compressed."""
    folder.mkdir()
    for split, lines in (("train", 150), ("valid", 10), ("test", TEST_VERSES)):
        for language in languages:
            with gzip.open(ROOT / f"data/bible-es-en/{split}.{language}.gz", "rt") as text:
                (folder / f"{split}.{language}").write_text("".join(islice(text, lines)))
    text = (folder / "train.en").read_bytes()
    (folder / "train.en.gz").write_bytes(gzip.compress(text))
    (folder / "train.en").unlink()
    return folder


class QuickStart:
    """A quick start on the CPU, by its script and by the function `main` that this runs.

    `timeout` in seconds is for runs that must succeed.
    """

    def __init__(self, script, main, timeout):
        self.script, self.main, self.timeout = ROOT / "scripts" / script, main, timeout

    def command(self, *arguments):
        return [str(self.script), "--cpu", *map(str, arguments)]

    def run(self, *arguments, cwd=None):
        """What a run that must succeed printed."""
        done = subprocess.run(
            self.command(*arguments), cwd=cwd, capture_output=True, text=True, timeout=self.timeout
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    def refusal(self, *arguments):
        """The one line with which a run, in this process, stops that must not start."""
        printed, told = io.StringIO(), io.StringIO()
        with (
            contextlib.chdir("."),  # and back: it goes to the project's root
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(told),
            mock.patch.object(Commands, "run", side_effect=AssertionError("it was not refused")),
        ):
            status = status_of(self.main, *self.command(*arguments)[1:])
        assert (status, printed.getvalue()) == (2, ""), told.getvalue()
        assert told.getvalue().count("\n") == 1, told.getvalue()
        return told.getvalue()


def kill_group(run):
    """Kill a process that leads its group, and wait until none of the group is left."""
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.killpg(run.pid, 0)
            time.sleep(0.05)
