"""Collects side effects: the difference between the shadows now and their state at first read.

An effect has the source of its target, and values of the trace; the residual stage generates code for it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.guard import TensorFacts
from sidefx_train.compile.capture.shadows.containers.iterators import IteratorRecord
from sidefx_train.compile.capture.shadows.containers.lists_and_dicts import DictRecord, Edit, ListRecord
from sidefx_train.compile.capture.shadows.containers.sets import SetRecord, is_replaced
from sidefx_train.compile.capture.shadows.deferred_values import TraceKey
from sidefx_train.compile.capture.shadows.finalizers import check_dropped
from sidefx_train.compile.capture.shadows.objects import weak_references
from sidefx_train.compile.capture.shadows.objects.jagged_tensors import JaggedRecord
from sidefx_train.compile.capture.shadows.objects.outside_exceptions import ExceptionRecord
from sidefx_train.compile.capture.shadows.objects.sparse_tensors import SparseRecord
from sidefx_train.compile.capture.shadows.objects.wrapper_tensors import WrapperRecord
from sidefx_train.compile.capture.shadows.records import UNREAD, InstanceRecord, LeafRecord, TensorRecord
from sidefx_train.compile.capture.side_effects.checkpoint import Checkpoint
from sidefx_train.compile.capture.side_effects.effect import Effect, EffectKind, SideEffects
from sidefx_train.compile.capture.side_effects.left_hooks import leaves_unknown
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.plain_values import is_set, slot_names, stored_entries
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.graph.freed_history import is_freed
from sidefx_train.torch_compat import output_of

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.capture_context import CaptureContext


def observe(world: CaptureContext, live: Iterable[Any] = ()) -> SideEffects:
    """Returns the effects so far, during a capture.

    Args:
        world: the world of the capture.
        live: values of the trace to restore, in addition to those of the frames being interpreted.
    """
    changes = _changes(world, finished=False)
    return SideEffects(changes, list(world.deferred), Checkpoint(world, live))


def collect(world: CaptureContext) -> SideEffects:
    """Returns the effects of a finished step.

    Raises:
        Unsupported: an effect cannot be written back.
    """
    changes = _changes(world, finished=True)
    check_dropped(world.heap)
    for change in changes:
        if change.kind == "set_item" and type(change.key) is int and change.key in _numbered(world):
            reason = f"leaves a hook registered in {change.target.label}; register it before the step"
            world.heap.refuse("SFX111", reason)
    return SideEffects(changes, [*world.left_hooks.of_inputs(), *world.deferred])


def _changes(world: CaptureContext, finished: bool) -> list[Effect]:
    """Compares every shadow with its snapshot."""
    changes: list[Effect] = []
    advanced: list[Effect] = []  # after the effects on their containers
    heap = world.heap
    for record in list(heap.by_real.values()):
        if safe_isinstance(record, ExceptionRecord) and record.raised_again():
            heap.refuse("SFX111", f"re-raises {record.source.label}, an exception raised outside, or raises from it")
        if safe_isinstance(record, InstanceRecord):
            changes += _instance(record)
        elif safe_isinstance(record, DictRecord):
            changes += _dict(world, record)
        elif safe_isinstance(record, ListRecord):
            changes += _list(record)
        elif safe_isinstance(record, SetRecord):
            changes += _set(record, finished)
        elif safe_isinstance(record, IteratorRecord):
            if record.taken() != 0 and record.begun is not None:
                advanced.append(Effect("advance", record.source, None, record.taken()))
        elif safe_isinstance(record, TensorRecord):
            changes += _tensor(world, record, finished)
        elif safe_isinstance(record, LeafRecord):
            changes += _leaf(world, record, finished)
        elif safe_isinstance(record, JaggedRecord):
            record.check()
        elif safe_isinstance(record, SparseRecord):
            changes += _sparse(record)
        if compat.is_jagged(record.shadow):
            compat.forget_layout(record.shadow)
        if record.instance is not None:
            changes += _instance(record.instance)
    for cell in heap.cells.values():
        if cell.value is not cell.initial or cell.emptied:
            kind: EffectKind = "del_cell" if cell.value is ABSENT else "set_cell"
            changes.append(Effect(kind, cell.source, None, cell.value))
    for space in heap.namespaces.values():
        for name, value in space.values.items():
            if value is space.snapshot.get(name, ABSENT) and name in space.snapshot:
                continue
            if value is ABSENT and name not in space.real:  # set and deleted again
                continue
            changes.append(Effect("del_item" if value is ABSENT else "set_item", space.source, name, value))
    for (cls, name), value in world.class_writes.items():
        if (cls, name) in registry.COUNTERS:
            continue
        if world.class_snapshot.get((cls, name), ABSENT) is not value:
            changes.append(Effect("set_class_attr", heap.sources.const(cls, cls.__qualname__), name, value))
    return changes + advanced


def _numbered(world: CaptureContext) -> range:
    """Returns the range of numbers that the capture assigned to objects of counting classes."""
    starts = list(registry.COUNTERS.values())
    return range(min(starts), max(starts) + (1 << 30)) if starts else range(0)


def _instance(record: InstanceRecord) -> list[Effect]:
    changes: list[Effect] = []
    if record.has_dict and record.filled and not record.shared:
        changes += _dict_effect(record)
    elif record.has_dict and not record.shared:
        now = object.__getattribute__(record.shadow, "__dict__")
        for name in record.written:
            if name in record.removed and name in record.space:
                changes.append(Effect("del_attr", record.base, name))
            if name in now and (
                name not in record.snapshot or record.snapshot[name] is not now[name] or name in record.removed
            ):
                changes.append(Effect("set_attr", record.base, name, now[name]))
        for name, value in now.items():  # written by C code, past the interpreter
            if name not in record.written and record.snapshot.get(name, ABSENT) is not value:
                changes.append(Effect("set_attr", record.base, name, value))
    for name in slot_names(type(record.real)):
        if not is_set(record.shadow, name):
            if name in record.written and is_set(record.real, name):
                changes.append(Effect("del_slot", record.base, name))
            continue
        value = object.__getattribute__(record.shadow, name)
        if record.snapshot.get(name, ABSENT) is not value:
            changes.append(Effect("set_slot", record.base, name, value))
    return changes


def _dict_effect(record: InstanceRecord) -> list[Effect]:
    """Returns changes of an instance ``__dict__`` that was read completely, also by C code past the interpreter."""
    now = object.__getattribute__(record.shadow, "__dict__")
    kept = [name for name in record.space if name in now]
    order = list(now)
    start = next((i for i, name in enumerate(kept) if order[i] != name), len(kept))
    moved = set(order[start:])  # deleted and added again: they follow the kept names
    changes = [Effect("del_attr", record.base, name) for name in record.space if name not in now or name in moved]
    for name, value in now.items():
        if name in moved or record.snapshot.get(name, ABSENT) is not value:
            changes.append(Effect("set_attr", record.base, name, value))
    return changes


def _dict(world: CaptureContext, record: DictRecord) -> list[Effect]:
    now = stored_entries(record.shadow)
    weak_references.check_keys(world.heap, record.base, now)
    added_again = record.filled and any(map(is_replaced, record.snapshot, now))
    if record.filled and not added_again and record.same_entries() and list(now) == list(record.snapshot):
        return []
    keys = {key: world.heap.real_key(key) for key in now}
    if record.filled:
        gone = [key for key in record.snapshot if key not in now]
        kept = [key for key in record.snapshot if key in now]
        added_again = any(map(is_replaced, kept, now))
        if added_again or list(now)[: len(kept)] != kept:  # a key was deleted: rebuild in eager's order
            changes = [Effect("clear", record.base, through=record.through)]
            return changes + [
                Effect("set_item", record.base, _key(world, keys, key), value, record.through)
                for key, value in now.items()
            ]
        changes = [Effect("del_item", record.base, world.heap.real_key(key), through=record.through) for key in gone]
    else:
        changes = []
    for key, value in now.items():
        if record.snapshot.get(key, ABSENT) is not value:
            changes.append(Effect("set_item", record.base, _key(world, keys, key), value, record.through))
    return changes


def _key(world: CaptureContext, keys: dict[Any, Any], key: Any) -> Any:
    record = world.heap.record_of(key)
    made = safe_isinstance(key, weakref.ReferenceType) if record is None else record.base.kind != "const"
    return TraceKey(key) if made or keys[key] is ABSENT else keys[key]


def _list(record: ListRecord) -> list[Effect]:
    if not record.filled:
        changes = [_edited(record, edit) for edit in record.edits]
        if record.appended:
            changes.append(Effect("extend", record.base, None, record.appended, record.through))
        return changes
    base: Any = list if safe_isinstance(record.shadow, list) else deque
    now, before = list(base.__iter__(record.shadow)), record.snapshot
    if len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True)):
        return []
    if len(now) > len(before) and all(a is b for a, b in zip(now, before, strict=False)):
        return [Effect("extend", record.base, None, now[len(before) :], record.through)]
    return [Effect("replace", record.base, None, now, record.through)]


def _edited(record: ListRecord, edit: Edit) -> Effect:
    key = TraceKey(edit.place)
    if edit.item is ABSENT:
        return Effect("del_item", record.base, key)
    return Effect("set_item", record.base, key, edit.item)


def _set(record: SetRecord, finished: bool) -> list[Effect]:
    changes_made = record.changes() if finished else record.net()
    return [Effect(kind, record.base, None, list(members), record.through) for kind, members in changes_made]


def _history(record: TensorRecord) -> Any:
    try:
        return record.shadow.grad_fn
    except RuntimeError as error:  # autograd forbids reading some views after their base was changed
        reason = f"{record.source.label} cannot be read after the step: {str(error).splitlines()[0]}"
        return record.heap.refuse("SFX107", reason)


def gets_new_history(world: CaptureContext, record: TensorRecord) -> bool:
    """Returns True for a base tensor that gets a value with autograd history in the step.

    Outside, it becomes a result of the captured part, in its own storage. Autograd regenerates the history of its
    views.
    """
    now = _history(record)
    if now is None or now is (record.edge.node if record.edge is not None else None):
        return False
    return not is_freed(world.freed, now) and record.entry_storage is None and not record.real._is_view()


def _written_under(record: TensorRecord) -> bool:
    """Returns True for an outside view whose storage was written: autograd regenerates its node."""
    if not record.real._is_view():
        return False
    memory = compat.storage_id(record.memory)
    others = [r for r in record.heap.by_real.values() if safe_isinstance(r, TensorRecord)]
    return any(r.version != r.entry_version for r in others if compat.storage_id(r.memory) == memory)


def bases_wanted(world: CaptureContext) -> frozenset[str]:
    """Returns labels of outside views whose history comes from a base that gets a new value in the step.

    Such a base must be known before anything is written: the step is captured again with it.
    """
    heap = world.heap
    views = [r for r in heap.by_real.values() if safe_isinstance(r, TensorRecord) and _written_under(r)]
    known = (r for r in views if _history(r) is not None or r.edge is not None)
    return frozenset(record.source.label for record in known) - heap.specialization.views_needing_base


def _metadata_mutated_view(record: TensorRecord) -> bool:
    """Returns True for a view whose history continues its own, not its base's: its metadata was mutated (``t_``)."""
    if record.edge is None or not record.real._is_view():
        return False
    seen, waiting = set[Any](), [_history(record)]
    while waiting:
        node = waiting.pop()
        if node is not None and node is not record.edge.node and node not in seen:
            seen.add(node)
            if (record.edge.node, record.edge.output_nr) in node.next_functions:
                return True
            waiting += [before for before, _ in node.next_functions]
    return False


