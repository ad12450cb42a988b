"""Attribute access in the capturing world: of classes, instances, and C objects."""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict
from typing import Any

import numpy as np
import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.interpreter.object_model import attributes
from sidefx_train.compile.capture.interpreter.world import LOCAL, hidden_attr
from sidefx_train.compile.capture.recording.dispatch_mode import RandomState
from sidefx_train.compile.capture.shadows.containers.instance_dicts import (
    check_hidden_dict,
    instance_dict_of,
    thread_dict,
)
from sidefx_train.compile.capture.shadows.containers.iterators import NativeIterator
from sidefx_train.compile.capture.shadows.containers.lists_and_dicts import DictRecord
from sidefx_train.compile.capture.shadows.deferred_values import (
    TEXT_METHODS,
    DeferredArray,
    DeferredValue,
    LimitedShadow,
    PassedItem,
)
from sidefx_train.compile.capture.shadows.definition_tracking import IMMUTABLE_CLASS
from sidefx_train.compile.capture.shadows.factories import PartialRecord
from sidefx_train.compile.capture.shadows.objects import weak_references
from sidefx_train.compile.capture.shadows.objects.jagged_tensors import JaggedRecord
from sidefx_train.compile.capture.shadows.objects.numpy_arrays import ArrayRecord, shows_copy
from sidefx_train.compile.capture.shadows.objects.sparse_matrices import SparseMatrix
from sidefx_train.compile.capture.shadows.records import InstanceRecord, LeafRecord, Record, TensorRecord
from sidefx_train.compile.capture.world.interfaces import CaptureWorldAPI
from sidefx_train.compile.capture.world.native_calls import (
    builtin_methods,
    caller_frames,
    class_creation,
    weakref_calls,
)
from sidefx_train.compile.capture.world.native_calls.function_overrides import ANSWERED_ATTRIBUTES
from sidefx_train.compile.capture.world.symbolic_numbers.computed_numbers import NUMBER_METHODS
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common import trace_rules
from sidefx_train.compile.common.library_modules import is_library
from sidefx_train.compile.common.plain_values import is_definition, is_derived, is_lasting, is_plain
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import hooks_loads, instance_dict, safe_isinstance, shows_another

_C_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_OF_ALL_NUMBERS = frozenset({"__class__", "__doc__", "imag", "denominator"})
"""Attributes that are equal for all numbers of a type."""
_NAMES_OF_CLASSES = frozenset({"__name__", "__qualname__"})
_SAVED = ("saved_", "_saved_")
"""How the attributes of an autograd node that hold saved tensors begin."""
_OTHER_NAMESPACES = (type, types.ModuleType, types.FunctionType, torch.Tensor)
"""Objects whose ``__dict__`` is not a plain instance dict."""

_HIDDEN_OF_WRAPPERS = frozenset({"__dict__", "_version", "data"})
"""Attributes of wrapper subclasses that no shadow answers for."""

_PLACE = frozenset({"_base", "output_nr"})
"""Attributes of a tensor that tell where it comes from, and that no other guard compares."""

_OF_ALL_NODES = frozenset({"__class__", "__doc__", "__hash__", "__eq__", "__ne__", "register_hook", "register_prehook"})
"""Attributes of an autograd node that one which stands for it in the capture shares; hooks are refused when called."""

_HISTORY = frozenset({"grad", "grad_fn", "is_leaf", "_base", "_is_view", "retains_grad"})
"""Attributes of a tensor that tell how autograd knows it."""

_SHOWN_TYPES: dict[type, type] = {
    weak_references.ShadowRef: weakref.ref,
    torch.SymInt: int,
    torch.SymFloat: float,
    torch.SymBool: bool,
    DeferredValue: str,
    RandomState: torch.Tensor,
    SparseMatrix: torch.Tensor,
}


_CACHED_FLAG = 1 << 19
"""Flag of a class whose attributes the interpreter has cached."""


def _lasting_flags(cls: type) -> int:
    return cls.__flags__ & ~_CACHED_FLAG


