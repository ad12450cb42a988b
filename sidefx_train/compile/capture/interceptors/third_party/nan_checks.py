"""torchmetrics' running means and sums without their branch on data.

``MeanMetric`` and ``SumMetric`` check whether a value is NaN before they add it, and drop it if so. A graph cannot
branch, so a captured step adds zero with weight zero instead, which gives the same sum, and warns after the graph where
eager would have warned.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


_SUMS = frozenset({"MeanMetric", "SumMetric"})
_DROPPING = frozenset({"warn", "ignore"})


@registry.intercept_method(torch.nn.Module, "_cast_and_nan_check_input")
def _nan_check(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    cls = type(args[0])
    kinds = {base.__name__ for base in cls.__mro__ if base.__module__ == "torchmetrics.aggregation"}
    own = cls._cast_and_nan_check_input.__module__ != "torchmetrics.aggregation"
    if own or not kinds & _SUMS or world.instance_attr(args[0], "nan_strategy") not in _DROPPING:
        return ABSENT
    return world.interp.call(_without_nans, args, kwargs)


def _without_nans(metric: Any, x: Any, weight: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the method's result; the interpreter runs this function instead."""
    if not safe_isinstance(x, torch.Tensor):
        x = torch.as_tensor(x, dtype=metric.dtype, device=metric.device)
    if weight is None:
        weight = torch.ones_like(x)
    elif not safe_isinstance(weight, torch.Tensor):
        weight = torch.as_tensor(weight, dtype=metric.dtype, device=metric.device)
    nans = torch.isnan(x) | torch.isnan(weight)
    if metric.nan_strategy == "warn":
        warn_of_nans(nans.any())
    x = torch.where(nans, torch.zeros_like(x), x)
    weight = torch.where(nans, torch.zeros_like(weight), weight)
    return x.to(metric.dtype), weight.to(metric.dtype)


def warn_of_nans(found: torch.Tensor) -> None:
    """Issues torchmetrics' warning if ``found`` is true."""
    if found.item():
        warnings.warn("Encountered `nan` values in tensor. Will be removed.", UserWarning, stacklevel=2)


@registry.intercept(warn_of_nans)
def _warn_after_the_graph(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    world.defer(warn_of_nans, args, kwargs)