def history_regenerated(world: CaptureContext, record: TensorRecord) -> bool:
    """Returns True for a view with history from its base that differs from its history at entry."""
    if record.source.label not in world.heap.specialization.views_needing_base or not has_history_of_base(
        world, record
    ):
        return False
    now = _history(record)
    return now is not None and now is not (None if record.edge is None else record.edge.node)


def has_history_of_base(world: CaptureContext, record: TensorRecord) -> bool:
    """Returns True for an outside view whose history comes from its base's history at the end of the step."""
    base = world.heap.by_real.get(id(record.real._base))
    if not safe_isinstance(base, TensorRecord) or base.entry_storage is not None or record.entry_storage is not None:
        return False
    if record.shadow._base is not base.shadow or record.entry_version != base.entry_version:
        return False
    return _history(base) is (None if base.edge is None else base.edge.node) or gets_new_history(world, base)


def _check_wrapper(record: WrapperRecord) -> None:
    """Refuses changes of a wrapper subclass itself; its attributes and inner tensors have records of their own."""
    if TensorFacts.of(record.shadow) != record.facts and record.shadow.requires_grad is record.requires_grad:
        record.heap.refuse("SFX109", f"changes the shape of {record.source.label}, a tensor subclass")


def _leaf(world: CaptureContext, record: LeafRecord, finished: bool) -> list[Effect]:
    if record.shadow.grad_fn is not None:
        reason = f"{record.source.label}, a tensor subclass, joins the step's autograd graph"
        record.heap.refuse("SFX107", reason)
    if record.shadow.requires_grad != record.requires_grad:
        record.heap.refuse("SFX111", f"sets {record.source.label}.requires_grad")
    if compat.gradient_dtype(record.shadow) is not record.gradient_dtype:
        record.heap.refuse("SFX111", f"sets {record.source.label}.grad_dtype")
    if safe_isinstance(record, WrapperRecord):
        _check_wrapper(record)
    if finished and leaves_unknown(world, record):
        record.heap.refuse("SFX111", f"changes the dict of hooks of {record.source.label}")
    writes = 0 if record.shadow.is_inference() else record.shadow._version - record.version
    if finished and writes and record.real._is_view() and not compat.is_jagged(record.real):
        record.heap.refuse("SFX109", f"changes {record.source.label}, a tensor subclass that is a view, in place")
    changes = [Effect("count_writes", record.source, None, writes)] if writes else []
    if record.grad is UNREAD or record.shadow.grad is record.grad:
        return changes
    return [*changes, Effect("set_grad", record.source, None, record.shadow.grad)]


