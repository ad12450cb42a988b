"""Rebuilds containers that the step created: tuples, sets, lists, dicts, deques, arrays of NumPy."""

from __future__ import annotations

import functools
import gc
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from sidefx_train.compile.capture.shadows.containers.sets import insertion, wide, wide_set
from sidefx_train.compile.capture.shadows.containers.traversal import DICT_VIEWS
from sidefx_train.compile.capture.shadows.objects.numpy_arrays import ArrayRecord
from sidefx_train.compile.common.plain_values import (
    base_container,
    bounds_of,
    instance_dict_of_plain,
    is_plain,
    make_tuple,
)
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.residual.reconstruct.attributes import fill_attributes
from sidefx_train.compile.residual.reconstruct.reconstruction import Reconstruction


def new_tuple(rebuilder: Reconstruction, value: tuple[Any, ...]) -> str:
    """Returns a tuple that the step created, of any class."""
    cls = type(value)
    with rebuilder.constructing():
        items = [rebuilder.expression(item) for item in value]
        if cls is tuple:
            return rebuilder.remember(value, f"({', '.join(items)}{',' if len(items) == 1 else ''})")
        maker = rebuilder.constant(make_tuple)
        made = rebuilder.remember(value, f"{maker}({rebuilder.constant(cls)}, ({', '.join(items)},))")
        fill_attributes(rebuilder, made, value)
        return made


def new_set(rebuilder: Reconstruction, value: Any) -> str:
    """Returns a set, filled in the order that gives it the order of the step's."""
    cls = type(value)
    members, table = _members(rebuilder, value)
    with rebuilder.reading():
        items = [rebuilder.expression(item) for item in members]
    made = f"({', '.join(items)}{',' if items else ''})"
    if table:
        made = f"{rebuilder.constant(wide_set)}({cls.__name__}, {made}, {table})"
        return rebuilder.remember(value, made)
    if cls in (set, frozenset):
        return rebuilder.remember(value, f"{cls.__name__}({made})")
    maker = rebuilder.constant(frozenset.__new__, "new_frozenset")
    name = rebuilder.remember(value, f"{maker}({rebuilder.constant(cls)}, {made})")
    rebuilder.fill(functools.partial(fill_attributes, rebuilder, name, value))
    return name


def _members(rebuilder: Reconstruction, value: Any) -> tuple[tuple[Any, ...], int]:
    """Returns the members of a set in the order in which to insert them, and the bytes of its table, 0 for the default
    size."""
    base: Any = set if safe_isinstance(value, set) else frozenset
    members = tuple(base.__iter__(value))
    _check_keys(rebuilder, members)
    if all(map(is_plain, members)):
        found = insertion(value)
        if found is None:
            rebuilder.refuse("SFX111", "cannot rebuild a set whose order depends on its history")
        return found
    # objects in traversal order, most likely that of insertion
    met = {id(record.shadow): i for i, record in enumerate(rebuilder.world.heap.by_real.values())}
    return tuple(sorted(members, key=lambda member: met.get(id(member), len(met)))), 0


def _check_keys(rebuilder: Reconstruction, keys: Iterable[Any]) -> None:
    """Refuses to fill a dict or set with keys whose methods have effects: the step has filled it once."""
    for key in keys:
        if not rebuilder.world.keys.hashes_quietly(key):
            what = f"a {type(key).__qualname__} as a key, whose __hash__ or __eq__ changes something"
            rebuilder.refuse("SFX111", f"cannot rebuild a container with {what}")


def new_container(rebuilder: Reconstruction, value: Any) -> str:
    """Returns a list, dict, deque or set of any class; its contents are filled in later."""
    cls = type(value)
    name = rebuilder.writer.fresh("n")
    rebuilder.named(value, name)
    if cls in (list, dict, OrderedDict, defaultdict):
        rebuilder.write(f"{name} = {rebuilder.constant(cls)}()")
    elif cls is deque:
        rebuilder.write(f"{name} = {rebuilder.constant(cls)}(maxlen={value.maxlen})")
    else:
        base: Any = base_container(cls)
        maker = rebuilder.constant(base.__new__, f"new_{base.__name__}")
        rebuilder.write(f"{name} = {maker}({rebuilder.constant(cls)})")
        if safe_isinstance(value, deque):
            rebuilder.write(f"{rebuilder.constant(deque.__init__, 'init')}({name}, (), {value.maxlen})")
    rebuilder.fill(functools.partial(_fill_container, rebuilder, name, value))
    return name


