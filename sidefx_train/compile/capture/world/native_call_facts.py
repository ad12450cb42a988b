"""Facts about C functions: what they read, store, hash and pass on, and where their errors come from."""

from __future__ import annotations

import builtins
import collections
import enum
import functools
import io
import itertools
import operator
import os
import re
import types
from collections.abc import Iterator
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.shadows.deferred_values import DeferredValue, message_of
from sidefx_train.compile.capture.shadows.definition_tracking import IMMUTABLE_CLASS
from sidefx_train.compile.common.library_modules import is_library
from sidefx_train.compile.common.type_checks import attribute_of, safe_isinstance

BARE = frozenset({id(object.__new__), id(object.__init__)})


def is_fake_tensor_error(error: Exception) -> bool:
    """Returns True if an error comes from torch's Python rules for fake tensors, not from checks that eager makes, or
    names the class of a fake tensor or symbolic number."""
    if _NAMES_FAKES.search(message_of(error)):
        return True
    trace, file = error.__traceback__, ""
    while trace is not None:
        code, trace = trace.tb_frame.f_code, trace.tb_next
        file = file if code.co_name in _RAISE else code.co_filename
    return file.startswith(tuple(os.path.join(TORCH_DIR, part) for part in _RULES))


_NAMES_FAKES = re.compile(r"FakeTensor|(?:not |got |got \([^)]*)Sym(?:Int|Float|Bool)")
_RAISE = frozenset({"_check", "_check_with"})
"""Functions of torch that raise for such a rule."""

_RULES = ("_refs", "_prims", "_prims_common", "_decomp", "_meta_registrations", "_subclasses")
"""Modules of torch with these rules."""


def compares_in_python(cls: type) -> bool:
    """Returns True if hashing or comparing an instance runs Python code that reads its attributes."""
    if cls.__flags__ & IMMUTABLE_CLASS:
        return False
    return any(
        safe_isinstance(getattr(cls, name, None), types.FunctionType) for name in ("__hash__", "__eq__", "__lt__")
    )


def runs_library_code(cls: type) -> bool:
    """Returns True if C code that converts or iterates over an instance runs Python code of a library, past the
    interpreter."""
    if cls.__flags__ & IMMUTABLE_CLASS or issubclass(cls, _READ_BY_ATTRIBUTE) or not is_library(cls.__module__):
        return False
    return any(safe_isinstance(getattr(cls, name, None), types.FunctionType) for name in _CONVERSIONS)


_CONVERSIONS = (
    *("__fspath__", "__len__", "__getitem__", "__iter__", "__contains__", "__float__", "__int__", "__index__"),
    *("__complex__", "__bool__", "__hash__", "__eq__", "__lt__"),
)
_READ_BY_ATTRIBUTE = (torch.nn.Module, torch.Tensor, torch.optim.Optimizer, enum.Enum, type, BaseException)


def wants_values(fn: Any, args: tuple[Any, ...]) -> bool:
    """Returns True for C code that treats a number of another class as an object: of NumPy and of ``json``."""
    if type(fn).__module__ == "_json" or _of_numpy(type(attribute_of(fn, "__self__"))):
        return True
    if attribute_of(fn, "__module__") == "_operator" or fn is divmod or fn is pow:
        operands = args[:1] if any(fn is each for each in _AT_PLACE) else args[:2]  # a list may have an index of NumPy
        return any(_of_numpy(type(value)) for value in operands)
    return _of_numpy(fn) or _of_numpy(attribute_of(fn, "__objclass__"))


def _of_numpy(value: Any) -> bool:
    """Returns True for a class or function of NumPy."""
    module = attribute_of(value, "__module__")
    return safe_isinstance(module, str) and module.split(".")[0] == "numpy"


def joins(fn: Any) -> bool:
    """Returns True for ``str.join`` of a string."""
    return type(fn) is types.BuiltinMethodType and fn.__name__ == "join" and type(fn.__self__) is str


