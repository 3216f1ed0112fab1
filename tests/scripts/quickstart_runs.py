"""What the tests of both quick starts share: a small corpus, and running the script on it."""

import contextlib
import gzip
import os
import signal
import subprocess
import time
from itertools import islice

from conftest import ROOT

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
    """A quick start on the CPU; `timeout` in seconds is for runs that must succeed."""

    def __init__(self, script, timeout):
        self.script, self.timeout = ROOT / "scripts" / script, timeout

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
        """The one line with which a run stops that must not start."""
        done = subprocess.run(self.command(*arguments), capture_output=True, text=True, timeout=120)
        assert done.returncode == 2, done.stdout + done.stderr
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1, done.stderr
        return done.stderr


def kill_group(run):
    """Kill a process that leads its group, and wait until none of the group is left."""
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.killpg(run.pid, 0)
            time.sleep(0.05)
