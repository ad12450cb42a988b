"""What the step did to Python: the difference between the shadows now and what was first read.

Effects name their target by source and their values as values of the trace; the residual stage turns them into code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from sidefx_train.compile import registry
from sidefx_train.compile.capture.world import ABSENT
from sidefx_train.compile.heap.later import DeferredCall
from sidefx_train.compile.heap.natives import slots_of
from sidefx_train.compile.heap.records import (
    UNREAD,
    DictRecord,
    InstanceRecord,
    ListRecord,
    SetRecord,
    TensorRecord,
)
from sidefx_train.compile.heap.source import Source

if TYPE_CHECKING:
    from sidefx_train.compile.heap.world import TraceWorld

EffectKind = Literal[
    "set_attr",
    "del_attr",
    "set_slot",
    "set_item",
    "del_item",
    "clear",
    "extend",
    "replace",
    "add",
    "set_cell",
    "del_cell",
    "set_class_attr",
    "set_grad",
    "set_requires_grad",
]


@dataclass(frozen=True)
class Effect:
    """One change to make after the graph has succeeded.

    Attributes:
        kind: what to do.
        target: the object that changes.
        key: attribute name or dict key, where there is one.
        value: value of the trace (shadow, fake tensor, symbolic number, plain value, container of such).
    """

    kind: EffectKind
    target: Source
    key: Any = None
    value: Any = None

    def describe(self) -> str:
        label = self.target.label
        if self.kind in ("set_attr", "set_slot", "set_class_attr"):
            return f"sets {label}.{self.key}"
        if self.kind == "del_attr":
            return f"deletes {label}.{self.key}"
        if self.kind == "set_item":
            return f"sets {label}[{_text(self.key)}]"
        if self.kind == "del_item":
            return f"deletes {label}[{_text(self.key)}]"
        if self.kind == "extend":
            return f"appends {len(self.value)} to {label}"
        if self.kind in ("replace", "clear"):
            return f"rewrites {label}"
        if self.kind == "add":
            return f"adds {len(self.value)} to {label}"
        if self.kind in ("set_cell", "del_cell"):
            return f"sets variable {label}"
        if self.kind == "set_grad":
            return f"sets {label}.grad"
        return f"sets {label}.requires_grad"


@dataclass
class SideEffects:
    """Everything a captured step leaves behind in Python.

    Attributes:
        changes: writes to outside objects.
        calls: deferred calls, in order.
    """

    changes: list[Effect] = field(default_factory=list)
    calls: list[DeferredCall] = field(default_factory=list)

    def describe(self) -> list[str]:
        return [change.describe() for change in self.changes] + [call.describe() for call in self.calls]


def collect(world: TraceWorld) -> SideEffects:
    """Compares every shadow with its snapshot."""
    changes: list[Effect] = []
    heap = world.heap
    for record in list(heap.by_real.values()):
        if isinstance(record, InstanceRecord):
            changes += _instance(record)
        elif isinstance(record, DictRecord):
            changes += _dict(world, record)
        elif isinstance(record, ListRecord):
            changes += _list(record)
        elif isinstance(record, SetRecord):
            changes += _set(record)
        elif isinstance(record, TensorRecord):
            changes += _tensor(record)
        if record.instance is not None:
            changes += _instance(record.instance)
    for cell in heap.cells.values():
        if cell.value is not cell.snapshot:
            kind: EffectKind = "del_cell" if cell.value is ABSENT else "set_cell"
            changes.append(Effect(kind, cell.source, None, cell.value))
    for space in heap.namespaces.values():
        for name, value in space.values.items():
            if value is space.snapshot.get(name, ABSENT) and name in space.snapshot:
                continue
            changes.append(Effect("del_item" if value is ABSENT else "set_item", space.source, name, value))
    for (cls, name), value in world.class_writes.items():
        if (cls, name) in registry.COUNTERS:
            continue
        if world.class_snapshot.get((cls, name), ABSENT) is not value:
            changes.append(Effect("set_class_attr", heap.sources.const(cls, cls.__qualname__), name, value))
    for change in changes:
        if change.kind == "set_item" and type(change.key) is int and change.key in _numbered(world):
            heap.refuse("SFX111", f"leaves a hook registered in {change.target.label}; register it before the step")
    return SideEffects(changes, list(world.deferred))


def _numbered(world: TraceWorld) -> range:
    """Numbers that the capture gave to objects of counting classes."""
    starts = list(registry.COUNTERS.values())
    return range(min(starts), max(starts) + (1 << 30)) if starts else range(0)


def _instance(record: InstanceRecord) -> list[Effect]:
    changes: list[Effect] = []
    if record.has_dict:
        now = object.__getattribute__(record.shadow, "__dict__")
        for name in record.written:
            if name in now:
                if name not in record.snapshot or record.snapshot[name] is not now[name]:
                    changes.append(Effect("set_attr", record.base, name, now[name]))
            elif name in record.space:
                changes.append(Effect("del_attr", record.base, name))
        for name, value in now.items():  # written by C code, past the interpreter
            if name not in record.written and record.snapshot.get(name, ABSENT) is not value:
                changes.append(Effect("set_attr", record.base, name, value))
    for name in slots_of(record):
        try:
            value = object.__getattribute__(record.shadow, name)
        except AttributeError:
            continue
        if record.snapshot.get(name, ABSENT) is not value:
            changes.append(Effect("set_slot", record.base, name, value))
    return changes


def _dict(world: TraceWorld, record: DictRecord) -> list[Effect]:
    now: dict[Any, Any] = record.shadow
    if record.filled and record.same_entries() and list(now) == list(record.snapshot):
        return []
    keys = {key: world.heap.real_key(key) for key in now}
    if record.filled:
        before = [key for key in record.snapshot if record.snapshot[key] is not ABSENT or key in now]
        gone = [key for key in before if key not in now]
        kept = [key for key in before if key in now]
        if list(now)[: len(kept)] != kept:  # a key was deleted and added again: rebuild in eager's order
            changes = [Effect("clear", record.base)]
            return changes + [Effect("set_item", record.base, _key(keys, key), value) for key, value in now.items()]
        changes = [Effect("del_item", record.base, world.heap.real_key(key)) for key in gone]
    else:
        changes = []
    for key, value in now.items():
        if record.snapshot.get(key, ABSENT) is not value:
            changes.append(Effect("set_item", record.base, _key(keys, key), value))
    return changes


class TraceKey:
    """A dict key made in the trace, to be rebuilt like any value."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _key(keys: dict[Any, Any], key: Any) -> Any:
    return TraceKey(key) if keys[key] is ABSENT else keys[key]


