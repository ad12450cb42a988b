"""``bernoulli`` with eager's check of its probabilities.

Torch makes it from a comparison with random numbers for fake tensors, and checks nothing there: NaN would give zeros.
On the CPU, eager raises. The graph asserts that the probabilities are in range.
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
