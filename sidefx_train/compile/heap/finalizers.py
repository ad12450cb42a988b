"""Objects whose death the program notices: ``__del__``, generators that clean up, weak references that call back."""

from __future__ import annotations

import abc
import ctypes
import functools
import gc
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train.compile.capture.cleanup import cleans_up
from sidefx_train.compile.heap import weak
from sidefx_train.compile.heap.library import is_library

if TYPE_CHECKING:
    from sidefx_train.compile.heap.heap import Heap

if not TYPE_CHECKING:
    from sidefx_train.compile.capture.kinds import isinstance

HOLDING: frozenset[type] = frozenset(
    {
        *(list, tuple, dict, set, frozenset, deque, OrderedDict, defaultdict),
        *(types.CellType, types.FunctionType, types.MethodType, functools.partial),
    }
)
"""Classes of Python's own whose instances take what they hold with them when they die."""

_MOST = 200
"""Objects looked at, of what a variable holds."""


def takes_along(cls: type) -> bool:
    """True if what instances of a class hold dies with them. A library's context managers, say, are left first."""
    return cls in HOLDING or not (is_library(cls.__module__) or issubclass(cls, (type, torch.Tensor, torch.nn.Module)))


def deletes(cls: type) -> bool:
    """True if instances of a class run Python code when they die."""
    return any(
        isinstance(vars(base).get("__del__"), types.FunctionType) for base in type.__getattribute__(cls, "__mro__")
    )


class Retired:
    """What a shadow of a class with ``__del__`` becomes when its capture is over."""


class RetiredAbstract(abc.ABC):  # noqa: B024 - for the layout in memory, which is another one below ``ABC``
    """Likewise, for classes below ``abc.ABC``."""


def retire(shadow: Any) -> None:
    """Has a shadow die without its ``__del__``."""
    for cls in (Retired, RetiredAbstract):
        try:
            object.__dict__["__class__"].__set__(shadow, cls)
        except TypeError:  # another layout in memory
            continue
        return
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(shadow))  # it never dies, not even when the process ends


def noticed(heap: Heap, value: Any) -> bool:
    """True if the program notices when a value of the trace dies, or something that it holds."""
    todo: list[Any] = [value]
    seen: set[int] = set()
    while todo and len(seen) < _MOST:
        item = todo.pop()
        if id(item) in seen or isinstance(item, torch.Tensor):  # torch has weak references of its own to those
            continue
        seen.add(id(item))
        if cleans_up(item):
            return True
        record = heap.record_of(item)
        if item is value and _may_be_missed(type(item)):
            return True
        if weakref.getweakrefcount(item) if record is None else _noticed_outside(record.real):
            return True
        held = item if record is None else record.real
        if takes_along(type(held)) and (record is None or type(held) in HOLDING):
            todo += gc.get_referents(held)
    return False


def _may_be_missed(cls: type) -> bool:
    """True for instances that a weak container may get to know behind a break, while a variable holds them."""
    return "__weakref__" in dir(cls) and not is_library(cls.__module__) and not issubclass(cls, torch.nn.Module)


def _noticed_outside(real: Any) -> bool:
    return weak.calls_back(real) or (deletes(type(real)) and not is_library(type(real).__module__))
