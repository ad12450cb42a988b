"""Functions of symbolic sizes that torch composes in C++ code, which asks for plain numbers.

They call the operators that the C++ code calls, which accept symbolic sizes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.interceptors.derivatives import once_differentiated
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.ops import sequences_of_numbers
from sidefx_train.compile.ops.symbolic_lengths import Cumprod, PadSequence

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld

aten = torch.ops.aten


def _on_host(value: Any) -> bool:
    return safe_isinstance(value, compat.FakeTensor) and value.device.type == "cpu"


# ---------------------------------------------------------------------- turns
_ROT90 = inspect.signature(lambda input, k=1, dims=(0, 1): None)


@registry.intercept(torch.rot90, torch.Tensor.rot90)
def _rot90(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Guards the number of quarter turns up to whole ones: there are four results."""
    given = registry.bound_arguments(_ROT90, args, kwargs)
    if given is None or not compat.are_changing_integers(given["k"]):
        return ABSENT
    quarters = given["k"] % 4
    turns = next(turns for turns in (0, 1, 2, 3) if turns == 3 or world.truth(quarters == turns))
    return world.interp.call(torch.rot90, (given["input"], turns, given["dims"]), {})


# ---------------------------------------------------------------------- products and joins
_KRON = inspect.signature(lambda input, other: None)


