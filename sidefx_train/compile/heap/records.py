"""What the heap knows of each outside object: its shadow, where it is found, and how it looked when first read."""

from __future__ import annotations

import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train.compile.capture.kinds import instance_dict
from sidefx_train.compile.capture.world import ABSENT
from sidefx_train.compile.heap.source import Source

if TYPE_CHECKING:
    from sidefx_train.compile.heap.heap import Heap

if not TYPE_CHECKING:
    from sidefx_train.compile.capture.kinds import isinstance


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

    def __init__(self, heap: Heap, real: Any, shadow: Any, source: Source, base: Source | None = None) -> None:
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
    """

    NOTES = ("grad",)

    def __init__(self, heap: Heap, real: Any, shadow: Any, source: Source, kind: str) -> None:
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
        self.returned = self.grown = False
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

    def __init__(self, heap: Heap, real: Any, shadow: Any, source: Source, base: Source) -> None:
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


class ListRecord(Record):
    """A list or deque. Until something reads it, the shadow holds only what the step appended."""

    NOTES = ("filled", "snapshot")

    def __init__(self, heap: Heap, real: Any, shadow: Any, source: Source, base: Source) -> None:
        super().__init__(heap, real, shadow, source, base)
        self.filled = False
        self.snapshot: list[Any] = []

    def fill(self) -> None:
        if self.filled:
            return
        if self.base.label in self.heap.growing:
            self.heap.refuse("SFX114", f"reads the whole of {self.base.label}, which grows from call to call")
        self.filled = True
        base = list if isinstance(self.shadow, list) else deque
        self.heap.guard("length", self.base, base.__len__(self.real))
        tail = list(base.__iter__(self.shadow))
        base.clear(self.shadow)
        for index, item in enumerate(list(base.__iter__(self.real))):
            base.append(self.shadow, self.heap.shadow(item, self.heap.sources.item(self.base, index)))
        self.snapshot = list(base.__iter__(self.shadow))
        base.extend(self.shadow, tail)

    def reset(self) -> None:
        base = list if isinstance(self.shadow, list) else deque
        base.clear(self.shadow)
        base.extend(self.shadow, self.snapshot)

    def from_end(self, index: int) -> Any:
        """The item at a negative index, read without the rest; :data:`ABSENT` if that cannot be."""
        if self.filled or not self.plain or type(self.real) is not list or index >= 0:
            return ABSENT
        if -index <= len(self.shadow):
            return self.shadow[index]
        outside = index + len(self.shadow)
        if -outside > len(self.real):
            return ABSENT
        return self.heap.shadow(self.real[outside], self.heap.sources.item(self.base, outside))

    def length(self) -> Any:
        """The length, symbolic for a list that grows; ``None`` if that takes reading the whole."""
        if self.filled or not self.plain or type(self.real) is not list:
            return None
        source = self.heap.sources.call(self.heap.sources.slot(self.base, "__len__"))
        if self.shadow or source.label in self.heap.symbolic:
            return self.heap.length(len(self.real), source) + len(self.shadow)
        self.heap.guard("length", self.base, len(self.real))
        return len(self.real)

    @property
    def appended(self) -> list[Any]:
        """What an unread list has gained."""
        return [] if self.filled else list(self.shadow)


class DictRecord(Record):
    """A dict, OrderedDict or defaultdict; plain keys come in one by one until the whole is read."""

    NOTES = ("filled", "snapshot", "missing")

    def __init__(self, heap: Heap, real: Any, shadow: Any, source: Source, base: Source) -> None:
        super().__init__(heap, real, shadow, source, base)
        self.filled = False
        self.snapshot: dict[Any, Any] = {}
        self.missing: set[Any] = set()

    def bring(self, key: Any) -> bool:
        """Brings the entry of ``key`` in, if there is one; True if the shadow has the key afterwards."""
        self._pin_written()
        if dict.__contains__(self.shadow, key):
            return True
        if self.filled or key in self.missing or key in self.snapshot:
            return False
        real_key = self.heap.real_key(key)
        if real_key is ABSENT:
            return False
        if not dict.__contains__(self.real, real_key):
            self.missing.add(key)
            self.heap.guard("no_item", self.base, real_key)
            return False
        self._take(key, real_key)
        return True

    def _pin_written(self) -> None:
        """What the step wrote unread is about to be compared with what it reads."""
        if not self.filled and dict.__len__(self.shadow) > len(self.snapshot):
            for key in _base(self.shadow).__iter__(self.shadow):
                if key not in self.snapshot:
                    self.heap.identities.pin_key(key)

    def _take(self, key: Any, real_key: Any) -> None:
        value = dict.__getitem__(self.real, real_key)
        hint = key if isinstance(key, str) else ""
        value = self.heap.shadow(value, self.heap.sources.item(self.base, real_key), hint)
        _base(self.shadow).__setitem__(self.shadow, key, value)
        self.snapshot[key] = value

    def fill(self) -> None:
        if self.filled:
            return
        self._pin_written()
        keys = tuple(_base(self.real).__iter__(self.real))
        if not keys:
            self.heap.guard("length", self.base, 0)
        else:
            self.heap.guard("keys", self.base, keys)
        changed = stored_entries(self.shadow)
        _base(self.shadow).clear(self.shadow)
        gone = {key for key in self.snapshot if key not in changed}
        order: list[Any] = []
        for position, real_key in enumerate(keys):
            key = self.heap.shadow_key(real_key, self.base, position)
            order.append(key)
            if key in gone:
                continue
            if key in changed:
                _base(self.shadow).__setitem__(self.shadow, key, changed.pop(key))
                if key not in self.snapshot:  # written before it was ever read
                    self.snapshot[key] = ABSENT
            else:
                self._take(key, real_key)
        for key, value in changed.items():
            _base(self.shadow).__setitem__(self.shadow, key, value)
        self.snapshot = {key: self.snapshot[key] for key in order if key in self.snapshot}  # not in order of reading
        self.filled = True

    def reset(self) -> None:
        self.snapshot = {key: value for key, value in self.snapshot.items() if value is not ABSENT}
        base = _base(self.shadow)
        base.clear(self.shadow)
        for key, value in self.snapshot.items():
            base.__setitem__(self.shadow, key, value)
        self.filled = False

    def length(self) -> int | None:
        """Length without reading the contents, where nothing was written yet."""
        if self.filled or any(key not in self.snapshot for key in _base(self.shadow).__iter__(self.shadow)):
            return None
        if len(self.snapshot) != dict.__len__(self.shadow):
            return None
        held = (item for entry in dict.items(self.real) for item in entry)
        if any(isinstance(item, weakref.ref) for item in held):  # entries go with what they refer to
            return None
        self.heap.guard("length", self.base, dict.__len__(self.real))
        return dict.__len__(self.real)

    def same_entries(self) -> bool:
        """True if the step changed nothing."""
        now = stored_entries(self.shadow)
        return len(now) == len(self.snapshot) and all(
            key in self.snapshot and self.snapshot[key] is value for key, value in now.items()
        )


class CellRecord(Record):
    """A closure cell that existed before the capture.

    Attributes:
        emptied: the step deleted the variable without having read what it held.
    """

    NOTES = ("read", "initial", "value", "emptied")

    def __init__(self, heap: Heap, real: types.CellType, source: Source) -> None:
        super().__init__(heap, real, real, source)
        self.read = self.emptied = False
        self.initial: Any = ABSENT
        self.value: Any = ABSENT

    def get(self, name: str) -> Any:
        if not self.read:
            self.read = True
            try:
                contents = self.real.cell_contents
            except ValueError:
                self.heap.guard("empty_cell", self.source, None)
                return ABSENT
            value = self.heap.shadow(contents, self.heap.sources.cell(self.source), name)
            self.value = self.initial = value
        return self.value

    def set(self, value: Any) -> None:
        self.emptied = value is ABSENT and self.initial is ABSENT
        self.read = True
        self.value = value

    def reset(self) -> None:
        self.emptied = False
        self.read = self.initial is not ABSENT
        self.value = self.initial


class NamespaceRecord(Record):
    """A module's globals: reads are guarded, writes are kept aside."""

    NOTES = ("values", "snapshot")

    def __init__(self, heap: Heap, real: dict[str, Any], source: Source) -> None:
        super().__init__(heap, real, real, source)
        self.values: dict[str, Any] = {}
        self.snapshot: dict[str, Any] = {}

    def get(self, name: str) -> Any:
        if name in self.values:
            return self.values[name]
        if name not in self.real:
            if self.heap.trusts(self.real):
                self.heap.definitions.took(self.real, name, ABSENT)
            else:
                self.heap.guard("no_item", self.source, name)
            return ABSENT
        value = self.real[name]
        if self.heap.trusts(self.real) and is_definition(value):
            self.heap.definitions.took(self.real, name, value)
            return value
        value = self.heap.shadow(value, self.heap.sources.item(self.source, name), name)
        self.values[name] = self.snapshot[name] = value
        return value

    def set(self, name: str, value: Any) -> None:
        self.values[name] = value

    def delete(self, name: str) -> bool:
        """True if the name was there."""
        if self.get(name) is ABSENT:
            return False
        if name not in self.snapshot:  # is there anything to take out of the namespace outside?
            self.values.pop(name, None)
            self.get(name)
        self.values[name] = ABSENT
        return True

    def reset(self) -> None:
        self.values = dict(self.snapshot)


