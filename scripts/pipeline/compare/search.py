"""The search of a comparison for each system's peak learning rate and, if asked, its warm-up."""

import itertools
from typing import NamedTuple

WIDENED = 4  # rates, or warm-ups, that a system tries at most beyond those that are listed


class Point(NamedTuple):
    """Where a system trains: its peak rate and the updates of its warm-up, as they are spelt."""

    rate: str
    warmup: str


AXES = Point._fields


def times(rate, factor):
    """Return a multiple of a rate, spelt like ``4e-3``."""
    digits, exponent = f"{float(rate) * factor:e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


class Search:
    """The points that systems have tried, and the best one of each.

    Args:
        rates, warmups: ``{system: values}`` to try at least; the search begins at the first.
        updates: those of a training, which a warm-up has to be shorter than.
        validate: ``validate([(system, point), …])`` trains there and returns the losses in
            validation, ``{(system, point): loss}``: None for a training that diverged; one that
            failed is not there.

    Attributes:
        points: ``{system: point}``, the best so far. Systems that have none are not there.
        losses: ``{system: {point: loss}}`` of all that was tried.
    """

    def __init__(self, rates, warmups, updates, validate):
        self.listed = {"rate": rates, "warmup": warmups}
        self.updates, self.validate = updates, validate
        self.points = {name: Point(rates[name][0], warmups[name][0]) for name in rates}
        self.losses = {name: {} for name in rates}

    def go(self):
        """Choose each system's rate and, where there are several, its warm-up, until both stay."""
        self.choose("rate", list(self.points))
        moving = [name for name in self.points if len(self.listed["warmup"][name]) > 1]
        for axis in itertools.cycle(("warmup", "rate")):
            if not moving:
                return
            before = dict(self.points)
            self.choose(axis, moving)
            moving = [name for name in self.points if self.points[name] != before[name]]

    def choose(self, axis, names):
        """Train systems at each rate, or with each warm-up, and go to the best in validation.

        Where the best of several is at an edge, twice or half of it is tried too. A system that
        fails is dropped.
        """
        waiting = {name: self.untried(name, axis) for name in names}
        while waiting:
            pairs = [(name, value) for name, values in waiting.items() for value in values]
            runs = [(name, self.beside(name, axis, value)) for name, value in pairs]
            found = self.validate(runs)
            for (name, point), loss in found.items():
                self.losses[name][point] = loss
            for name in {name for name, point in runs if (name, point) not in found}:
                del self.points[name]
            beyond = {name: self.settle(name, axis) for name in waiting if name in self.points}
            waiting = {name: [value] for name, value in beyond.items() if value}

    def beside(self, name, axis, value):
        """Return the point with another rate, or warm-up, than the best so far of a system."""
        return self.points[name]._replace(**{axis: value})

    def untried(self, name, axis):
        """Return the rates, or warm-ups, that a system has still to try beside the other.

        Those are the listed ones and, of those that it had elsewhere, the ones in between.
        """
        listed, here = self.listed[axis][name], getattr(self.points[name], axis)
        ends = [float(value) for value in (*listed, here)]
        had = [getattr(point, axis) for point in self.losses[name]]
        between = [value for value in had if min(ends) <= float(value) <= max(ends)]
        values = dict.fromkeys([*listed, *between])
        return [v for v in values if self.beside(name, axis, v) not in self.losses[name]]

    def tried(self, name, axis):
        """Return ``{rate: loss}`` with the best warm-up so far, or the other way round."""
        found = {}
        for point, loss in self.losses[name].items():
            value = getattr(point, axis)
            if point == self.beside(name, axis, value):
                found[value] = loss
        return {value: found[value] for value in sorted(found, key=float)}

    def settle(self, name, axis):
        """Go to the best of the rates, or warm-ups, of a system; drop it if there can be none.

        Returns a value that has to be tried before that is settled, or None.
        """
        losses = self.tried(name, axis)
        values, finite = list(losses), [value for value in losses if losses[value] is not None]
        chosen = min(finite, key=losses.get) if finite else values[0]
        self.points[name] = self.beside(name, axis, chosen)
        most = len(self.listed[axis][name]) + WIDENED
        if chosen in (values[0], values[-1]) and 1 < len(values) < most:
            factor = 0.5 if chosen == values[0] else 2
            if axis == "rate":
                return times(chosen, factor)
            if 1 <= (updates := int(int(chosen) * factor)) < self.updates:
                return str(updates)
        if not finite:
            del self.points[name]
        return None
