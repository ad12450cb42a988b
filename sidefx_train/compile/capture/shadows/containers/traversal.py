"""Traverses values as C code reads them: items of containers, and the containers of views and iterators."""

from __future__ import annotations

import collections
import functools
import gc
import types
from collections.abc import Callable, Iterable
from typing import Any

from sidefx_train.compile.capture.interpreter.generator_finalizers import COMPOSED
from sidefx_train.compile.common.plain_values import is_set, slot_names
from sidefx_train.compile.common.type_checks import safe_isinstance

_BASES: tuple[Any, ...] = (list, tuple, set, frozenset, collections.deque)
_DICTS: tuple[Any, ...] = ({}, collections.OrderedDict())
_VIEWS: tuple[Any, ...] = tuple(view for empty in _DICTS for view in (empty.keys(), empty.values(), empty.items()))
_SEQUENCES: tuple[Any, ...] = ([], (), collections.deque())

DICT_VIEWS: dict[type, Callable[[Any], Any]] = {
    type(getattr(base(), name)()): getattr(base, name)
    for base in (dict, collections.OrderedDict)
    for name in ("keys", "values", "items")
}
"""What makes a view of a dict of this class."""
VIEWS: tuple[type, ...] = tuple(type(view) for view in _VIEWS[:3])
_WALKERS = frozenset(
    {type(view) for view in _VIEWS}
    | {type(iter(empty)) for empty in (*_VIEWS, *_SEQUENCES, set())}
    | {type(reversed(empty)) for empty in (*_VIEWS, *_SEQUENCES)}
    | COMPOSED
    | {types.MappingProxyType, functools.partial}
)
READ_BY_C = frozenset({types.SimpleNamespace})
"""C classes whose instances are compared and printed by the contents of their ``__dict__``."""


def held_by(value: Any) -> Iterable[Any]:
    """Returns the objects that C code reading ``value`` may read, one level down."""
    if safe_isinstance(value, dict):
        return list(dict.values(value))
    for base in _BASES:
        if safe_isinstance(value, base):
            return list(base.__iter__(value))  # bypasses overridden methods
    cls = type(value)
    if cls in _WALKERS:
        return [held for held in gc.get_referents(value) if not callable(held)]
    if cls in READ_BY_C:
        return list(vars(value).values())
    if cls is slice:
        return (value.start, value.stop, value.step)
    return value.args if safe_isinstance(value, BaseException) else ()


def attributes_of(value: Any) -> dict[str, Any]:
    """Returns the attributes of an instance of a Python class by name, from its ``__dict__`` and its slots."""
    space = object.__getattribute__(value, "__dict__") if is_set(value, "__dict__") else {}
    slots = [name for name in slot_names(type(value)) if is_set(value, name)]
    return {**space, **{name: object.__getattribute__(value, name) for name in slots}}
