"""Items that a step appends to a list and may draw from it again, at an index that changes.

The prologue finds such an item before the step has appended it: it makes a tuple like it from the objects in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.source import NOT_FOUND, Pick, Source, can_fetch
from sidefx_train.compile.common.plain_values import is_named_tuple, is_plain, make_tuple
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI

_Make = Callable[[tuple[Any, ...]], Any]
"""Makes an item of the values of its sources."""


class AppendedItems:
    """The items that a step has appended to a list, by what finds the objects in them at each call.

    Args:
        heap: the table of outside objects.
        items: the appended items, as the step has them.

    Attributes:
        items: the appended items.
        sources: where these objects are found.
        values: these objects now.
        makers: what makes each item of them; ``None`` if one cannot be made.
        makes_objects: some items are new objects.
    """

    def __init__(self, heap: ShadowTableAPI, items: list[Any]) -> None:
        self._heap = heap
        self.items = items
        self.sources: list[Source] = []
        self.values: list[Any] = []
        self.makes_objects = False
        makers = [self._maker(item) for item in items]
        self.makers = None if None in makers else [make for make in makers if make is not None]

    def _maker(self, item: Any) -> _Make | None:
        found = self._outside(item)
        if found is not None:
            place = len(self.sources)
            self.sources.append(found[0])
            self.values.append(found[1])
            return lambda values: values[place]
        if is_plain(item):
            return lambda values: item
        cls = type(item)
        if cls is not tuple and not is_named_tuple(cls):
            return None
        self.makes_objects = True
        parts = [self._maker(part) for part in tuple.__iter__(item)]
        if None in parts:
            return None
        return lambda values: make_tuple(cls, [part(values) for part in parts if part is not None])

    def _outside(self, item: Any) -> tuple[Source, Any] | None:
        """Returns where an object is found at each call, and its value now."""
        if safe_isinstance(item, compat.SYMBOLS):
            found = self._heap.numbers.found(item)
        else:
            record = self._heap.record_of(item)
            found = None if record is None else (record.source, record.real)
        return found if found is not None and can_fetch(found[0]) else None


class PickAmongAppended(Pick):
    """Finds an item of a list, or makes one that the step will append to it.

    Args:
        code: as of :class:`Pick`: the index in the list before the step has changed it.
        operands: as of :class:`Pick`.
        names: as of :class:`Pick`.
        appended: the items that follow those of the list.
    """

    __slots__ = ("_count", "_makers", "makes_objects")

    def __init__(self, code: str, operands: dict[str, Source], names: dict[str, Any], appended: AppendedItems) -> None:
        super().__init__(code, operands, names)
        self._count, self._makers = len(operands), appended.makers or []
        self.makes_objects = appended.makes_objects
        self.operands = (*self.operands, *appended.sources)

    def __call__(self, items: Any, *operands: Any) -> Any:
        numbers, values = operands[: self._count], operands[self._count :]
        if type(items) not in (list, deque) or any(type(number) is not int for number in numbers):
            return NOT_FOUND
        index = self.index_of(*numbers) - len(items)
        if index < 0:
            return super().__call__(items, *numbers)
        return self._makers[index](values) if index < len(self._makers) else NOT_FOUND
