"""Shadows of cells and namespaces: variables that the step reads and sets."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.capture.shadows.records import Record
from sidefx_train.compile.common.plain_values import is_lasting
from sidefx_train.compile.common.sentinels import ABSENT

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI


class CellRecord(Record):
    """A closure cell that existed before the capture.

    Attributes:
        emptied: the step deleted the variable without reading its value.
    """

    NOTES = ("read", "initial", "value", "emptied")

    def __init__(self, heap: ShadowTableAPI, real: types.CellType, source: Source) -> None:
        super().__init__(heap, real, real, source)
        self.read = self.emptied = False
        self.initial: Any = ABSENT
        self.value: Any = ABSENT

    def get(self, name: str) -> Any:
        if not self.read:
            self.read = True
            try:
                contents = self.real.cell_contents
            except ValueError:
                self.heap.guard("empty_cell", self.source, None)
                return ABSENT
            value = self.heap.shadow(contents, self.heap.sources.cell(self.source), name)
            self.value = self.initial = value
        return self.value

    def set(self, value: Any) -> None:
        self.emptied = value is ABSENT and self.initial is ABSENT
        self.read = True
        self.value = value

    def reset(self) -> None:
        self.emptied = False
        self.read = self.initial is not ABSENT
        self.value = self.initial


class NamespaceRecord(Record):
    """A module's globals: reads are guarded, writes are deferred."""

    NOTES = ("values", "snapshot")

    def __init__(self, heap: ShadowTableAPI, real: dict[str, Any], source: Source) -> None:
        super().__init__(heap, real, real, source)
        self.values: dict[str, Any] = {}
        self.snapshot: dict[str, Any] = {}

    def get(self, name: str) -> Any:
        if name in self.values:
            return self.values[name]
        if name not in self.real:
            if self.heap.trusts(self.real):
                self.heap.definitions.took(self.real, name, ABSENT)
            else:
                self.heap.guard("no_item", self.source, name)
            return ABSENT
        value = self.real[name]
        if self.heap.trusts(self.real) and is_lasting(value):
            self.heap.definitions.took(self.real, name, value)
            return value
        value = self.heap.shadow(value, self.heap.sources.item(self.source, name), name)
        self.values[name] = self.snapshot[name] = value
        return value

    def set(self, name: str, value: Any) -> None:
        self.values[name] = value

    def delete(self, name: str) -> bool:
        """Returns True if the name existed."""
        if self.get(name) is ABSENT:
            return False
        if name not in self.snapshot:  # must the name be deleted from the real namespace?
            self.values.pop(name, None)
            self.get(name)
        self.values[name] = ABSENT
        return True

    def reset(self) -> None:
        self.values = dict(self.snapshot)
