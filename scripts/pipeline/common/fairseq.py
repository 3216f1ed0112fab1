"""Running fairseq's commands: their environment, their logs, their checkpoints."""

import os
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path

from tqdm import tqdm

from pipeline.common.command import Failed
from pipeline.common.folder import show
from pipeline.common.logs import statistics
from pipeline.common.paths import ROOT

# Threads that spin while they wait starve each other as soon as anything else runs. Memory is kept
# instead of being handed back to the system after each tensor: a tenth faster. Matrix products are
# in bfloat16 on processors that have them in hardware, where training takes about half the time.
CPU_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "MALLOC_TOP_PAD_": "64000000",
    "TALK_MATMUL_PRECISION": "medium",
}
TAIL = 15  # lines of a log that an error shows


def command(name):
    """Return the path of a command of this environment, such as ``fairseq-train``."""
    return Path(sys.executable).parent / name


def in_words(words):
    """Return a command as a line that a shell takes."""
    return shlex.join(str(Path(word).name if n == 0 else word) for n, word in enumerate(words))


def binarising(corpus, languages, output):
    """Return the words of fairseq-preprocess for what prepare_corpus.py wrote.

    Two languages share a dictionary.
    """
    end = "" if len(languages) == 2 else f".{languages[0]}"
    sides = ["--only-source"]
    if len(languages) == 2:
        sides = ["--source-lang", languages[0], "--target-lang", languages[1]]
        sides += ["--joined-dictionary"]
    prefixes = []
    for split in ("train", "valid", "test"):
        prefixes += [f"--{split}pref", corpus / "pieces" / f"{split}{end}"]
    return ["fairseq-preprocess", *sides, "--workers", "2", *prefixes, "--destdir", output]


class Commands:
    """Runs commands of this environment, several at a time, and stops them together.

    Args:
        on_cpu: run them with CPU_ENVIRONMENT.
        threads: OpenMP threads of each, unless ``OMP_NUM_THREADS`` is set (None: all cores).
        lock: an open file that each command inherits, so that a folder stays locked while one of
            them lives.
    """

    def __init__(self, on_cpu, threads=None, lock=None):
        self.environment = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1"}
        if on_cpu:
            self.environment |= CPU_ENVIRONMENT
        programs = Path(sys.executable).parent  # `python` and fairseq's commands by their names
        self.environment["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"
        if threads:
            self.environment.setdefault("OMP_NUM_THREADS", str(threads))
        self.inherited = [lock.fileno()] if lock else []
        self.stopped, self._running, self._guard = False, set(), threading.Lock()

    def run(self, words, log, watch=None):
        """Run a command until it ends; what it prints is appended to the file `log`.

        `watch` is called with each line. Raises Failed, with the end of the log.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "a", encoding="utf-8") as file, subprocess.Popen(
            [str(word) for word in words], cwd=ROOT, env=self.environment,
            pass_fds=self.inherited, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace",
        ) as process:  # fmt: skip
            with self._guard:
                self._running.add(process)
                if self.stopped:  # while it started
                    process.terminate()
            try:
                for line in process.stdout:
                    file.write(line)
                    file.flush()
                    if watch:
                        watch(line)
            except BaseException:
                process.terminate()
                process.wait()  # it holds what it inherited, such as the lock of a folder
                raise
            finally:
                with self._guard:
                    self._running.discard(process)
        if process.returncode:
            tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
            signalled = f"was killed by signal {-process.returncode}"
            how = signalled if process.returncode < 0 else "failed"
            name = Path(words[2] if words[0] == "env" else words[0]).name  # env NAME=VALUE COMMAND
            raise Failed(f"{name} {how}; {log} ends with\n" + "\n".join(tail))

    def stop(self):
        """Stop what runs, and what is started later."""
        with self._guard:
            self.stopped = True
            for process in self._running:
                process.terminate()


class _Bar:
    """A bar on a terminal; elsewhere, and where there is a title, a line for each tenth.

    Call it with each line of the log of a command that runs with the bar's `options`.
    """

    options = ()

    def __init__(self, title=""):
        self.title, self.tenth = title, -1
        self.bar, self.drawn = None, sys.stdout.isatty() and not title

    def show(self, share, text):
        """Show that a share from 0 to 1 is done, and the text."""
        share = min(1.0, share)
        if self.drawn and self.tenth < 0:
            form = "{percentage:3.0f}%|{bar:40}| {desc}"
            self.bar = self.bar or tqdm(total=100, file=sys.stdout, bar_format=form)
            self.bar.n = round(100 * share)
            self.bar.set_description_str(text)
            if share == 1:
                self.close()
        elif int(10 * share) > self.tenth:
            self.tenth = int(10 * share)
            before = f"{self.title}: " if self.title else ""
            show(f"{before}{share:4.0%}  {text}")

    def close(self):
        """Leave the bar as it is and go to a line of its own; nothing more is shown."""
        self.tenth = 10
        if self.bar:
            self.bar.close()
            self.bar = None


class TrainingBar(_Bar):
    """Shows the progress of a training from the lines of its log; call it with each of them.

    A bar on a terminal; elsewhere, and where `title` says that other trainings run beside it, a
    line for each tenth.

    Args:
        updates: that the training makes.
        share: ``share(updates so far)``, how much is done, from 0 to 1, where that is not the
            share of the updates (None).
    """

    options = ("--log-format", "json")

    def __init__(self, updates, title="", share=None):
        super().__init__(title)
        self.share = share or (lambda done: done / updates)

    def __call__(self, line):
        logged = statistics(line)
        if not logged or logged[0] != "train_inner":
            return
        numbers = logged[1]
        done = int(numbers["num_updates"])
        text = f"update {done:,}, loss {numbers['loss']:g}, perplexity {numbers['ppl']:g}"
        self.show(self.share(done), text)


class BatchBar(_Bar):
    """The same for fairseq-generate, whose log counts its batches with ``--log-interval 1``."""

    options = ("--log-format", "simple")

    def __call__(self, line):
        if counted := re.search(r": +(\d+) / (\d+) wps=", line):
            done, count = map(int, counted.groups())
            self.show(done / count, f"batch {done:,} of {count:,}")


def updates_of(checkpoint):
    """Return the number of updates in the name ``checkpoint_EPOCH_UPDATES.pt``."""
    return int(checkpoint.stem.rpartition("_")[2])


def numbered(folder):
    """Return the checkpoints of a run that name a number of updates, the newest last."""
    return sorted(folder.glob("checkpoint_*_*.pt"), key=updates_of)


def last_checkpoints(folder, updates, count):
    """Return the last `count` checkpoints of a run of so many `updates`.

    The last update's has no number in its name if it ends an epoch.
    """
    paths = numbered(folder)
    last = folder / "checkpoint_last.pt"
    if (not paths or updates_of(paths[-1]) != updates) and last.exists():
        paths.append(last)
    return paths[-count:]