def _sparse(record: SparseRecord) -> list[Effect]:
    if record.shadow.requires_grad:
        record.heap.refuse("SFX109", f"{record.source.label}, a sparse tensor, requires gradients")
    changes = [Effect("count_writes", record.source, None, record.writes)] if record.writes else []
    return [*changes, Effect("set_rows", record.source, None, record.shadow)] if record.replaced else changes


def _tensor(world: CaptureContext, record: TensorRecord, finished: bool) -> list[Effect]:
    changes: list[Effect] = []
    fake: torch.Tensor = record.shadow
    history = _history(record)
    metadata_mutated = (record.memory.shape, record.memory.stride()) != record.entry_layout
    if finished and record.edge is None and record.requires_grad and fake.requires_grad and metadata_mutated:
        record.heap.refuse("SFX107", f"{record.source.label}, which requires gradients, changes its shape")
    if finished and record.edge is not None:
        if fake.requires_grad and history is None:
            reason = f"{record.source.label}, which has an outside history, is detached and becomes a leaf in the step"
            record.heap.refuse("SFX107", reason)
        if metadata_mutated and not fake.requires_grad:
            reason = f"{record.source.label}, which has an outside history, is detached and has its metadata mutated"
            record.heap.refuse("SFX107", reason)
        if (
            metadata_mutated
            and history is not None
            and str(output_of(history, fake.output_nr)[0]) != str(tuple(fake.shape))
        ):
            reason = f"{record.source.label}, which has an outside history, has its metadata mutated with autograd off"
            record.heap.refuse("SFX107", reason)
        changed = (history is not None and history is not record.edge.node and not gets_new_history(world, record)) or (
            _written_under(record)
        )
        if changed and _metadata_mutated_view(record):
            record.heap.refuse(
                "SFX107", f"{record.source.label}, a view made outside the step, has its metadata mutated"
            )
        if changed and not has_history_of_base(world, record):
            record.heap.refuse("SFX107", f"changes {record.source.label}, which has an outside history, in place")
    joins = record.edge is None and history is not None
    if finished and joins and not gets_new_history(world, record) and not has_history_of_base(world, record):
        record.heap.refuse("SFX107", f"{record.source.label} joins the step's autograd graph")
    if record.new_storage is not None:
        kind: EffectKind = "grow" if record.resized else "set_data"
        changes.append(Effect(kind, record.source, None, record.new_storage))
    if record.edge is not None and not fake.requires_grad:
        changes.append(Effect("detach", record.source, None, None))
    elif fake.requires_grad != record.requires_grad and not (finished and history is not None):
        changes.append(Effect("set_requires_grad", record.source, None, fake.requires_grad))
    watched = history is None or record.real.retains_grad
    if watched and record.grad is not UNREAD and fake.grad is not record.grad:
        changes.append(Effect("set_grad", record.source, None, fake.grad))
    if finished and record.edge is None and leaves_unknown(world, record):
        record.heap.refuse("SFX111", f"changes the dict of hooks of {record.source.label}")
    return changes