def _list(record: ListRecord) -> list[Effect]:
    if not record.filled:
        return [Effect("extend", record.base, None, record.appended)] if record.appended else []
    now, before = list(record.shadow), record.snapshot
    if len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True)):
        return []
    if len(now) > len(before) and all(a is b for a, b in zip(now, before, strict=False)):
        return [Effect("extend", record.base, None, now[len(before) :])]
    return [Effect("replace", record.base, None, now)]


def _set(record: SetRecord) -> list[Effect]:
    if not record.filled:
        return [Effect("add", record.base, None, list(record.shadow))] if record.shadow else []
    if record.shadow == record.snapshot:
        return []
    return [Effect("clear", record.base), Effect("add", record.base, None, list(record.shadow))]


def _tensor(record: TensorRecord) -> list[Effect]:
    changes: list[Effect] = []
    fake: torch.Tensor = record.shadow
    if fake.requires_grad != record.requires_grad:
        if fake.grad_fn is not None:
            record.heap.refuse("SFX107", f"{record.source.label} joins the step's autograd graph")
        changes.append(Effect("set_requires_grad", record.source, None, fake.requires_grad))
    if fake.is_leaf and record.grad is not UNREAD and fake.grad is not record.grad:
        changes.append(Effect("set_grad", record.source, None, fake.grad))
    return changes


def _text(key: Any) -> str:
    return repr(key) if isinstance(key, (str, int, float, bool, type(None))) else type(key).__name__
