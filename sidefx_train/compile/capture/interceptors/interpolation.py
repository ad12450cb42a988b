"""``F.interpolate`` of images of symbolic sizes.

torch's C++ function asks for plain sizes. The operators that it calls accept symbolic ones.
"""

from __future__ import annotations

import inspect
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

_OPERATORS: dict[tuple[str, bool], Any] = {
    ("nearest", False): aten.upsample_nearest2d.default,
    ("nearest-exact", False): aten._upsample_nearest_exact2d.default,
    ("bilinear", True): aten._upsample_bilinear2d_aa.default,
}
"""By mode and antialiasing, of images. The fake kernels of the other operators need plain sizes."""

_SIGNATURE = inspect.signature(F.interpolate)


@registry.intercept(F.interpolate)
def _interpolate(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        given = _SIGNATURE.bind(*args, **kwargs)
    except TypeError:
        return ABSENT
    given.apply_defaults()
    x, size, factor, mode, corners, recomputed, antialias = given.arguments.values()
    if not safe_isinstance(x, compat.FakeTensor) or x.device.type != "cpu" or x.dim() != 4:
        return ABSENT
    sizes, factors = _spread(size), _spread(factor)
    if not any(safe_isinstance(each, torch.SymInt) for each in (*x.shape, *(sizes or ()))):
        return ABSENT
    operator = _OPERATORS.get((mode, antialias)) if type(mode) is str and type(antialias) is bool else None
    nearest = mode in ("nearest", "nearest-exact")
    if operator is None or (nearest and corners is not None) or corners not in (None, True, False):
        return ABSENT
    if (sizes is None) == (factors is None) or (recomputed and sizes is not None):
        return ABSENT
    if factors is not None:
        sizes = [_scaled(length, each) for length, each in zip(x.shape[2:], factors, strict=True)]
    if sizes is None or not all(type(each) is int or safe_isinstance(each, torch.SymInt) for each in sizes):
        return ABSENT
    scales = [None, None] if factors is None or recomputed else [float(each) for each in factors]
    options = () if nearest else (bool(corners),)
    return world.guarded(operator, (x, sizes, *options, *scales), {})


def _spread(value: Any) -> list[Any] | None:
    """Returns one value for each of two dimensions."""
    if value is None:
        return None
    found = list(value) if safe_isinstance(value, (tuple, list)) else [value, value]
    return found if len(found) == 2 else None


def _scaled(length: Any, factor: Any) -> Any:
    """Returns the size of a scaled dimension; ``None`` if that is not a product of integers."""
    if type(factor) not in (int, float):
        return None
    if type(length) is int:
        return int(length * float(factor))
    return length * int(factor) if factor == int(factor) else None
