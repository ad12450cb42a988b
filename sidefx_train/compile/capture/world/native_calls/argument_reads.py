"""What C code reads of its arguments: it is brought in before the call."""

from __future__ import annotations

import collections
import functools
import operator
import types
from collections import OrderedDict
from typing import Any

from sidefx_train.compile.capture.shadows.containers.instance_dicts import InstanceDictRecord
from sidefx_train.compile.capture.shadows.containers.lists_and_dicts import DictRecord, ListRecord
from sidefx_train.compile.capture.shadows.containers.sets import HANDED_ON, IGNORES_ORDER, SetRecord, by_address
from sidefx_train.compile.capture.shadows.containers.traversal import READ_BY_C, attributes_of, held_by
from sidefx_train.compile.capture.shadows.objects.numpy_arrays import ArrayRecord
from sidefx_train.compile.capture.shadows.records import InstanceRecord
from sidefx_train.compile.capture.world.interfaces import CaptureWorldAPI
from sidefx_train.compile.capture.world.native_call_facts import (
    COMPARES_IDENTITY,
    DEEP_METHODS,
    FILLS,
    HASHED,
    HASHING,
    KEYED_METHODS,
    READS_NOTHING,
    READS_TYPE,
    STORING_METHODS,
    TAKING_METHODS,
    compares_in_python,
    hashed_by,
    is_fromkeys,
    keeps_arguments,
    passes_items,
    runs_library_code,
)
from sidefx_train.compile.capture.world.native_calls import builtin_methods
from sidefx_train.compile.capture.world.symbolic_numbers import concrete_numbers
from sidefx_train.compile.common import trace_rules
from sidefx_train.compile.common.library_modules import is_library
from sidefx_train.compile.common.plain_values import CONTAINERS, PLAIN_TYPES, is_derived, slot_names
from sidefx_train.compile.common.type_checks import attribute_of, safe_isinstance

_KEY_FUNCTION = type(functools.cmp_to_key(operator.sub))


def _number_of_keys(fn: Any, args: tuple[Any, ...]) -> int:
    """Returns how many of the arguments of a dict's or set's method are keys."""
    return 1 if attribute_of(fn, "__name__") in KEYED_METHODS else len(args)


