"""Writes calls that run after the graph, and values that they compute."""

from __future__ import annotations

import types
from contextlib import nullcontext
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.interpreter.frame_objects import Place
from sidefx_train.compile.capture.shadows.deferred_values import (
    DeferredArray,
    DeferredCall,
    DeferredValue,
    TensorSnapshot,
    TraceKey,
)
from sidefx_train.compile.capture.shadows.objects.sparse_matrices import SparseMatrix
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.plain_values import bounds_of, is_plain
from sidefx_train.compile.common.type_checks import attribute_of, safe_isinstance
from sidefx_train.compile.residual.reconstruct.functions import bound_method, keywords
from sidefx_train.compile.residual.reconstruct.reconstruction import Reconstruction


def call(
    rebuilder: Reconstruction, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: Place | None = None
) -> str:
    """Returns code for a call; with a place, the call is made on behalf of the user's line there."""
    reads = not all(map(_is_value, (*args, *kwargs.values())))
    with rebuilder.reading() if reads else nullcontext():  # a container that is still to be filled may hold the result
        parts = [*map(rebuilder.expression, args), *keywords(rebuilder, kwargs)]
    called = _called(rebuilder, fn)
    if place is not None:
        parts, called = [called, *parts], rebuilder.constant(place, "place")
    return f"{called}({', '.join(parts)})"


def _is_value(value: Any) -> bool:
    """Returns True for what contains nothing that is filled in later."""
    if safe_isinstance(value, DeferredValue):
        return all(map(_is_value, (*value.args, *value.kwargs.values())))
    if type(value) is tuple:
        return all(map(_is_value, value))
    if type(value) is slice:
        return all(map(_is_value, bounds_of(value)))
    return is_plain(value) or safe_isinstance(value, (torch.Tensor, TensorSnapshot, *compat.SYMBOLS))


def write_call(rebuilder: Reconstruction, deferred: DeferredCall) -> None:
    """Writes a deferred call as a statement, in program order."""
    code = call(rebuilder, deferred.fn, deferred.args, deferred.kwargs, deferred.place)
    if deferred.result is not None:
        code = f"{rebuilder.named(deferred.result, rebuilder.writer.fresh('r'))} = {code}"
    rebuilder.write(f"{_with_dtype(rebuilder, deferred.dtype)}{code}  # {deferred.location}")


def deferred_value(rebuilder: Reconstruction, value: DeferredValue) -> str:
    """Returns a value that is computed after the graph."""
    if type(value) is SparseMatrix and value.parts[-1].requires_grad:
        rebuilder.refuse("SFX109", "a sparse matrix with an autograd history leaves the step")
    place = value.place if safe_isinstance(value, DeferredArray) else None
    made = call(rebuilder, value.fn, value.args, value.kwargs, place)
    if value.dtype is None:
        return rebuilder.remember(value, made)
    name = rebuilder.writer.fresh("r")
    rebuilder.write(f"{_with_dtype(rebuilder, value.dtype)}{name} = {made}")
    return rebuilder.remember(value, name)


def _with_dtype(rebuilder: Reconstruction, dtype: torch.dtype | None) -> str:
    """Returns the head of a ``with`` statement for torch's default dtype; empty for ``None``."""
    if dtype is None:
        return ""
    return f"with {rebuilder.constant(compat.default_dtype)}({rebuilder.constant(dtype)}): "


def _called(rebuilder: Reconstruction, fn: Any) -> str:
    """Returns what is called: a method of an outside object is bound to that object."""
    record = rebuilder.world.heap.record_of(attribute_of(fn, "__self__"))
    if safe_isinstance(fn, (types.MethodType, types.BuiltinMethodType)) and record is not None:
        if type(fn) is types.MethodType and fn.__func__ in registry.LOOKED_UP:
            return f"{rebuilder.writer.value(record.source)}.{registry.LOOKED_UP[fn.__func__]}"
        if type(fn) is types.MethodType:
            func = rebuilder.constant(fn.__func__, "function")
            maker = rebuilder.constant(types.MethodType, "Method")
            return f"{maker}({func}, {rebuilder.writer.value(record.source)})"
        return bound_method(rebuilder, fn, rebuilder.writer.value(record.source))
    return rebuilder.constant(fn, attribute_of(fn, "__name__", "fn"))


def trace_key(rebuilder: Reconstruction, value: TraceKey) -> str:
    """Returns the value that a key of the trace is."""
    return rebuilder.expression(value.value)
