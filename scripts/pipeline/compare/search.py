"""The search of a comparison for a system's peak learning rate and, if asked, its warm-up."""

import itertools
from typing import NamedTuple

import numpy as np

WIDENED = 4  # rates, or warm-ups, that a system tries at most beyond those that are listed


class Point(NamedTuple):
    """Where a system trains: its peak rate and the updates of its warm-up, as they are spelt."""

    rate: str
    warmup: str


class Search:
    """The points that a system has tried, and the best of them in validation.

    Args:
        rates, warmups: what to try at least; the first warm-up is the usual one.
        updates: those of a training, which a warm-up has to be shorter than.

    Attributes:
        losses: ``{point: loss}`` of all that was tried, None for a training that diverged.
    """

    def __init__(self, rates, warmups, updates):
        self.listed, self.updates = {"rate": rates, "warmup": warmups}, updates
        self.best, self.losses = Point(rates[0], warmups[0]), {}

    def rounds(self):
        """Yield the points to train at next, until the best is found; then go on with their losses.

        Chooses the rate and, where there are several, the warm-up, in turn until both stay.
        """
        yield from self.along("rate")
        if len(self.listed["warmup"]) == 1 or self.losses[self.best] is None:
            return
        for axis in itertools.cycle(("warmup", "rate")):
            before = self.best
            yield from self.along(axis)
            if self.best == before:
                return

    def along(self, axis):
        """Yield what to train next along one axis, with the best of the other axis so far.

        Values within the range that were tried with others of the other axis are tried here too.
        """
        ends = [float(value) for value in (*self.listed[axis], getattr(self.best, axis))]
        had = [getattr(point, axis) for point in self.losses]
        between = [value for value in had if min(ends) <= float(value) <= max(ends)]
        values = list(dict.fromkeys([*self.listed[axis], *between]))
        while values:
            points = [self.best._replace(**{axis: value}) for value in values]
            yield [point for point in points if point not in self.losses]
            losses = self.tried(axis)
            finite = [value for value in losses if losses[value] is not None]
            chosen = min(finite, key=losses.get) if finite else next(iter(losses))
            self.best = self.best._replace(**{axis: chosen})
            values = self.beyond(axis, list(losses), chosen)

    def tried(self, axis):
        """Return ``{rate: loss}`` with the best warm-up so far, or the other way round."""
        values = sorted({getattr(point, axis) for point in self.losses}, key=float)
        points = {value: self.best._replace(**{axis: value}) for value in values}
        return {value: self.losses[at] for value, at in points.items() if at in self.losses}

    def beyond(self, axis, tried, chosen):
        """Return what to try beyond the edge at which the chosen one of several is: one or none."""
        most = len(self.listed[axis]) + WIDENED
        if chosen not in (tried[0], tried[-1]) or not 1 < len(tried) < most:
            return []
        factor = 0.5 if chosen == tried[0] else 2
        if axis == "rate":
            return [np.format_float_scientific(float(chosen) * factor, trim="-", exp_digits=1)]
        updates = int(int(chosen) * factor)
        return [str(updates)] if 1 <= updates < self.updates else []
