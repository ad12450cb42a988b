"""Which object it is: guards for what a step compares by identity, or looks up in dicts and sets.

An object from outside has a shadow of its own, so the step tells shadows apart as it would the objects. That two paths
lead to two objects, and a key to the object it led to, are conditions of the entry where the objects may be others at
the next call.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.guards.guard import Guard
from sidefx_train.compile.capture.shadows.containers.traversal import attributes_of
from sidefx_train.compile.capture.shadows.records import InstanceRecord, Record, TensorRecord
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.guards.source import Source
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI


class Identities:
    """What one capture told apart."""

    def __init__(self, heap: ShadowTableAPI) -> None:
        self._heap = heap
        self._distinguished: dict[int, Record] = {}
        """Objects that served as keys, or that C code compared with others."""

    def guard_distinct(self, one: Any, other: Any) -> None:
        """The step goes by two objects from outside not being one: they must not come to be."""
        first, second = self._heap.record_of(one), self._heap.record_of(other)
        if first is None or second is None or first is second or type(first.real) is not type(second.real):
            return
        bases = (first.base, second.base)
        if first.real is not second.real and any(base.kind != "const" for base in bases):
            key = ("all_distinct", *sorted(map(id, bases)))
            if key not in self._heap.guards:
                self._heap.guards[key] = Guard("all_distinct", bases[0], bases, self._heap.locate())

    def note_hashed(self, key: Any) -> None:
        """A key is about to be told from other keys, in a container of the step's own maybe."""
        for part in _parts([key]):
            self.note_distinguished(part)

    def note_distinguished(self, value: Any) -> None:
        """An object is told from others of its kind: from those noted so far, and from those to come."""
        record = self._heap.record_of(value)
        if record is not None and (safe_isinstance(record, _DISTINGUISHED) or type(value) is types.FunctionType):
            self._distinguished.setdefault(id(record), record)

    def separated(self) -> list[Guard]:
        """Objects that were told apart must not come to be one."""
        kinds: dict[type, list[Source]] = {}
        for record in self._distinguished.values():
            kinds.setdefault(type(record.real), []).append(record.base)
        varying = [bases for bases in kinds.values() if any(base.kind != "const" for base in bases)]
        return [Guard("all_distinct", bases[0], tuple(bases), None) for bases in varying if len(bases) > 1]

    def pin_key(self, key: Any) -> None:
        """The step sees what a dict or set has under a key: where that depends on which object it is, so it stays."""
        todo = [key]
        for part in _parts(todo):
            record = self._heap.record_of(part)
            if record is None or record.base.is_fixed:
                continue
            if safe_isinstance(record, TensorRecord) or vars(object)["__hash__"] is type(part).__hash__:
                self._heap.guard("is", record.base, record.real)
            elif safe_isinstance(record, InstanceRecord):
                record.fill()
                todo += attributes_of(part)


def _parts(todo: list[Any]) -> Iterator[Any]:
    """What decides which keys composite ones are; ``todo`` may grow meanwhile."""
    while todo:
        key = todo.pop()
        if safe_isinstance(key, tuple):
            todo += key
        elif type(key) is types.MethodType:
            todo.append(key.__self__)
        elif safe_isinstance(key, weakref.ReferenceType):
            todo.append(key())
        else:
            yield key


_DISTINGUISHED = (InstanceRecord, TensorRecord)