def asks_missing(fn: Any, args: tuple[Any, ...]) -> bool:
    """Returns True for ``dict.__getitem__`` of a dict whose class defines ``__missing__`` in Python."""
    owner = attribute_of(fn, "__self__", args[0] if args else None)
    missing = getattr(type(owner), "__missing__", None) if issubclass(type(owner), dict) else None
    return attribute_of(fn, "__name__", "") == "__getitem__" and safe_isinstance(missing, types.FunctionType)


def is_fromkeys(fn: Any) -> bool:
    return type(fn) is types.BuiltinFunctionType and fn.__name__ == "fromkeys"


def inside(value: Any) -> Iterator[Any]:
    """Yields the leaves of nested arguments."""
    if safe_isinstance(value, (list, tuple)):
        base: Any = list if safe_isinstance(value, list) else tuple
        for item in base.__iter__(value):  # a class of the program may have an iteration of its own
            yield from inside(item)
    elif safe_isinstance(value, dict):
        for item in value.values():
            yield from inside(item)
    else:
        yield value


def known_late(value: Any, error: Exception) -> bool:
    """Returns True for a number that only the graph knows, or a tensor that C code cannot convert to one."""
    if safe_isinstance(value, DeferredValue):
        return True
    if safe_isinstance(value, compat.SYMBOLS):
        return compat.is_unbacked(value)
    return safe_isinstance(error, TypeError) and type(value) is compat.FakeTensor and value.dim() == 0


