"""Finds deferred values in what C code formats: the string exists only after the graph has run."""

from __future__ import annotations

import collections
import types
from typing import Any, Literal

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.interpreter.object_model.attributes import is_c_level
from sidefx_train.compile.capture.shadows.containers.traversal import held_by
from sidefx_train.compile.capture.shadows.deferred_values import DeferredValue
from sidefx_train.compile.common.type_checks import safe_isinstance

Found = Literal["", "shown", "hidden"]
_LATE = (DeferredValue, torch.Tensor, *compat.SYMBOLS)
_CONTAINERS = (list, tuple, set, frozenset, dict, collections.deque, slice)
_METHODS = {"repr": ("__repr__",), "ascii": ("__repr__",), "str": ("__str__", "__repr__")}


def deferred_in(value: Any, name: str = "") -> Found:
    """Returns whether the string of a value contains values known only after the step.

    Args:
        value: the value to format.
        name: ``str``, ``repr``, ``ascii`` or ``format``: if the value's class defines a Python method for it, the
        interpreter calls that method, whose own formatting is checked separately.

    Returns:
        ``"shown"`` if it does, ``"hidden"`` if such a value is inside a C object that cannot be copied now, else
        ``""``.
    """
    todo: list[tuple[Any, bool]] = [(value, False)]
    seen: set[int] = set()
    found: Found = ""
    if safe_isinstance(value, _LATE):
        return "shown"
    if name and has_python_text(type(value), name):
        return found
    while todo:
        item, hidden = todo.pop()
        if safe_isinstance(item, _LATE):
            if hidden:
                return "hidden"
            found = "shown"
        elif id(item) not in seen:
            seen.add(id(item))
            hidden = hidden or not safe_isinstance(item, _CONTAINERS)
            todo += [(part, hidden) for part in held_by(item)]
            if safe_isinstance(item, dict):
                todo += [(key, hidden) for key in dict.keys(item)]
    return found


def has_python_text(cls: type, name: str) -> bool:
    """Returns True if a Python method of the class makes the string, by Python's own lookup rules."""
    methods = ("__format__", "__str__", "__repr__") if name == "format" else _METHODS[name]
    for method in methods:
        found = next((vars(base)[method] for base in cls.__mro__ if method in vars(base)), None)
        if found is not vars(object).get(method):
            return not is_c_level(found)
    return False


def as_shown(value: Any, method: str) -> Any:
    """Converts a container, whose own method has called that of its base, to what that C method formats.

    Args:
        value: an instance of a subclass of ``list``, ``tuple`` or ``dict``.
        method: the slot wrapper's name.

    Returns:
        The items in a container of the base class; ``None`` if the method formats more than the items.
    """
    cls = type(value)
    for base in (tuple, list, dict):
        if issubclass(cls, base):
            shows = next((owner for owner in cls.__mro__ if type(vars(owner).get(method)) is _WRAPPER), object)
            if shows is base:
                return dict(dict.items(value)) if base is dict else base(base.__iter__(value))
    return None


_WRAPPER = types.WrapperDescriptorType
