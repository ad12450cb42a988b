"""``F.interpolate`` of tensors of symbolic sizes, strides or offsets, or by a factor that changes.

torch's C++ function asks for plain sizes. The operators that it calls accept symbolic ones.
"""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld

aten = torch.ops.aten

_EXACT = frozenset({"nearest", "nearest-exact", "area"})
"""Modes that refuse ``align_corners``."""


def _mean_of_line(x: torch.Tensor, size: list[Any]) -> torch.Tensor:
    """``F.adaptive_avg_pool1d``, as its C++ code composes it."""
    return F.adaptive_avg_pool2d(x.unsqueeze(-2), (1, *size)).squeeze(-2)


_OPERATORS: dict[tuple[int, str, bool], Any] = {
    (1, "nearest", False): aten.upsample_nearest1d.default,
    (2, "nearest", False): aten.upsample_nearest2d.default,
    (3, "nearest", False): aten.upsample_nearest3d.default,
    (1, "nearest-exact", False): aten._upsample_nearest_exact1d.default,
    (2, "nearest-exact", False): aten._upsample_nearest_exact2d.default,
    (3, "nearest-exact", False): aten._upsample_nearest_exact3d.default,
    (1, "linear", False): aten.upsample_linear1d.default,
    (2, "bilinear", False): aten.upsample_bilinear2d.default,
    (2, "bilinear", True): aten._upsample_bilinear2d_aa.default,
    (2, "bicubic", False): aten.upsample_bicubic2d.default,
    (2, "bicubic", True): aten._upsample_bicubic2d_aa.default,
    (3, "trilinear", False): aten.upsample_trilinear3d.default,
    (1, "area", False): _mean_of_line,
    (2, "area", False): F.adaptive_avg_pool2d,
    (3, "area", False): F.adaptive_avg_pool3d,
}
"""By number of spatial dimensions, mode and antialiasing."""
_MOST_PARTS = 64
"""Limit of the denominator of a scale: a product with a larger one may round otherwise as a float."""

_SIGNATURE = inspect.signature(F.interpolate)


@registry.intercept(F.interpolate)
def _interpolate(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = registry.bound_arguments(_SIGNATURE, args, kwargs)
    if given is None:
        return ABSENT
    x, size, factor, mode, corners, recomputed, antialias = given.values()
    if not safe_isinstance(x, compat.FakeTensor) or x.device.type != "cpu" or not 3 <= x.dim() <= 5:
        return ABSENT
    sizes, factors = _spread(size, x.dim() - 2), _spread(factor, x.dim() - 2)
    layout = (*x.shape, *x.stride(), x.storage_offset())  # a crop at a random place has plain sizes
    if not any(safe_isinstance(each, compat.SYMBOLS) for each in (*layout, *(sizes or ()), *(factors or ()))):
        return ABSENT
    known = type(mode) is str and type(antialias) is bool
    operator = _OPERATORS.get((x.dim() - 2, mode, antialias)) if known else None
    exact = mode in _EXACT
    if operator is None or (exact and corners is not None) or corners not in (None, True, False):
        return ABSENT
    if (sizes is None) == (factors is None) or (recomputed and sizes is not None):
        return ABSENT
    if factors is not None:
        sizes = [_scaled(world, length, each) for length, each in zip(x.shape[2:], factors, strict=True)]
    if sizes is None or not all(type(each) is int or safe_isinstance(each, torch.SymInt) for each in sizes):
        return ABSENT
    if mode == "area":
        return world.guarded(operator, (x, sizes), {})
    scales = [None] * len(sizes) if factors is None or recomputed else list(map(torch.sym_float, factors))
    options = () if exact else (bool(corners),)
    return world.guarded(operator, (x, sizes, *options, *scales), {})


def _spread(value: Any, dimensions: int) -> list[Any] | None:
    """Returns one value for each spatial dimension."""
    if value is None:
        return None
    found = list(value) if safe_isinstance(value, (tuple, list)) else [value] * dimensions
    return found if len(found) == dimensions else None


def _scaled(world: TraceWorld, length: Any, factor: Any) -> Any:
    """Returns the size of a scaled dimension; ``None`` for what is no factor."""
    if safe_isinstance(factor, torch.SymFloat):
        return world.computed_numbers.call(int, (torch.sym_float(length) * factor,), {})
    if safe_isinstance(factor, torch.SymInt):
        return length * factor if not compat.is_unbacked(factor) and world.truth(factor > 0) else None
    if type(factor) not in (int, float) or not math.isfinite(factor) or factor <= 0:
        return None
    if type(length) is int:
        return int(length * float(factor))
    over, under = factor.as_integer_ratio()
    if under <= _MOST_PARTS:  # exact in integers
        return length * over // under
    return world.computed_numbers.call(int, (torch.sym_float(length) * factor,), {})