class ArgumentReads:
    """Reads contents of shadows for C code, which does not look them up itself."""

    def __init__(self, world: CaptureWorldAPI) -> None:
        self.world = world
        self.heap = world.heap

    def touch(self, value: Any, deep: bool = True, asked: str = "") -> None:
        """Reads the contents of a container before C code does, nested ones too if ``deep``.

        Args:
            value: the container, or anything else.
            deep: nested containers too.
            asked: name of the function or method: for some the order of a set does not matter.
        """
        given, todo, seen = value, [value], set()
        while todo:
            value = todo.pop()
            if id(value) in self.world.module_namespaces and not self.heap.trusts(value):
                self.heap.refuse("SFX111", f"reads the whole namespace of {value.get('__name__')}")
            if id(value) in self.world.class_views:
                cls = self.world.class_views[id(value)][1]
                self.heap.refuse("SFX111", f"reads the whole namespace of the class {cls.__qualname__}")
            record = self.heap.by_shadow.get(id(value))
            if record is not None and record.shadow is value:
                if safe_isinstance(record, (ListRecord, DictRecord, SetRecord)):
                    if not record.filled:
                        record.fill()
                    if safe_isinstance(record, SetRecord):
                        record.look()
                        if record.unordered and asked not in IGNORES_ORDER:
                            why = f"reads {record.source.label}, a set, in an order that depends on its history"
                            self.heap.refuse("SFX111", why)
                elif safe_isinstance(record, ArrayRecord) or (
                    safe_isinstance(record, InstanceRecord)
                    and (compares_in_python(type(value)) or runs_library_code(type(value)))
                ):
                    record.fill()  # C code that hashes or compares it runs Python methods on the shadow itself
                    if safe_isinstance(record, InstanceRecord) and compares_in_python(type(value)):
                        self.world.keys.compares_by(type(value))
                elif safe_isinstance(record, InstanceDictRecord) or type(value) in READ_BY_C:
                    record.fill()
                elif not safe_isinstance(value, (tuple, types.MappingProxyType, functools.partial, BaseException)):
                    continue
            elif type(value) in (set, frozenset) and asked not in HANDED_ON and by_address(self.heap, value):
                self.heap.refuse("SFX111", "reads a set of objects in an order that depends on their addresses")
            if not deep:
                return
            if id(value) not in seen:
                seen.add(id(value))
                todo += [item for item in held_by(value) if type(item) not in PLAIN_TYPES]
                reenters = value is given and not is_library(type(value).__module__)
                if not reenters and (compares_in_python(type(value)) or runs_library_code(type(value))):
                    todo += [item for item in attributes_of(value).values() if type(item) not in PLAIN_TYPES]

    def touch_entries(self, values: tuple[Any, ...], asked: str) -> None:
        """Reads what C code reads of dicts whose values it passes on: their keys."""
        for value in values:
            self.touch(value, deep=type(value) is not dict, asked=asked)
            for key in dict.keys(value) if type(value) is dict else ():
                self.touch(key, asked=asked)

    def of_call(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Reads what C code reads of its arguments: of some only the class."""
        if any(fn is known for known in READS_TYPE):
            return
        name = attribute_of(fn, "__name__", "")
        if type(fn) is types.FunctionType and args:  # a method of torch in Python, which reads any attribute
            record = self.heap.record_of(args[0])
            if safe_isinstance(record, InstanceRecord) and getattr(type(args[0]), name, None) is fn:
                record.fill()
        if fn is operator.contains and type(args[0]) in HASHED:
            self.heap.identities.note_hashed(args[1])
            self.touch(args[0], deep=False, asked=name)
            self.touch(args[1], asked=name)
            return
        subscript = fn is operator.getitem or fn is operator.setitem
        if subscript and (type(args[0]) in CONTAINERS or type(args[0]) is tuple):
            self.touch(args[0], deep=False, asked=name)
            self.touch(args[1], asked=name)
            if type(args[1]) is slice:
                for value in args[2:]:
                    self.touch(value, deep=False, asked=name)
            return
        if keeps_arguments(fn, args):
            return
        if any(fn is known for known in FILLS) or (name in ("or_", "ior") and args and type(args[0]) is dict):
            self.touch_entries(args, name)
            return
        if name in COMPARES_IDENTITY:
            self.world.keys.guard_distinct([attribute_of(fn, "__self__"), *args])
        deep = not passes_items(fn, args)
        for value in (*args, *kwargs.values()):
            self.touch(value, deep, asked=name)

    def hashed(self, fn: Any, owner: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the arguments with the values of symbolic numbers that become keys, and notes what is hashed."""
        if fn is operator.contains and safe_isinstance(self.heap.record_of(args[0]), (SetRecord, DictRecord)):
            self.world.own_key(args[1])
        for key in hashed_by(fn, owner, args):
            self.world.keys.hashed(key)
        if type(fn) is types.MethodDescriptorType and args and safe_isinstance(args[0], (set, frozenset)):
            return (args[0], *self._as_keys(fn, args[1:]))
        if fn is collections._count_elements:  # type: ignore[attr-defined]
            return (*args[:1], *self._as_keys(fn, args[1:]))
        if safe_isinstance(owner, (set, frozenset)) or any(fn is known for known in HASHING) or is_fromkeys(fn):
            return self._as_keys(fn, args)
        if safe_isinstance(owner, dict):
            keys = _number_of_keys(fn, args)
            return (*map(concrete_numbers.concrete, args[:keys]), *args[keys:])
        return args

    def _as_keys(self, fn: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
        for value in values:
            self.touch(value, deep=False, asked=fn.__name__)
            for key in held_by(value) or (value,):
                self.heap.identities.note_hashed(key)
        return tuple(concrete_numbers.concrete(concrete_numbers.concrete_items(value)) for value in values)

    def stores_only(self, fn: Any, owner: Any, args: tuple[Any, ...]) -> bool:
        """Brings in the container whose method is called; returns True if the method only stores its arguments."""
        record = self.heap.record_of(owner)
        if safe_isinstance(record, DictRecord) and fn.__name__ in TAKING_METHODS:
            builtin_methods.refuse_iteration(self.world, owner)
        if type(owner) not in CONTAINERS and record is None:
            return False
        self.touch(owner, deep=fn.__name__ in DEEP_METHODS, asked=fn.__name__)
        if not safe_isinstance(owner, (dict, set)):
            return fn.__name__ in STORING_METHODS
        if record is not None:
            for value in args[: _number_of_keys(fn, args)]:
                self.world.own_key(value)
        return fn.__name__ in STORING_METHODS and all(type(value) in PLAIN_TYPES for value in args[:1])

    def fill_owner(self, fn: Any, args: tuple[Any, ...]) -> None:
        """Reads the whole instance for ``dir``, and C methods that every object has (``__reduce_ex__``...)."""
        if fn is dir and args:
            fn, owner = object.__dir__, args[0]
        else:
            owner = attribute_of(fn, "__self__")
        if owner is None and safe_isinstance(fn, (types.MethodDescriptorType, types.WrapperDescriptorType)) and args:
            owner = args[0]
        record = self.heap.record_of(owner)
        if record is None or fn.__name__ in READS_NOTHING:
            return
        if safe_isinstance(record, InstanceRecord):
            record.fill()
        elif safe_isinstance(owner, tuple) and record.instance is not None:
            record.instance.fill()
        elif is_derived(type(owner)) and hasattr(object, fn.__name__):  # ``object.__reduce_ex__`` and similar
            own = next((base for base in type(owner).__mro__ if fn.__name__ in vars(base)), object)
            if own is object and record.instance is not None:
                if record.instance.space or vars(record.instance.shadow) or slot_names(type(owner)):
                    what = f"{record.source.label}, a {type(owner).__qualname__} with attributes"
                    self.heap.refuse("SFX104", f"{trace_rules.describe(fn)} gets {what}")
                record.instance.fill()
        elif safe_isinstance(record, (ListRecord, DictRecord, SetRecord)) and hasattr(object, fn.__name__):
            if safe_isinstance(record, DictRecord) and type(record.real) is OrderedDict and vars(record.real):
                record.own_attributes().fill()
            elif record.instance is not None:
                record.instance.fill()

    def refuse_unshadowed(self, fn: Any, args: tuple[Any, ...]) -> None:
        """Refuses to pass C code a mutable outside object that has no shadow."""
        called = (fn,) if type(fn) is _KEY_FUNCTION else ()  # it calls Python code; other callables of C do not
        for value in (*called, attribute_of(fn, "__self__"), *args):
            record = self.heap.by_shadow.get(id(value))
            if record is not None and record.shadow is value and record.unshadowed:
                kind = type(value).__qualname__
                self.heap.refuse("SFX104", f"{trace_rules.describe(fn)} gets {record.source.label}, a {kind}")
