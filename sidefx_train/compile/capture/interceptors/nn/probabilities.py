"""``bernoulli`` and ``normal`` with eager's check of probabilities and deviations.

Compiled code makes them from other random numbers, and checks nothing: NaN as a probability would give zeros. On the
CPU, eager raises. The graph asserts that the values are in range.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


@registry.intercept(torch.bernoulli, torch.Tensor.bernoulli)
def _bernoulli(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    p: Any = args[0] if args else kwargs.get("input")
    by_number = len(args) > 1 or "p" in kwargs
    if type(p) is compat.FakeTensor and p.device.type == "cpu" and p.is_floating_point() and not by_number:
        with torch.no_grad():
            inside = world.guarded(torch.all, ((p >= 0) & (p <= 1),), {})
            world.grant(inside, True)
    return ABSENT


@registry.intercept(torch.normal)
def _normal(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    std: Any = args[1] if len(args) > 1 else kwargs.get("std")
    if type(std) is compat.FakeTensor and std.device.type == "cpu" and std.is_floating_point():
        with torch.no_grad():
            world.grant(world.guarded(torch.all, (std >= 0,), {}), True)
    return ABSENT
