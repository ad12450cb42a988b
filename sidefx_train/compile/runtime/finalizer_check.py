"""Finds objects whose finalization, when the state of a suspended frame is dropped, would run code of the program.

A captured part applies its effects at its end, so objects dropped in it would be finalized too late for their
``__del__``, ``finally`` or weakref callbacks to see the program's state as in eager.
"""

from __future__ import annotations

import gc
import sys
import types
import weakref
from typing import Any

import torch

from sidefx_train.compile.capture.interpreter.generator_finalizers import HOLDERS, has_pending_finally
from sidefx_train.compile.capture.resume.suspension import State
from sidefx_train.compile.capture.shadows.finalizers import takes_along
from sidefx_train.compile.common.library_modules import is_library
from sidefx_train.compile.common.type_checks import deletes, safe_isinstance

_PLAIN: frozenset[type] = frozenset(
    {
        *(int, float, complex, bool, str, bytes, range, slice, type(None), type(...), type(NotImplemented)),
        *(torch.nn.Parameter, torch.dtype, torch.device, torch.Size),
        *(type, types.ModuleType, types.CodeType, types.BuiltinFunctionType),
    }
)
"""Classes of objects that own no objects of the program."""

_MOST = 2000
"""Limit of inspected objects: larger states are not checked."""


def observable_finalization(state: State) -> str | None:
    """Describes an object in a frame's state with observable finalization; ``None`` if there is none.

    Iterators that are variables themselves are excluded: the capture tracks those.

    Args:
        state: ``[cells, values]``, to which nothing else refers.
    """
    held: dict[int, Any] = {}
    counts: dict[int, int] = {}
    todo: list[Any] = list(state)
    top = True
    while todo and len(held) < _MOST:
        touched = _count_referents(todo, held, counts)
        todo = []
        for key in dict.fromkeys(touched):
            if sys.getrefcount(held[key]) != counts[key] + 2:  # the table's, and the argument's
                continue
            found = _observable(held[key], top)
            if found is not None:
                return found
            if type(held[key]) in HOLDERS or takes_along(type(held[key])):
                todo.append(held[key])
        top = False
    return None


def _count_referents(containers: list[Any], held: dict[int, Any], counts: dict[int, int]) -> list[int]:
    touched = []
    for container in containers:
        for item in gc.get_referents(container):
            if type(item) not in _PLAIN:
                key = id(item)
                held[key] = item
                counts[key] = counts.get(key, 0) + 1
                touched.append(key)
    return touched


def _observable(item: Any, top: bool) -> str | None:
    cls = type(item)
    if cls in HOLDERS:
        return (
            f"a suspended {cls.__name__}, which has a pending finally"
            if not top and has_pending_finally(item)
            else None
        )
    if safe_isinstance(item, torch.Tensor):  # torch's own references to tensors are of other classes, or have callbacks
        plain = any(type(ref) is weakref.ref and ref.__callback__ is None for ref in weakref.getweakrefs(item))
        return "a tensor, to which weak references refer" if plain else None
    if is_library(cls.__module__):
        return None
    if deletes(cls):
        return f"a {cls.__qualname__}, whose class has __del__"
    if weakref.getweakrefcount(item):
        return f"a {cls.__qualname__}, to which weak references refer"
    return None
