"""Creates shadows of containers, callables and objects, with their guards."""

from __future__ import annotations

import datetime
import enum
import functools
import operator
import re
import struct
import types
from collections import OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any

import numpy as np

from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.capture.shadows import transient_objects
from sidefx_train.compile.capture.shadows.containers.instance_dicts import check_hidden_dict, note_instance_dict
from sidefx_train.compile.capture.shadows.containers.lists_and_dicts import DictRecord, ListRecord
from sidefx_train.compile.capture.shadows.containers.sets import SetRecord
from sidefx_train.compile.capture.shadows.deferred_values import DeferredValue
from sidefx_train.compile.capture.shadows.definition_tracking import IMMUTABLE_CLASS
from sidefx_train.compile.capture.shadows.objects import weak_references
from sidefx_train.compile.capture.shadows.records import Attributes, InstanceRecord, Record
from sidefx_train.compile.common.draws.generator_states import copy_of, is_plain_generator
from sidefx_train.compile.common.plain_values import (
    HEAP_TYPE,
    bounds_of,
    empty_like,
    exact_value,
    factory_of,
    is_plain,
    is_structure,
    make_tuple,
    maxlen_of,
    slot_names,
)
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.trace_rules import runs_pure_code
from sidefx_train.compile.common.type_checks import bound, descriptor_of, hooks_loads, safe_isinstance, shows_another

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI


IMMUTABLE_C: tuple[type, ...] = (
    int,  # and its subclasses
    float,
    complex,
    str,
    bytes,
    re.Pattern,
    re.Match,
    struct.Struct,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    types.UnionType,
    types.GenericAlias,
    np.dtype,
    np.ufunc,
)
"""C classes whose instances are immutable as far as C code reads them."""


_NO_DEFAULTS = frozenset({list, dict, OrderedDict, deque, set})
"""Containers that can be read without running code or creating anything."""


def tuple_shadow(heap: ShadowTableAPI, real: Any, source: Source) -> Any:
    """Returns a tuple of shadows, or the tuple itself if it contains only plain unchanging values."""
    has_float = any(type(item) is float for item in tuple.__iter__(real))
    changes = has_float or source.label in heap.specialization.symbolic_numbers
    if is_plain(real) and not changes:
        heap.guard("equal", source, real)
        return real
    if is_structure(type(real)) and type(real).n_fields != type(real).n_sequence_fields:
        heap.refuse(
            "SFX104", f"{source.label} is a {type(real).__qualname__}, which has fields in addition to its items"
        )
    heap.guard("type", source, type(real))
    cls = type(real)
    if cls is not tuple:
        if shows_another(cls):
            check_hidden_dict(heap, real)
        overridden = (getattr(cls, name) for name in ("__getitem__", "__len__", "__getattribute__"))
        source.hooked = any(type(method) is types.FunctionType for method in overridden)
    items = [heap.shadow(item, heap.sources.item(source, index)) for index, item in enumerate(tuple.__iter__(real))]
    heap.guard("length", source, len(items))
    shadow = make_tuple(cls, items)
    record = Record(heap, real, shadow, source)
    heap.register(record)
    if cls is not tuple and hasattr(cls, "__dict__") and cls.__dictoffset__:
        record.instance = InstanceRecord(heap, real, shadow, source, source)
        note_instance_dict(heap, record.instance)
    return shadow


def slice_shadow(heap: ShadowTableAPI, real: slice, source: Source) -> slice:
    """Returns a slice of shadows, or the slice itself if it contains only plain unchanging values."""
    if source.label not in heap.specialization.symbolic_numbers and all(is_plain(bound) for bound in bounds_of(real)):
        heap.guard("equal", source, real)
        return heap.register(Record(heap, real, real, source))
    heap.guard("type", source, slice)
    names = ("start", "stop", "step")
    bounds = [heap.shadow(getattr(real, name), heap.sources.slot(source, name), name) for name in names]
    return heap.register(Record(heap, real, slice(*bounds), source))


def container_shadow(heap: ShadowTableAPI, real: Any, source: Source) -> Any:
    """Returns an empty container of the same class; items are added as the step reads them."""
    cls = type(real)
    heap.guard("type", source, cls)
    source.hooked = cls not in _NO_DEFAULTS
    if issubclass(cls, deque):
        heap.guard("equal", heap.sources.slot(source, "maxlen"), maxlen_of(real))
    try:
        shadow = empty_like(real)
    except TypeError:
        heap.refuse("SFX104", f"{source.label} is a {cls.__qualname__}, which cannot be copied empty")
    if issubclass(cls, defaultdict):
        factory = heap.sources.slot(source, "default_factory")
        makes = factory_of(real)
        heap.guard("is", factory, makes)
        if type(makes) not in (types.FunctionType, type, types.NoneType):
            shadow.default_factory = heap.shadow(makes, factory)
    kind = DictRecord if safe_isinstance(real, dict) else SetRecord if safe_isinstance(real, set) else ListRecord
    record: DictRecord | SetRecord | ListRecord = kind(heap, real, shadow, source, source)
    heap.register(record)
    if not record.plain:
        record.fill()
        if shows_another(cls):
            check_hidden_dict(heap, real)
        elif cls.__dictoffset__:
            record.instance = InstanceRecord(heap, real, shadow, source, source)
            note_instance_dict(heap, record.instance)
    return shadow


