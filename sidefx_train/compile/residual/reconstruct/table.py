"""Which kind of object is rebuilt by which function: by its exact class, else by the first rule that holds."""

from __future__ import annotations

import datetime
import functools
import types
import typing
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.backends.cuda import SDPAParams

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.interpreter.generators import InterpretedGenerator
from sidefx_train.compile.capture.interpreter.object_model.iteration import PythonIterable, PythonIterator
from sidefx_train.compile.capture.recording.dispatch_mode import RandomState
from sidefx_train.compile.capture.shadows.containers.iterators import HANDED_ON, REBUILT
from sidefx_train.compile.capture.shadows.containers.traversal import DICT_VIEWS
from sidefx_train.compile.capture.shadows.deferred_values import (
    DeferredValue,
    RangeOfNumber,
    TensorSnapshot,
    TraceKey,
)
from sidefx_train.compile.capture.shadows.shadow_table import PASSED_THROUGH
from sidefx_train.compile.common.plain_values import is_member_of_c_enum
from sidefx_train.compile.common.sentinels import NATIVE_CODE
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.distributed.collective_calls import PendingCollective
from sidefx_train.compile.residual.reconstruct import (
    containers,
    deferred,
    functions,
    instances,
    iterators,
    tensor_subclasses,
    tensors,
)
from sidefx_train.compile.residual.reconstruct.reconstruction import Reconstruction

Build = Callable[[Reconstruction, Any], str]
"""Writes the statements that make an object; returns its expression."""
Test = Callable[[Reconstruction, Any], bool]


def _same_object(rebuilder: Reconstruction, value: Any) -> str:
    return rebuilder.constant(value)


def _refused(code: str, reason: Callable[[Any], str]) -> Build:
    """Returns what refuses an object: nothing outside would be equal to it."""
    return lambda rebuilder, value: rebuilder.refuse(code, f"cannot rebuild {reason(value)}")


_created = _refused("SFX104", lambda value: f"a {type(value).__qualname__} created in the step")

BY_CLASS: dict[type, Build] = {
    slice: containers.new_slice,
    set: containers.new_set,
    np.ndarray: containers.new_array,
    bytearray: containers.new_bytearray,
    RangeOfNumber: lambda rebuilder, value: f"{rebuilder.constant(range)}({rebuilder.expression(value.length)})",
    types.CellType: functions.new_cell,
    **dict.fromkeys(REBUILT | HANDED_ON, iterators.iterator),
    PythonIterable: iterators.python_iterable,
    PythonIterator: iterators.python_iterator,
    InterpretedGenerator: iterators.generator,
    torch.utils.hooks.RemovableHandle: tensors.hook_handle,
    datetime.date: instances.new_date,
    datetime.time: instances.new_date,
    datetime.datetime: instances.new_date,
    datetime.timedelta: instances.new_date,
    datetime.timezone: _same_object,
    RandomState: tensors.random_state,
    PendingCollective: _refused("SFX104", lambda value: f"the Work of torch.distributed.{value.name}"),
    SDPAParams: instances.new_attention_arguments,
    types.MappingProxyType: containers.new_mapping_proxy,
    **dict.fromkeys(DICT_VIEWS, containers.new_dict_view),
}
"""By exact class."""

_TYPE_PARAMETERS = (typing.TypeVar, typing.ParamSpec, typing.TypeVarTuple, typing.NewType)
_UNCHANGING = frozenset({types.GenericAlias, types.UnionType, type(np.random.Generator.random)})
"""Classes beside :data:`PASSED_THROUGH` whose instances mean the same at every call; the last one is that of the
functions of NumPy's generators, which are no built-in functions."""


def _is_a(*classes: type) -> Test:
    return lambda rebuilder, value: safe_isinstance(value, classes)


def _is_new_function(rebuilder: Reconstruction, value: Any) -> bool:
    return safe_isinstance(value, types.FunctionType) and id(value) in rebuilder.world.new_functions


