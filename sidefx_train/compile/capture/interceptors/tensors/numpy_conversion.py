"""Tensors made from NumPy arrays, whose memory is an input of the graph, read at every call; arrays of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.interceptors.tensors.tensor_from_numbers import by_keywords
from sidefx_train.compile.capture.shadows.objects.numpy_arrays import ArrayRecord
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


def _record(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> ArrayRecord | None:
    record = world.heap.record_of(args[0] if args else kwargs.get(name))
    return record if safe_isinstance(record, ArrayRecord) else None


def _made(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """Returns an array argument that the step created, or ``None``."""
    array = args[0] if args else kwargs.get(name)
    return array if type(array) is np.ndarray and world.heap.record_of(array) is None else None


def _over_made(
    world: TraceWorld, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str
) -> torch.Tensor | Any:
    """Calls ``fn`` on an array that the step created; returns ``ABSENT`` for any other argument."""
    array = _made(world, args, kwargs, name)
    if array is None:
        return ABSENT
    rest = {key: value for key, value in kwargs.items() if key != name}
    of = world.heap.record_of(array.base) if type(array.base) is np.ndarray else None
    if isinstance(of, ArrayRecord) and (part := world.guarded(of.part, (array,), {})) is not None:
        return part if fn is torch.from_numpy else world.guarded(fn, (part, *args[1:]), rest)
    held = world.heap.made_arrays.substitute(array)
    made = over = world.guarded(torch.from_numpy, (held,), {})
    if fn is not torch.from_numpy:
        made = world.guarded(fn, (over, *args[1:]), rest)
    if held is array or compat.storage_id(made) == compat.storage_id(over):
        world.heap.made_arrays.note(array, over)
    return made


def _tensor_over(world: TraceWorld, record: ArrayRecord) -> torch.Tensor:
    """Returns the tensor over an array's memory; raises the same error as torch if torch refuses the array."""
    if record.tensor is None:
        world.guarded(torch.from_numpy, (record.shadow.copy(),), {})
    return record.as_tensor()


@registry.intercept(torch.from_numpy)
def _from_numpy(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    record = _record(world, args, kwargs, "ndarray")
    if record is None:
        return _over_made(world, torch.from_numpy, args, kwargs, "ndarray")
    return _tensor_over(world, record)


def _over_array(world: TraceWorld, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """Calls ``fn``, which makes a tensor over the memory of its argument ``name`` where it can."""
    record = _record(world, args, kwargs, name)
    if record is None:
        made = by_keywords(world, args, kwargs, name)
        return _over_made(world, fn, args, kwargs, name) if made is ABSENT else made
    rest = {key: value for key, value in kwargs.items() if key != name}
    return world.guarded(fn, (_tensor_over(world, record), *args[1:]), rest)


@registry.intercept(torch.from_dlpack, torch.utils.dlpack.from_dlpack)
def _from_dlpack(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Makes a tensor over the memory of an array that may be written to: NumPy does not hand out others."""
    array = args[0] if len(args) == 1 and not kwargs else None
    if type(array) is np.ndarray and array.size and array.dtype.byteorder in "=|":
        record = world.heap.record_of(array)
        if record.real.flags.writeable if safe_isinstance(record, ArrayRecord) else array.flags.writeable:
            return world.interp.call(torch.from_numpy, (array,), {})
    return world.heap.refuse("SFX104", "torch.from_dlpack of an object whose memory the capture cannot follow")


@registry.intercept(torch.frombuffer)
def _frombuffer(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Makes a tensor over all the memory of an array with elements of the same type."""
    array = args[0] if len(args) == 1 and kwargs.keys() == {"dtype"} else None
    if type(array) is np.ndarray and array.size and array.ndim and array.flags.c_contiguous:
        record = world.heap.record_of(array)
        if not safe_isinstance(record, ArrayRecord) or (record.is_laid_out and record.real.flags.writeable):
            made = world.interp.call(torch.from_numpy, (array,), {})
            if made.dtype is kwargs["dtype"]:
                return world.guarded(torch.Tensor.view, (made, -1), {})
    return world.heap.refuse("SFX104", "torch.frombuffer over memory that the capture cannot follow")


@registry.intercept(torch.as_tensor)
def _as_tensor(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _over_array(world, torch.as_tensor, args, kwargs, "data")


@registry.intercept(torch.asarray)
def _asarray(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _over_array(world, torch.asarray, args, kwargs, "obj")


@registry.intercept(torch.tensor)
def _tensor(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args and type(args[0]) is np.ndarray:
        args = (world.random_draws.copied(args[0]), *args[1:])
    record = _record(world, args, kwargs, "data")
    array = _made(world, args, kwargs, "data")
    if array is not None:  # a constant of the graph must not share its memory
        rest = {name: value for name, value in kwargs.items() if name != "data"}
        return world.guarded(torch.tensor, (world.heap.made_arrays.substitute(array), *args[1:]), rest)
    if record is None:
        return by_keywords(world, args, kwargs, "data")
    if len(args) > 1 or set(kwargs) - {"data", "dtype", "device", "requires_grad"}:
        return ABSENT
    target = {name: kwargs[name] for name in ("dtype", "device") if kwargs.get(name) is not None}
    copy = _tensor_over(world, record).detach().clone().to(**{"device": torch.get_default_device(), **target})
    return copy.requires_grad_(kwargs.get("requires_grad", False))


@registry.intercept(torch.Tensor.numpy)
def _numpy(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return ABSENT if len(args) != 1 or kwargs else world.deferred_arrays.of_tensor(args[0])
