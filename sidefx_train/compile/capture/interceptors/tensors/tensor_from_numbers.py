"""Tensors made of numbers that change between calls (``torch.tensor([step, 1.0])``, ``torch.tensor([loss, k])``).

The C code that creates them would read the value of each number and so make it a constant. This module creates a 0-dim
tensor of the graph for each number and stacks them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.world.symbolic_numbers.concrete_numbers import concrete_within
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.ops.sequences_of_numbers import range_length

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


_MOST = 256
"""For more numbers, capturing again is cheaper than creating a node for each."""

_CHANGING = (*compat.SYMBOLS, compat.FakeTensor)
_PYTHON = (int, float, bool, torch.SymInt, torch.SymFloat)

_WIDE = (torch.int64, torch.float32, torch.float64, torch.bfloat16)
"""dtypes that hold any of these numbers without an overflow error, as long as no float becomes an integer."""


def of_numbers(world: TraceWorld, data: Any, dtype: torch.dtype | None, device: Any, requires_grad: bool) -> Any:
    """Returns the tensor that ``torch.tensor`` would make of nested lists of numbers.

    Args:
        world: the capturing world.
        data: a number, or lists or tuples of numbers and 0-dim tensors, nested to any depth.
        dtype: dtype of the tensor; ``None`` for the one that torch infers.
        device: device of the tensor; ``None`` for the default.
        requires_grad: flag of the tensor.

    Returns:
        The tensor; :data:`~sidefx_train.compile.capture.interpreter.world.ABSENT` if no number changes between calls,
        or if torch itself must read them: ragged lists, more than 256 numbers, dtypes that some number may not fit.

    Raises:
        Unsupported: the lists contain tensors whose values torch would read.
    """
    if type(data) in (list, tuple) and _arrays(data) and world.random_draws.is_drawn(data):
        array = world.random_draws.derived(np.array, (data,), {})
        if type(array) is np.ndarray:
            device = torch.get_default_device() if device is None else device
            return world.interp.call(
                torch.tensor, (array,), {"dtype": dtype, "device": device, "requires_grad": requires_grad}
            )
    if world.random_draws.is_history(data):
        array = world.random_draws.derived(np.array, (data,), {})
        if type(array) is np.ndarray:
            if dtype is None:
                dtype = torch.int64 if array.dtype.kind == "i" else torch.get_default_dtype()
            given = {"dtype": dtype, "device": device or torch.get_default_device(), "requires_grad": requires_grad}
            return world.interp.call(torch.tensor, (array,), given)
    if type(data) in (list, tuple):
        world.touch(data)
    numbers: list[Any] = []
    shape = _shape(world, data, numbers)
    if shape is None and _holds_tensor(data):
        world.heap.refuse("SFX106", "torch.tensor of tensors needs values that exist only when the graph runs")
    if shape is None or safe_isinstance(data, torch.Tensor) or not any(type(number) in _CHANGING for number in numbers):
        return ABSENT
    inferred = functools.reduce(torch.promote_types, map(_dtype, numbers))
    made = dtype or inferred
    fits = made in (*_WIDE, inferred) if inferred is torch.bool else made in _WIDE
    fits = fits or all(_has_dtype(number) and _dtype(number) == made for number in numbers)
    if not fits or (inferred.is_floating_point and made is torch.int64):
        return ABSENT
    place = {"device": torch.get_default_device() if device is None else device}
    items = [_item(world, number, made, place) for number in numbers]
    tensor = _stacked(world, items, shape)
    return world.guarded(torch.Tensor.requires_grad_, (tensor,), {}) if requires_grad else tensor


def _stacked(world: TraceWorld, items: list[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    """Returns a tensor of 0-dim tensors that is no view: the program may ask."""
    if not shape:
        return items[0]
    if len(shape) > 1:
        size = len(items) // shape[0]
        items = [_stacked(world, items[start : start + size], shape[1:]) for start in range(0, len(items), size)]
    return world.guarded(torch.stack, (items,), {})


def _item(world: TraceWorld, number: Any, dtype: torch.dtype, place: dict[str, Any]) -> torch.Tensor:
    if safe_isinstance(number, torch.Tensor):
        number = world.guarded(torch.Tensor.detach, (number,), {})
        return world.guarded(torch.Tensor.to, (number,), {"dtype": dtype, "copy": True, **place})
    number = world.heap.numbers.number_of(number)
    exact = torch.float64 if type(number) in (float, torch.SymFloat) else torch.int64
    made = world.guarded(torch.scalar_tensor, (number,), {"dtype": exact, **place})
    return made if dtype is exact else world.guarded(torch.Tensor.to, (made, dtype), {})


def _has_dtype(number: Any) -> bool:
    """Returns True for a tensor and for a number of NumPy."""
    return safe_isinstance(number, torch.Tensor) or compat.numpy_class(number) is not None


def _dtype(number: Any) -> torch.dtype:
    """Returns the dtype that torch infers for one number."""
    if safe_isinstance(number, torch.Tensor):
        return number.dtype
    if type(number) in (bool, torch.SymBool):
        return torch.bool
    of_numpy = compat.numpy_class(number)
    if of_numpy is not None:
        return torch.from_numpy(np.empty(0, of_numpy)).dtype
    return torch.get_default_dtype() if type(number) in (float, torch.SymFloat) else torch.int64


def _shape(world: TraceWorld, data: Any, numbers: list[Any]) -> tuple[int, ...] | None:
    """Returns the shape of nested lists and appends their numbers in order; ``None`` for anything else."""
    quiet = type(data) is compat.FakeTensor and data.dim() == 0 and not data.requires_grad  # torch warns otherwise
    is_input = type(data) is torch.SymBool and world.heap.numbers.number_of(data) is not data
    if quiet or is_input or type(data) in _PYTHON:
        numbers.append(data)
        return ()
    if type(data) not in (list, tuple) or not 0 < len(data) <= _MOST - len(numbers):
        return None
    shapes = {_shape(world, item, numbers) for item in data}
    inner = shapes.pop()
    return None if shapes or inner is None else (len(data), *inner)


def _arrays(data: Any) -> bool:
    """Returns True for nested lists of arrays alone."""
    if type(data) in (list, tuple):
        return all(map(_arrays, data))
    return type(data) is np.ndarray


def _holds_tensor(data: Any) -> bool:
    if type(data) not in (list, tuple):
        return False
    return any(type(item) is compat.FakeTensor or _holds_tensor(item) for item in data)


def by_keywords(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """Calls :func:`of_numbers` with the arguments of ``torch.tensor`` or a similar function; ``name`` names the
    data."""
    data = args[0] if args else kwargs.get(name)
    rest = {key: value for key, value in kwargs.items() if key != name}
    if len(args) > 1 or set(rest) - {"dtype", "device", "requires_grad"}:
        return ABSENT
    return of_numbers(world, data, rest.get("dtype"), rest.get("device"), rest.get("requires_grad", False) is True)


@registry.intercept(torch.Tensor.new_tensor)
def _new_tensor(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    like, *given = args
    data = given[0] if given else kwargs.get("data")
    if type(data) is np.ndarray:
        rest = {name: value for name, value in kwargs.items() if name != "data"}
        target = {name: getattr(like, name) for name in ("dtype", "device") if rest.get(name) is None}
        return world.interp.call(torch.tensor, (data, *given[1:]), {**rest, **target})
    return by_keywords(world, tuple(given), {"dtype": like.dtype, "device": like.device, **kwargs}, "data")


def _of_array(world: TraceWorld, array: Any, dtype: torch.dtype, device: Any) -> Any:
    """Makes a tensor of an array, over the same memory where the types agree."""
    if not array.ndim:
        return ABSENT
    fn = torch.as_tensor if array.dtype == _NUMPY.get(dtype, object) else torch.tensor
    return world.interp.call(fn, (array,), {"dtype": dtype, "device": device})


@registry.intercept(torch.Tensor.new)
def _new(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 2 or kwargs:
        return ABSENT
    if type(args[1]) in (list, tuple) and args[0].dtype in _WIDE:
        return of_numbers(world, args[1], args[0].dtype, args[0].device, False)
    if type(args[1]) is not np.ndarray:
        return ABSENT
    return _of_array(world, args[1], args[0].dtype, args[0].device)


def _register(cls: Any, dtype: torch.dtype | None, lists: bool) -> None:
    @registry.intercept(cls)
    def make(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) != 1 or kwargs:
            return ABSENT
        (data,), made = args, dtype or torch.get_default_dtype()
        if type(data) is np.ndarray:
            return _of_array(world, data, made, "cpu")
        return of_numbers(world, data, made, "cpu", False) if lists and type(data) in (list, tuple) else ABSENT


_NUMPY: dict[torch.dtype, Any] = {
    torch.float16: np.float16,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.uint8: np.uint8,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.bool: np.bool_,
}

_register(torch.Tensor, None, lists=True)  # one number would be a size
_register(torch.FloatTensor, torch.float32, lists=True)
_register(torch.DoubleTensor, torch.float64, lists=True)
_register(torch.LongTensor, torch.int64, lists=True)
_register(torch.HalfTensor, torch.float16, lists=False)
_register(torch.IntTensor, torch.int32, lists=False)
_register(torch.ShortTensor, torch.int16, lists=False)
_register(torch.CharTensor, torch.int8, lists=False)
_register(torch.ByteTensor, torch.uint8, lists=False)
_register(torch.BoolTensor, torch.bool, lists=False)


def _register_range(fn: Any) -> None:
    @registry.intercept(fn)
    def make(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes ``arange`` of floats that change; specializes those of other dtypes, and of ``torch.range``."""
        if not any(type(value) is torch.SymFloat for value in (*args, *kwargs.values())):
            return ABSENT
        made = _float_range(world, args, kwargs) if fn is torch.arange else ABSENT
        return world.guarded(fn, *concrete_within((args, kwargs), (torch.SymFloat,))) if made is ABSENT else made


