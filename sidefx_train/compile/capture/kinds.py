"""``isinstance`` and ``getattr`` for values of the program.

Python's own, where the class alone does not say yes, asks the object for its ``__class__``: that runs the program's
``__getattribute__``, if its class has one, which the program would notice. Modules that look at values of the program
import this one under the same name, where type checkers do not look: it narrows types as Python's does.
"""

from __future__ import annotations

import builtins
import types
from typing import Any

_type_attribute = type.__getattribute__
_isinstance = builtins.isinstance


def isinstance(value: Any, classes: Any) -> bool:
    """``builtins.isinstance(value, classes)``, but objects with a ``__getattribute__`` of their own are not asked."""
    cls = type(value)
    if type(_type_attribute(cls, "__getattribute__")) is types.FunctionType:
        return issubclass(cls, classes)
    return _isinstance(value, classes)


def attribute_of(value: Any, name: str, default: Any = None) -> Any:
    """``getattr(value, name, default)`` for what callables say of themselves.

    A ``__getattr__`` or ``__getattribute__`` of the program's is not run.
    """
    if type(value) in _PLAIN:
        return getattr(value, name, default)
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return default


_PLAIN = frozenset({types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodDescriptorType})