def builtin_method_shadow(heap: ShadowTableAPI, real: types.BuiltinMethodType, source: Source) -> Any:
    """Returns a bound C method, bound to the shadow of its object.

    In the arguments, and where it keeps being replaced, it is identified by its owner and descriptor.
    """
    descriptor = descriptor_of(real)
    if not source.from_arguments and source.label not in heap.specialization.refetched:
        heap.guard("is", source, real)
        source = heap.sources.const(real, source.label)
    else:
        heap.guard("type", source, type(real))
        if descriptor is None:
            heap.guard("equal", heap.sources.slot(source, "__name__"), real.__name__)
        else:
            heap.guard("method", source, descriptor)
    owner = heap.shadow(real.__self__, heap.sources.slot(source, "__self__"))
    if owner is real.__self__:
        shadow: Any = real
    elif type(owner) is DeferredValue and descriptor is not None:  # of a string that is passed on
        shadow = types.MethodType(descriptor, owner)
    else:  # getattr would return an override of a subclass
        known = descriptor is not None and safe_isinstance(owner, descriptor.__objclass__)
        shadow = bound(descriptor, owner) if known else getattr(owner, real.__name__)
    return heap.register(Record(heap, real, shadow, source, source))


def method_shadow(heap: ShadowTableAPI, real: types.MethodType, source: Source) -> Any:
    """Returns a bound method, bound to the shadow of its object; what it calls may be a method, too."""
    heap.guard("type", source, types.MethodType)
    function: Any = real.__func__
    called = heap.sources.slot(source, "__func__")
    if type(function) is types.FunctionType:
        heap.guard("is", called, function)
    else:
        function = heap.shadow(function, called)
    owner = heap.shadow(real.__self__, heap.sources.slot(source, "__self__"))
    return heap.register(Record(heap, real, types.MethodType(function, owner), source))


def _pinned(heap: ShadowTableAPI, real: Any, source: Source) -> Source:
    """Guards an object's identity, or the class of a transient object; returns the path to its parts."""
    if transient_objects.is_transient(heap, real, source):
        heap.guard("type", source, type(real))
        return source
    heap.guard("is", source, real)
    return heap.sources.const(real, source.label)


def partial_shadow(heap: ShadowTableAPI, real: Any, source: Source) -> Any:
    """Returns a partial of shadows."""
    base = _pinned(heap, real, source)
    func = heap.shadow(real.func, heap.sources.slot(base, "func"))
    spots, names = heap.sources.slot(base, "args"), heap.sources.slot(base, "keywords")
    if base is source:
        heap.guard("length", spots, len(real.args))
        heap.guard("keys", names, tuple(real.keywords))
    args = [heap.shadow(value, heap.sources.item(spots, i)) for i, value in enumerate(real.args)]
    keywords = {k: heap.shadow(v, heap.sources.item(names, k), k) for k, v in real.keywords.items()}
    made = functools.partial(func, *args, **keywords)
    return heap.register(PartialRecord(heap, real, made, base, base))


class PartialRecord(Record):
    """A partial, which a step may read and call, but not change."""

    def __init__(self, heap: ShadowTableAPI, real: Any, shadow: Any, source: Source, base: Source) -> None:
        super().__init__(heap, real, shadow, source, base)
        self._before = _state_of(shadow)

    def attribute(self, name: str) -> Any:
        """Returns the shadow of an attribute of its own; :data:`ABSENT` if there is none."""
        own = vars(self.real)
        if name == "__dict__" and own:
            self.heap.refuse("SFX104", f"reads the namespace of {self.source.label}, a functools.partial")
        return self.heap.shadow(own[name], self.heap.sources.attr(self.base, name), name) if name in own else ABSENT

    def check(self) -> None:
        """Refuses a step that has changed the partial."""
        after = _state_of(self.shadow)
        if len(after) != len(self._before) or any(map(operator.is_not, after, self._before)):
            self.heap.refuse("SFX104", f"changes {self.source.label}, a functools.partial")


