"""Shadows of C iterators, given by their container and position.

A part of a step receives the iterators of loops that are running. The shadow of such an iterator is an iterator of the
same class over shadows, at the same position; the epilogue advances the real one by as many items as the step took.

This makes one entry per position. If the position has changed between calls, for iterators that do not expose it or
share what they wrap with another reader, and for those that an object from outside holds, the shadow is a
:class:`NativeIterator`: the real iterator is advanced natively, between two parts that fit every iteration.
"""

from __future__ import annotations

import functools
import gc
import itertools
import operator
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.capture.interpreter.generator_finalizers import HOLDERS, ClosingStandIn, has_pending_finally
from sidefx_train.compile.capture.shadows.records import Record
from sidefx_train.compile.common.positioned_iterators import TYPES, WRAPPERS, is_reducible
from sidefx_train.compile.common.sentinels import NATIVE_CODE
from sidefx_train.compile.common.thread_warnings import no_warnings
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI


REBUILT: frozenset[type] = TYPES | {
    type(iter({})),
    type(iter({}.values())),
    type(iter({}.items())),
    type(iter(set())),
}
"""Classes whose instances can be rebuilt outside if the step created them."""

HANDED_ON: frozenset[type] = frozenset(
    {
        map,
        filter,
        itertools.accumulate,
        itertools.chain,
        itertools.combinations,
        itertools.combinations_with_replacement,
        itertools.compress,
        itertools.count,
        itertools.cycle,
        itertools.dropwhile,
        itertools.filterfalse,
        itertools.groupby,
        itertools.islice,
        itertools.permutations,
        itertools.product,
        itertools.repeat,
        itertools.starmap,
        itertools.takewhile,
        itertools.zip_longest,
        type(next(itertools.groupby("a"))[1]),
        type(iter(int, 1)),
        type(reversed({})),
        type(reversed({}.values())),
        type(reversed({}.items())),
    }
)
"""More such classes: they call functions or iterate over other iterators; nothing inspects them outside."""


OPAQUE: frozenset[type] = (HOLDERS | REBUILT | HANDED_ON) - TYPES
"""Classes of iterators that do not expose their position."""


VIEWS: dict[type, Callable[[Any], Any]] = {
    type(iter({})): dict.keys,
    type(iter({}.values())): dict.values,
    type(iter({}.items())): dict.items,
    type(reversed({})): lambda table: reversed(dict.keys(table)),
    type(reversed({}.values())): lambda table: reversed(dict.values(table)),
    type(reversed({}.items())): lambda table: reversed(dict.items(table)),
    type(iter(set())): iter,
}
"""The view of a dict or set that an iterator of this class runs over."""


def iterated_container(iterator: Any) -> Any:
    """Returns the dict or set of an iterator; ``None`` at its end."""
    return next((item for item in gc.get_referents(iterator) if safe_isinstance(item, (dict, set, frozenset))), None)


def left_over(iterator: Any) -> int | None:
    """Returns the number of items left of an iterator over a dict or set; ``None`` if the container changed size."""
    try:
        return len(iterator.__reduce__()[1][0])
    except RuntimeError:
        return None


def walk(view: Callable[[Any], Any], container: Any, taken: int) -> Iterator[Any]:
    """Returns an iterator over a dict or set, advanced by ``taken`` items."""
    iterator = iter(view(container))
    advance(iterator, taken)
    return iterator


def iteration_is_invalid(view: Callable[[Any], Any]) -> Iterator[Any]:
    """Returns an iterator over a dict or set that changed size: advancing it raises an error."""
    container: Any = {0} if view is iter else {0: 0}
    iterator = iter(view(container))
    container |= {1} if view is iter else {1: 1}
    return iterator


class NativeIterator:
    """Shadow of an iterator that only native code can advance.

    Args:
        cls: class of the iterator.
        refuse: stops the capture.
    """

    __slots__ = ("__weakref__", "cls", "refuse")

    def __init__(self, cls: type, refuse: Callable[[], NoReturn]) -> None:
        self.cls = cls
        self.refuse = refuse

    def __iter__(self) -> NativeIterator:
        return self

    def __next__(self) -> Any:
        self.refuse()

    def __length_hint__(self) -> int:
        self.refuse()

    def __repr__(self) -> str:
        self.refuse()  # it has the address of the real one

    def __getattr__(self, name: str) -> Any:
        """Returns a method such as ``send``; calling it stops the capture."""
        return types.MethodType(_call_outside, self)


def _call_outside(iterator: NativeIterator, *args: Any, **kwargs: Any) -> NoReturn:
    iterator.refuse()


class ClosingIterator(NativeIterator, ClosingStandIn):
    """Shadow of an outside iterator with a pending finally; only the program refers to the shadow.

    Args:
        cls: class of the iterator.
        refuse: stops the capture.
        dropped: called when the program drops its last reference.
    """

    __slots__ = ("dropped",)

    def __init__(self, cls: type, refuse: Callable[[], NoReturn], dropped: Callable[[], None]) -> None:
        super().__init__(cls, refuse)
        self.dropped = dropped

    def __del__(self) -> None:
        self.dropped()


NATIVE_CODE.add(id(_call_outside.__code__))
for _cls in (NativeIterator, ClosingIterator):
    NATIVE_CODE.update(id(fn.__code__) for fn in vars(_cls).values() if safe_isinstance(fn, types.FunctionType))


class IteratorRecord(Record):
    """An iterator that existed before the capture."""

    def __init__(self, heap: ShadowTableAPI, real: Any, shadow: Any, source: Source) -> None:
        super().__init__(heap, real, shadow, source)
        self.begun = position(shadow)

    def taken(self) -> int | None:
        """Returns how many items the step has taken; ``None`` if it reached the end."""
        now = position(self.shadow)
        return None if now is None else now - (self.begun or 0)


