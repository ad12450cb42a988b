"""Global variables and closure cells in the capturing world."""

from __future__ import annotations

import builtins
import types
from typing import Any

from sidefx_train.compile.capture.world.interfaces import CaptureWorldAPI
from sidefx_train.compile.common.plain_values import is_lasting
from sidefx_train.compile.common.sentinels import ABSENT

_BUILTINS = vars(builtins)


class Variables:
    """Reads and writes globals and cells."""

    def __init__(self, world: CaptureWorldAPI) -> None:
        self.world = world
        self.heap, self.interp, self.tracer = world.heap, world.interp, world.tracer

    def run_in(self, space: dict[str, Any]) -> None:
        if any(
            id(space) in known
            for known in (self.world.own_namespaces, self.world.module_namespaces, self.heap.namespaces)
        ):
            return
        frame = self.interp.current_frame
        while frame is not None:
            if frame.globals is space:
                return
            frame = frame.back
        self.world.touch(space, deep=False)
        self.world.own_namespaces[id(space)] = space

    def load_global(self, namespace: dict[str, Any], name: str) -> Any:
        if id(namespace) in self.world.own_namespaces:
            return namespace[name] if name in namespace else _BUILTINS.get(name, ABSENT)
        if name in namespace:
            value = namespace[name]
            record = self.heap.namespaces.get(id(namespace))
            if (record is None or name not in record.values) and is_lasting(value) and self.heap.trusts(namespace):
                self.heap.definitions.took(namespace, name, value)
                return value
        value = self.heap.namespace(namespace).get(name)
        if self.world.reads.listening and (value is not ABSENT or name not in _BUILTINS):
            self.world.reads.variable(namespace, name, value)
        if value is ABSENT:
            value = _BUILTINS.get(name, ABSENT)
            self.heap.definitions.took(_BUILTINS, name, value)
        return value

    def store_global(self, namespace: dict[str, Any], name: str, value: Any) -> None:
        if id(namespace) in self.world.own_namespaces:
            namespace[name] = value
            return
        self.heap.namespace(namespace).set(name, value)

    def delete_global(self, namespace: dict[str, Any], name: str) -> bool:
        if id(namespace) in self.world.own_namespaces:
            return namespace.pop(name, ABSENT) is not ABSENT
        return self.heap.namespace(namespace).delete(name)

    def load_cell(self, cell: types.CellType) -> Any:
        if id(cell) in self.world.new_cells:
            try:
                value = cell.cell_contents
            except ValueError:
                return ABSENT
            if self.world.reads.listening:
                self.world.reads.variable(cell, "", value)
            return value
        name = self._cell_name(cell)
        value = self.heap.cell(cell, name).get(name)
        if self.world.reads.listening:
            self.world.reads.variable(cell, name, value)
        return value

    def store_cell(self, cell: types.CellType, value: Any) -> None:
        if id(cell) not in self.world.new_cells:
            self.heap.cell(cell, self._cell_name(cell)).set(value)
        elif value is ABSENT:
            del cell.cell_contents
        else:
            cell.cell_contents = value

    def _cell_name(self, cell: types.CellType) -> str:
        frame = self.interp.current_frame
        if frame is not None and frame.closure:
            for name, held in zip(frame.code.co_freevars, frame.closure, strict=True):
                if held is cell:
                    return name
        return "cell"

    def globals_dict(self, space: dict[str, Any]) -> dict[str, Any]:
        if id(space) not in self.world.own_namespaces:
            self.world.module_namespaces[id(space)] = space
        return space
