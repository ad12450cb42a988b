"""Attributes that the capture answers before Python's lookup: of tensors, numbers, deferred values, modules."""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.interpreter.object_model import attributes
from sidefx_train.compile.capture.recording.dispatch_mode import RandomState
from sidefx_train.compile.capture.shadows.containers.iterators import NativeIterator
from sidefx_train.compile.capture.shadows.deferred_values import (
    TEXT_METHODS,
    DeferredArray,
    DeferredValue,
    LimitedShadow,
)
from sidefx_train.compile.capture.shadows.factories import PartialRecord
from sidefx_train.compile.capture.shadows.objects import weak_references
from sidefx_train.compile.capture.shadows.objects.jagged_tensors import JaggedRecord
from sidefx_train.compile.capture.shadows.objects.sparse_matrices import SparseMatrix
from sidefx_train.compile.capture.shadows.records import LeafRecord
from sidefx_train.compile.capture.world.attributes import module_members
from sidefx_train.compile.capture.world.interfaces import CaptureWorldAPI
from sidefx_train.compile.capture.world.native_calls import caller_frames, weakref_calls
from sidefx_train.compile.capture.world.native_calls.torch_overrides.function_overrides import ANSWERED_ATTRIBUTES
from sidefx_train.compile.capture.world.symbolic_numbers import concrete_numbers
from sidefx_train.compile.capture.world.symbolic_numbers.computed_numbers import NUMBER_METHODS
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import hooks_loads, safe_isinstance

_OF_ALL_NUMBERS = frozenset({"__class__", "__doc__", "imag", "denominator"})
"""Attributes that are equal for all numbers of a type."""
_HIDDEN_OF_WRAPPERS = frozenset({"__dict__", "_version", "data"})
"""Attributes of wrapper subclasses that no shadow answers for."""

_HISTORY = frozenset({"grad", "grad_fn", "is_leaf", "_base", "_is_view", "retains_grad"})
"""Attributes of a tensor that tell how autograd knows it."""

SHOWN_TYPES: dict[type, type] = {
    weak_references.ShadowRef: weakref.ref,
    torch.SymInt: int,
    torch.SymFloat: float,
    torch.SymBool: bool,
    DeferredValue: str,
    RandomState: torch.Tensor,
    SparseMatrix: torch.Tensor,
}
"""Class that the program sees of a value that stands for another in the capture."""


class AttributeOverrides:
    """Answers attributes of values that stand for others in the capture; ``ABSENT`` leaves one to Python's lookup."""

    def __init__(self, world: CaptureWorldAPI) -> None:
        self.world = world
        self.heap, self.interp, self.tracer = world.heap, world.interp, world.tracer

    def load(self, obj: Any, name: str) -> Any:
        """Returns the value that the program reads, or ``ABSENT``."""
        if issubclass(type(obj), DeferredValue):
            found = self._of_deferred(obj, name)
            method: Any = vars(str).get(name)
            if found is ABSENT and method in TEXT_METHODS and self.world.type_of(obj) is str:
                found = types.MethodType(method, obj)
            if found is not ABSENT:
                return found
            if issubclass(type(obj), LimitedShadow):
                obj.refuse(self.heap)
            self.heap.refuse("SFX106", f"reads .{name} of a value that is known only after the step")
        if type(obj) in compat.SYMBOLS:
            if name in ("real", "numerator") and type(obj) is not torch.SymBool:
                return obj
            kind = compat.numpy_class(obj) or SHOWN_TYPES[type(obj)]
            if name in _OF_ALL_NUMBERS or not hasattr(kind, name):
                return getattr(kind(), name)
            method = vars(kind).get(name, getattr(kind, name))
            if method in NUMBER_METHODS:
                return types.MethodType(method, obj)
            return getattr(self.world.guarded(concrete_numbers.concrete, (obj,), {}), name)
        if issubclass(type(obj), NativeIterator):
            obj.refuse()
        if type(obj) is OrderedDict and not hasattr(OrderedDict, name):
            return self.world.instance_attr(obj, name)
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
                raise AttributeError(f"{self.world.type_of(obj).__name__!r} object has no attribute {name!r}")
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
            return module_members.module_getattr(self.world, obj, name)
        return ABSENT

    def _of_deferred(self, obj: DeferredValue, name: str) -> Any:
        if type(obj) is DeferredArray:
            return self.world.deferred_arrays.attribute(obj, name)
        if type(obj) is SparseMatrix:
            return obj.attribute(name)
        return self.world.computed_objects.attribute(obj, name) if type(obj) is DeferredValue else ABSENT

    def store(self, obj: Any, name: str, value: Any) -> bool:
        """Sets an attribute; returns False if it is left to Python's lookup."""
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
                setattr(obj, name, concrete_numbers.concrete(value) if type(value) is torch.SymBool else value)
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
            return module_members.module_setattr(self.world, obj, name, value)
        return False

    def delete(self, obj: Any, name: str) -> bool:
        """Deletes an attribute; returns False if it is left to Python's lookup."""
        if type(obj) in weakref.ProxyTypes:
            attributes.delete(self.interp, weakref_calls.through(self.world, obj), name)
            return True
        if issubclass(type(obj), torch.nn.Module):
            return module_members.module_delattr(self.world, obj, name)
        return False
