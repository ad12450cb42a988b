"""Attributes in the capturing world, as classes and instances store them; ``attributes/`` has those of C code."""

from __future__ import annotations

import types
from collections import OrderedDict
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.interpreter.object_model import attributes
from sidefx_train.compile.capture.interpreter.world import LOCAL, hidden_attr
from sidefx_train.compile.capture.shadows.containers.instance_dicts import check_hidden_dict, thread_dict
from sidefx_train.compile.capture.shadows.containers.iterators import NativeIterator
from sidefx_train.compile.capture.shadows.containers.lists_and_dicts import DictRecord
from sidefx_train.compile.capture.shadows.deferred_values import DeferredArray, DeferredValue, PassedItem
from sidefx_train.compile.capture.shadows.definition_tracking import IMMUTABLE_CLASS
from sidefx_train.compile.capture.shadows.records import InstanceRecord, Record, TensorRecord
from sidefx_train.compile.capture.world.attributes.attribute_overrides import SHOWN_TYPES
from sidefx_train.compile.capture.world.interfaces import CaptureWorldAPI
from sidefx_train.compile.capture.world.native_calls import builtin_methods, class_creation
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common import trace_rules
from sidefx_train.compile.common.library_modules import is_library
from sidefx_train.compile.common.plain_values import is_lasting
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import instance_dict, safe_isinstance, shows_another

_C_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)


def _of_attributes(record: Record | None) -> Record | None:
    """Returns the record with an object's attributes: its own, or the one beside that of its contents."""
    if safe_isinstance(record, TensorRecord):
        return record.own_attributes()
    if safe_isinstance(record, DictRecord) and type(record.real) is OrderedDict:
        return record.own_attributes()
    return record if record is None or record.instance is None else record.instance


class Attributes:
    """Classes of values, and attributes in namespaces of classes, modules, functions and instances."""

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
        return obj.cls if issubclass(cls, NativeIterator) else SHOWN_TYPES.get(cls, cls)

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

    def _type_of_outside(self, record: TensorRecord) -> type:
        """Returns the class of the node whose place another one takes in the capture, guarded."""
        cls = type(record.real.grad_fn)
        self.heap.guard("type", self.heap.sources.slot(record.base, "grad_fn"), cls)
        return cls
