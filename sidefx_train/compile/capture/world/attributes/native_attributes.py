"""Attributes that C code answers: their values are brought in, guarded, or refused."""

from __future__ import annotations

import functools
import types
import weakref
from typing import Any

import numpy as np
import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.interpreter.world import LOCAL
from sidefx_train.compile.capture.shadows.containers.instance_dicts import instance_dict_of, thread_dict
from sidefx_train.compile.capture.shadows.objects.numpy_arrays import ArrayRecord, shows_copy
from sidefx_train.compile.capture.shadows.records import InstanceRecord, TensorRecord
from sidefx_train.compile.capture.world.interfaces import CaptureWorldAPI
from sidefx_train.compile.common import trace_rules
from sidefx_train.compile.common.library_modules import is_library
from sidefx_train.compile.common.plain_values import is_definition, is_derived, is_plain
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

_NAMES_OF_CLASSES = frozenset({"__name__", "__qualname__"})

_SAVED = ("saved_", "_saved_")
"""How the attributes of an autograd node that hold saved tensors begin."""

_OTHER_NAMESPACES = (type, types.ModuleType, types.FunctionType, torch.Tensor)
"""Objects whose ``__dict__`` is not a plain instance dict."""

_PLACE = frozenset({"_base", "output_nr"})
"""Attributes of a tensor that tell where it comes from, and that no other guard compares."""

_OF_ALL_NODES = frozenset({"__class__", "__doc__", "__hash__", "__eq__", "__ne__", "register_hook", "register_prehook"})
"""Attributes of an autograd node that one which stands for it in the capture shares; hooks are refused when called."""

_CACHED_FLAG = 1 << 19
"""Flag of a class whose attributes the interpreter has cached."""


def _lasting_flags(cls: type) -> int:
    return cls.__flags__ & ~_CACHED_FLAG


class NativeAttributes:
    """Reads attributes of C descriptors, after Python's lookup has found nothing written in Python."""

    def __init__(self, world: CaptureWorldAPI) -> None:
        self.world = world
        self.heap, self.interp, self.tracer = world.heap, world.interp, world.tracer

    def load(self, obj: Any, name: str) -> Any:
        """Returns the value of an attribute that C code stores or computes."""
        record = self.heap.record_of(obj)
        if name == "__dict__" and type(obj) is compat.FakeTensor:  # not the fake tensor's own
            shown = self.heap.shown.of(obj)
            if shown is not None:
                return vars(shown.attributes)
            if not safe_isinstance(record, TensorRecord) or not compat.converts_functions(type(record.real)):
                self.heap.refuse("SFX104", "reads the __dict__ of a tensor")
            own = record.own_attributes()
            own.fill()
            return vars(own.shadow)
        if name == "__dict__" and issubclass(type(obj), LOCAL):
            return thread_dict(self.heap, obj).shadow
        if name == "__dict__" and not safe_isinstance(obj, _OTHER_NAMESPACES):
            return instance_dict_of(self.heap, obj)
        owner = record.instance if record is not None and is_derived(type(obj)) else record
        if safe_isinstance(owner, InstanceRecord):
            if name == "__class__":
                return type(obj)
            if safe_isinstance(self.world.class_attr(type(obj), name), types.MemberDescriptorType):
                return owner.get_slot(name)
        if name == "__dict__" and issubclass(type(obj), types.ModuleType):
            return self.world.globals_dict(vars(obj))
        if name == "__dict__" and safe_isinstance(obj, type) and id(obj) not in self.world.new_classes:
            view = type.__getattribute__(obj, "__dict__")
            self.world.class_views[id(view)] = (view, obj)
            return view
        if issubclass(type(obj), torch.Tensor) and name in trace_rules.VALUE_METHODS:
            self.heap.refuse("SFX106", f"Tensor.{name} needs values that exist only when the graph runs")
        if name == "__class__":
            return self.world.type_of(obj)
        if name == "__flags__" and safe_isinstance(obj, type):
            return self._flags(obj)
        if name in _NAMES_OF_CLASSES and safe_isinstance(obj, type) and record is None:
            self._named(obj, name)
        if name == "__callback__" and safe_isinstance(obj, weakref.ReferenceType):
            self.heap.refuse("SFX111", "reads the callback of a weak reference")
        if name == "T" and self.world.random_draws.is_drawn(obj):
            view = self.world.random_draws.derived(np.ndarray.transpose, (obj,), {})
            if view is not ABSENT:
                return view
        if safe_isinstance(record, ArrayRecord):
            record.look(name)
        if shows_copy(name, obj):
            self.heap.refuse("SFX104", f"reads .{name} of a NumPy array from outside")
        if safe_isinstance(obj, torch.autograd.graph.Node) and (
            name.startswith(_SAVED)
            if record is not None
            else id(obj) in self.heap.outside_nodes and name not in _OF_ALL_NODES
        ):
            self.heap.refuse("SFX111", f"reads {name} of a node in an autograd graph from before the step")
        if name in _PLACE and safe_isinstance(record, TensorRecord):
            self._placed(record, name)
            if name == "output_nr" and record.edge is not None and obj.grad_fn is record.edge.node:
                return record.real.output_nr
        value = (
            self.world.guarded(getattr, (obj, name), {}) if issubclass(type(obj), torch.Tensor) else getattr(obj, name)
        )
        if safe_isinstance(obj, types.FunctionType) and name in ("__defaults__", "__kwdefaults__"):
            values = value.values() if safe_isinstance(value, dict) else value or ()
            held = self.heap.sources.const(obj, obj.__qualname__) if record is None else record.base
            body_guarded = held.kind == "const" and all(is_plain(item) for item in values)
            if id(obj) in self.world.new_functions or body_guarded:
                return value
            shadow = self.heap.shadow(value, self.heap.sources.slot(held, name))
            self.world.touch(shadow, deep=False)
            return shadow
        if record is not None and record.shadow is record.real and not is_definition(value):
            if safe_isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType)):
                return value
            if safe_isinstance(record.real, torch.Generator):
                self.heap.refuse("SFX110", f"uses the random generator {record.source.label}")
            return self.heap.shadow(value, self.heap.sources.slot(record.base, name), name)
        return value

    def _flags(self, cls: type) -> int:
        """Returns the flags of a class, guarded but for those that say what the interpreter has cached of it."""
        if id(cls) not in self.world.new_classes:
            ask = functools.partial(_lasting_flags, cls)
            sources = self.heap.sources
            self.heap.guard("equal", sources.call(sources.const(ask, f"{cls.__qualname__}.__flags__")), ask())
        return cls.__flags__

    def _placed(self, record: TensorRecord, name: str) -> None:
        """Guards an attribute of a tensor from outside that differs between tensors of equal metadata."""
        source, value = self.heap.sources.slot(record.base, name), getattr(record.real, name)
        if name == "_base" and value is not None:
            self.heap.guard("type", source, type(value))
        else:
            self.heap.guard("is" if value is None else "equal", source, value)

    def _named(self, cls: type, name: str) -> None:
        """Guards the name of a class that no variable led to, such as ``type(x).__name__``."""
        if id(cls) not in self.world.new_classes and not is_library(cls.__module__):
            sources, ask = self.heap.sources, functools.partial(type.__getattribute__, cls, name)
            self.heap.guard("equal", sources.call(sources.const(ask, f"{cls.__qualname__}.{name}")), ask())
