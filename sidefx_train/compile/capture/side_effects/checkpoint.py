"""Checkpoint: the contents of every object of a trace at one moment, and rollback to it.

Shadows are real objects of the outside object's class, so they are saved and restored like objects created in the step:
by items, entries, attributes and slots. The record of a shadow (read or not, state at entry) is saved with it. Guards
are never removed: they are conditions on what has been read, and additional ones are still correct.
"""

from __future__ import annotations

import copy
import enum
import functools
import gc
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.interpreter.frame import Frame
from sidefx_train.compile.capture.interpreter.generators import InterpretedGenerator
from sidefx_train.compile.capture.shadows.containers.iterators import HANDED_ON, REBUILT, NativeIterator, place_of
from sidefx_train.compile.capture.shadows.deferred_values import DeferredCall, DeferredValue, TensorSnapshot
from sidefx_train.compile.capture.shadows.records import Record, TensorRecord
from sidefx_train.compile.common.plain_values import DEFINITIONS, PLAIN_TYPES, bounds_of, is_set, slot_names
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import instance_dict, safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.recording.write_log import WriteLog
    from sidefx_train.compile.capture.shadows.capture_context import CaptureContext


@dataclass(frozen=True)
class Contents:
    """Contents of one mutable object at the checkpoint.

    Attributes:
        value: the object, kept alive so that its ``id`` stays unique.
        items: members of a list, deque or set; ``None`` for anything else.
        entries: a dict's entries in order; ``None`` for anything else.
        attributes: its ``__dict__``.
        slots: its ``__slots__``, where set.
        cell: contents of a closure cell, :data:`ABSENT` if empty.
        tensor: number of writes so far, ``requires_grad``, gradient and hooks of a tensor.
        place: how far an iterator of C has come; ``None`` for anything else.
    """

    value: Any
    items: tuple[Any, ...] | None = None
    entries: tuple[tuple[Any, Any], ...] | None = None
    attributes: dict[str, Any] = field(default_factory=dict)
    slots: dict[str, Any] = field(default_factory=dict)
    cell: Any = None
    tensor: tuple[int, bool, Any, dict[Any, Any]] | None = None
    place: Any = None

    @classmethod
    def of(cls, value: Any, writes: WriteLog) -> Contents | None:
        """Returns the contents of an object of the trace, or ``None`` if it has no mutable contents."""
        if safe_isinstance(value, types.FunctionType):
            return cls(value, attributes=dict(vars(value)))
        if safe_isinstance(value, (*_FIXED, *DEFINITIONS)):
            return None
        if type(value) in _ITERATORS:
            return cls(value, place=place_of(value))
        if safe_isinstance(value, types.CellType):
            return cls(value, cell=_cell_contents(value))
        if safe_isinstance(value, torch.Tensor):
            grad = value.grad if value.is_leaf else None
            return cls(value, tensor=(len(writes.to(value)), value.requires_grad, grad, compat.tensor_hooks(value)))
        if safe_isinstance(value, (Frame, InterpretedGenerator)):
            names = _FRAME if safe_isinstance(value, Frame) else _GENERATOR
            return cls(value, slots={name: getattr(value, name) for name in names})
        items = entries = None
        if safe_isinstance(value, (list, deque, set)):
            items = tuple(_base(value).__iter__(value))
        elif safe_isinstance(value, dict):
            entries = tuple(_base(value).items(value))
        slots = {n: object.__getattribute__(value, n) for n in slot_names(type(value)) if is_set(value, n)}
        return cls(value, items, entries, dict(_space(value)), slots)

    def parts(self) -> Iterator[Any]:
        """Yields the objects that the object refers to."""
        yield from self.items or ()
        for key, value in self.entries or ():
            yield key
            yield value
        yield from self.attributes.values()
        yield from self.slots.values()
        if self.cell is not None:
            yield self.cell
        if self.tensor is not None:
            yield self.tensor[2]
        if self.place is not None:
            yield from gc.get_referents(self.value)

    def restore(self) -> None:
        """Restores these contents."""
        value = self.value
        if self.tensor is not None:
            _restore_tensor(value, self.tensor)
            return
        if safe_isinstance(value, types.CellType):
            _set_cell(value, self.cell)
            return
        if self.items is not None:
            base = _base(value)
            base.clear(value)
            adder = base.update if base is set else base.extend
            adder(value, self.items)
        if self.entries is not None:
            base = _base(value)
            base.clear(value)
            for key, item in self.entries:
                base.__setitem__(value, key, item)
        space = _space(value)
        space.clear()
        space.update(self.attributes)
        for name, held in self.slots.items():
            object.__setattr__(value, name, held)
        for name in slot_names(type(value)) if not safe_isinstance(value, (Frame, InterpretedGenerator)) else ():
            if name not in self.slots and is_set(value, name):
                object.__delattr__(value, name)