def _is_callback(rebuilder: Reconstruction, value: Any) -> bool:
    return safe_isinstance(value, types.FunctionType) and id(value.__code__) in NATIVE_CODE


def _is_defined(rebuilder: Reconstruction, value: Any) -> bool:
    return type(value) is types.BuiltinMethodType and rebuilder.world.heap.definitions.gave(value)


def _is_bound(rebuilder: Reconstruction, value: Any) -> bool:
    """Returns True for a C method of an object other than a module or class."""
    if not safe_isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType)):
        return False
    return value.__self__ is not None and not safe_isinstance(value.__self__, (types.ModuleType, type))


def _is_unchanging(rebuilder: Reconstruction, value: Any) -> bool:
    cls = type(value)
    unchanging = is_member_of_c_enum(value) or cls.__module__ == "typing" or cls in _UNCHANGING
    return unchanging or safe_isinstance(value, PASSED_THROUGH)


def _is_outside_cache(rebuilder: Reconstruction, value: Any) -> bool:
    """Returns True for a cached function that the step has not made: one that a class or module defines."""
    return type(value) is functools._lru_cache_wrapper and id(value) not in rebuilder.world.caches.made


def _is_new_instance_dict(rebuilder: Reconstruction, value: Any) -> bool:
    """Returns True for the ``__dict__`` of an instance that may leave: not of a class that the step creates."""
    _, owner = rebuilder.world.heap.new_namespaces.get(id(value), (None, None))
    return owner is not None and id(type(owner)) not in rebuilder.world.new_classes


RULES: tuple[tuple[Test, Build], ...] = (
    # values of the trace
    (_is_a(TraceKey), deferred.trace_key),
    (lambda rebuilder, value: compat.is_dtensor(value), tensor_subclasses.dtensor),
    (lambda rebuilder, value: compat.is_jagged(value), tensor_subclasses.jagged),
    (lambda rebuilder, value: compat.is_wrapper(value), tensor_subclasses.wrapper),
    (_is_a(torch.Tensor), tensors.new_tensor),
    (_is_a(*compat.SYMBOLS), tensors.number),
    (_is_a(TensorSnapshot), tensors.snapshot),
    (_is_a(DeferredValue), deferred.deferred_value),
    (_is_a(np.dtype), _same_object),
    # objects that the step created
    (_is_a(tuple), containers.new_tuple),
    (_is_a(frozenset), containers.new_set),
    (_is_a(types.MethodType), functions.method),
    (_is_new_function, functions.new_function),
    (_is_callback, functions.callback),
    (_is_defined, functions.named_builtin),
    (_is_bound, functions.builtin_method),
    (_is_a(weakref.ReferenceType), instances.weak_reference),
    (
        lambda rebuilder, value: safe_isinstance(value, type) and id(value) in rebuilder.world.new_classes,
        _refused("SFX111", lambda value: f"the class {value.__qualname__}, which the step creates"),
    ),
    (lambda rebuilder, value: id(value) in rebuilder.world.new_modules, instances.new_module),
    (lambda rebuilder, value: id(value) in rebuilder.world.new_descriptors, functions.new_descriptor),
    (_is_a(functools.partial), functions.new_partial),
    (_is_a(*_TYPE_PARAMETERS), _created),
    (_is_outside_cache, _same_object),
    (_is_unchanging, _same_object),
    (
        lambda rebuilder, value: id(type(value)) in rebuilder.world.new_classes,
        _refused(
            "SFX111", lambda value: f"an instance of the class {type(value).__qualname__}, which the step creates"
        ),
    ),
    (_is_new_instance_dict, containers.instance_dict),
    (_is_a(list, deque, dict, set), containers.new_container),
)
"""In this order; what no rule knows is an instance of a class."""


def builder_of(rebuilder: Reconstruction, value: Any) -> Build:
    """Returns the function that rebuilds a value of the trace which has no expression yet."""
    exact = BY_CLASS.get(type(value))
    if exact is not None:
        return exact
    return next((build for test, build in RULES if test(rebuilder, value)), instances.new_instance)
