"""What the heap knows of each outside object: its shadow, where it is found, and how it looked when first read."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.common.plain_values import CONTAINERS, base_container, is_set, slot_names
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import instance_dict

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI


class Record:
    """One outside object and its shadow.

    Attributes:
        real: the object outside; never written during a capture.
        shadow: its stand-in inside the capture (the object itself where nothing can change).
        source: path to the object at entry.
        base: path from which its parts are reached (the object itself, where it is guarded by identity).
        through: Python's own container class below the object's class, ``None`` if it is that class itself
            and has every operator that an effect needs.
        plain: the object is a container of exactly one of Python's own classes.
        instance: the attributes of a container whose class is a subclass.
        unshadowed: the object stands for itself though C code could change it.
    """

    def __init__(
        self, heap: ShadowTableAPI, real: Any, shadow: Any, source: Source, base: Source | None = None
    ) -> None:
        self.heap = heap
        self.real = real
        self.shadow = shadow
        self.source = source
        self.base = base or source
        self.plain = type(real) in CONTAINERS
        self.through = None if self.plain and type(real) is not deque else base_container(type(real))
        self.instance: InstanceRecord | None = None
        self.unshadowed = False

    NOTES: tuple[str, ...] = ()
    """Attributes that say what the step has read and written: part of a checkpoint."""

    def fill(self) -> None:
        """Brings the whole contents in, guarded: C code is about to read them."""

    def save(self) -> dict[str, Any]:
        """The notes as they are now; the shadow's contents are saved by the checkpoint."""
        return {name: _copied(getattr(self, name)) if name in _COPIED else getattr(self, name) for name in self.NOTES}

    def restore(self, saved: dict[str, Any]) -> None:
        """Takes notes of :meth:`save` back."""
        for name, value in saved.items():
            setattr(self, name, _copied(value) if name in _COPIED else value)

    def reset(self) -> None:
        """Takes back what the step wrote since the object was first read."""


def _copied(value: Any) -> Any:
    return type(value)(value) if type(value) in (dict, list, set) else value


_COPIED = frozenset({"snapshot", "missing", "written", "removed", "values"})
"""Notes that are containers of the record itself."""


UNREAD: Any = type("Unread", (), {"__repr__": lambda self: "<gradient not read>"})()
"""``TensorRecord.grad`` of a leaf whose gradient the step has not looked at: nothing is guarded."""

OVERWRITTEN: Any = type("Overwritten", (), {"__repr__": lambda self: "<gradient overwritten>"})()
"""``TensorRecord.grad`` of a leaf whose gradient the step replaced without looking at the old one."""


class TensorRecord(Record):
    """A tensor; its shadow is a fake tensor with a proxy.

    Attributes:
        hooks: those of the shadow of a leaf before anything ran.
        home: a stand-in for the memory that it had, with its version counter, where the step gave it another
            (``.data =``).
        given: the memory that it has when the step has ended.
        grown: that is its own, which got larger (``resize_``).
        returned: it has the memory that it had.
        accumulator_hooked: the node that accumulates its gradient has hooks.
    """

    NOTES = ("grad",)

    def __init__(self, heap: ShadowTableAPI, real: Any, shadow: Any, source: Source, kind: str) -> None:
        super().__init__(heap, real, shadow, source)
        self.kind = kind
        self.grad: Any = None
        self.hooks: Any = None
        self.requires_grad = real.requires_grad
        self.entry_version = self.version
        self.entry_layout = (shadow.shape, shadow.stride())
        self.entry_memory = str(shadow.untyped_storage().nbytes())
        self.home: Any = None
        self.given: Any = None
        self.returned = self.grown = self.accumulator_hooked = False
        self.edge: Any = None if shadow.grad_fn is None else torch.autograd.graph.get_gradient_edge(shadow)

    @property
    def memory(self) -> Any:
        """A stand-in for the tensor in the memory that it has at entry."""
        return self.shadow if self.home is None else self.home

    @property
    def version(self) -> int:
        """The version of the shadow; tensors made in inference mode have none."""
        return 0 if self.shadow.is_inference() else int(self.shadow._version)

    def own_attributes(self) -> InstanceRecord:
        """What the program keeps in the tensor's ``__dict__``."""
        if self.instance is None:
            self.instance = InstanceRecord(self.heap, self.real, Attributes(), self.source, self.source)
        return self.instance

    def reset(self) -> None:
        if self.shadow.is_leaf:
            if self.grad is OVERWRITTEN:
                self.grad = UNREAD
            if self.shadow.requires_grad != self.requires_grad:
                self.shadow.requires_grad_(self.requires_grad)
            self.shadow.grad = None if self.grad is UNREAD else self.grad


class Attributes:
    """Holds the attributes that a step sets on an outside function, which stands for itself, or tensor."""


