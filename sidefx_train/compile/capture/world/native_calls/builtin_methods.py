"""C functions that must handle shadows: container methods, nn.Module attributes, symbolic numbers."""

from __future__ import annotations

import bisect
import gc
import math
import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.recording.constant_folding import constant_value
from sidefx_train.compile.capture.shadows.containers.lists_and_dicts import DictRecord, ListRecord
from sidefx_train.compile.capture.shadows.containers.sets import SetRecord
from sidefx_train.compile.capture.shadows.objects.numpy_arrays import ArrayRecord
from sidefx_train.compile.capture.world.symbolic_numbers import graph_functions, integer_functions, number_subclasses
from sidefx_train.compile.capture.world.symbolic_numbers.domain_errors import function_raises, no_integer
from sidefx_train.compile.capture.world.symbolic_numbers.scalar_tensors import host_value
from sidefx_train.compile.common.plain_values import (
    base_of,
    empty_like,
    is_plain,
    make_tuple,
    slot_names,
    stored_entries,
)
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import hooks_loads, safe_isinstance
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

# --- nn.Module ---------------------------------------------------------------------------------------------------

_MEMBERS = ("_parameters", "_buffers", "_modules")
_PLAIN_HOOKS = {name: vars(torch.nn.Module)[name] for name in ("__getattr__", "__setattr__", "__delattr__")}


def _plain_lookup(world: CaptureContext, cls: type, name: str) -> bool:
    """Returns True if the class inherits ``name`` (an attribute hook) from ``nn.Module``."""
    return world.class_attr(cls, name) is _PLAIN_HOOKS[name]


def module_getattr(world: CaptureContext, obj: Any, name: str) -> Any:
    """Loads parameters, buffers and submodules, which ``nn.Module`` stores in its own dicts."""
    cls = type(obj)
    if name == "__dict__" or world.class_attr(cls, name) is not ABSENT or hooks_loads(cls):
        return ABSENT
    value = world.instance_attr(obj, name)
    if value is not ABSENT:
        return value
    if not _plain_lookup(world, cls, "__getattr__"):
        return ABSENT
    return module_member(world, obj, name)


def module_member(world: CaptureContext, obj: Any, name: str) -> Any:
    """Returns a parameter, buffer or submodule, as ``nn.Module.__getattr__`` does; :data:`ABSENT` if there is none."""
    for member in _MEMBERS:
        entries = world.instance_attr(obj, member)
        if entries is ABSENT:
            continue
        record = world.heap.dict_record(entries)
        if record is not None and not record.filled:
            if name not in entries and name not in record.snapshot and not dict.__contains__(record.real, name):
                continue  # the dict that contains it is guarded; a name cannot be in two of them
            if record.bring(name):
                return dict.__getitem__(entries, name)
        elif name in entries:
            return dict.__getitem__(entries, name)
    return ABSENT


def module_setattr(world: CaptureContext, obj: Any, name: str, value: Any) -> bool:
    """Runs the default ``nn.Module.__setattr__`` of a plain attribute; that of members is interpreted."""
    return _plain_lookup(world, type(obj), "__setattr__") and set_plainly(world, obj, name, value)


def set_plainly(world: CaptureContext, obj: Any, name: str, value: Any) -> bool:
    """Runs ``nn.Module.__setattr__`` of a plain attribute, without reading the rest of the object."""
    if world.class_attr(type(obj), name) is not ABSENT:
        return False
    if safe_isinstance(value, (torch.nn.Parameter, torch.nn.Module)) or isinstance(value, torch.nn.Buffer):
        return False
    for member in _MEMBERS:
        entries = world.instance_attr(obj, member)
        if entries is ABSENT:
            return False
        record = world.heap.dict_record(entries)
        if record.bring(name) if record is not None else name in entries:
            return False
    world.set_instance_attr(obj, name, value)
    return True