@registry.intercept(torch.kron, torch.Tensor.kron)
def _kron(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = registry.bound_arguments(_KRON, args, kwargs)
    if given is None or not all(map(_on_host, given.values())) or not _has_symbolic_sizes(given.values()):
        return ABSENT
    return world.guarded(_outer, tuple(given.values()), {})


def _outer(a: Any, b: Any) -> Any:
    dims = max(a.dim(), b.dim())
    rows, columns = ((1,) * (dims - each.dim()) + tuple(each.shape) for each in (a, b))
    first = [length for each in rows for length in (each, 1)]
    second = [length for each in columns for length in (1, each)]
    product = aten._unsafe_view.default(a, first) * aten._unsafe_view.default(b, second)
    return aten._unsafe_view.default(product, [i * j for i, j in zip(rows, columns, strict=True)])


@registry.intercept(torch.block_diag)
def _block_diag(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or not all(map(_on_host, args)) or not _has_symbolic_sizes(args):
        return ABSENT
    if len({each.dtype for each in args}) > 1 or any(each.dim() > 2 for each in args):
        return ABSENT
    return world.guarded(_blocks, args, {})


def _blocks(*tensors: Any) -> Any:
    blocks = [each if each.dim() == 2 else each.expand(1, each.numel()) for each in tensors]
    made = torch.zeros([sum(each.shape[dim] for each in blocks) for dim in (0, 1)], dtype=blocks[0].dtype, device="cpu")
    row = column = 0
    for each in blocks:
        below, right = row + each.shape[0], column + each.shape[1]
        made[row:below, column:right].copy_(each)
        row, column = below, right
    return made


_PAD = inspect.signature(lambda sequences, batch_first=False, padding_value=0.0, padding_side="right": None)


@registry.intercept(compat.pad_list)
def _pad_sequence(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = registry.bound_arguments(_PAD, args, kwargs)
    if given is None or not safe_isinstance(given["sequences"], (tuple, list)):
        return ABSENT
    sequences, batch_first, value, side = given.values()
    if type(batch_first) is not bool or type(value) not in (int, float) or side not in ("right", "left"):
        return ABSENT
    known = all(map(_on_host, sequences)) and _has_symbolic_sizes(sequences) and not compat.inside_transform()
    if not known or len({(each.dtype, each.dim()) for each in sequences}) > 1 or not sequences[0].dim():
        return ABSENT
    if any(each.shape[1:] != sequences[0].shape[1:] for each in sequences):
        return ABSENT
    return world.guarded(PadSequence.apply, (batch_first, float(value), side == "left", *sequences), {})


def _has_symbolic_sizes(tensors: Iterable[Any]) -> bool:
    return any(map(compat.is_symbolic_integer, (length for each in tensors for length in each.shape)))


# ---------------------------------------------------------------------- products of all elements before
_CUMPROD = inspect.signature(lambda input, dim, *, dtype=None: None)


@registry.intercept(torch.cumprod, torch.Tensor.cumprod)
def _cumprod(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The derivative asks for the length; a second derivative has one operation for each element."""
    given = registry.bound_arguments(_CUMPROD, args, kwargs)
    if given is None or not _on_host(given["input"]):
        return ABSENT
    x, dim, dtype = given.values()
    records = x.requires_grad and torch.is_grad_enabled() and not compat.inside_transform()
    if not records or x.is_complex() or dtype is not None or type(dim) is not int or not -x.dim() <= dim < x.dim():
        return ABSENT
    if not compat.is_symbolic_integer(x.shape[dim]):
        return ABSENT
    return world.guarded(Cumprod.apply, (once_differentiated(world, "cumprod"), x, dim), {})


# ---------------------------------------------------------------------- spectra
_STFT = inspect.signature(torch.stft)


@registry.intercept(torch.stft)
def _stft(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = registry.bound_arguments(_STFT, args, kwargs)
    if given is None or type(given["n_fft"]) is not int:
        return ABSENT
    x, n_fft, hop, width, window, center, _, normalized, onesided, as_complex, *aligned = given.values()
    hop, width = n_fft // 4 if hop is None else hop, n_fft if width is None else width
    known = (
        _on_host(x) and x.is_floating_point() and x.dim() in (1, 2) and any(map(compat.is_symbolic_integer, x.shape))
    )
    known = known and type(center) is type(normalized) is bool and (onesided is None or type(onesided) is bool)
    if not known or not all(type(each) is int for each in (n_fft, hop, width)) or aligned not in ([], [None], [False]):
        return ABSENT
    if as_complex is not True or not 0 < width <= n_fft or hop <= 0 or not _is_window(window, width):
        return ABSENT
    if not center and x.shape[-1] < n_fft:
        return ABSENT
    return world.guarded(_spectra, (given, hop, width), {})


def _is_window(window: Any, width: int) -> bool:
    return _on_host(window) and window.is_floating_point() and window.shape == (width,)  # torch warns of none


def _spectra(given: dict[str, Any], hop: int, width: int) -> Any:
    x, n_fft, window, onesided = given["input"], given["n_fft"], given["window"], given["onesided"]
    single = x.dim() == 1
    if given["center"]:
        x = F.pad(x.view((1,) * (3 - x.dim()) + x.shape), (n_fft // 2, n_fft // 2), given["pad_mode"]).squeeze(0)
    elif single:
        x = x.unsqueeze(0)
    if width < n_fft:
        narrow, window = window, torch.zeros(n_fft, dtype=window.dtype)
        window.narrow(0, (n_fft - width) // 2, width).copy_(narrow)
    x = x.unfold(1, n_fft, hop)  # torch has as_strided, whose backward adds in the same order, but asks for numbers
    norm = 1 if given["normalized"] else 0
    made = aten._fft_r2c.default(x * window, [2], norm, onesided in (None, True)).transpose_(1, 2)
    return made.squeeze_(0) if single else made


# ---------------------------------------------------------------------- sequences of numbers
_WINDOW = inspect.signature(
    lambda window_length, periodic=True, *numbers, dtype=None, device=None, requires_grad=False: None
)
_SPACED = {
    torch.linspace: inspect.signature(lambda start, end, steps, *, dtype=None, device=None, requires_grad=False: None),
    torch.logspace: inspect.signature(
        lambda start, end, steps, base=10.0, *, dtype=None, device=None, requires_grad=False: None
    ),
}


def _sequence(function: Any, world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = registry.bound_arguments(_SPACED.get(function, _WINDOW), args, kwargs)
    if given is None:
        return ABSENT
    *numbers, dtype, device, needs_gradient = given.values()
    if function in _SPACED:
        length = numbers.pop(2)
    else:
        length, periodic, more = numbers
        numbers = [periodic, *more]
    if not compat.is_symbolic_integer(length) or needs_gradient is not False or not all(map(_is_number, numbers)):
        return ABSENT
    dtype = torch.get_default_dtype() if dtype is None else dtype
    device = torch.get_default_device() if device is None else device
    if str(device) != "cpu" or not safe_isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return ABSENT
    operator = torch.ops.sidefx.sequence_of_numbers.default
    return world.guarded(operator, (function.__name__, numbers, length, dtype), {})


def _is_number(value: Any) -> bool:
    return type(value) in (bool, int, float)


for _function in sequences_of_numbers.FUNCTIONS.values():
    registry.intercept(_function)(partial(_sequence, _function))
