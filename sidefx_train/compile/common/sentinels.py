"""Sentinels and sets of code that parts of the compiler share. Imports nothing of the compiler."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "<absent>", "__bool__": lambda self: False})()
"""Result of a lookup that found nothing."""

NATIVE_CODE: set[int] = set()
"""Ids of code of this package's functions that interpreted programs may hold: run natively, never interpreted."""

TRANSPARENT: set[types.CodeType] = set()
"""Code of functions that may lie between two interpreted frames: they return the inner frame's result as the result of
the outer frame's call, unchanged. A part of a step may end in the inner frame."""


def transparent(fn: _Function) -> _Function:
    """Adds a function, as a decorator, to those that may lie between two interpreted frames."""
    TRANSPARENT.add(fn.__code__)
    return fn


DYNAMIC_DIMS = "_sidefx_dynamic"
"""Attribute of a tensor with the dimensions that :func:`sidefx_train.mark_dynamic` marked."""