class ClosingRecord(Record):
    """Record of an iterator whose shadow only the program refers to."""

    _held: weakref.ref[NativeIterator]

    @property
    def shadow(self) -> NativeIterator:  # type: ignore[override]
        held: NativeIterator | None = self._held()
        if held is None:  # another reference keeps it alive
            held = self._kept = NativeIterator(type(self.real), self._refuse)
            self._held = weakref.ref(held)
            self.heap.by_shadow[id(held)] = self
        return held

    @shadow.setter
    def shadow(self, made: NativeIterator) -> None:
        self._refuse = made.refuse
        self._held = weakref.ref(made)


def position(iterator: Any) -> int | None:
    """Returns a number that grows by one with each item taken; ``None`` at the end."""
    made, arguments, *state = iterator.__reduce__()
    if made is enumerate:
        return None if position(arguments[0]) is None else int(arguments[1])
    if made is zip:
        inner = [position(part) for part in arguments]
        return None if None in inner or not inner else inner[0]
    if safe_isinstance(arguments[0], list) or made is reversed:
        if not state:
            return None
        return -state[0] if made is reversed else int(state[0])
    left = operator.length_hint(iterator)
    return -left if left else None


def place_of(iterator: Any) -> Any:
    """Returns a value that is another one once an iterator of C has given an item; always another if it is unknown."""
    if type(iterator) in VIEWS:
        return left_over(iterator)
    if not is_reducible(type(iterator)):
        return object()
    with no_warnings():  # of itertools, since Python 3.12
        _, *state = iterator.__reduce__()
    return tuple(map(_place_in, state))


def _place_in(state: Any) -> Any:
    if type(state) is tuple:
        return tuple(map(_place_in, state))
    if type(state) in REBUILT or type(state) in HANDED_ON:
        return place_of(state)
    return repr(state) if safe_isinstance(state, (int, float, torch.SymInt, torch.SymFloat)) else None


def advance(iterator: Iterator[Any], count: int | None) -> None:
    """Takes ``count`` items, or all if it is ``None``."""
    if count is None:
        deque(iterator, maxlen=0)
    else:
        for _ in range(count):
            next(iterator)


def outside_iterator(heap: ShadowTableAPI, real: Any, source: Source) -> Record:
    """Returns the record of an iterator whose position is not shadowed."""
    heap.guard("type", source, type(real))
    return Record(heap, real, NativeIterator(type(real), refusal(heap, source)), source)


def refusal(heap: ShadowTableAPI, source: Source) -> Callable[[], NoReturn]:
    """Returns what stops the capture where such an iterator is advanced."""

    def refuse() -> NoReturn:
        code, why = ("SFX113", "continues a loop") if heap.is_part else ("SFX103", "advances the outside iterator")
        heap.refuse(code, f"{why} {source.label}")

    return refuse


def given_state(
    heap: ShadowTableAPI,
    state: list[tuple[Any, ...]],
    names: tuple[tuple[str, ...], ...],
    changing: frozenset[str] = frozenset(),
) -> tuple[Any, ...]:
    """Returns shadows of a resume function's argument, ``[cells, values]``; its code empties the list.

    Args:
        heap: the shadow table.
        state: the cells and values.
        names: the user's names of them.
        changing: those that differ in each round of a loop: integers are inputs from the start.
    """
    place = heap.sources.arg(0)
    parts = enumerate(zip(state, names, strict=True))
    return ([tuple(_given(heap, heap.sources.item(place, i), part, called, changing)) for i, (part, called) in parts],)


def _given(
    heap: ShadowTableAPI, inside: Source, part: tuple[Any, ...], names: tuple[str, ...], changing: frozenset[str]
) -> Iterator[Any]:
    for i, (real, name) in enumerate(zip(part, names, strict=True)):
        source = heap.sources.item(inside, i, name)
        if type(real) is int and name in changing:
            heap.guard("type", source, int)
            yield heap.numbers.length(real, source)
            continue
        if type(real) not in HOLDERS:
            yield heap.shadow(real, source)
            continue
        closing = has_pending_finally(real)
        heap.guard("runs_code_when_freed", source, closing)
        if not closing or id(real) in heap.by_real:
            yield heap.shadow(real, source)
            continue
        heap.guard("type", source, type(real))
        made = ClosingIterator(type(real), refusal(heap, source), functools.partial(heap.dropped, source.label))
        yield heap.register(ClosingRecord(heap, real, made, source))
        del made


def shadow_iterator(heap: ShadowTableAPI, real: Any, source: Source) -> Any:
    """Returns the shadow of an outside iterator that exposes its position; guards everything it depends on."""
    heap.guard("type", source, type(real))
    reduced = real.__reduce__()
    whole = heap.sources.call(heap.sources.slot(source, "__reduce__"))
    heap.guard("length", whole, len(reduced))
    arguments = heap.sources.item(whole, 1)
    heap.guard("length", arguments, len(reduced[1]))
    parts = []
    for i, part in enumerate(reduced[1]):
        place = heap.sources.item(arguments, i)
        if type(part) is int:
            heap.guard("equal", place, part)
        elif type(real) in WRAPPERS:
            part = shadow_iterator(heap, part, place)
        else:
            part = heap.shadow(part, place)
            record = heap.record_of(part)
            if record is not None:
                record.fill()
        parts.append(part)
    made = reduced[0](*parts)
    if len(reduced) > 2:
        heap.guard("equal", heap.sources.item(whole, 2), reduced[2])
        if reduced[2] is not None:
            made.__setstate__(reduced[2])
    return made
