"""Shadows of iterators from outside whose next items are known: the entry finds them, and advances the real iterator.

Iterators over lists, tuples and ranges, and ``cycle``, ``enumerate`` and ``zip`` over these, tell how far they are. At
each call the items ahead are looked up, whatever the position; that there is another item, or none, is guarded.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from sys import getrefcount
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from sidefx_train.compile.capture.guards.source import NOT_FOUND, Pick, Source
from sidefx_train.compile.capture.shadows.containers.iterators import IteratorRecord, NativeIterator
from sidefx_train.compile.capture.shadows.containers.lists_and_dicts import ListRecord
from sidefx_train.compile.common.positioned_iterators import TYPES, WRAPPERS, exposes_position, is_reducible
from sidefx_train.compile.common.thread_warnings import no_warnings
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI

_MOST_TAKEN = 8
"""Limit of items that one capture takes; a loop over all of a long iterator shares its parts."""

_ITEMS: tuple[type, ...] = (torch.Tensor, int, float, bool, list, dict)
"""Classes of items that another call may find replaced, besides tuples; others are taken natively."""

END = object()
"""What is found instead of an item that an iterator does not have."""


class Ahead(Pick):
    """Finds an item that an iterator has not given yet.

    Args:
        count: how many items come before it.
    """

    __slots__ = ("_count",)

    def __init__(self, count: int) -> None:
        self.operands, self.label, self._count = (), f"next + {count}" if count else "next", count

    def __call__(self, items: Any, *numbers: Any) -> Any:
        """Returns the item, :data:`END`, or a value that no guard accepts."""
        rest = _rest(items)
        if rest is None:
            return NOT_FOUND
        length, item = rest
        return item(self._count) if self._count < length else END


class Apart(Pick):
    """Tells whether an iterator runs over none of some lists.

    Args:
        lists: sources of the lists.
    """

    __slots__ = ()

    def __init__(self, lists: tuple[Source, ...]) -> None:
        self.operands, self.label = lists, f"not over {', '.join(each.label for each in lists)}"

    def __call__(self, items: Any, *lists: Any) -> bool:
        if not _is_known(items):
            return False
        return {id(each) for each in _lists(items)}.isdisjoint(map(id, lists))


_Rest = tuple[float, Callable[[int], Any]]
"""How many items are left, and what returns one of them."""


def _rest(iterator: Any) -> _Rest | None:
    """Returns what is left of an iterator; ``None`` if that is not known without advancing it."""
    cls = type(iterator)
    if cls is itertools.cycle:
        return _rest_of_cycle(iterator)
    if cls not in TYPES or not exposes_position(iterator):
        return None
    made, arguments, *state = iterator.__reduce__()
    if cls is zip:
        parts = list(map(_rest, arguments))
        if state or not parts or any(part is None for part in parts):  # a strict one may raise
            return None
        known = [part for part in parts if part is not None]
        return min(length for length, _ in known), lambda place: tuple(item(place) for _, item in known)
    if cls is enumerate:
        inner = _rest(arguments[0])
        if inner is None:
            return None
        first, (length, item) = arguments[1], inner
        return length, lambda place: (first + place, item(place))
    items = arguments[0]
    if type(items) not in (list, tuple, range, str):
        return None
    if not state:
        return 0, _no_item
    begin = state[0]
    if made is reversed:
        return begin + 1, lambda place: items[begin - place]
    return len(items) - begin, lambda place: items[begin + place]


def _rest_of_cycle(iterator: Any) -> _Rest | None:
    if not is_reducible(itertools.cycle):
        return None
    with no_warnings():  # since Python 3.12
        _, (inner,), (kept, keeps_all) = iterator.__reduce__()
    if type(inner) in WRAPPERS:  # the cycle keeps the tuples that it gets
        return None
    alone = getrefcount(inner) <= _ALONE
    rest = _rest(inner) if alone else None
    if rest is None:
        return None
    length, item = rest
    if keeps_all:
        repeated, again = len(kept), kept.__getitem__
    else:
        repeated = len(kept) + int(length) if length != math.inf else 0
        again = lambda place: kept[place] if place < len(kept) else item(place - len(kept))  # noqa: E731
    if not repeated:
        return length, item
    return math.inf, lambda place: item(place) if place < length else again((place - int(length)) % repeated)


def _no_item(place: int) -> NoReturn:
    raise IndexError(place)


def _references() -> int:
    state: Any = itertools.cycle([0])
    with no_warnings():
        _, (inner,), _ = state.__reduce__()
    del state
    return getrefcount(inner)


_ALONE = _references() + 1 if is_reducible(itertools.cycle) else 0
"""Count of references to an iterator that only a cycle refers to, which is alive here and not there."""


class KnownIterator(NativeIterator):
    """Shadow of such an iterator."""

    __slots__ = ("record",)

    record: KnownRecord

    def __next__(self) -> Any:
        return self.record.take()


class KnownRecord(IteratorRecord):
    """An iterator that existed before the capture.

    Attributes:
        count: how many items the step has taken.
        ended: it has found the end.
    """

    NOTES = ("count", "ended")

    def __init__(self, heap: ShadowTableAPI, real: Any, shadow: KnownIterator, source: Source) -> None:
        super(IteratorRecord, self).__init__(heap, real, shadow, source)
        self.begun, self.count, self.ended = 0, 0, False
        shadow.record = self

    def take(self) -> Any:
        """Returns the next item, as ``next`` does."""
        place = self.heap.sources.picked(self.source, ahead := Ahead(self.count))
        found = ahead(self.real)
        known = safe_isinstance(found, (tuple, *_ITEMS)) or found is END
        if self.count >= _MOST_TAKEN or not known or self._is_changed() or (self.ended and _takes_more(self.real)):
            self.shadow.refuse()
        if found is END:
            self.heap.guard("is", place, END)
            self.ended = True
            raise StopIteration
        self.count += 1
        return self.heap.shadow(found, place)

    def taken(self) -> int | None:
        if (self.count or self.ended) and self._is_changed():
            self.heap.unknown_iterators.add(self.source.label)
            self.shadow.refuse()
        return None if self.ended else self.count

    def guard_apart(self, lists: tuple[Source, ...]) -> None:
        """Guards that the iterator runs over none of ``lists``, if the step has used it."""
        if self.count or self.ended:
            self.heap.guard("is", self.heap.sources.picked(self.source, Apart(lists)), True)

    def _is_changed(self) -> bool:
        """Returns True if the step has changed a list that the iterator runs over."""
        lists = (self.heap.by_real.get(id(each)) for each in _lists(self.real))
        return any(safe_isinstance(record, ListRecord) and record.is_changed for record in lists)


def _is_known(iterator: Any) -> bool:
    return _rest(iterator) is not None


def _takes_more(iterator: Any) -> bool:
    """Returns True if an iterator that has ended takes items of those that it wraps all the same."""
    return type(iterator) is zip or (type(iterator) is enumerate and _takes_more(iterator.__reduce__()[1][0]))


def _lists(iterator: Any) -> Iterator[list[Any]]:
    """Yields the lists that an iterator runs over."""
    with no_warnings():
        _, arguments, *_ = iterator.__reduce__()
    for each in arguments:
        if type(each) is list:
            yield each
        elif type(each) in TYPES:
            yield from _lists(each)


def known_iterator(heap: ShadowTableAPI, real: Any, source: Source, refuse: Callable[[], NoReturn]) -> Any:
    """Returns the record of an iterator whose next items are known; ``None`` for another one."""
    if source.label in heap.specialization.native_iterators or _rest(real) is None:
        return None
    heap.guard("type", source, type(real))
    return KnownRecord(heap, real, KnownIterator(type(real), refuse), source)
