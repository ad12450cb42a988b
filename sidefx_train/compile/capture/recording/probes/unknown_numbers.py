"""What C++ code computes from a number that only the graph knows: the same from every value, or some are assumed away.

A probe stands for such a number, too. But nothing says between which limits the number is. So the call runs in trials
with a probe in each of these places, with the limits themselves, infinity and NaN. All must make the operations of one
of them, with the constants that its functions compute from the value. A place where the call raises, and a single value
that makes other operations, are assumed not to occur; where two places differ, no probe is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch

from sidefx_train.compile.capture.recording.probes.trial_runs import Stream, is_explained, names_of, with_single
from sidefx_train.compile.graph.derived_numbers import Derived, as_single

Table = dict[float, Derived]
Place = tuple[float, float]


class Assuming(Protocol):
    """What may be assumed of numbers that only the graph knows."""

    def grant(self, condition: Any, holds: bool, /) -> bool:
        """Assumes a condition; returns False if that is not possible."""

    def grant_finite(self, number: Any, *, infinite: bool, nan: bool) -> bool:
        """Assumes that a number is not infinite, or not NaN; returns False if that is not possible."""


class Way(NamedTuple):
    """The operations that a call makes with a number, and the values that it makes these with.

    Attributes:
        place: where the probe may lie.
        rounded: the call rounds the number to float32.
        low: least bound of the number.
        high: greatest bound.
        included: whether the bounds themselves belong to it.
        excluded: values between them that do not.
        infinite: infinity is among the values; also where a bound is infinite.
        nan: so is NaN.
    """

    place: Place
    rounded: bool
    low: float
    high: float
    included: tuple[bool, bool]
    excluded: tuple[float, ...]
    infinite: bool
    nan: bool

    def assume(self, number: torch.SymFloat, world: Assuming) -> bool:
        """Assumes that a number is one of the values; returns False if that is not possible."""
        conditions = [number != each for each in self.excluded]
        if not math.isinf(self.low):
            conditions.append(number >= self.low if self.included[0] else number > self.low)
        if not math.isinf(self.high):
            conditions.append(number <= self.high if self.included[1] else number < self.high)
        if not all(world.grant(condition, True) for condition in conditions):
            return False
        return (self.infinite and self.nan) or world.grant_finite(number, infinite=not self.infinite, nan=not self.nan)


class Trials:
    """The trials of one call.

    Args:
        run: makes the call with a value, and returns its operations; ``None`` if it raises.
        table: returns what C++ code may compute from a value.
        probe: returns a new probe between two limits.
    """

    def __init__(
        self, run: Callable[[float], Stream | None], table: Callable[[float], Table], probe: Callable[[Place], float]
    ) -> None:
        self._run, self._table, self._probe = run, table, probe

    def way(self, limits: list[float]) -> Way | None:
        """Returns the way that all values take which do not raise; ``None`` if there are several."""
        places = list(pairwise(limits))
        usual = sorted(places, key=lambda place: (place[0] < 0.0, abs(place[0])))  # kernels may check others
        found = next(((place, each) for place in usual if (each := self._pattern(place)) is not None), None)
        if found is None:
            return None
        place, (pattern, rounded) = found
        follow = []
        for other in places:
            fits = self._fits(pattern, self._probe(other))
            if fits is False:
                return None
            if fits:
                follow.append(other)
        if any(before[1] != after[0] for before, after in pairwise(follow)):
            return None

        def follows(value: float) -> bool:
            return bool(self._fits(pattern, value))

        low, high = follow[0][0], follow[-1][1]
        ends = [each for each in (low, high) if math.isinf(each)]
        return Way(
            place,
            rounded,
            low,
            high,
            (follows(low), follows(high)),
            tuple(each for each in limits if low < each < high and not follows(each)),
            all(map(follows, ends)),
            len(ends) < 2 or follows(math.nan),  # a comparison with a bound fails for NaN
        )

    def _pattern(self, place: Place) -> tuple[Stream, bool] | None:
        """Returns the operations of a probe in a place, with functions of the number, and whether it is rounded."""
        values = sorted(self._probe(place) for _ in range(2))
        first, second = map(self._run, values)
        if first is None or second is None:
            return None
        exact = [self._table(value) for value in values]
        single = [with_single(value, table) for value, table in zip(values, exact, strict=True)]
        for tables, rounded in ((exact, False), (single, True)):
            if is_explained(first, second, *([each] for each in tables)):
                return _with_functions(first, second, *tables), rounded
        return None

    def _fits(self, pattern: Stream, value: float) -> bool | None:
        """Returns True if the call makes the operations of a pattern with a value, with its functions of the value;
        ``None`` if the call raises, or a function does."""
        made = self._run(value)
        if made is None:
            return None
        try:
            expected = [tuple(each(value) if type(each) is _Function else each for each in one) for one in pattern]
        except (ArithmeticError, ValueError):
            return None
        return list(map(len, expected)) == list(map(len, made)) and all(map(_same, sum(expected, ()), sum(made, ())))


class _Function(NamedTuple):
    """A constant that depends on the number."""

    function: Callable[[Any], Any]
    of_single: bool

    def __call__(self, value: float) -> Any:
        return self.function(as_single(value) if self.of_single else value)


def _with_functions(first: Stream, second: Stream, table: Table, again: Table) -> Stream:
    """Returns the first of two explained runs with functions in place of the constants that differ."""
    before, after = names_of([table]), names_of([again])

    def pattern(a: Any, b: Any) -> Any:
        if a == b:
            return a
        names = before[a] & after[b]
        return _Function(table[a][0], any("float32" in name for _, name in names))

    return [
        tuple(pattern(a, b) for a, b in zip(one, other, strict=True)) for one, other in zip(first, second, strict=True)
    ]


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (a == b or (type(a) is float and math.isnan(a) and math.isnan(b)))
