"""Functions of tensors with an integer that changes, which torch's operators take as a plain number.

Such as ``round(decimals=k)``, ``polygamma(k, x)``, ``torch.histc(x, k)``, ``x.random_(k)``, ``x.unfold(0, k, 1)``.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.graph.strided_layout import is_static, may_overlap
from sidefx_train.compile.ops import integer_operators

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld

_ROUND = inspect.signature(lambda input, *, decimals=0: None)
_POLYGAMMA = inspect.signature(lambda n, input: None)
_HISTC = inspect.signature(lambda input, bins=100, min=0, max=0: None)


def _changes(*numbers: Any) -> bool:
    """Returns True if some numbers are symbolic, all with values that may be compared, outside of ``torch.func``."""
    return compat.are_changing_integers(*numbers) and not compat.inside_transform()


def _is_plain(x: Any) -> bool:
    return safe_isinstance(x, compat.FakeTensor) and x.layout is torch.strided


@registry.intercept(torch.round, torch.Tensor.round)
def _round(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = registry.bound_arguments(_ROUND, args, kwargs)
    if given is None or not _changes(given["decimals"]) or not _is_plain(given["input"]):
        return ABSENT
    if not given["input"].is_floating_point():
        return ABSENT
    return world.guarded(integer_operators.Rounded.apply, tuple(given.values()), {})


def _polygamma(world: TraceWorld, n: Any, x: Any) -> Any:
    if not _changes(n) or not _is_plain(x) or not x.is_floating_point() or not world.truth(n >= 0):
        return ABSENT
    return world.guarded(integer_operators.Polygamma.apply, (n, x), {})


@registry.intercept(torch.polygamma, torch.special.polygamma)
def _polygamma_function(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = registry.bound_arguments(_POLYGAMMA, args, kwargs)
    return ABSENT if given is None else _polygamma(world, given["n"], given["input"])


@registry.intercept(torch.Tensor.polygamma)
def _polygamma_method(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _polygamma(world, args[1], args[0]) if len(args) == 2 and not kwargs else ABSENT


@registry.intercept(torch.histc, torch.Tensor.histc)
def _histc(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = registry.bound_arguments(_HISTC, args, kwargs)
    if given is None or not _changes(given["bins"]) or not _is_plain(given["input"]):
        return ABSENT
    x, bins, low, high = given.values()
    known = x.is_floating_point() and x.device.type == "cpu" and not (x.requires_grad and torch.is_grad_enabled())
    if not known or not all(type(each) in (int, float) for each in (low, high)) or not world.truth(bins > 0):
        return ABSENT
    return world.guarded(integer_operators.HISTOGRAM, (x, bins, low, high), {})


# ---------------------------------------------------------------------- random integers
_RANDOM = inspect.signature(lambda input, *bounds, generator=None: None)


@registry.intercept(torch.Tensor.random_)
def _random(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draws as ``randint`` does, which accepts symbolic bounds."""
    given = registry.bound_arguments(_RANDOM, args, kwargs)
    if given is None or not 1 <= len(given["bounds"]) <= 2 or not _changes(*given["bounds"]):
        return ABSENT
    x, bounds, generator = given.values()
    if not _is_plain(x) or not x.is_contiguous() or generator is not None or x.dtype is torch.bool:
        return ABSENT
    if x.requires_grad and torch.is_grad_enabled():  # autograd records the draw, or raises
        return ABSENT
    drawn = world.interp.call(torch.randint, (*bounds, tuple(x.shape)), {"dtype": x.dtype, "device": x.device})
    with torch.no_grad():
        return world.guarded(torch.Tensor.copy_, (x, drawn), {})


_RANDINT_LIKE = inspect.signature(lambda input, *bounds, dtype=None, device=None, requires_grad=False: None)


@registry.intercept(torch.randint_like)
def _randint_like(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = registry.bound_arguments(_RANDINT_LIKE, args, kwargs)
    if given is None or not 1 <= len(given["bounds"]) <= 2 or not _changes(*given["bounds"]):
        return ABSENT
    x, bounds, dtype, device, needs_gradient = given.values()
    if not _is_plain(x) or not x.is_contiguous() or needs_gradient is not False:
        return ABSENT
    place = {"dtype": x.dtype if dtype is None else dtype, "device": x.device if device is None else device}
    return world.interp.call(torch.randint, (*bounds, tuple(x.shape)), place)


# ---------------------------------------------------------------------- windows along a dimension
_UNFOLD = inspect.signature(lambda input, dimension, size, step: None)


@registry.intercept(torch.Tensor.unfold)
def _unfold(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Makes windows of a size that changes; not of a step, as torch's tracer does not find products of several symbols.

    Inductor does not compile the gradient of windows by a step other than 1, which chooses between sizes.
    """
    given = registry.bound_arguments(_UNFOLD, args, kwargs)
    if given is None:
        return ABSENT
    x, dim, size, step = given.values()
    if not _changes(size) or type(step) is not int or step <= 0 or not _is_plain(x) or not is_static(x):
        return ABSENT
    if type(dim) is not int or not -x.dim() <= dim < x.dim():
        return ABSENT
    if x.requires_grad and torch.is_grad_enabled() and (step != 1 or may_overlap(x)):
        return ABSENT  # the gradient of ``as_strided`` is divided among elements in one place
    length = x.shape[dim]
    if not all(world.truth(each) for each in (size >= 0, size <= length)):
        return ABSENT
    sizes, strides = list(x.shape), list(x.stride())
    sizes[dim], strides[dim] = (length - size) // step + 1, step * x.stride(dim)
    return world.guarded(torch.as_strided, (x, [*sizes, size], [*strides, x.stride(dim)]), {})
