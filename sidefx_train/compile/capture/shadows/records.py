"""Records of outside objects: the shadow, the source, and the state at first read."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.common.plain_values import CONTAINERS, base_container, is_set, slot_names
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import instance_dict

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI


class Record:
    """One outside object and its shadow.

    Attributes:
        real: the outside object; never written during a capture.
        shadow: its replacement inside the capture (the object itself if nothing can change).
        source: path to the object at entry.
        base: path to its parts (the object itself, if it is guarded by identity).
        through: Python's own container class below the object's class, ``None`` if it is that class itself and has
            every operator that an effect needs.
        plain: the object is a container of exactly one of Python's own classes.
        instance: the attributes of a container whose class is a subclass.
        unshadowed: the object passes through although C code could change it.
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
    """Attributes that record what the step has read and written: part of a checkpoint."""

    def fill(self) -> None:
        """Reads and guards all contents: C code is about to read them."""

    def save(self) -> dict[str, Any]:
        """Returns the current values of :attr:`NOTES`; the checkpoint saves the shadow's contents."""
        return {name: _copied(getattr(self, name)) if name in _COPIED else getattr(self, name) for name in self.NOTES}

    def restore(self, saved: dict[str, Any]) -> None:
        """Restores the result of :meth:`save`."""
        for name, value in saved.items():
            setattr(self, name, _copied(value) if name in _COPIED else value)

    def reset(self) -> None:
        """Reverts what the step wrote since the object was first read."""


def _copied(value: Any) -> Any:
    return type(value)(value) if type(value) in (dict, list, set) else value


_COPIED = frozenset({"snapshot", "edits", "missing", "written", "removed", "values"})
"""Attributes of :attr:`Record.NOTES` that are containers of the record itself."""


UNREAD: Any = type("Unread", (), {"__repr__": lambda self: "<gradient not read>"})()
"""``TensorRecord.grad`` of a leaf whose gradient the step has not read: nothing is guarded."""

OVERWRITTEN: Any = type("Overwritten", (), {"__repr__": lambda self: "<gradient overwritten>"})()
"""``TensorRecord.grad`` of a leaf whose gradient the step replaced without reading the old one."""


class TensorRecord(Record):
    """A tensor; its shadow is a fake tensor with a proxy.

    Attributes:
        hooks: hooks of a leaf's shadow before anything ran.
        carried: for each kind of hook, those that the leaf has at entry: number of the shadow's hook -> (shadow of the
            leaf's dict of hooks, key in it).
        entry_storage: fake tensor of the entry storage, with its version counter, if the step replaced the storage
            (``.data =``).
        new_storage: fake tensor of the storage at the end of the step.
        resized: that storage is the resized entry storage (``resize_``).
        returned: the tensor has its entry storage again.
        accumulator_hooked: its ``AccumulateGrad`` node has hooks.
    """

    NOTES = ("grad",)

    def __init__(self, heap: ShadowTableAPI, real: Any, shadow: Any, source: Source, kind: str) -> None:
        super().__init__(heap, real, shadow, source)
        self.kind = kind
        self.grad: Any = None
        self.hooks: Any = None
        self.carried: Any = ({}, {})
        self.requires_grad = real.requires_grad
        self.entry_version = self.version
        self.entry_layout = (shadow.shape, shadow.stride())
        self.entry_memory = str(shadow.untyped_storage().nbytes())
        self.entry_storage: Any = None
        self.new_storage: Any = None
        self.returned = self.resized = self.accumulator_hooked = False
        self.edge: Any = None if shadow.grad_fn is None else torch.autograd.graph.get_gradient_edge(shadow)

    @property
    def memory(self) -> Any:
        """The fake tensor of the storage that the tensor has at entry."""
        return self.shadow if self.entry_storage is None else self.entry_storage

    @property
    def version(self) -> int:
        """Version of the shadow; tensors created in inference mode have none."""
        return 0 if self.shadow.is_inference() else int(self.shadow._version)

    def own_attributes(self) -> InstanceRecord:
        """Returns the record of the tensor's ``__dict__``."""
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


class LeafRecord(Record):
    """A leaf tensor that is no input of the graph itself, such as a ``DTensor``, whose local tensor is one.

    Attributes:
        grad: gradient at entry, or one of the marks for a gradient that was not read.
        requires_grad: at entry.
        gradient_dtype: dtype of its gradients at entry.
        version: version of the shadow before anything ran.
        hooks: hooks of the shadow before anything ran; ``None`` for none.
        carried: as of a :class:`TensorRecord`.
    """

    NOTES = ("grad",)

    def __init__(self, heap: ShadowTableAPI, real: Any, shadow: Any, source: Source) -> None:
        super().__init__(heap, real, shadow, source)
        self.grad: Any = UNREAD
        self.hooks: Any = None
        self.carried: Any = ({}, {})
        self.requires_grad = real.requires_grad
        self.gradient_dtype = compat.gradient_dtype(real)
        self.version = 0 if shadow.is_inference() else int(shadow._version)

    def reset(self) -> None:
        if self.grad is OVERWRITTEN:
            self.grad = UNREAD
        self.shadow.grad = None if self.grad is UNREAD else self.grad


class Attributes:
    """Holds the attributes that a step sets on an outside function, which passes through, or tensor."""


class InstanceRecord(Record):
    """An instance of a Python class; attributes are read one by one.

    Attributes:
        shared: its ``__dict__`` is the shadow of a dict with its own record, which tracks the changes.
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
        """Returns an entry of the instance ``__dict__``, or :data:`ABSENT`."""
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
        """Returns the entry at the beginning of the step, guarded; :data:`ABSENT` if there was none."""
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
            self.written.pop(name, None)  # new attributes come last, in insertion order
        self.written[name] = None
        mine[name] = value

    def delete(self, name: str) -> bool:
        """Returns True if the attribute existed."""
        if self.get(name) is ABSENT:
            return False
        self._bring(name)  # must the attribute of the real object be deleted?
        self.written[name] = None
        self.removed.add(name)
        del object.__getattribute__(self.shadow, "__dict__")[name]
        return True

    def get_slot(self, name: str) -> Any:
        """Returns an attribute stored in a slot of ``__slots__``."""
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
        """Returns the slot's value at the beginning of the step, guarded; :data:`ABSENT` if it was not set."""
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
        """Deletes a slot's value; raises AttributeError like Python if it is not set."""
        if name not in self.written:
            self.get_slot(name)
        object.__delattr__(self.shadow, name)
        self._bring_slot(name)  # must the slot of the real object be cleared?
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