class Checkpoint:
    """State that a trace can change, at one moment.

    Args:
        world: the world of the capture.
        live: further objects of the trace to save: locals and stacks of the frames being interpreted.

    Attributes:
        contents: by ``id``, every mutable object that a shadow or something live reaches.
        running: ``id`` of the running frames, their variables and stacks: the position of a step, not its effects.
    """

    def __init__(self, world: CaptureContext, live: Iterable[Any] = ()) -> None:
        self.world = world
        heap = world.heap
        self.records = {id(record): (record, record.save()) for record in all_records(world)}
        self.class_writes = dict(world.class_writes)
        self.deferred = list(world.deferred)
        self.variables = world.context.count()
        self.freed = set(world.freed)
        self.states = len(world.pending_state)
        self.given = heap.memory.count
        self.live = tuple(live)
        roots: list[Any] = [
            *self.live,
            *frames(world),
            *self.class_writes.values(),
            *world.context.held(),
            *self.deferred,
        ]
        roots += [record.shadow for record in heap.by_real.values()]
        roots += [record.value for record in heap.cells.values()]
        roots += [value for space in heap.namespaces.values() for value in space.values.values()]
        self.running = {id(part) for frame in frames(world) for part in (frame, frame.locals, frame.stack)}
        self.contents: dict[int, Contents] = {}
        self._reach(roots)

    def rollback(self) -> None:
        """Restores every shadow and every saved object. Values read since stay guarded.

        Running frames get their variables back and continue from their current instruction; suspended generators are
        rewound.

        Raises:
            Unsupported: a tensor was changed in place, or optimizer state was created, since: the graph contains that.
                Or an iterator of C has given an item, which it cannot take back.
        """
        world = self.world
        if len(world.pending_state) != self.states:
            world.heap.refuse("SFX111", "reverts the creation of optimizer state")
        if world.heap.memory.count != self.given:
            world.heap.refuse("SFX111", "reverts a storage replacement")
        for value, writes in self._writes():
            if len(world.writes.to(value)) != writes:
                world.heap.refuse("SFX111", "reverts an in-place change of a tensor")
        if any(
            saved.place != place_of(saved.value) for saved in self.contents.values() if type(saved.value) in _ITERATORS
        ):
            world.heap.refuse("SFX111", "reverts what an iterator has given")
        running = {id(part) for frame in frames(world) for part in (frame, frame.stack)}
        changing = [saved for key, saved in self.contents.items() if key not in running]
        changing.sort(
            key=lambda saved: safe_isinstance(saved.value, (dict, set))
        )  # a key's hash may read restored values
        for saved in changing:
            saved.restore()
        for record in all_records(world):
            known = self.records.get(id(record))
            if known is not None:
                record.restore(known[1])
            else:
                record.reset()
        world.class_writes.clear()
        world.class_writes.update(self.class_writes)
        world.deferred[:] = self.deferred
        world.context.take_back(self.variables)
        world.freed.clear()
        world.freed.update(self.freed)

    def clone(self) -> Checkpoint:
        """Returns a copy; pruning it does not change this checkpoint."""
        copied = copy.copy(self)
        copied.contents = dict(self.contents)
        return copied

    def prune(self, roots: Iterable[Any]) -> int:
        """Removes objects created in the step that ``roots`` do not reach; returns their number."""
        kept = self._walk(roots)
        dead = [key for key, saved in self.contents.items() if key not in kept and not self.is_shadow(saved.value)]
        for key in dead:
            del self.contents[key]
        return len(dead)

    def made(self) -> list[Any]:
        """Returns the objects created in the step, in traversal order."""
        inner = (Frame, types.CellType)
        values = [saved.value for saved in self.contents.values() if not safe_isinstance(saved.value, inner)]
        return [value for value in values if not self.is_shadow(value) and not self._is_part_of_frame(value)]

    def is_shadow(self, value: Any) -> bool:
        return self.world.heap.record_of(value) is not None

    def parts(self, value: Any) -> Iterator[Any]:
        """Yields what an object referred to at this moment; nothing for the outside world's own objects."""
        saved = self.contents.get(id(value))
        if saved is not None:
            yield from saved.parts()
        yield from fixed_parts(value)

    def _is_part_of_frame(self, value: Any) -> bool:
        frames_ = [saved.value for saved in self.contents.values() if safe_isinstance(saved.value, Frame)]
        return any(value is frame.locals or value is frame.stack for frame in frames_)

    def _reach(self, roots: Iterable[Any]) -> None:
        seen: set[int] = set()
        todo = list(roots)[::-1]
        while todo:
            value = todo.pop()
            if id(value) in seen or type(value) in PLAIN_TYPES or self._is_outside(value):
                continue
            seen.add(id(value))
            contents = Contents.of(value, self.world.writes)
            if contents is not None:
                self.contents[id(value)] = contents
            todo += list(self.parts(value))[::-1]

    def _is_outside(self, value: Any) -> bool:
        """Returns True for pass-through objects: the trace never writes to them."""
        world = self.world
        record = world.heap.record_of(value)
        if record is not None:
            return record.shadow is record.real
        if safe_isinstance(value, types.FunctionType):
            return id(value) not in world.new_functions
        return safe_isinstance(value, types.CellType) and id(value) not in world.new_cells

    def _walk(self, roots: Iterable[Any]) -> dict[int, Any]:
        seen: dict[int, Any] = {}
        todo = list(roots)
        while todo:
            value = todo.pop()
            if id(value) not in seen and type(value) not in PLAIN_TYPES:
                seen[id(value)] = value
                todo += self.parts(value)
        return seen

    def _writes(self) -> Iterator[tuple[torch.Tensor, int]]:
        for saved in self.contents.values():
            if saved.tensor is not None:
                yield saved.value, saved.tensor[0]
        for record in self.world.heap.by_real.values():
            if safe_isinstance(record, TensorRecord) and id(record) not in self.records:
                yield record.shadow, 0