def _state_of(partial: Any) -> list[Any]:
    parts = partial.keywords, vars(partial)
    return [partial.func, *partial.args, *(item for part in parts for pair in part.items() for item in pair)]


def passthrough(heap: ShadowTableAPI, real: Any, source: Source) -> Any:
    """Registers a pass-through object: the step only passes it on, calls it, or reads its attributes."""
    heap.guard("is", source, real)
    base = heap.sources.const(real, source.label)
    record = Record(heap, real, real, base, base)
    record.unshadowed = safe_isinstance(real, functools.partial)  # a subclass may override what it calls
    if type(real) is types.FunctionType:
        record.instance = InstanceRecord(heap, real, Attributes(), base, base)
    return heap.register(record)


def derived_shadow(heap: ShadowTableAPI, real: Any, source: Source) -> Any:
    """Registers a number or string of a Python subclass: it passes through, its attributes have shadows."""
    cls = type(real)
    if shows_another(cls):
        check_hidden_dict(heap, real)
    if slot_names(cls) and cls.__dictoffset__:
        heap.refuse(
            "SFX104", f"{source.label} is a {cls.__qualname__}, a {exact_value(real)!r} with slots and attributes"
        )
    base = heap.bind(real, source)
    if hooks_loads(cls):
        source.hooked = base.hooked = True
    if base is source:
        heap.guard("value", source, exact_value(real))
    return _with_attributes(heap, real, base)


def _with_attributes(heap: ShadowTableAPI, real: Any, base: Source) -> Any:
    """Registers a pass-through object whose ``__dict__`` has a shadow."""
    record = Record(heap, real, real, base, base)
    record.instance = InstanceRecord(heap, real, Attributes(), base, base)
    heap.register(record)
    if record.instance.has_dict:
        note_instance_dict(heap, record.instance)
    return real


def member_shadow(heap: ShadowTableAPI, real: enum.Enum, source: Source) -> enum.Enum:
    """Registers a member of an enumeration: it passes through, its attributes have shadows."""
    return _with_attributes(heap, real, heap.sources.const(real, source.label))


def weak_shadow(heap: ShadowTableAPI, real: Any, source: Source) -> Any:
    """Returns a weak reference to the shadow of its referent."""
    base = _pinned(heap, real, source)
    return heap.register(Record(heap, real, weak_references.shadow_of(heap, real, base), base, base))


def instance_shadow(heap: ShadowTableAPI, real: Any, source: Source) -> Any:
    """Returns an instance of the same class whose attributes are added as the step reads them."""
    cls = type(real)
    if shows_another(cls):
        check_hidden_dict(heap, real)
    try:
        shadow = ABSENT if _is_of_c(cls) else cls() if cls is types.SimpleNamespace else object.__new__(cls)
    except TypeError:
        shadow = ABSENT
    if shadow is ABSENT and is_plain_generator(real) and _fetches_generator(heap, real, source):
        heap.guard("type", source, cls)
        record = Record(heap, real, copy_of(real), source)  # the step draws from the copy, the entry from the real one
        record.unshadowed = True
        return heap.register(record)
    if shadow is ABSENT:
        readable = safe_isinstance(real, IMMUTABLE_C)  # by C code, without guards
        is_transient = transient_objects.is_transient(heap, real, source)
        if is_transient and transient_objects.is_value(real):
            heap.guard("equal", source, real)
            heap.register(Record(heap, real, real, source, source))
        elif is_transient and not readable and (cls in transient_objects.HANDLES or not runs_pure_code(cls)):
            heap.guard("type", source, cls)
            for name in transient_objects.HANDLES.get(cls, ()):
                heap.guard("equal", heap.sources.slot(source, name), getattr(real, name))
            heap.register(Record(heap, real, real, source, source))
        else:
            passthrough(heap, real, source)
        heap.by_real[id(real)].unshadowed = not readable
        return real
    base = heap.bind(real, source)
    if hooks_loads(cls):
        source.hooked = base.hooked = True
    record = InstanceRecord(heap, real, shadow, source if base is source else base, base)
    heap.register(record)  # first: the attributes may refer back to it
    if record.has_dict:
        note_instance_dict(heap, record)
    return shadow


def _fetches_generator(heap: ShadowTableAPI, real: Any, source: Source) -> bool:
    """Returns True for a random generator that is expected to be another object at the next call."""
    return source.from_arguments or transient_objects.is_transient(heap, real, source)


def _is_of_c(cls: type) -> bool:
    """Returns True for a C class whose empty instances would break its methods (files, since 3.12)."""
    made_by_c = HEAP_TYPE | IMMUTABLE_CLASS
    return any(base.__flags__ & made_by_c == made_by_c for base in cls.__mro__)
