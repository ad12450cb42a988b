"""Outside values that change at every call, and that the step only passes on: stored, formatted, printed, returned."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.capture.guards.specialization import is_among
from sidefx_train.compile.capture.shadows.deferred_values import DeferredValue, PassedItem, passed_on
from sidefx_train.compile.capture.shadows.records import Record
from sidefx_train.compile.common.draws.generator_states import is_state
from sidefx_train.compile.common.plain_values import DEFINITIONS, base_container
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI


_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)
_DEPTH = 4


def holds_passed_items(value: Any) -> bool:
    """Returns True for a value, or the cell of a variable, in which there are items of any class, and for plain
    values."""
    if type(value) is types.CellType:
        return value != types.CellType() and holds_passed_items(value.cell_contents)
    return type(value) in _PLAIN or _has_item(value, _DEPTH)


def _has_item(value: Any, depth: int) -> bool:
    cls = type(value)
    if cls is PassedItem or not depth:
        return cls is PassedItem
    if issubclass(cls, (torch.Tensor, torch.nn.Module, *DEFINITIONS)):
        return False
    base: Any = tuple if issubclass(cls, tuple) else base_container(cls)
    if base is None:
        held = object.__getattribute__(value, "__dict__") if cls.__dictoffset__ else {}
        return any(_has_item(each, depth - 1) for each in dict.values(held))
    items = dict.values(value) if issubclass(base, dict) else base.__iter__(value)
    return any(_has_item(each, depth - 1) for each in items)


class PassedValues:
    """The values of one capture that are passed on: no branch depends on them.

    Args:
        heap: the shadow table.

    Attributes:
        tuples: lengths of the tuples of strings among them, by their labels.
    """

    def __init__(self, heap: ShadowTableAPI) -> None:
        self.heap = heap
        self.tuples: dict[str, int] = {}
        self._made: dict[int, DeferredValue] = {}

    def shadow(self, real: Any, source: Source) -> Any:
        """Returns the shadow of a string, bytes, date, tuple of strings, number of NumPy, state of ``random``, or
        item of any class that is passed on; :data:`ABSENT` for other values."""
        cls, spec = type(real), self.heap.specialization
        if spec.pass_through_strings and spec.passes_on(cls, source.label):
            if cls is tuple:
                self.tuples[source.label] = len(real)
            return self._of_one_class(real, source)
        if cls is tuple and is_state(real):
            return self._of_one_class(real, source)
        if spec.items_of_any_class and self._is_of_any_class(real, source):
            return self._item(real, source)
        if issubclass(cls, np.generic) and source.label in spec.changing_arrays:
            return self._of_one_class(real, source)
        return ABSENT

    def _of_one_class(self, real: Any, source: Source) -> DeferredValue:
        found = self._made.get(id(source))
        if found is None:
            self.heap.guard("type", source, type(real))
            found = self._make(passed_on(real), real, source)
        return found

    def _item(self, real: Any, source: Source) -> DeferredValue:
        found = self._made.get(id(source))
        if found is None:
            self.heap.guard("tensor_or_none", source, None)
            found = self._make(PassedItem(), real, source)
        return found

    def _is_of_any_class(self, real: Any, source: Source) -> bool:
        """Returns True for an item that is a tensor in some calls and ``None`` in others."""
        if not (real is None or safe_isinstance(real, torch.Tensor)) or not source.from_arguments:
            return False
        return is_among(self.heap.specialization.items_of_any_class, source.label)

    def _make(self, made: DeferredValue, real: Any, source: Source) -> DeferredValue:
        self._made[id(source)] = made
        self.heap.by_shadow[id(made)] = Record(self.heap, real, made, source)
        return made