def first_line(error: BaseException) -> str:
    """Returns an error's first nonempty line."""
    lines = [line.strip() for line in message_of(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


DEFERRED_ARGUMENT = f"{DeferredValue.__name__} found"
HASHING = (hash, set, frozenset)
_HASH_TABLES: tuple[type, ...] = (dict, set, frozenset, type({}.keys()), type({}.items()))
_AT_PLACE = (operator.getitem, operator.setitem, operator.delitem)
_AT_KEY = (*_AT_PLACE, operator.contains)
_ONE_KEY = frozenset({"add", "discard", "remove", "__contains__", "get", "setdefault", "pop", "__getitem__",
                      "__setitem__", "__delitem__", "move_to_end"})  # fmt: skip
_MANY_KEYS = frozenset({"update", "union", "intersection", "difference", "symmetric_difference", "issubset",
                        "issuperset", "isdisjoint", "intersection_update", "difference_update",
                        "symmetric_difference_update"})  # fmt: skip
_LISTED: tuple[Any, ...] = (list, tuple, set, frozenset, collections.deque)


def hashed_by(fn: Any, owner: Any, args: tuple[Any, ...]) -> Iterator[Any]:
    """Yields the objects that C code hashes and compares as keys of dicts and sets, except those that are keys already.

    Args:
        fn: the C code.
        owner: the object that it is bound to.
        args: its arguments.
    """
    if any(fn is known for known in _AT_KEY):
        if safe_isinstance(args[0], _HASH_TABLES):
            yield args[1]
        return
    if type(fn) in (types.MethodDescriptorType, types.WrapperDescriptorType) and args:
        owner, args = args[0], args[1:]
    name = attribute_of(fn, "__name__", "")
    if fn is hash:
        yield from args
    elif safe_isinstance(owner, _HASH_TABLES) and name in _ONE_KEY:
        yield from args[:1]
    elif (safe_isinstance(owner, (set, frozenset)) and name in _MANY_KEYS) or fn is set or fn is frozenset:
        for value in args:
            yield from _items(value)
    elif is_fromkeys(fn):
        yield from _items(args[0])
    elif fn is collections._count_elements:  # type: ignore[attr-defined]
        yield from _items(args[1])


def _items(value: Any) -> Iterator[Any]:
    for base in _LISTED:
        if safe_isinstance(value, base):
            yield from base.__iter__(value)  # bypasses methods of subclasses
            return


BUFFERS = (io.StringIO, io.BytesIO)
STORING_METHODS = frozenset({"append", "appendleft", "insert", "add", "setdefault", "__setitem__", "discard"})
TAKING_METHODS = frozenset({"pop", "popitem", "clear", "__delitem__", "move_to_end"})
READS_TYPE = (builtins.isinstance, issubclass, type, id, callable)
"""C functions that read the class or the identity of their arguments."""


HASHED = (set, frozenset, dict)
"""Functions that look up by hash: the keys were read when they were inserted."""


_KEEPS_ARGUMENTS = (functools.partial, types.MethodType)

PASSES_ITEMS = (
    *(len, iter, next, reversed, enumerate, zip, list, tuple, tuple.__new__, list.__init__, list.copy),
    *(collections.deque, itertools.chain, itertools.islice, itertools.cycle, itertools.zip_longest),
)
"""C functions that count or pass on the items of a container without reading them."""

_CALLS_WITH_ITEMS = (map, filter, functools.reduce)
_FIELD = type(vars(collections.namedtuple("_Named", "field"))["field"])
_JOINS = frozenset({"add", "iadd", "concat", "iconcat", "mul", "imul"})

FILLS = (dict, dict.__init__, dict.update, dict.__ior__, dict.__or__, dict.__ror__, dict.copy, collections.OrderedDict)
"""C functions that pass on the values of a dict, and read its keys."""


def keeps_arguments(fn: Any, args: tuple[Any, ...]) -> bool:
    """Returns True for a C function that keeps its arguments without reading them."""
    if fn is types.SimpleNamespace:
        return not args  # from Python 3.13 on, it reads a mapping
    return any(fn is known for known in _KEEPS_ARGUMENTS)


def passes_items(fn: Any, args: tuple[Any, ...]) -> bool:
    """Returns True for a C function that reads its arguments, but not what is in their items.

    What Python functions among the arguments do with the items is interpreted.
    """
    name = attribute_of(fn, "__name__", "")
    if any(fn is known for known in PASSES_ITEMS) or name == "extend":
        return True
    if attribute_of(fn, "__module__") == "_operator":
        return joins_items(name, args)
    if any(fn is known for known in _CALLS_WITH_ITEMS):
        return bool(args) and type(args[0]) is types.FunctionType
    return bool(args) and type(args[0]) is _FIELD


def joins_items(name: str, args: tuple[Any, ...]) -> bool:
    """Returns True for an operator, by name, that passes on the items of lists and tuples."""
    return name in _JOINS and all(type(value) in (list, tuple, int) for value in args)


DEEP_METHODS = frozenset({"index", "count", "remove", "sort", "__eq__", "__ne__", "__lt__", "__contains__"})
COMPARES_IDENTITY = frozenset(
    {"eq", "ne", "contains", "index", "count", "remove", "countOf", "indexOf", "__eq__", "__ne__", "__contains__"}
)
"""Names of functions and methods that compare objects by identity or equality."""
ORDERS = frozenset({"lt", "le", "gt", "ge", "__lt__", "__le__", "__gt__", "__ge__"})


KEYED_METHODS = frozenset({"__setitem__", "setdefault", "get", "pop"})
"""Dict methods with a key as the first argument, and a value as the second."""


READS_NOTHING = frozenset(
    {"__init__", "__new__", "__setattr__", "__delattr__", "__getattribute__", "__init_subclass__", "__class__"}
)


READS_VALUE = frozenset({"item", "tolist", "__bool__", "__int__", "__float__", "__index__"})
REGISTERS_HOOK = frozenset({"register_hook", "register_prehook", "register_post_accumulate_grad_hook", "retain_grad"})
MAKES_SUBCLASS = frozenset({"_make_subclass", "_make_wrapper_subclass", "as_subclass"})
HASHABLE = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
NO_OWNER = (type(None), types.ModuleType, type, compat.BINDING)
DISABLERS = ("_compile.py", "eval_frame.py", "_fully_shard/_fsdp_common.py")
TORCH_DIR = torch.__path__[0]
