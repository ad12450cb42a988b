"""Shadows of ``itertools.count`` from outside: counters, whose number is an input of the step."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.guards.source import Pick, Source
from sidefx_train.compile.capture.shadows.containers.iterators import IteratorRecord
from sidefx_train.compile.common.thread_warnings import no_warnings

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI


class Position(Pick):
    """Finds the next number of a count.

    Args:
        step: the difference of its numbers.
    """

    __slots__ = ("_step",)

    def __init__(self, step: int) -> None:
        self.operands, self.label, self._step = (), "next", step

    def __call__(self, items: Any, *numbers: Any) -> Any:
        """Returns the number, or a value that no guard accepts."""
        position = _position(items) if type(items) is itertools.count else None
        return position[0] if position is not None and position[1] == self._step else None


def _position(count: Iterator[Any]) -> tuple[int, int] | None:
    """Returns the next number of a count and its step; ``None`` unless both are plain integers.

    Pickling would tell them as well, but warns since Python 3.12.
    """
    found = re.fullmatch(r"count\((-?\d+)(?:, (-?\d+))?\)", repr(count))
    return None if found is None else (int(found[1]), int(found[2] or 1))


class CountRecord(IteratorRecord):
    """A count that existed before the capture; its shadow counts on from a symbolic number."""

    def __init__(self, heap: ShadowTableAPI, real: Any, shadow: Any, source: Source, step: int) -> None:
        super(IteratorRecord, self).__init__(heap, real, shadow, source)
        self._entry, self._step = _number(shadow), step
        self.begun = 0

    def taken(self) -> int | None:
        """Returns how many numbers the step has taken."""
        return int(_number(self.shadow) - self._entry) // self._step


def _number(shadow: Any) -> Any:
    with no_warnings():  # since Python 3.12
        return shadow.__reduce__()[1][0]


def count_record(heap: ShadowTableAPI, real: Any, source: Source) -> CountRecord | None:
    """Returns the record of a count of integers; ``None`` for any other, which only native code can advance."""
    position = _position(real)
    if position is None or not position[1]:
        return None
    number, step = position
    heap.guard("type", source, itertools.count)
    place = heap.sources.picked(source, Position(step))
    heap.guard("type", place, int)
    return CountRecord(heap, real, itertools.count(heap.numbers.length(number, place), step), source, step)