PLAIN_TYPES: set[type] = {int, float, complex, str, bytes, bool, type(None), type(Ellipsis), type(NotImplemented)}


def is_plain(value: Any) -> bool:
    """True for an immutable value of plain Python, or a tuple or frozenset of such."""
    if type(value) in PLAIN_TYPES:
        return True
    if type(value) in (tuple, frozenset):
        return all(is_plain(item) for item in value)
    return False


def bounds_of(value: slice) -> tuple[Any, Any, Any]:
    """Start, stop and step of a slice, each any object."""
    return value.start, value.stop, value.step


DEFINITIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    type,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
)


def is_definition(value: Any) -> bool:
    """True for what a module defines once: functions, classes, other modules."""
    return issubclass(type(value), DEFINITIONS)  # isinstance() would run a Python-level __getattribute__


def slot_names(cls: type) -> list[str]:
    """Names of the ``__slots__`` entries of a class and its bases, as attributes."""
    names: list[str] = []
    for base in cls.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return [name for name in names if name not in ("__dict__", "__weakref__") and not _is_hidden(cls, name)]


def _is_hidden(cls: type, slot: str) -> bool:
    """True if a class behind the one with the slot has a property, or anything else, of that name."""
    found = next((vars(base)[slot] for base in cls.__mro__ if slot in vars(base)), None)
    return found is not None and type(found) is not types.MemberDescriptorType


