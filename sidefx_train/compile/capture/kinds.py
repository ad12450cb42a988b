"""``isinstance`` for values of the program.

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
