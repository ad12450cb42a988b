"""Sets: their members, and the order they show them in, which comes from hashes and from what was done to the set."""

from __future__ import annotations

import itertools
import operator
import types
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch

from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.capture.shadows.records import Record
from sidefx_train.compile.common.plain_values import is_plain
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI


_ENTRY = 16
"""Bytes that one place in the table of a set takes."""

_ORDERS = 200
"""Orders of insertion that are tried."""

_MOST_CHANGES = 64
"""Changes to one set that are made again one by one."""

HIDDEN_FROM_AUTOGRAD = frozenset(
    {
        "add", "remove", "discard", "clear", "issubset", "issuperset", "isdisjoint", "difference_update", "len", "bool",
        "hash", "contains", "lt", "le", "eq", "ne", "gt", "ge", "isub", "is_", "is_not", "__contains__", "__len__",
        "__eq__", "__ne__", "__le__", "__lt__", "__ge__", "__gt__",
    }
)  # fmt: skip
"""Functions and methods to which the order of a set makes no difference."""

HANDED_ON = HIDDEN_FROM_AUTOGRAD | frozenset(
    {
        "update", "union", "intersection", "difference", "symmetric_difference", "intersection_update",
        "symmetric_difference_update", "copy", "set", "frozenset", "or_", "and_", "xor", "sub", "ior", "iand", "ixor",
    }
)  # fmt: skip
"""Those that make sets of sets besides."""

MembershipChange = tuple[Literal["add", "remove", "clear"], tuple[Any, ...]]
"""What was done to a set, and the members concerned."""


class SetRecord(Record):
    """A set. Until something reads it, the shadow holds only what the step added.

    Attributes:
        unordered: the shadow shows its members in another order than the set outside.
        membership_changes: what was added and removed since the members were last looked at; ``None`` if not kept.
        seen: the members at that time.
    """

    NOTES = ("filled", "snapshot", "unordered", "membership_changes", "seen")

    def __init__(self, heap: ShadowTableAPI, real: Any, shadow: Any, source: Source, base: Source) -> None:
        super().__init__(heap, real, shadow, source, base)
        self.filled = False
        self.snapshot: set[Any] = set()
        self.unordered = False
        self.membership_changes: tuple[MembershipChange, ...] | None = ()
        self.seen: tuple[Any, ...] = ()

    def fill(self) -> None:
        if self.filled:
            return
        self.look()
        self.filled = True
        order = tuple(set.__iter__(self.real))
        inside = [self.heap.shadow_key(item, self.base, i) for i, item in enumerate(order)]
        added = list(set.__iter__(self.shadow))
        for key in added:
            self.heap.identities.pin_key(key)
        for _ in _arrangements(self.shadow, self.real, inside):
            self.unordered = any(map(operator.is_not, set.__iter__(self.shadow), inside))
            if not self.unordered:
                break
        self.heap.guard("members" if self.unordered else "order", self.base, order)
        set.update(self.shadow, added)
        self.snapshot = set(inside)
        self.seen = tuple(set.__iter__(self.shadow))

    def look(self) -> None:
        """Notes what the last operation changed; called before the next one."""
        now = tuple(set.__iter__(self.shadow))
        if self.membership_changes is None or now == self.seen:
            return
        if len(self.membership_changes) >= _MOST_CHANGES or not all(map(is_plain, (*now, *self.seen))):
            self.membership_changes = None
            return
        before, after = set(self.seen), set(now)
        gone = tuple(member for member in self.seen if member not in after)
        new = tuple(member for member in now if member not in before)
        self.membership_changes = (
            *self.membership_changes,
            *_membership_changes(gone, new, emptied=not now and len(gone) > 1),
        )
        self.seen = now

    def changes(self) -> tuple[MembershipChange, ...]:
        """What to do to the set outside, in the program's turns where they are known: they decide its order."""
        self.look()
        return self.net() if self.membership_changes is None else self.membership_changes

    def net(self) -> tuple[MembershipChange, ...]:
        """Only what changed."""
        now = dict.fromkeys(set.__iter__(self.shadow))
        gone = tuple(member for member in self.snapshot if member not in now)
        new = tuple(member for member in now if member not in self.snapshot)
        return _membership_changes(gone, new, emptied=False)

    def reset(self) -> None:
        set.clear(self.shadow)
        set.update(self.shadow, self.snapshot)


def _membership_changes(gone: tuple[Any, ...], new: tuple[Any, ...], emptied: bool) -> tuple[MembershipChange, ...]:
    removed: tuple[MembershipChange, ...] = ((("clear", ()) if emptied else ("remove", gone)),) if gone else ()
    return (*removed, ("add", new)) if new else removed


def _arrangements(shadow: set[Any], real: set[Any], inside: list[Any]) -> Iterator[None]:
    """Fills ``shadow`` with ``inside`` in ways that may give it the order of ``real``.

    The order comes from the hashes, the size of the table, and which of two members with one place came first.
    """

    def filled(members: Iterable[Any]) -> None:
        set.clear(shadow)
        set.update(shadow, members)

    if all(map(operator.is_, set.__iter__(real), inside)):
        filled(real)  # the table itself, if it is of the usual size
        yield
    for order in itertools.islice(itertools.permutations(inside), _ORDERS):
        filled(order)
        yield
    wide(shadow, inside, _table(real))
    yield


def _table(real: Any) -> int:
    """Bytes of a set's table outside of the object itself."""
    return int(real.__sizeof__() - type(real)().__sizeof__())


def wide(made: set[Any], members: Iterable[Any], table: int) -> None:
    """Fills a set with members in the places of a larger table.

    Args:
        made: the set.
        members: what it is to hold.
        table: bytes of the table.
    """
    members = tuple(members)
    fillers = {object() for _ in range(table // _ENTRY // 2 - len(members) - 1)}
    set.clear(made)
    set.update(made, members)
    set.update(made, fillers)  # first gives those that are there the places of the larger table
    set.difference_update(made, fillers)


def wide_set(cls: Any, members: tuple[Any, ...], table: int) -> Any:
    """A set or frozenset made by :func:`wide`."""
    made: set[Any] = set()
    wide(made, members, table)
    return made if cls is set else cls(made)


def insertion(container: Any) -> tuple[tuple[Any, ...], int] | None:
    """How a set of plain values is made again so that it shows them in the same order.

    Returns:
        The members in the order of insertion, and the bytes of the table for :func:`wide_set`, 0 for the usual one;
        ``None`` if no way was found.
    """
    cls, order = type(container), list(container)
    for tried in itertools.islice(itertools.permutations(order), _ORDERS):
        if list(cls(tried)) == order:
            return tried, 0
    table = _table(container)
    return (tuple(order), table) if list(wide_set(cls, tuple(order), table)) == order else None


def by_address(heap: ShadowTableAPI, container: Any) -> bool:
    """True if a set of the step's own shows objects in an order that their addresses outside decide."""
    return len(container) > 1 and any(_hashes_address(heap, member) for member in container)


def _hashes_address(heap: ShadowTableAPI, member: Any) -> bool:
    cls = type(member)
    if cls in (tuple, frozenset):
        return any(_hashes_address(heap, item) for item in member)
    if cls is types.MethodType:
        return _hashes_address(heap, member.__self__)
    record = heap.record_of(member)
    if record is None or record.real is member:
        return False
    made_by: Any = cls.__hash__
    return safe_isinstance(member, torch.Tensor) or made_by is object.__hash__
