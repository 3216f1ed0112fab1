"""Training for a number of updates, or by the clock."""

import re
import time

from pipeline.common.command import Failed
from pipeline.common.fairseq import resuming, training

LEAST = 20  # seconds of a training by the clock


def train(session, title, folder, words, keep):
    """Train a model, unless that is done, and return how many updates it has had.

    For as many as were asked for, or else by the clock, in two legs. In the first the learning rate
    stays up, for a third of the time. Its updates tell how many this machine will make in the rest,
    over which the rate falls to zero in the second. If the machine turns slower, the second leg
    still stops in time. A training that was stopped goes on where it was.

    Args:
        session: the run of a quick start.
        title: what is trained, in words.
        folder: for its checkpoints; the final ones are in ``falling``.
        words: fairseq-train with its options, but for the schedule and the checkpoints.
        keep: how many of the last checkpoints, beside ``checkpoint_last.pt``.
    """
    plan, done, origin = folder / "plan", folder / "done", folder / "steady/checkpoint_last.pt"
    log = folder / "train.log"
    updates, warmup = session.args.updates, session.settings["warmup"]
    seconds = max(LEAST, session.seconds())
    first = seconds // 3

    def steady(partial):
        session.run([
            *words, "--stop-time-hours", _hours(first), "--warmup-updates", warmup,
            "--total-num-update", 10**9, "--save-interval-updates", 100,
            "--keep-interval-updates", 1, *resuming(folder / "steady"),
        ], training(_by_the_clock(first)), log)  # fmt: skip
        made = _reached(log)
        partial.write_text(f"{made} {made + made * 19 // 10}\n")

    def falling(partial):
        stop = [] if updates else ["--stop-time-hours", _hours(seconds)]
        share = (lambda so_far: so_far / end) if updates else _by_the_clock(seconds - first)
        session.run([
            *words, *stop, "--warmup-updates", start or min(warmup, end // 4),
            "--total-num-update", end, "--max-update", end,
            "--save-interval-updates", max(1, (end - start) // 40),
            "--keep-interval-updates", keep, *resuming(folder / "falling", origin),
        ], training(share), log)  # fmt: skip
        partial.write_text(f"{_reached(log)}\n")

    if updates:
        start, end, title = 0, updates, f"{title} for {updates} updates"
    else:
        session.folder.once(f"{title}, first leg: {first} seconds", plan, steady)
        start, end = map(int, plan.read_text().split())
        title += f", second leg: updates {start} to {end}, at most {seconds - first} seconds"
    session.folder.once(title, done, falling)
    return int(done.read_text())


def _reached(log):
    """Return the number of updates at the last checkpoint that was saved or loaded."""
    counts = re.findall(r"@ (\d+) updates", log.read_text(encoding="utf-8", errors="replace"))
    if not counts:
        raise Failed(f"{log}: expected checkpoints of a training, got none")
    return int(counts[-1])


def _by_the_clock(seconds):
    """Return a function that tells which share of so many seconds from now is over."""
    began = time.monotonic()
    return lambda _: (time.monotonic() - began) / seconds


def _hours(seconds):
    return f"{seconds / 3600:.4f}"
