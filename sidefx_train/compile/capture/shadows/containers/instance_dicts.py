"""The ``__dict__`` of an instance, reached as a dict: one thing under two names."""

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
    """The ``__dict__`` of an outside instance; what the step does to it stands in the instance's record.

    It may be that of other instances too, which are known by the ``__dict__`` then.
    """

    def __init__(self, owner: InstanceRecord) -> None:
        source = owner.heap.sources.slot(owner.base, "__dict__")
        super().__init__(owner.heap, owner.space, object.__getattribute__(owner.shadow, "__dict__"), source)
        self.owner = owner

    def fill(self) -> None:
        self.owner.fill()


def note_instance_dict(heap: ShadowTableAPI, owner: InstanceRecord) -> None:
    """Makes the ``__dict__`` of a new shadow known, or takes the shadow that its dict already has."""
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
    """Refuses an instance whose class shows another ``__dict__``, if it may have attributes in its own.

    A container that keeps nothing but its items has none.
    """
    if safe_isinstance(instance, dict):
        known = {id(type(instance)), *map(id, dict.keys(instance)), *map(id, dict.values(instance))}
        if all(id(item) in known for item in gc.get_referents(instance)):
            return
    heap.refuse("SFX104", f"a {type(instance).__qualname__}, whose class shows another __dict__ than it has")


def thread_dict(heap: ShadowTableAPI, local: Any) -> DictRecord:
    """What a ``threading.local`` holds for the running thread."""
    record = heap.record_of(local)
    if record is None:
        heap.refuse("SFX111", "uses a threading.local made in the step")
    shadow = heap.shadow(thread_dict_of(local), heap.sources.slot(record.base, "__dict__"))
    found = heap.record_of(shadow)
    assert safe_isinstance(found, DictRecord), "it is a plain dict"
    return found


def instance_dict_of(heap: ShadowTableAPI, instance: Any) -> dict[str, Any]:
    """The ``__dict__`` of an instance of the trace, complete.

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
    else:  # an outside object that stands for itself: its dict does not
        return heap.shadow(space, heap.sources.slot(record.base, "__dict__"))  # type: ignore[no-any-return]
    return space
