"""Values of symbolic numbers, guarded: for C code that hashes them, or takes Python's own numbers alone."""

from __future__ import annotations

import operator
from collections import deque
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common.plain_values import (
    base_of,
    empty_like,
    is_plain,
    make_tuple,
    slot_names,
    stored_entries,
)
from sidefx_train.compile.common.type_checks import safe_isinstance


def concrete(value: Any) -> Any:
    """Returns a symbolic number's value, guarded, for hashing or C code; ragged sizes have none and are hashed so."""
    if compat.is_ragged_size(value):
        return value
    if safe_isinstance(value, (torch.SymInt, torch.SymFloat)):
        plain = int(value) if safe_isinstance(value, torch.SymInt) else float(value)
        if plain == 0 and type(value) is torch.SymFloat and not compat.is_unbacked(value):
            plain = float(compat.hint_of(value))  # sympy has no negative zero
        kind = compat.numpy_class(value)
        return plain if kind is None else kind(plain)
    if safe_isinstance(value, torch.SymBool):
        return bool(value)
    if type(value) is tuple and not is_plain(value):
        return tuple(concrete(item) for item in value)
    return value


def concrete_within(value: Any, kinds: tuple[type, ...] = compat.SYMBOLS) -> Any:
    """Returns a value with :func:`concrete` numbers, also in containers, which are copied if they change.

    Args:
        value: any value.
        kinds: types of symbolic numbers to convert.
    """
    if type(value) in kinds:
        return concrete(value)
    if type(value) is slice:
        bounds = (value.start, value.stop, value.step)
        return slice(*(concrete_within(each, kinds) for each in bounds)) if {*map(type, bounds)} & {*kinds} else value
    if safe_isinstance(value, tuple):
        items = [concrete_within(item, kinds) for item in tuple.__iter__(value)]
        return value if all(map(operator.is_, items, tuple.__iter__(value))) else make_tuple(type(value), items)
    if safe_isinstance(value, (list, deque)):
        base: Any = list if safe_isinstance(value, list) else deque
        items = [concrete_within(item, kinds) for item in base.__iter__(value)]
        if all(map(operator.is_, items, base.__iter__(value))):
            return value
        made = empty_like(value)
        base.extend(made, items)
        return made
    if safe_isinstance(value, dict):
        entries = {key: concrete_within(item, kinds) for key, item in stored_entries(value).items()}
        if all(map(operator.is_, entries.values(), stored_entries(value).values())):
            return value
        made = empty_like(value)
        for key, item in entries.items():
            base_of(made).__setitem__(made, key, item)
        return made
    return value


def settle(obj: Any, names: frozenset[str] | None = None) -> None:
    """Specializes the symbolic numbers among an object's attributes: C code is about to hash the object.

    Args:
        obj: the object.
        names: the attributes that are read, ``None`` for all.
    """
    try:
        space = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        space = {}
    for name, value in list(space.items()):
        if (names is None or name in names) and concrete(value) is not value:
            space[name] = concrete(value)
    for name in slot_names(type(obj)):
        if names is not None and name not in names:
            continue
        try:
            value = object.__getattribute__(obj, name)
        except AttributeError:
            continue
        if concrete(value) is not value:
            object.__setattr__(obj, name, concrete(value))


def concrete_items(value: Any) -> Any:
    """Returns the items of a list or deque as they are hashed."""
    return [concrete(item) for item in value] if type(value) in (list, deque) else value