def _of_attributes(record: Record | None) -> Record | None:
    """Returns the record with an object's attributes: its own, or the one beside that of its contents."""
    if safe_isinstance(record, TensorRecord):
        return record.own_attributes()
    if safe_isinstance(record, DictRecord) and type(record.real) is OrderedDict:
        return record.own_attributes()
    return record if record is None or record.instance is None else record.instance


class Attributes:
    """Reads, sets and deletes attributes of classes, instances and values of C."""

    def __init__(self, world: CaptureWorldAPI) -> None:
        self.world = world
        self.heap, self.interp, self.tracer = world.heap, world.interp, world.tracer

    def type_of(self, obj: Any) -> type:
        cls = type(obj)
        if cls is compat.FakeTensor:
            record = self.heap.record_of(obj)
            if record is not None:
                return type(record.real)
            shown = self.heap.shown.of(obj)
            if shown is not None:
                return shown.cls
            return torch.nn.Parameter if safe_isinstance(obj, torch.nn.Parameter) else torch.Tensor
        if cls is DeferredArray:
            return type(obj.sample)
        if cls is PassedItem:
            obj.refuse(self.heap)
        if cls is DeferredValue:  # one that passes through has a record
            record = self.heap.record_of(obj)
            return str if record is None else type(record.real)
        if compat.is_ragged_size(obj):
            return torch.SymInt
        of_numpy = compat.numpy_class(obj)
        if of_numpy is not None:
            return of_numpy
        if id(obj) in self.heap.outside_nodes:
            return self._type_of_outside(self.heap.outside_nodes[id(obj)])
        return obj.cls if issubclass(cls, NativeIterator) else _SHOWN_TYPES.get(cls, cls)

    def class_attr(self, cls: type, name: str) -> Any:
        if id(cls) not in self.world.new_classes:
            self.heap.definitions.looked_at(cls)
        for base in type.__getattribute__(cls, "__mro__"):
            value = self.class_entry(base, name)
            if value is not ABSENT:
                if self.world.reads.listening:
                    self.world.reads.class_attribute(base, name, value)
                return value
        return ABSENT

    def class_entry(self, cls: type, name: str) -> Any:
        if id(cls) in self.world.new_classes:
            return type.__getattribute__(cls, "__dict__").get(name, ABSENT)
        if (cls, name) in self.world.class_writes:
            return self.world.class_writes[cls, name]
        if (cls, name) in registry.COUNTERS:
            return registry.COUNTERS[cls, name]
        space = type.__getattribute__(cls, "__dict__")
        value = space.get(name, ABSENT)
        definition = is_lasting(value) or (hasattr(type(value), "__get__") and is_library(type(value).__module__))
        plain = definition and (is_library(cls.__module__) or safe_isinstance(value, _C_DESCRIPTORS))
        if value is ABSENT or plain or cls.__flags__ & IMMUTABLE_CLASS:
            if not cls.__flags__ & IMMUTABLE_CLASS:
                self.heap.definitions.took(cls, name, value)
            return value
        proxy = self.world.class_namespaces.setdefault(cls, space)
        source = self.heap.sources.item(self.heap.sources.const(proxy, cls.__qualname__), name)
        if definition:
            self.heap.guard("is", source, value)
            return value
        value = self.world.class_snapshot[cls, name] = self.heap.shadow(value, source, name)
        return value

    def instance_attr(self, obj: Any, name: str) -> Any:
        value = self._instance_attr(obj, name)
        if self.world.mutated_after_graph and id(obj) in self.world.mutated_after_graph and value is not ABSENT:
            by = self.world.mutated_after_graph[id(obj)]
            self.heap.refuse("SFX103", f"reads {name} of an object that {by} changes after the graph")
        if self.world.reads.listening:
            self.world.reads.attribute(obj, name, value)
        return value

    def _instance_attr(self, obj: Any, name: str) -> Any:
        if issubclass(type(obj), type):
            return self.class_entry(obj, name)
        if issubclass(type(obj), types.ModuleType):
            space = vars(obj)
            value = space.get(name, ABSENT)
            if id(obj) in self.world.new_modules:
                return value
            record = self.heap.namespaces.get(id(space))
            if (record is None or name not in record.values) and is_lasting(value) and self.heap.trusts(space):
                self.heap.definitions.took(space, name, value)
                return value
            self.heap.guard("type", self.heap.sources.const(obj, str(space.get("__name__"))), type(obj))
            return self.heap.namespace(space).get(name)
        if type(obj) is types.FunctionType and not is_library(obj.__module__ or ""):
            self._function(obj)
        owner = self.heap.record_of(obj)
        if issubclass(type(obj), LOCAL):
            space = thread_dict(self.heap, obj)
            if name == "__dict__":
                return space.shadow
            return dict.__getitem__(space.shadow, name) if space.bring(name) else ABSENT
        if safe_isinstance(owner, TensorRecord) and owner.instance is None:
            return owner.own_attributes().get(name)
        shown = self.heap.shown.of(obj)
        if shown is not None:
            return vars(shown.attributes).get(name, ABSENT)
        holder = _of_attributes(owner)
        if safe_isinstance(holder, InstanceRecord):
            return self.heap.instance_attr(holder, name)
        try:
            space = instance_dict(obj)
        except AttributeError:
            if shows_another(type(obj)):
                check_hidden_dict(self.heap, obj)
                return ABSENT
            return hidden_attr(obj, name)
        if owner is None:
            return space.get(name, ABSENT)
        if name in space:
            return self.heap.shadow(space[name], self.heap.sources.attr(owner.base, name), name)
        self.heap.guard("absent", owner.base, name)
        return ABSENT

    def set_instance_attr(self, obj: Any, name: str, value: Any) -> None:
        if issubclass(type(obj), type):
            class_creation.set_class_attribute(self.world, obj, name, value)
            return
        if issubclass(type(obj), types.ModuleType):
            if id(obj) in self.world.new_modules:
                vars(obj)[name] = value
            else:
                self.heap.namespace(vars(obj)).set(name, value)
            return
        field = self.class_attr(type(obj), name)
        if type(obj) is types.FunctionType:
            if type(field) in _C_DESCRIPTORS:
                class_creation.set_function_field(self.world, obj, name, value)
                return
            self._function(obj)
        record = self.heap.record_of(obj)
        if issubclass(type(obj), LOCAL):
            space = thread_dict(self.heap, obj)
            builtin_methods.dict_operator(self.world, space, "setitem", (space.shadow, name, value))
            return
        record = _of_attributes(record)
        if record is not None and safe_isinstance(obj, trace_rules.READ_BY_DEFERRED_CALLS):
            self.heap.refuse("SFX103", f"changes how {type(obj).__qualname__} shows or logs values")
        if safe_isinstance(record, InstanceRecord):
            if type(field) is types.MemberDescriptorType:
                record.set_slot(name, value)
            elif type(field) is types.GetSetDescriptorType:
                self.heap.refuse("SFX111", f"sets {name} of {record.source.label}")
            elif record.has_dict:
                record.set(name, value)
            else:
                object.__setattr__(obj, name, value)  # raises: there is no storage for it
        elif record is not None:
            self.heap.refuse("SFX104", f"sets {name!r} of {record.source.label}, which cannot be shadowed")
        else:
            if name == "__dict__":  # everything that it shares from now on
                self.world.touch(value, deep=False)
            shown = self.heap.shown.of(obj)
            if shown is not None:
                obj = shown.attributes
            if type(obj) is compat.FakeTensor and type(field) not in _C_DESCRIPTORS:
                self.world.tagged.setdefault(id(obj), (obj, {}))[1][name] = None
            object.__setattr__(obj, name, value)

    def _function(self, fn: types.FunctionType) -> None:
        """Makes the attributes of an outside function shadowed."""
        if id(fn) not in self.world.new_functions and self.heap.record_of(fn) is None:
            self.heap.shadow(fn, self.heap.sources.const(fn, fn.__qualname__))

    def del_instance_attr(self, obj: Any, name: str) -> None:
        if type(obj) is types.FunctionType:
            self._function(obj)
        record = self.heap.record_of(obj)
        if issubclass(type(obj), LOCAL):
            space = thread_dict(self.heap, obj)
            if not space.bring(name):
                raise AttributeError(f"{attributes.shown_name(type(obj))!r} object has no attribute {name!r}")
            builtin_methods.dict_operator(self.world, space, "delitem", (space.shadow, name))
            return
        record = _of_attributes(record)
        if safe_isinstance(record, InstanceRecord) and safe_isinstance(
            self.class_attr(type(obj), name), types.MemberDescriptorType
        ):
            record.delete_slot(name)
        elif safe_isinstance(record, InstanceRecord) and record.has_dict:
            if not record.delete(name):
                raise AttributeError(f"{attributes.shown_name(type(obj))!r} object has no attribute {name!r}")
        elif id(obj) in self.world.new_modules and name in vars(obj):
            del vars(obj)[name]
        elif (record is not None and not safe_isinstance(obj, type)) or safe_isinstance(obj, types.ModuleType):
            self.heap.refuse("SFX111", f"deletes the attribute {name!r} of {trace_rules.describe(obj)}")
        elif safe_isinstance(obj, type):
            class_creation.delete_class_attribute(self.world, obj, name)
        else:
            shown = self.heap.shown.of(obj)
            object.__delattr__(obj if shown is None else shown.attributes, name)

    def native_getattr(self, obj: Any, name: str) -> Any:
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
            if safe_isinstance(self.class_attr(type(obj), name), types.MemberDescriptorType):
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
            return self.type_of(obj)
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

    def _type_of_outside(self, record: TensorRecord) -> type:
        """Returns the class of the node whose place another one takes in the capture, guarded."""
        cls = type(record.real.grad_fn)
        self.heap.guard("type", self.heap.sources.slot(record.base, "grad_fn"), cls)
        return cls

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

    def _of_deferred(self, obj: DeferredValue, name: str) -> Any:
        if type(obj) is DeferredArray:
            return self.world.deferred_arrays.attribute(obj, name)
        if type(obj) is SparseMatrix:
            return obj.attribute(name)
        return self.world.computed_objects.attribute(obj, name) if type(obj) is DeferredValue else ABSENT

    def override_getattr(self, obj: Any, name: str) -> Any:
        if issubclass(type(obj), DeferredValue):
            found = self._of_deferred(obj, name)
            method: Any = vars(str).get(name)
            if found is ABSENT and method in TEXT_METHODS and self.type_of(obj) is str:
                found = types.MethodType(method, obj)
            if found is not ABSENT:
                return found
            if issubclass(type(obj), LimitedShadow):
                obj.refuse(self.heap)
            self.heap.refuse("SFX106", f"reads .{name} of a value that is known only after the step")
        if type(obj) in compat.SYMBOLS:
            if name in ("real", "numerator") and type(obj) is not torch.SymBool:
                return obj
            kind = compat.numpy_class(obj) or _SHOWN_TYPES[type(obj)]
            if name in _OF_ALL_NUMBERS or not hasattr(kind, name):
                return getattr(kind(), name)
            method = vars(kind).get(name, getattr(kind, name))
            if method in NUMBER_METHODS:
                return types.MethodType(method, obj)
            return getattr(self.world.guarded(builtin_methods.concrete, (obj,), {}), name)
        if issubclass(type(obj), NativeIterator):
            obj.refuse()
        if type(obj) is OrderedDict and not hasattr(OrderedDict, name):
            return self.instance_attr(obj, name)
        if type(obj) is RandomState:
            self.heap.refuse("SFX110", f"reads .{name} of a random state saved in the step")
        if type(obj) in weakref.ProxyTypes:
            return attributes.load(self.interp, weakref_calls.through(self.world, obj), name)
        if type(obj) is types.FrameType and name == "f_back":
            return caller_frames.caller_of(self.world, obj)
        if name in ANSWERED_ATTRIBUTES and (type(obj) is compat.FakeTensor or compat.is_wrapper(obj)):
            found = self.world.functions.attribute(obj, name)
            if found is not ABSENT:
                return found
        if type(obj) is compat.FakeTensor:
            if name == "data":
                return self.tracer.data_of(obj)
            if name == "grad":
                self.tracer.touches()
                self.heap.read_grad(obj)
            if name == "_version" and not obj.is_inference():
                return self.heap.numbers.version_of(obj)
            if name in compat.attributes_of_fakes() and self.heap.record_of(obj) is None:
                raise AttributeError(f"{self.type_of(obj).__name__!r} object has no attribute {name!r}")
            return ABSENT
        if name in _HISTORY and safe_isinstance(self.heap.record_of(obj), JaggedRecord):
            self.heap.refuse("SFX107", f"reads {name} of a nested tensor whose gradient leaves the step")
        if name == "grad" and (compat.is_dtensor(obj) or compat.is_wrapper(obj)):
            self.tracer.touches()
            self.heap.read_grad(obj)
            return obj.grad
        if name in _HIDDEN_OF_WRAPPERS and compat.is_wrapper(obj):
            self.heap.refuse("SFX109", f"reads {name} of a {type(obj).__qualname__}, a tensor subclass")
        if type(obj) in compat.OPERATORS or compat.is_operator_of_functions(type(obj)):
            return getattr(obj, name)
        if safe_isinstance(obj, functools.partial):
            record = self.heap.record_of(obj)
            return record.attribute(name) if safe_isinstance(record, PartialRecord) else ABSENT
        if type(obj) in compat.OPERATOR_NAMESPACES:
            hasattr(obj, name)  # then it is there before a guard looks
        if issubclass(type(obj), torch.nn.Module):
            for base, hook in self.world.attribute_hooks.get(name, ()):
                if safe_isinstance(obj, base) and not hooks_loads(type(obj)):
                    value = hook(self.world, obj, name)
                    if value is not ABSENT:
                        return value
            return builtin_methods.module_getattr(self.world, obj, name)
        return ABSENT

    def override_setattr(self, obj: Any, name: str, value: Any) -> bool:
        answered = name in ANSWERED_ATTRIBUTES and (type(obj) is compat.FakeTensor or compat.is_wrapper(obj))
        if answered and self.world.functions.attribute(obj, name, value) is not ABSENT:
            return True
        if type(obj) is compat.FakeTensor:
            if name == "data":
                self.heap.memory.assign(obj, value)
                return True
            if name in ("grad", "requires_grad"):
                self.tracer.touches()
                if name == "grad":
                    self.heap.overwrite_grad(obj)
                setattr(obj, name, builtin_methods.concrete(value) if type(value) is torch.SymBool else value)
                return True
            if name == "grad_dtype" and safe_isinstance(self.heap.record_of(obj), LeafRecord):
                setattr(obj, name, value)
                return True
            if name in compat.attributes_of_fakes() and self.heap.record_of(obj) is None:
                self.heap.refuse("SFX111", f"sets {name} of a tensor, a name that the capture uses itself")
            return False
        if name == "grad" and (compat.is_dtensor(obj) or compat.is_wrapper(obj)):
            self.tracer.touches()
            self.heap.overwrite_grad(obj)
            obj.grad = value
            return True
        if compat.is_wrapper(obj) and safe_isinstance(getattr(torch.Tensor, name, None), types.GetSetDescriptorType):
            if name != "requires_grad":
                self.heap.refuse("SFX109", f"sets {name} of a {type(obj).__qualname__}, a tensor subclass")
            self.tracer.touches()
            obj.requires_grad = value
            return True
        if compat.is_dtensor(obj) and name == "_local_tensor" and compat.local_of(obj) is value:
            return True  # ``+=`` stores what it has changed in place
        if type(obj) in weakref.ProxyTypes:
            attributes.store(self.interp, weakref_calls.through(self.world, obj), name, value)
            return True
        if issubclass(type(obj), torch.nn.Module):
            return builtin_methods.module_setattr(self.world, obj, name, value)
        return False

    def override_delattr(self, obj: Any, name: str) -> bool:
        if type(obj) in weakref.ProxyTypes:
            attributes.delete(self.interp, weakref_calls.through(self.world, obj), name)
            return True
        if issubclass(type(obj), torch.nn.Module):
            return builtin_methods.module_delattr(self.world, obj, name)
        return False
