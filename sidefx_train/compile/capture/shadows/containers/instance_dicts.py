"""The ``__dict__`` of an instance, read as a dict: the same data under two names."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.interpreter.world import thread_dict_of
from sidefx_train.compile.capture.shadows.containers.lists_and_dicts import DictRecord
from sidefx_train.compile.capture.shadows.records import InstanceRecord, Record
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI


class InstanceDictRecord(Record):
    """The ``__dict__`` of an outside instance; the instance's record contains its changes.

    If several instances share it, the record of the ``__dict__`` contains them.
    """

    def __init__(self, owner: InstanceRecord) -> None:
        source = owner.heap.sources.slot(owner.base, "__dict__")
        super().__init__(owner.heap, owner.space, object.__getattribute__(owner.shadow, "__dict__"), source)
        self.owner = owner

    def fill(self) -> None:
        self.owner.fill()


def note_instance_dict(heap: ShadowTableAPI, owner: InstanceRecord) -> None:
    """Registers the ``__dict__`` of a new shadow, or uses the existing shadow of that dict."""
    known = heap.by_real.get(id(owner.space))
    if not safe_isinstance(known, (DictRecord, InstanceDictRecord)):
        record = InstanceDictRecord(owner)
        heap.by_real[id(record.real)] = heap.by_shadow[id(record.shadow)] = record
        return
    known.fill()
    heap.guard("same", heap.sources.slot(owner.base, "__dict__"), known.source)
    object.__setattr__(owner.shadow, "__dict__", known.shadow)
    noted = known.snapshot if safe_isinstance(known, DictRecord) else known.owner.snapshot
    owner.snapshot = {name: noted[name] for name in owner.space if name in noted}
    owner.filled = owner.shared = True


def check_hidden_dict(heap: ShadowTableAPI, instance: Any) -> None:
    """Refuses an instance whose class overrides ``__dict__``, if the instance's own dict may have attributes.

    A container that holds nothing but its items has none.
    """
    if safe_isinstance(instance, dict):
        known = {id(type(instance)), *map(id, dict.keys(instance)), *map(id, dict.values(instance))}
        if all(id(item) in known for item in gc.get_referents(instance)):
            return
    heap.refuse("SFX104", f"a {type(instance).__qualname__}, whose class overrides __dict__")


def thread_dict(heap: ShadowTableAPI, local: Any) -> DictRecord:
    """Returns the record of a ``threading.local``'s dict in the running thread."""
    record = heap.record_of(local)
    if record is None:
        heap.refuse("SFX111", "uses a threading.local made in the step")
    shadow = heap.shadow(thread_dict_of(local), heap.sources.slot(record.base, "__dict__"))
    found = heap.record_of(shadow)
    assert safe_isinstance(found, DictRecord), "it is a plain dict"
    return found


def instance_dict_of(heap: ShadowTableAPI, instance: Any) -> dict[str, Any]:
    """Returns the completely filled ``__dict__`` of an instance of the trace.

    Raises:
        AttributeError: the instance has none.
    """
    record = heap.record_of(instance)
    owner = record if record is None or safe_isinstance(record, InstanceRecord) else record.instance
    space: dict[str, Any] = object.__getattribute__(instance if owner is None else owner.shadow, "__dict__")
    if owner is not None:
        owner.fill()
    elif record is None:
        heap.new_namespaces[id(space)] = (space, instance)
    else:  # a pass-through object: its dict has a shadow
        return heap.shadow(space, heap.sources.slot(record.base, "__dict__"))  # type: ignore[no-any-return]
    return space
