"""Iterators of C that expose their position, and whether they alone advance the iterators that they wrap."""

from __future__ import annotations

from sys import getrefcount
from typing import Any

WRAPPERS: tuple[type, ...] = (enumerate, zip)
"""Classes of iterators over other iterators."""

_ITERATED: tuple[Any, ...] = ([], (), "", range(0), range(1 << 70))
TYPES: frozenset[type] = frozenset({*(type(iter(each)) for each in _ITERATED), *WRAPPERS, type(reversed([]))})
"""Classes of iterators that expose their position."""


def is_reducible(cls: type) -> bool:
    """Returns True if ``__reduce__`` gives their state: from Python 3.14 on not that of those of itertools."""
    found: Any = cls.__reduce__
    return found is not object.__reduce__


def exposes_position(iterator: Any) -> bool:
    """Returns True if the position is known by ``__reduce__``, and nothing else can advance what an iterator wraps.

    ``zip(it, it)`` takes two items of ``it`` at a time, and the program may take others: the place of such a wrapper is
    not a number of items.
    """
    cls = type(iterator)
    if cls not in WRAPPERS:
        return cls in TYPES
    parts, counts = _wrapped(iterator)
    return all(map(exposes_position, parts)) and all(count == _ALONE[cls] for count in counts)


def _wrapped(wrapper: Any) -> tuple[list[Any], list[int]]:
    """Returns the iterators that one wraps, and how many references each had."""
    inner = wrapper.__reduce__()[1]
    inner = inner if type(wrapper) is zip else inner[:1]
    counts = [getrefcount(inner[i]) for i in range(len(inner))]
    return list(inner), counts


_ALONE = {cls: _wrapped(cls(iter([])))[1][0] for cls in WRAPPERS}
"""Counts of references, as :func:`_wrapped` finds them, to an iterator that only its wrapper refers to."""
