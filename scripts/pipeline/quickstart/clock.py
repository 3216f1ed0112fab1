"""Training for a number of updates, or by the clock."""

import re
import time

from pipeline.common.command import Failed
from pipeline.common.fairseq import TrainingBar, numbered
from pipeline.common.files import write_whole
from pipeline.quickstart.session import announce

LEAST = 20  # seconds of a training by the clock


class Training:
    """The training of a model, which resumes where it was stopped.

    Args:
        session: the run of a quick start.
        title: what is trained, in words.
        folder: for its checkpoints; the final ones are in ``falling``.
        words: fairseq-train with its options, but for the schedule and the checkpoints.
        keep: how many of the last checkpoints, beside ``checkpoint_last.pt``.
    """

    def __init__(self, session, title, folder, words, keep):
        self.session, self.title, self.folder = session, title, folder
        self.words, self.keep = words, ("--keep-interval-updates", keep)
        self.warmup = session.settings["warmup"]

    def run(self, seconds):
        """Train, unless that is done, and return how many updates the model has had.

        For as many as were asked for, or else for so many `seconds`, in two legs. In the first the
        learning rate stays up, for a third of the time. Its updates tell how many this machine will
        make in the rest, over which the rate falls to zero in the second. If the machine turns
        slower, the second leg still stops in time.
        """
        done = self.folder / "done"
        if not done.exists():
            if updates := self.session.args.updates:
                announce(f"{self.title} for {updates} updates")
                self._falling(0, updates, min(self.warmup, updates // 4), TrainingBar(updates))
            else:
                self._by_the_clock(max(LEAST, kept(self.folder / "seconds", seconds)))
            write_whole(done, f"{reached(self.session.log)}\n")
        return int(done.read_text())

    def _by_the_clock(self, seconds):
        first, plan = seconds // 3, self.folder / "plan"
        if not plan.exists():
            announce(f"{self.title}, first leg: {first} seconds")
            self._leg("steady", None, _clock_bar(first), [
                "--stop-time-hours", _hours(first), "--warmup-updates", self.warmup,
                "--total-num-update", 10**9, "--save-interval-updates", 100,
                "--keep-interval-updates", 1,
            ])  # fmt: skip
            updates = reached(self.session.log)
            write_whole(plan, f"{updates} {updates + updates * 19 // 10}\n")
        start, end = map(int, plan.read_text().split())
        announce(
            f"{self.title}, second leg: updates {start} to {end}, at most {seconds - first} seconds"
        )
        stop = ["--stop-time-hours", _hours(seconds)]
        self._falling(start, end, start, _clock_bar(seconds - first), stop)

    def _falling(self, start, end, warmup, bar, stop=()):
        """Train from update `start` to `end`, over which the rate falls to zero."""
        origin = self.folder / "steady/checkpoint_last.pt" if start else None
        self._leg("falling", origin, bar, [
            *stop, "--warmup-updates", warmup, "--total-num-update", end, "--max-update", end,
            "--save-interval-updates", max(1, (end - start) // 40), *self.keep,
        ])  # fmt: skip

    def _leg(self, name, origin, bar, options):
        """Train from the newest checkpoint of this leg, else from `origin`, else from nothing."""
        folder = self.folder / name
        newest = [*numbered(folder)[-1:], folder / "checkpoint_last.pt", origin]
        restore = [("--restore-file", path) for path in newest if path and path.exists()][:1]
        words = [*self.words, *options, "--save-dir", folder, *sum(restore, ())]
        self.session.run(words, bar)


def kept(path, number):
    """Return the whole number in the file `path`, which an earlier run wrote, or write `number`."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, f"{number}\n")
    return int(path.read_text())


def reached(log):
    """Return the number of updates at the last checkpoint that was saved or loaded."""
    counts = re.findall(r"@ (\d+) updates", log.read_text(encoding="utf-8", errors="replace"))
    if not counts:
        raise Failed(f"{log}: expected checkpoints of a training, got none")
    return int(counts[-1])


def _clock_bar(seconds):
    began = time.monotonic()
    return TrainingBar(None, share=lambda done: (time.monotonic() - began) / seconds)


def _hours(seconds):
    return f"{seconds / 3600:.4f}"