def _float_range(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns ``torch.arange`` of floats that change; :data:`ABSENT` for dtypes and options that need their values."""
    names = ("end",) if len(args) == 1 else ("start", "end", "step")
    given = {"start": 0, "step": 1, "dtype": None, "device": None, "requires_grad": False, **kwargs}
    given.update(zip(names, args, strict=False))
    dtype = torch.get_default_dtype() if given["dtype"] is None else given["dtype"]
    limits = given["start"], given.get("end"), given["step"]
    if len(args) > 3 or given.keys() - _RANGE or not all(type(each) in _RANGED for each in limits):
        return ABSENT
    if type(dtype) is not torch.dtype or not dtype.is_floating_point:
        return ABSENT
    start, end, step = limits
    if not (end > start and step > 0) and not (end < start and step < 0):  # guarded; else torch says what is wrong
        return ABSENT
    length = world.computed_numbers.call(range_length, limits, {})
    if length is ABSENT:
        return ABSENT
    device = torch.get_default_device() if given["device"] is None else torch.device(given["device"])
    made = world.guarded(torch.ops.sidefx.float_range.default, (*limits, length, dtype, device), {})
    return world.guarded(torch.Tensor.requires_grad_, (made,), {}) if given["requires_grad"] is True else made


_RANGE = frozenset({"start", "end", "step", "dtype", "device", "requires_grad"})
"""Arguments of ``torch.arange`` with which a range between floats is made in the graph."""
_RANGED = (int, float, torch.SymInt, torch.SymFloat)

_register_range(torch.arange)
_register_range(torch.range)


@registry.intercept(compat.SHAPE_AS_TENSOR)
def _shape_as_tensor(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 1 or kwargs or type(args[0]) is not compat.FakeTensor:
        return ABSENT
    return world.interp.call(torch.tensor, (list(args[0].shape),), {"dtype": torch.int64, "device": "cpu"})
