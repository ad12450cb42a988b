"""Shadows of sets: members and iteration order, which depends on hashes and on the set's history."""

from __future__ import annotations

import itertools
import operator
import types
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch

from sidefx_train.compile.capture.guards.guard import same_value
from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.capture.shadows.records import Record
from sidefx_train.compile.common.plain_values import is_plain
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI


_ENTRY = 16
"""Bytes of one slot in the hash table of a set."""

_ORDERS = 200
"""Limit of insertion orders that are tried."""

_MOST_CHANGES = 64
"""Limit of changes to one set that are replayed one by one."""

IGNORES_ORDER = frozenset(
    {
        "add", "remove", "discard", "clear", "issubset", "issuperset", "isdisjoint", "difference_update", "len", "bool",
        "hash", "contains", "lt", "le", "eq", "ne", "gt", "ge", "isub", "is_", "is_not", "__contains__", "__len__",
        "__eq__", "__ne__", "__le__", "__lt__", "__ge__", "__gt__",
    }
)  # fmt: skip
"""Functions and methods whose result does not depend on a set's order."""

HANDED_ON = IGNORES_ORDER | frozenset(
    {
        "update", "union", "intersection", "difference", "symmetric_difference", "intersection_update",
        "symmetric_difference_update", "copy", "set", "frozenset", "or_", "and_", "xor", "sub", "ior", "iand", "ixor",
    }
)  # fmt: skip
"""The same, and functions that make sets of sets."""

MembershipChange = tuple[Literal["add", "remove", "clear"], tuple[Any, ...]]
"""One change of a set, and its members."""


class SetRecord(Record):
    """A set. Until something reads it, the shadow contains only what the step added.

    Attributes:
        unordered: the shadow iterates in another order than the real set.
        membership_changes: changes since the members were last compared; ``None`` if they are not recorded.
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
        """Records the changes of the last operation; called before the next one."""
        now = tuple(set.__iter__(self.shadow))
        same = len(now) == len(self.seen) and all(map(operator.is_, now, self.seen))  # not ==, which may be Python's
        if self.membership_changes is None or same:
            return
        if len(self.membership_changes) >= _MOST_CHANGES or not all(map(is_plain, (*now, *self.seen))):
            self.membership_changes = None
            return
        gone, new = _differences(self.seen, now)
        self.membership_changes = (
            *self.membership_changes,
            *_membership_changes(gone, new, emptied=not now and len(gone) > 1),
        )
        self.seen = now

    def changes(self) -> tuple[MembershipChange, ...]:
        """Returns the changes to apply to the real set, in the program's order if known: they determine its order."""
        self.look()
        return self.net() if self.membership_changes is None else self.membership_changes

    def net(self) -> tuple[MembershipChange, ...]:
        """Returns only the net changes."""
        return _membership_changes(*_differences(self.snapshot, tuple(set.__iter__(self.shadow))), emptied=False)

    def reset(self) -> None:
        set.clear(self.shadow)
        set.update(self.shadow, self.snapshot)


def is_replaced(key: Any, now: Any) -> bool:
    """Returns True if a key or member took the place of an equal one that the step removed: ``True`` that of 1, say."""
    return key is not now and not (is_plain(key) and same_value(key, now))


def _differences(before: Iterable[Any], now: Iterable[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns the members that are gone, and those that are new."""
    old, new = ({member: member for member in members} for members in (before, now))
    gone = tuple(member for member in old if member not in new or is_replaced(member, new[member]))
    return gone, tuple(member for member in new if member not in old or is_replaced(old[member], member))


def _membership_changes(gone: tuple[Any, ...], new: tuple[Any, ...], emptied: bool) -> tuple[MembershipChange, ...]:
    removed: tuple[MembershipChange, ...] = ((("clear", ()) if emptied else ("remove", gone)),) if gone else ()
    return (*removed, ("add", new)) if new else removed


def _arrangements(shadow: set[Any], real: set[Any], inside: list[Any]) -> Iterator[None]:
    """Fills ``shadow`` with ``inside`` in ways that may reproduce the order of ``real``.

    The order depends on the hashes, the size of the table, and the insertion order of colliding members.
    """

    def filled(members: Iterable[Any]) -> None:
        set.clear(shadow)
        set.update(shadow, members)

    if all(map(operator.is_, set.__iter__(real), inside)):
        filled(real)  # copies the table, if it has the default size
        yield
    for order in itertools.islice(itertools.permutations(inside), _ORDERS):
        filled(order)
        yield
    wide(shadow, inside, _table(real))
    yield


def _table(real: Any) -> int:
    """Returns the bytes of a set's table, without the object itself."""
    base = set if safe_isinstance(real, set) else frozenset
    return int(base.__sizeof__(real)) - type(real).__basicsize__


def wide(made: set[Any], members: Iterable[Any], table: int) -> None:
    """Fills a set with members at their slots of a larger table.

    Args:
        made: the set to fill.
        members: its members.
        table: bytes of the larger table.
    """
    members = tuple(members)
    fillers = {object() for _ in range(table // _ENTRY // 2 - len(members) - 1)}
    set.clear(made)
    set.update(made, members)
    set.update(made, fillers)  # grows the table, which places the members
    set.difference_update(made, fillers)


def wide_set(cls: Any, members: tuple[Any, ...], table: int) -> Any:
    """Returns a set or frozenset made by :func:`wide`."""
    made: set[Any] = set()
    wide(made, members, table)
    return made if cls is set else cls(made)


def insertion(container: Any) -> tuple[tuple[Any, ...], int] | None:
    """Returns how to rebuild a set of plain values, of any class, with the same iteration order.

    Returns:
        The members in insertion order, and the table bytes for :func:`wide_set`, 0 for the default size; ``None`` if no
        way was found.
    """
    base: Any = set if safe_isinstance(container, set) else frozenset
    order = list(base.__iter__(container))
    for tried in itertools.islice(itertools.permutations(order), _ORDERS):
        if list(base(tried)) == order:
            return tried, 0
    table = _table(container)
    return (tuple(order), table) if list(wide_set(base, tuple(order), table)) == order else None


def by_address(heap: ShadowTableAPI, container: Any) -> bool:
    """Returns True if the order of a set of the step depends on addresses of outside objects."""
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
