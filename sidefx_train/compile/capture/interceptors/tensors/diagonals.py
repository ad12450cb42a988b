"""Diagonals at an offset that changes: ``x.diagonal(k)``, ``torch.diag(x, k)``, ``torch.tril_indices(k, k)``.

Torch takes the offset as a plain integer. A diagonal beside the main one is the main diagonal of the columns,
or of the rows, from the offset on: the same view of the same memory. Which of the two is guarded.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.ops.sequences_of_numbers import triangle_size

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld

aten = torch.ops.aten

_VIEW = inspect.signature(lambda input, offset=0, dim1=0, dim2=1: None)
_MATRIX_VIEW = inspect.signature(lambda A, *, offset=0, dim1=-2, dim2=-1: None)
_EMBED = inspect.signature(lambda input, offset=0, dim1=-2, dim2=-1: None)
_SCATTER = inspect.signature(lambda input, src, offset=0, dim1=0, dim2=1: None)
_DIAG = inspect.signature(lambda input, diagonal=0: None)
_FLAT = inspect.signature(lambda input, offset=0: None)


def _dims(x: Any, dim1: Any, dim2: Any, more: int = 0) -> tuple[int, int] | None:
    """Returns two different dimensions, counted from 0; ``None`` for what is no such pair.

    Args:
        x: the tensor.
        dim1: a dimension.
        dim2: another one.
        more: how many dimensions the result has beside those of ``x``.
    """
    if not safe_isinstance(x, compat.FakeTensor) or x.layout is not torch.strided:
        return None
    count = x.dim() + more
    if not all(type(dim) is int and -count <= dim < count for dim in (dim1, dim2)):
        return None
    first, second = dim1 % count, dim2 % count
    return None if first == second else (first, second)


def _view(world: TraceWorld, x: Any, offset: Any, dims: tuple[int, int]) -> Any:
    """Returns the view of a diagonal."""
    above = world.truth(offset >= 0)
    dim, start = (dims[1], offset) if above else (dims[0], -offset)
    length = x.shape[dim]
    if world.truth(start <= length):
        part = world.guarded(torch.narrow, (x, dim, start, length - start), {})
    else:
        part = world.guarded(torch.narrow, (x, dim, 0, 0), {})
    return world.guarded(torch.diagonal, (part, 0, *dims), {})


def _diagonal(
    signature: inspect.Signature, copies: bool, world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    given = registry.bound_arguments(signature, args, kwargs)
    if given is None or not compat.are_changing_integers(given["offset"]):
        return ABSENT
    x, offset, dim1, dim2 = given.values()
    dims = _dims(x, dim1, dim2)
    if dims is None:
        return ABSENT
    view = _view(world, x, offset, dims)
    return world.guarded(torch.clone, (view,), {"memory_format": torch.contiguous_format}) if copies else view


registry.intercept(torch.diagonal, torch.Tensor.diagonal)(partial(_diagonal, _VIEW, False))
registry.intercept(torch.linalg.diagonal)(partial(_diagonal, _MATRIX_VIEW, False))
registry.intercept(torch.diagonal_copy)(partial(_diagonal, _VIEW, True))


def _filled(world: TraceWorld, x: Any, offset: Any, dims: tuple[int, int]) -> Any:
    """Returns a tensor that is zero beside a diagonal, which has the values of ``x``."""
    *sizes, length = x.shape
    length = length + (offset if world.truth(offset >= 0) else -offset)
    for dim in sorted(dims):
        sizes.insert(dim, length)
    made = world.guarded(torch.zeros, (sizes,), {"dtype": x.dtype, "device": x.device})
    world.guarded(torch.Tensor.copy_, (_view(world, made, offset, dims), x), {})
    return made


@registry.intercept(torch.diag_embed, torch.Tensor.diag_embed)
def _diag_embed(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = registry.bound_arguments(_EMBED, args, kwargs)
    if given is None or not compat.are_changing_integers(given["offset"]):
        return ABSENT
    x, offset, dim1, dim2 = given.values()
    dims = _dims(x, dim1, dim2, more=1)
    return ABSENT if dims is None or not x.dim() else _filled(world, x, offset, dims)


@registry.intercept(torch.diag, torch.Tensor.diag)
def _diag(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = registry.bound_arguments(_DIAG, args, kwargs)
    if given is None or not compat.are_changing_integers(given["diagonal"]):
        return ABSENT
    x, offset = given.values()
    if not safe_isinstance(x, compat.FakeTensor) or x.dim() not in (1, 2) or x.layout is not torch.strided:
        return ABSENT
    if x.dim() == 1:
        return _filled(world, x, offset, (0, 1))
    return world.guarded(torch.clone, (_view(world, x, offset, (0, 1)),), {"memory_format": torch.contiguous_format})


@registry.intercept(torch.diagflat, torch.Tensor.diagflat)
def _diagflat(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = registry.bound_arguments(_FLAT, args, kwargs)
    if (
        given is None
        or not compat.are_changing_integers(given["offset"])
        or not safe_isinstance(given["input"], compat.FakeTensor)
    ):
        return ABSENT
    line = world.guarded(torch.Tensor.reshape, (given["input"], -1), {})
    return _filled(world, line, given["offset"], (0, 1))


@registry.intercept(torch.diagonal_scatter, torch.Tensor.diagonal_scatter)
def _diagonal_scatter(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = registry.bound_arguments(_SCATTER, args, kwargs)
    if given is None or not compat.are_changing_integers(given["offset"]):
        return ABSENT
    x, source, offset, dim1, dim2 = given.values()
    dims = _dims(x, dim1, dim2)
    if dims is None or not safe_isinstance(source, compat.FakeTensor) or not x.is_contiguous():
        return ABSENT
    if _view(world, x, offset, dims).shape != source.shape:
        return ABSENT
    made = world.guarded(torch.clone, (x,), {})
    world.guarded(torch.Tensor.copy_, (_view(world, made, offset, dims), source), {})
    return made


_TRIANGLE = inspect.signature(lambda row, col, offset=0, *, dtype=torch.int64, device=None, layout=torch.strided: None)


def _triangle(lower: bool, world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Makes the indices of a triangle whose sizes or offset change."""
    given = registry.bound_arguments(_TRIANGLE, args, kwargs)
    if given is None:
        return ABSENT
    *numbers, dtype, device, layout = given.values()
    known = all(type(each) in (int, torch.SymInt) for each in numbers)
    if not known or not any(map(compat.are_changing_integers, numbers)):
        return ABSENT
    if (
        dtype is not torch.int64
        or layout is not torch.strided
        or not all(world.truth(size >= 0) for size in numbers[:2])
    ):
        return ABSENT
    length = world.computed_numbers.call(triangle_size, (lower, *numbers), {})
    if length is ABSENT:
        return ABSENT
    device = torch.get_default_device() if device is None else torch.device(device)
    return world.guarded(torch.ops.sidefx.triangle_indices.default, (lower, *numbers, length, device), {})


registry.intercept(torch.tril_indices)(partial(_triangle, True))
registry.intercept(torch.triu_indices)(partial(_triangle, False))