def _fill_container(rebuilder: Reconstruction, name: str, value: Any) -> None:
    """Fills a new container."""
    cls = type(value)
    if safe_isinstance(value, defaultdict):
        init = rebuilder.constant(defaultdict.__init__, "init")
        rebuilder.write(f"{init}({name}, {rebuilder.expression(value.default_factory)})")
    if safe_isinstance(value, dict):
        setter = name if cls in (dict, OrderedDict, defaultdict) else None
        held: Any = base_container(cls)
        _check_keys(rebuilder, dict.keys(value))
        for key, item in held.items(value):
            key_code, item_code = rebuilder.expression(key), rebuilder.expression(item)
            if setter:
                rebuilder.write(f"{name}[{key_code}] = {item_code}")
            else:
                base = OrderedDict if safe_isinstance(value, OrderedDict) else dict
                rebuilder.write(f"{rebuilder.constant(base.__setitem__, 'set_item')}({name}, {key_code}, {item_code})")
    elif safe_isinstance(value, set):
        members, table = _members(rebuilder, value)
        items = ", ".join(map(rebuilder.expression, members))
        if table:
            rebuilder.write(f"{rebuilder.constant(wide)}({name}, ({items},), {table})")
        elif items:
            rebuilder.write(f"{rebuilder.constant(set.update, 'extend')}({name}, ({items},))")
    else:
        kind: Any = list if safe_isinstance(value, list) else deque
        items = ", ".join(map(rebuilder.expression, kind.__iter__(value)))
        if items:
            rebuilder.write(f"{rebuilder.constant(kind.extend, 'extend')}({name}, ({items},))")
    if cls not in (list, dict, deque, defaultdict):
        fill_attributes(rebuilder, name, value)


def new_array(rebuilder: Reconstruction, value: np.ndarray[Any, Any]) -> str:
    """Returns a copy of a NumPy array of the step: what it was computed from is guarded. A view is one of the copy of
    the array that owns its memory, or of the outside array."""
    if value.dtype.hasobject:
        rebuilder.refuse("SFX104", "cannot rebuild a NumPy array of objects created in the step")
    if type(value.base) is np.ndarray:
        return _array_view(rebuilder, value, value.base)
    contents = value.copy(order="K")
    if not value.flags.owndata or contents.strides != value.strides:
        rebuilder.refuse("SFX104", "cannot rebuild a NumPy array created in the step, over memory of something else")
    made = rebuilder.remember(value, f"{rebuilder.constant(contents, 'array')}.copy('K')")
    if not value.flags.writeable:
        rebuilder.write(f"{made}.setflags(write=False)")
    return made


def new_bytearray(rebuilder: Reconstruction, value: bytearray) -> str:
    """Returns a copy of a bytearray of the step: what it was made of is guarded."""
    return rebuilder.remember(value, f"{rebuilder.constant(bytearray)}({rebuilder.constant(bytes(value))})")


def _array_view(rebuilder: Reconstruction, value: np.ndarray[Any, Any], base: np.ndarray[Any, Any]) -> str:
    record = rebuilder.world.heap.record_of(base)
    layout = (_address(value) - _address(base), value.dtype, value.shape, value.strides)
    if safe_isinstance(record, ArrayRecord):
        if not record.is_laid_out:
            rebuilder.refuse("SFX104", "cannot rebuild a view of a NumPy array from outside, which has gaps")
        real = record.real
    else:
        real = base
    try:
        array_view(real, *layout)
    except (TypeError, ValueError):
        rebuilder.refuse("SFX104", "cannot rebuild a view of a NumPy array, which has gaps")
    made = rebuilder.remember(
        value,
        f"{rebuilder.constant(array_view)}({rebuilder.expression(base)}, *{rebuilder.constant(layout, 'layout')})",
    )
    if record is None and not value.flags.writeable:
        rebuilder.write(f"{made}.setflags(write=False)")
    return made


def array_view(
    base: np.ndarray[Any, Any], offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...]
) -> np.ndarray[Any, Any]:
    """Returns an array over part of the memory of another.

    Args:
        base: the other array.
        offset: bytes from its first element.
        dtype: dtype of the elements.
        shape: sizes.
        strides: bytes between elements.

    Raises:
        TypeError: the memory that ``base`` is a part of has gaps.
        ValueError: the memory is too small, or has gaps.
    """
    owner = base
    while type(owner.base) is np.ndarray:
        owner = owner.base
    return np.ndarray(shape, dtype, owner, offset + _address(base) - _address(owner), strides)  # type: ignore[arg-type]


def _address(array: np.ndarray[Any, Any]) -> int:
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return]


def new_slice(rebuilder: Reconstruction, value: slice) -> str:
    with rebuilder.constructing():
        return rebuilder.remember(value, f"slice({', '.join(map(rebuilder.expression, bounds_of(value)))})")


def new_mapping_proxy(rebuilder: Reconstruction, value: types.MappingProxyType[Any, Any]) -> str:
    (shown,) = gc.get_referents(value)
    with rebuilder.constructing():
        return rebuilder.remember(value, f"{rebuilder.constant(type(value), 'proxy')}({rebuilder.expression(shown)})")


def new_dict_view(rebuilder: Reconstruction, value: Any) -> str:
    """Returns a view of the keys, values or items of a dict."""
    (shown,) = gc.get_referents(value)
    with rebuilder.constructing():
        made = f"{rebuilder.constant(DICT_VIEWS[type(value)], 'view')}({rebuilder.expression(shown)})"
    return rebuilder.remember(value, made)


def instance_dict(rebuilder: Reconstruction, value: dict[str, Any]) -> str:
    """Returns the instance ``__dict__`` of a new object."""
    _, owner = rebuilder.world.heap.new_namespaces[id(value)]
    return rebuilder.remember(value, f"{rebuilder.constant(instance_dict_of_plain)}({rebuilder.expression(owner)})")