def all_records(world: CaptureContext) -> list[Record]:
    """Returns the records of objects, attributes of containers, cells and namespaces."""
    heap = world.heap
    found: list[Record] = list(heap.by_real.values())
    found += [record.instance for record in heap.by_real.values() if record.instance is not None]
    return [*found, *heap.cells.values(), *heap.namespaces.values()]


def frames(world: CaptureContext) -> Iterator[Frame]:
    """Yields the frames being interpreted, innermost first."""
    frame = world.interp.current_frame
    while frame is not None:
        yield frame
        frame = frame.back


def fixed_parts(value: Any) -> Iterable[Any]:
    """Yields the immutable references of an object: members of a tuple, a function's cells, a method's owner."""
    if safe_isinstance(value, (tuple, frozenset)):
        return value
    if type(value) is slice:
        return bounds_of(value)
    if safe_isinstance(value, types.FunctionType):
        return (*(value.__closure__ or ()), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    if safe_isinstance(value, types.MethodType):
        return (value.__self__, value.__func__)
    if safe_isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if safe_isinstance(value, (DeferredValue, DeferredCall)):
        return (*value.args, *value.kwargs.values())
    if safe_isinstance(value, TensorSnapshot):
        return (value.fake,)
    return ()


def _cell_contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def _set_cell(cell: types.CellType, value: Any) -> None:
    if value is not ABSENT:
        cell.cell_contents = value
    elif _cell_contents(cell) is not ABSENT:
        del cell.cell_contents


def _space(value: Any) -> dict[str, Any]:
    try:
        space = instance_dict(value)
    except AttributeError:
        return {}
    return space if safe_isinstance(space, dict) else {}


def _base(value: Any) -> Any:
    """Returns the class whose methods change members without running overrides."""
    for base in (OrderedDict, dict, list, deque, set):
        if safe_isinstance(value, base):
            return base
    raise TypeError(f"{type(value).__qualname__} is no container")


def _restore_tensor(value: torch.Tensor, saved: tuple[int, bool, Any, dict[Any, Any]]) -> None:
    _, requires_grad, grad, hooks = saved
    if value.is_leaf:
        if value.requires_grad != requires_grad:
            value.requires_grad_(requires_grad)
        if value.grad is not grad:
            value.grad = grad
    compat.set_tensor_hooks(value, hooks)


_ITERATORS = REBUILT | HANDED_ON
_FRAME = ("locals", "namespace", "stack", "pc", "result", "done")
_GENERATOR = ("frame", "started", "running")
_FIXED: tuple[type, ...] = (
    tuple,
    frozenset,
    types.MethodType,
    types.CodeType,
    functools.partial,
    weakref.ReferenceType,
    torch.dtype,
    torch.device,
    torch.SymInt,
    torch.SymFloat,
    torch.SymBool,
    enum.Enum,
    DeferredValue,
    DeferredCall,
    TensorSnapshot,
    NativeIterator,
)