def module_delattr(world: CaptureContext, obj: Any, name: str) -> bool:
    """Deletes a plain attribute; ``nn.Module.__delattr__`` deletes members."""
    if not _plain_lookup(world, type(obj), "__delattr__") or world.instance_attr(obj, name) is ABSENT:
        return False
    world.del_instance_attr(obj, name)
    return True


# --- containers --------------------------------------------------------------------------------------------------


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


def one_object(left: Any, right: Any) -> Any:
    """``left is right`` for a symbolic number: Python may use one object for equal numbers."""
    kinds = (type(left), type(right))
    known = all(kind in _PYTHON_NUMBERS for kind in kinds) and any(kind in compat.SYMBOLS for kind in kinds)
    if left is right or not known:
        return ABSENT
    return concrete(left) is concrete(right)


_PYTHON_NUMBERS = frozenset({int, float, bool, *compat.SYMBOLS})


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


_MOST_COMPARED = 64
"""Limit of comparisons with a symbolic number before it is specialized."""

_TO_INTEGER = (math.floor, math.ceil, math.trunc)
_OF_OTHERS = ("comb", "factorial", "gcd", "isqrt", "lcm", "ldexp", "perm", "trunc", "dist", "fsum", "prod", "sumprod")
_OF_FLOATS = frozenset(fn for name, fn in vars(math).items() if callable(fn) and name not in _OF_OTHERS)
"""Functions that convert each argument with ``float``, a tensor of one element, too."""


