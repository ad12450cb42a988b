"""Classifies and reads values of the program without calling their own methods: containers, slots, definitions."""

from __future__ import annotations

import enum
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any

import torch

from sidefx_train.compile.common.type_checks import HEAP_TYPE, instance_dict, safe_isinstance

PLAIN_TYPES: set[type] = {int, float, complex, str, bytes, bool, type(None), type(Ellipsis), type(NotImplemented)}

DEFINITIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    type,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
)

CONTAINERS: frozenset[type] = frozenset({list, deque, dict, OrderedDict, defaultdict, set})


_CHANGING = (list, deque, dict, set, bytearray, types.GeneratorType, torch.Tensor)
"""Objects that their methods in C change."""


def is_plain(value: Any) -> bool:
    """Returns True for an immutable value of plain Python, or a tuple or frozenset of such values."""
    if type(value) in PLAIN_TYPES:
        return True
    if type(value) in (tuple, frozenset):
        return all(is_plain(item) for item in value)
    return False


DERIVED_FROM: tuple[type, ...] = (int, float, complex, str, bytes)
"""Python's own immutable classes that programs may subclass: instances may have attributes."""


def is_derived(cls: type) -> bool:
    """Returns True for a Python class whose instances are numbers or strings."""
    return bool(cls.__flags__ & HEAP_TYPE) and issubclass(cls, DERIVED_FROM) and not issubclass(cls, enum.Enum)


def exact_value(value: Any) -> Any:
    """Returns the number or string value of an instance of a subclass, bypassing the class's own methods."""
    if safe_isinstance(value, str):
        return str.__str__(value)
    if safe_isinstance(value, bytes):
        return bytes.__getitem__(value, slice(None))
    if safe_isinstance(value, int):
        return int.__int__(value)
    if safe_isinstance(value, float):
        return float.__float__(value)
    return complex(*(vars(complex)[part].__get__(value) for part in ("real", "imag")))


def bounds_of(value: slice) -> tuple[Any, Any, Any]:
    """Returns start, stop and step of a slice; each may be any object."""
    return value.start, value.stop, value.step


def is_definition(value: Any) -> bool:
    """Returns True for objects that a module defines once: functions, classes, other modules."""
    return issubclass(type(value), DEFINITIONS)  # isinstance() would run a Python-level __getattribute__


def is_lasting(value: Any) -> bool:
    """Returns True for a definition that does the same whatever the program has done since: no C method of a container,
    generator or tensor, such as a module's ``register = _registered.append``."""
    if not is_definition(value):
        return False
    return not issubclass(type(value), types.BuiltinMethodType) or not safe_isinstance(value.__self__, _CHANGING)


def slot_names(cls: type) -> list[str]:
    """Returns the names of the ``__slots__`` entries of a class and its bases, as attributes."""
    names: list[str] = []
    for base in cls.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in [slots] if safe_isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return [name for name in names if name not in ("__dict__", "__weakref__") and not _is_hidden(cls, name)]


def _is_hidden(cls: type, slot: str) -> bool:
    """Returns True if a class after the slot's class in the MRO overrides the name, for example by a property."""
    found = next((vars(base)[slot] for base in cls.__mro__ if slot in vars(base)), None)
    return found is not None and type(found) is not types.MemberDescriptorType


def instance_dict_of_plain(value: Any) -> dict[str, Any]:
    """Returns the instance ``__dict__``, empty for objects without one."""
    try:
        return instance_dict(value)
    except AttributeError:
        return {}


def is_set(value: Any, slot: str) -> bool:
    """Returns True if a slot attribute has a value."""
    try:
        object.__getattribute__(value, slot)
    except AttributeError:
        return False
    return True


def base_of(container: Any) -> Any:
    """Returns the class whose methods change entries without running overrides."""
    return OrderedDict if safe_isinstance(container, OrderedDict) else dict


def stored_entries(container: dict[Any, Any]) -> dict[Any, Any]:
    """Returns the entries of a dict, bypassing the methods of its class."""
    base = base_of(container)
    return {key: dict.__getitem__(container, key) for key in base.__iter__(container)}


def base_container(cls: type) -> type | None:
    """Returns Python's own container class that a class derives from."""
    return next((base for base in (OrderedDict, dict, list, deque, set) if issubclass(cls, base)), None)


def is_named_tuple(cls: type) -> bool:
    """Returns True for a class of named tuples whose instances have no attributes besides."""
    return issubclass(cls, tuple) and hasattr(cls, "_fields") and not cls.__dictoffset__


def make_tuple(cls: Any, items: Iterable[Any]) -> Any:
    """Returns a tuple of class ``cls``, created without its own ``__new__``; C structures need theirs."""
    return cls(tuple(items)) if is_structure(cls) or cls is torch.Size else tuple.__new__(cls, items)


def is_structure(cls: Any) -> bool:
    """Returns True for tuples with named fields that C code defines (``time.struct_time``,
    ``torch.return_types.max``)."""
    return type(vars(cls).get("n_sequence_fields")) is int


maxlen_of = vars(deque)["maxlen"].__get__
"""Returns the ``maxlen`` of a deque; runs no ``__getattribute__`` of its class."""
factory_of = vars(defaultdict)["default_factory"].__get__
"""Returns the ``default_factory`` of a defaultdict; runs no ``__getattribute__`` of its class."""


def empty_like(real: Any) -> Any:
    """Returns an empty container of the same class."""
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
        deque.__init__(made, (), maxlen_of(real))
        return made
    if safe_isinstance(real, defaultdict):
        made = defaultdict.__new__(cls)
        defaultdict.__init__(made, factory_of(real))
        return made
    if base is not None:
        return base.__new__(cls)
    raise TypeError(f"cannot make an empty {cls.__qualname__}")


def is_member_of_c_enum(value: Any) -> bool:
    """Returns True for a constant of an enumeration that pybind11 made (``SDPBackend.MATH``): there is one of each."""
    cls = type(value)
    return "__entries" in vars(cls) and any(value is member for member in cls.__members__.values())
