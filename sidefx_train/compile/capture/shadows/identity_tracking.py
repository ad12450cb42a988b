"""Guards on object identity: for what a step compares by identity, or looks up in dicts and sets.

Each outside object has one shadow, so the step distinguishes shadows as it would distinguish the objects. If the
objects may be others at the next call, the entry guards that two paths lead to two objects, and that a path leads to
the same key.
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
    """Objects that one capture has distinguished by identity.

    Attributes:
        needs_appended: the step uses the identity of an item that it may have appended to a list.
    """

    def __init__(self, heap: ShadowTableAPI) -> None:
        self._heap = heap
        self._distinguished: dict[int, Record] = {}
        """Objects that served as keys, or that C code compared with others."""
        self.needs_appended = False

    def refuse_made(self, record: Record | None) -> None:
        """Refuses to use the identity of an item that the prologue makes, which the step appends later."""
        if record is not None and record.source.kind == "picked" and record.source.key.makes_objects:
            self.needs_appended = True
            self._heap.refuse("SFX104", f"uses {record.source.label} itself, which the step may have appended")

    def guard_distinct(self, one: Any, other: Any) -> None:
        """Guards that two outside objects stay distinct: the step relies on it."""
        first, second = self._heap.record_of(one), self._heap.record_of(other)
        self.refuse_made(first)
        self.refuse_made(second)
        if first is None or second is None or first is second or type(first.real) is not type(second.real):
            return
        bases = (first.base, second.base)
        if first.real is not second.real and any(base.kind != "const" for base in bases):
            key = ("all_distinct", *sorted(map(id, bases)))
            if key not in self._heap.guards:
                self._heap.guards[key] = Guard("all_distinct", bases[0], bases, self._heap.locate())

    def note_hashed(self, key: Any) -> None:
        """Records that a key is compared with other keys, possibly in a container of the step."""
        for part in _parts([key]):
            self.note_distinguished(part)

    def note_distinguished(self, value: Any) -> None:
        """Records that an object is compared with all others of its type, earlier and later ones."""
        record = self._heap.record_of(value)
        if record is not None and (safe_isinstance(record, _DISTINGUISHED) or type(value) is types.FunctionType):
            self._distinguished.setdefault(id(record), record)

    def separated(self) -> list[Guard]:
        """Returns guards that recorded objects stay distinct."""
        kinds: dict[type, list[Source]] = {}
        for record in self._distinguished.values():
            kinds.setdefault(type(record.real), []).append(record.base)
        varying = [bases for bases in kinds.values() if any(base.kind != "const" for base in bases)]
        return [Guard("all_distinct", bases[0], tuple(bases), None) for bases in varying if len(bases) > 1]

    def pin_key(self, key: Any) -> None:
        """Guards the identity of a key if an entry that the step reads depends on it."""
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
    """Yields the parts that determine the equality of composite keys; the caller may append to ``todo``."""
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