def number_function(world: CaptureContext, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Functions of numbers that keep a symbolic argument symbolic; others get its value, which is guarded."""
    if type(fn).__hash__ is None:  # an object with a comparison of its own, such as a key of `functools.cmp_to_key`
        return ABSENT
    if fn in _OF_FLOATS and not kwargs and any(safe_isinstance(value, torch.Tensor) for value in args):
        converted = [world.interp.call(float, (x,), {}) if safe_isinstance(x, torch.Tensor) else x for x in args]
        return world.interp.call(fn, tuple(converted), {})
    if fn is round:
        args, kwargs = integer_functions.positional(args, kwargs)
    found = graph_functions.call(world, fn, args, kwargs)
    if found is not ABSENT:
        return found
    if kwargs or not any(safe_isinstance(value, compat.SYMBOLS) for value in args):
        return world.computed_numbers.call(fn, args, kwargs)
    found = number_subclasses.slot_operator(world, fn, args)
    if found is not ABSENT:
        return found
    if any(map(compat.numpy_class, args)):
        found = world.computed_numbers.call(fn, args, kwargs)
        if found is not ABSENT:
            return found
    to_integer = fn in _TO_INTEGER or (fn is round and (len(args) == 1 or args[1] is None))
    if to_integer and args:
        found = integer_functions.computed_integer(world, fn, args)
        if found is not ABSENT:
            return found
        if no_integer(world, args[0]):
            return world.guarded(fn, tuple(map(concrete, args)), {})
        found = integer_functions.unknown_integer(world, fn, args[0])
        if found is not ABSENT:
            return found
    if fn is divmod and len(args) == 2 and any(map(_is_of_graph, args)):
        return integer_functions.divided(world, args)
    if fn is round and type(args[0]) is torch.SymInt and len(args) == 2:
        found = world.computed_numbers.call(fn, args, kwargs)
        return integer_functions.rounded(world, args[0], concrete(args[1])) if found is ABSENT else found
    if fn in (bisect.bisect_left, bisect.bisect_right):
        return integer_functions.bisect(world, fn is bisect.bisect_right, *args)
    if not all(safe_isinstance(value, (torch.SymInt, torch.SymFloat, int, float)) for value in args):
        return world.computed_numbers.call(fn, args, kwargs)
    if function_raises(world, fn, args):
        return world.guarded(fn, tuple(map(concrete, args)), {})
    if any(type(value) is float and not math.isfinite(value) for value in args):  # sympy takes the others for finite
        return _computed(world, fn, args)
    symbolic = compat.SYMBOLIC_MATH.get(fn)
    if symbolic is not None:
        values = [symbolic(torch.sym_float(value)) for value in args]
        return values[0] / values[1] if fn is math.log and len(values) == 2 else values[0]
    if fn is math.pow:
        return torch.sym_float(args[0]) ** torch.sym_float(args[1])
    known = fn in _OF_FLOATS and fn not in _TO_INTEGER and not any(map(_is_of_graph, args))
    return _computed(world, fn, args) if known else world.computed_numbers.call(fn, args, kwargs)


def _is_of_graph(value: Any) -> bool:
    return safe_isinstance(value, compat.SYMBOLS) and compat.is_unbacked(value)


def _computed(world: CaptureContext, fn: Any, args: tuple[Any, ...]) -> Any:
    """Returns the number that the prologue computes, or else that of the values, which are guarded."""
    found = world.computed_numbers.call(fn, args, {})
    return world.guarded(fn, tuple(map(concrete, args)), {}) if found is ABSENT else found


def among(world: CaptureContext, container: Any, value: Any) -> Any:
    """``value in container`` for a symbolic integer and a few plain numbers: guards that it differs from them.

    Returns:
        :data:`ABSENT` in any other case; the number is specialized then.
    """
    base = next((kind for kind in (dict, set, frozenset) if safe_isinstance(container, kind)), None)
    if base is None or type(container).__contains__ is not base.__contains__ or compat.is_unbacked(value):
        return ABSENT
    world.touch(container, deep=False, asked="contains")
    items = list(base.__iter__(container))
    if len(items) > _MOST_COMPARED or not all(type(item) in (int, float) for item in items):
        return ABSENT
    return any(world.truth(value == item) for item in items)


def _truth_of_tensor(world: CaptureContext, value: torch.Tensor) -> Any:
    """``bool(x)``: a symbolic number where only the graph knows the value; a branch on it is checked there."""
    try:
        return world.truth(value)
    except Unsupported as stop:
        if stop.code != "SFX101" or value.numel() != 1:
            raise
    truth = value if value.dtype is torch.bool else value != 0
    return world.guarded(truth.item, (), {})


def convert_number(world: CaptureContext, kind: type, args: tuple[Any, ...]) -> Any:
    """``int(x)``, ``float(x)`` and ``bool(x)`` of tensors and symbolic numbers."""
    if len(args) != 1:
        return ABSENT
    value = args[0]
    if safe_isinstance(value, torch.Tensor):
        if kind is bool:
            return _truth_of_tensor(world, value)
        if type(size := value.numel()) is int and size != 1:
            with compat.real_world():
                return kind(torch.zeros(min(size, 2), dtype=value.dtype))  # raises
        known = constant_value(world.tracer, value)
        number = host_value(world, value) if known is None else known.item()
        if number is None:
            if value.dtype is torch.bool:
                value = value.to(torch.int64)  # a symbolic bool has no symbolic int
            number = world.guarded(value.item, (), {})
        value = number
    if not safe_isinstance(value, compat.SYMBOLS):
        return ABSENT if value is args[0] else kind(value)
    if kind is bool:
        return world.truth(value)
    value = world.heap.numbers.number_of(value)
    if compat.numpy_class(value) is not None:
        found = world.computed_numbers.call(kind, (value,), {})
        return world.guarded(kind, (concrete(value),), {}) if found is ABSENT else found
    if kind is int:
        found = integer_functions.computed_integer(world, int, (value,))
        if found is not ABSENT:
            return found
        if no_integer(world, value):
            return world.guarded(int, (concrete(value),), {})
        found = integer_functions.unknown_integer(world, int, value)
        if found is not ABSENT:
            return found
    return world.guarded(torch.sym_float if kind is float else torch.sym_int, (value,), {})