class InstanceRecord(Record):
    """An instance of a Python class; attributes come in one by one, when read.

    Attributes:
        shared: its ``__dict__`` is the shadow of a dict that another record is about, and that notes the changes.
    """

    NOTES = ("snapshot", "missing", "written", "removed", "filled")

    def __init__(self, heap: ShadowTableAPI, real: Any, shadow: Any, source: Source, base: Source) -> None:
        super().__init__(heap, real, shadow, source, base)
        self.filled = self.shared = False
        self.removed: set[str] = set()
        self.snapshot: dict[str, Any] = {}
        self.missing: set[str] = set()
        self.written: dict[str, None] = {}
        try:
            self.space = instance_dict(real)
            self.has_dict = True
        except AttributeError:
            self.space, self.has_dict = {}, False

    def get(self, name: str) -> Any:
        """Entry of the instance ``__dict__``, or :data:`ABSENT`."""
        if not self.has_dict:
            return ABSENT
        mine = object.__getattribute__(self.shadow, "__dict__")
        if name in mine:
            return mine[name]
        if self.filled or name in self.written:
            return ABSENT
        value = self._bring(name)
        if value is not ABSENT:
            mine[name] = value
        return value

    def _bring(self, name: str) -> Any:
        """What the entry was when the step began, guarded; :data:`ABSENT` where there was none."""
        if name in self.snapshot:
            return self.snapshot[name]
        if self.filled or name in self.missing:
            return ABSENT
        if name not in self.space:
            self.missing.add(name)
            self.heap.guard("absent", self.base, name)
            return ABSENT
        value = self.heap.shadow(self.space[name], self.heap.sources.attr(self.base, name), name)
        self.snapshot[name] = value
        return value

    def set(self, name: str, value: Any) -> None:
        mine = object.__getattribute__(self.shadow, "__dict__")
        if name not in mine:
            self.written.pop(name, None)  # new attributes come last, in the order they came
        self.written[name] = None
        mine[name] = value

    def delete(self, name: str) -> bool:
        """True if the attribute was there."""
        if self.get(name) is ABSENT:
            return False
        self._bring(name)  # whether there is anything to take out of the object outside
        self.written[name] = None
        self.removed.add(name)
        del object.__getattribute__(self.shadow, "__dict__")[name]
        return True

    def get_slot(self, name: str) -> Any:
        """An attribute kept in a ``__slots__`` entry."""
        try:
            return object.__getattribute__(self.shadow, name)
        except AttributeError:
            if name in self.written or name in self.snapshot or name in self.missing:
                raise
        value = self._bring_slot(name)
        if value is ABSENT:
            return object.__getattribute__(self.real, name)  # raises
        object.__setattr__(self.shadow, name, value)
        return value

    def _bring_slot(self, name: str) -> Any:
        """What the slot held when the step began, guarded; :data:`ABSENT` where it was not set."""
        if name in self.snapshot:
            return self.snapshot[name]
        if name in self.missing:
            return ABSENT
        if not is_set(self.real, name):
            self.missing.add(name)
            self.heap.guard("unset_slot", self.base, name)
            return ABSENT
        value = object.__getattribute__(self.real, name)
        value = self.snapshot[name] = self.heap.shadow(value, self.heap.sources.slot(self.base, name), name)
        return value

    def set_slot(self, name: str, value: Any) -> None:
        self.written[name] = None
        object.__setattr__(self.shadow, name, value)

    def delete_slot(self, name: str) -> None:
        """Raises AttributeError as Python does if the slot is not set."""
        if name not in self.written:
            self.get_slot(name)
        object.__delattr__(self.shadow, name)
        self._bring_slot(name)  # whether there is anything to take out of the object outside
        self.written[name] = None

    def fill(self) -> None:
        for name in slot_names(type(self.real)):
            if name not in self.written and is_set(self.real, name):
                self.get_slot(name)
        if self.has_dict and not self.filled:
            self.heap.guard("keys", self.heap.sources.slot(self.base, "__dict__"), tuple(self.space))
            for name in self.space:
                self.get(name)
            self.filled = True
            mine = object.__getattribute__(self.shadow, "__dict__")
            now = dict(mine)
            mine.clear()
            mine.update({name: now.pop(name) for name in self.space if name in now and name not in self.removed})
            mine.update(now)

    def reset(self) -> None:
        self.written = {}
        self.removed = set()
        self.filled = self.shared
        slots = slot_names(type(self.real))
        if self.has_dict and not self.shared:
            mine = object.__getattribute__(self.shadow, "__dict__")
            mine.clear()
            mine.update({name: value for name, value in self.snapshot.items() if name not in slots})
        for name in slots:
            if name in self.snapshot:
                object.__setattr__(self.shadow, name, self.snapshot[name])
            elif is_set(self.shadow, name):
                object.__delattr__(self.shadow, name)