def instance_space(value: Any) -> dict[str, Any]:
    """The instance ``__dict__``, empty for objects without one."""
    try:
        return instance_dict(value)
    except AttributeError:
        return {}


def is_set(value: Any, slot: str) -> bool:
    """True if an attribute kept in a slot has a value."""
    try:
        object.__getattribute__(value, slot)
    except AttributeError:
        return False
    return True


def _base(container: Any) -> Any:
    """The class whose methods move entries without running overrides."""
    return OrderedDict if isinstance(container, OrderedDict) else dict


def stored_entries(container: dict[Any, Any]) -> dict[Any, Any]:
    """What a dict holds, past the methods of its class."""
    base = _base(container)
    return {key: dict.__getitem__(container, key) for key in base.__iter__(container)}


def base_container(cls: type) -> type | None:
    """Python's own container class that a class derives from."""
    return next((base for base in (OrderedDict, dict, list, deque, set) if issubclass(cls, base)), None)


def make_tuple(cls: Any, items: Iterable[Any]) -> Any:
    """A tuple of class ``cls``, made past its own ``__new__``; those made by C have no other."""
    return cls(tuple(items)) if is_structure(cls) or cls is torch.Size else tuple.__new__(cls, items)


def is_structure(cls: Any) -> bool:
    """True for tuples with named fields that C code defines (``time.struct_time``, ``torch.return_types.max``)."""
    return type(vars(cls).get("n_sequence_fields")) is int


def empty_like(real: Any) -> Any:
    """An empty container of the same class."""
    cls = type(real)
    if cls is deque:
        return deque(maxlen=real.maxlen)
    if cls is defaultdict:
        return defaultdict(real.default_factory)
    if cls in CONTAINERS:
        return cls()
    base: Any = base_container(cls)
    made: Any
    if base is deque:
        made = deque.__new__(cls)
        deque.__init__(made, (), real.maxlen)
        return made
    if isinstance(real, defaultdict):
        made = defaultdict.__new__(cls)
        defaultdict.__init__(made, real.default_factory)
        return made
    if base is not None:
        return base.__new__(cls)
    raise TypeError(f"cannot make an empty {cls.__qualname__}")


CONTAINERS: frozenset[type] = frozenset({list, deque, dict, OrderedDict, defaultdict, set})
