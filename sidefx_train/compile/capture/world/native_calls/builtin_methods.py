"""Operators and methods of Python's containers that must handle shadows: they read only the entry in question."""

from __future__ import annotations

import gc
import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train.compile.capture.shadows.containers.lists_and_dicts import DictRecord, ListRecord
from sidefx_train.compile.capture.shadows.containers.sets import SetRecord
from sidefx_train.compile.capture.shadows.objects.numpy_arrays import ArrayRecord
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.errors import Unsupported

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.capture_context import CaptureContext


_OPERATOR_NAMES = (
    "getitem setitem delitem contains add sub mul truediv floordiv mod pow matmul lshift rshift and_ or_ xor "
    "iadd isub imul itruediv ifloordiv imod ipow imatmul ilshift irshift iand ior ixor "
    "lt le eq ne gt ge neg pos invert is_ is_not"
)
OPERATORS: dict[str, Callable[..., Any]] = {name: getattr(operator, name) for name in _OPERATOR_NAMES.split()}
ARITHMETIC = frozenset(id(fn) for name, fn in OPERATORS.items() if name not in ("getitem", "setitem", "delitem"))


def dict_operator(world: CaptureContext, record: DictRecord, name: str, args: tuple[Any, ...]) -> Any:
    """Subscript and containment of a shadow dict; reads only the entry in question."""
    shadow = record.shadow
    if name == "contains":
        key = world.own_key(args[1])
        return record.bring(key) if _hashable(key) else ABSENT
    if name in ("getitem", "setitem", "delitem"):
        key = world.own_key(args[1], pin=name != "setitem" or record.filled)
        world.touch(key, deep=False)
        if not _hashable(key):
            return ABSENT
        if name == "setitem":
            shadow[key] = args[2]
            return None
        if name == "delitem":
            refuse_iteration(world, shadow)
            record.fill()
            world.guarded(dict.__delitem__ if type(shadow) is not OrderedDict else operator.delitem, (shadow, key), {})
            return None
        if record.bring(key):
            return dict.__getitem__(shadow, key)
        if safe_isinstance(shadow, defaultdict) and shadow.default_factory is not None:
            value = world.interp.call(shadow.default_factory, (), {})
            shadow[key] = value
            return value
        if type(shadow) in (dict, defaultdict) or not hasattr(type(shadow), "__missing__"):
            return world.guarded(dict.__getitem__, (shadow, key), {})  # raises CPython's own message
        return ABSENT
    for value in args:
        world.touch(value, deep=name not in ("iter", "next"), asked=name)
    return ABSENT


_DICT_ITERATORS: tuple[type, ...] = (type(iter({})), type(iter({}.values())), type(iter({}.items())))


def refuse_iteration(world: CaptureContext, shadow: Any) -> None:
    """Refuses to remove a key from an outside dict that a loop iterates over.

    Python's behavior then depends on the gaps that earlier deletions have left in it, which are unknown.
    """
    frame = world.interp.current_frame
    while frame is not None:
        for value in frame.stack:
            if type(value) in _DICT_ITERATORS and any(held is shadow for held in gc.get_referents(value)):
                stop = Unsupported("SFX111", "removes a key from a dict while iterating over it", world.locate())
                stop.whole = True  # a recreated iterator would have another position
                raise stop
        frame = frame.back


def namespace_operator(world: CaptureContext, name: str, args: tuple[Any, ...]) -> Any:
    """Subscript and containment of a module's namespace, which the program holds as a dict."""
    space, key = args[0], args[1]
    if name == "setitem":
        world.store_global(space, key, args[2])
        return None
    if name == "delitem":
        if not world.delete_global(space, key):
            raise KeyError(key)
        return None
    value = world.heap.namespace(space).get(key)
    if name == "contains":
        return value is not ABSENT
    if value is ABSENT:
        raise KeyError(key)
    return value


def class_view_operator(world: Any, name: str, args: tuple[Any, ...]) -> Any:
    """Subscript, ``get`` and containment of a class's namespace."""
    view, key, *default = args
    value = world.class_entry(world.class_views[id(view)][1], key)
    if name == "get":
        return (*default, None)[0] if value is ABSENT else value
    if name == "contains":
        return value is not ABSENT
    if value is ABSENT:
        raise KeyError(key)
    return value


def _hashable(key: Any) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True


def container_method(world: CaptureContext, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Methods of outside containers that need not read all items: append, get, setdefault, add, len."""
    name = fn.__name__
    if name == "len" and fn is len and len(args) == 1:
        record = world.heap.record_of(args[0])
        if safe_isinstance(record, DictRecord) and record.plain:
            length = record.length()
            return ABSENT if length is None else length
        if safe_isinstance(record, ListRecord):
            length = record.length()
            return ABSENT if length is None else length
        if safe_isinstance(record, ArrayRecord):
            record.measure()
            return len(args[0])
        return ABSENT
    owner = fn.__self__
    if id(owner) in world.class_views and name == "get" and args and not kwargs:
        return class_view_operator(world, name, (owner, *args))
    if id(owner) in world.module_namespaces and not kwargs:
        if name == "get" and args:
            value = world.heap.namespace(owner).get(args[0])
            return (args[1] if len(args) > 1 else None) if value is ABSENT else value
        if not world.heap.trusts(owner):
            world.heap.refuse("SFX111", f"calls {name} of the namespace of {owner.get('__name__')}")
    record = world.heap.record_of(owner) if owner is not None else None
    if record is None or kwargs or not record.plain:
        return ABSENT
    if safe_isinstance(record, ListRecord):
        if name == "append" and len(args) == 1:
            fn(args[0])
            return None
        if name == "extend" and len(args) == 1:
            fn(world.interp.iterate(args[0]))
            return None
        if name == "popleft" and not args:
            return record.take(0)
        most = 1 if safe_isinstance(record.real, list) else 0
        if name == "pop" and len(args) <= most and all(type(index) in (int, torch.SymInt) for index in args):
            return record.take(*args or (-1,))
        return ABSENT
    if safe_isinstance(record, SetRecord):
        record.look()
        if name == "add" and not record.filled:
            fn(world.own_key(args[0], pin=False))
            return None
        return ABSENT
    if safe_isinstance(record, DictRecord) and args:
        args = (world.own_key(args[0], pin=name != "__setitem__"), *args[1:])
    if safe_isinstance(record, DictRecord) and args and _hashable(args[0]):
        if name == "get":
            return dict.__getitem__(owner, args[0]) if record.bring(args[0]) else (args[1] if len(args) > 1 else None)
        if name == "setdefault":
            if not record.bring(args[0]):
                owner[args[0]] = args[1] if len(args) > 1 else None
            return dict.__getitem__(owner, args[0])
        if name == "__contains__":
            return record.bring(args[0])
        if name == "__getitem__":
            return dict_operator(world, record, "getitem", (owner, *args))
        if name == "__setitem__":
            return dict_operator(world, record, "setitem", (owner, *args))
    return ABSENT
