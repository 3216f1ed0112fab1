"""Running fairseq's commands: their environment, their logs, their checkpoints."""

import concurrent.futures
import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

from tqdm import tqdm

from pipeline.common.command import Failed
from pipeline.common.folder import show
from pipeline.common.logs import statistics
from pipeline.common.paths import PROGRAMS, ROOT

# Threads that spin while they wait starve each other as soon as anything else runs. Memory is kept
# instead of being handed back to the system after each tensor: a tenth faster.
CPU_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_WAIT_POLICY": "PASSIVE",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "MALLOC_TOP_PAD_": "64000000",
}
PRECISION = "TALK_MATMUL_PRECISION"
TAIL = 15  # lines of a log that an error shows


def environment_of(device):
    """Return the environment of programs on a device: "cuda", with one GPU, or "cpu", with none.

    fairseq starts a process for each GPU that it sees, also with ``--cpu``. Unless the caller's
    environment names another precision, matrix products are in bfloat16 on processors that have it
    in hardware, where training takes about half the time.
    """
    if device == "cpu":
        return CPU_ENVIRONMENT | {PRECISION: os.environ.get(PRECISION, "medium")}
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]}


def set_environment(device):
    """Restart this process in the environment that suits the device, unless it is in it.

    For programs that compute themselves: some of CPU_ENVIRONMENT counts only when a process begins.
    """
    wanted = os.environ | environment_of(device)
    if wanted != os.environ:
        os.execve(sys.executable, sys.orig_argv, wanted)


class Commands:
    """Runs commands of this environment, several at a time, and stops them together.

    Args:
        device: "cpu" or "cuda", for `environment_of`.
        jobs: how many run side by side, each with a title to tell it by if there are several.
        threads: OpenMP threads of each, unless ``OMP_NUM_THREADS`` is set (None: all cores).
        lock: an open file that each command inherits, so that a folder stays locked while one of
            them lives.
    """

    def __init__(self, device, jobs=1, threads=None, lock=None):
        self.environment = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1"}
        self.environment |= environment_of(device)
        self.environment["PATH"] = f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}"
        if threads:
            self.environment.setdefault("OMP_NUM_THREADS", str(threads))
        self.inherited = [lock.fileno()] if lock else []
        self.jobs, self.stopped, self._running = jobs, False, []

    def run(self, words, log, read=None, title=""):
        """Run a command until it ends; what it prints is appended to the file `log`.

        `read` and `title` are those of its `Bar`. Raises Failed, with the end of the log.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with (
            open(log, "a", encoding="utf-8") as file,
            contextlib.closing(Bar(read, title if self.jobs > 1 else "")) as bar,
            subprocess.Popen(
                [str(word) for word in words], cwd=ROOT, env=self.environment,
                pass_fds=self.inherited, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, errors="replace",
            ) as process,
        ):  # fmt: skip
            self._running.append(process)
            if self.stopped:  # while it started
                process.terminate()
            try:
                for line in process.stdout:
                    file.write(line)
                    file.flush()
                    bar(line)
            except BaseException:
                process.terminate()
                process.wait()  # it holds what it inherited, such as the lock of a folder
                raise
            finally:
                self._running.remove(process)
        if process.returncode:
            tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
            signalled = f"was killed by signal {-process.returncode}"
            how = signalled if process.returncode < 0 else "failed"
            name = Path(words[2] if words[0] == "env" else words[0]).name  # env NAME=VALUE COMMAND
            raise Failed(f"{name} {how}; {log} ends with\n" + "\n".join(tail))

    def side_by_side(self, work, items):
        """Call ``work(*item)`` with each item, each in a thread; what stops one stops all."""
        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            futures = [pool.submit(work, *item) for item in items]
            try:
                for future in concurrent.futures.as_completed(futures):
                    future.result()
            except BaseException:
                self.stopped = True
                pool.shutdown(wait=False, cancel_futures=True)
                for process in self._running.copy():
                    process.terminate()
                raise


class Bar:
    """Shows the progress of a command of fairseq; call it with each line of its log.

    A bar on a terminal; elsewhere, and where there is a title, a line for each tenth.

    Args:
        read: ``read(line)`` returns the share that is done, from 0 to 1, and a text; or None for a
            line that does not tell. None shows nothing.
        title: what is running, where other commands run beside it.
    """

    def __init__(self, read, title=""):
        self.read, self.title, self.tenth, self.bar = read, title, -1, None

    def __call__(self, line):
        if not (found := self.read and self.read(line)):
            return
        share, text = min(1.0, found[0]), found[1]
        if sys.stdout.isatty() and not self.title:
            form = "{percentage:3.0f}%|{bar:40}| {desc}"
            self.bar = self.bar or tqdm(total=100, file=sys.stdout, bar_format=form)
            self.bar.n = round(100 * share)
            self.bar.set_description_str(text)
        elif int(10 * share) > self.tenth:
            self.tenth = int(10 * share)
            before = f"{self.title}: " if self.title else ""
            show(f"{before}{share:4.0%}  {text}")

    def close(self):
        """Leave the bar as it is, and go to a line of its own."""
        if self.bar is not None:
            self.bar.close()


def training(share):
    """Return what `Bar` reads of fairseq-train: ``share(updates)`` is what is done by then."""

    def read(line):
        tag, numbers = statistics(line) or (None, None)
        if tag == "train_inner":
            done = int(numbers["num_updates"])
            text = f"update {done:,}, loss {numbers['loss']:g}, perplexity {numbers['ppl']:g}"
            return share(done), text

    return read


def generation(line):
    """Read for `Bar` a line of fairseq-generate, which counts batches with ``--log-interval 1``."""
    if counted := re.search(r": +(\d+) / (\d+) wps=", line):
        done, count = map(int, counted.groups())
        return done / count, f"batch {done:,} of {count:,}"


def resuming(folder, origin=None):
    """Return the words to go on from checkpoint_last.pt, as fairseq does, or begin at `origin`."""
    begins = origin and origin.exists() and not (folder / "checkpoint_last.pt").exists()
    return ["--save-dir", folder, *(["--restore-file", origin] if begins else [])]


def last_checkpoints(folder, updates, count):
    """Return the last `count` checkpoints of a run of so many `updates`.

    The last update's has no number in its name if it ends an epoch.
    """
    named = {int(path.stem.rpartition("_")[2]): path for path in folder.glob("checkpoint_*_*.pt")}
    paths = [named[number] for number in sorted(named)]
    last = folder / "checkpoint_last.pt"
    if updates not in named and last.exists():
        paths.append(last)
    return paths[-count:]
