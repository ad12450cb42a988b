"""``one_hot`` with eager's check of its classes.

Torch makes it from a comparison for fake tensors, and checks nothing there: a class out of range would give zeros. On
the CPU, eager reads the smallest and the largest class first. The graph asserts that they are in range.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


@registry.intercept(F.one_hot)
def _one_hot(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    classes, number = _arguments(*args, **kwargs)
    known = type(classes) is compat.FakeTensor and classes.dtype is torch.int64 and classes.device.type == "cpu"
    changes = compat.are_changing_integers(number)
    if not known or not (changes or type(number) is int) or not world.truth(number > 0):
        return ABSENT
    with torch.no_grad():
        outside = world.guarded(torch.any, ((classes < 0) | (classes >= number),), {})
        if world.grant(outside, False):
            if changes:  # ``one_hot`` wants the value; this is what it computes for fake tensors
                every = torch.arange(number, device=classes.device)
                return (classes.contiguous().unsqueeze(-1) == every).to(torch.int64)
            return world.guarded(F.one_hot, (classes.contiguous(), number), {})  # as eager lays it out
        made = torch.zeros(*classes.shape, number, dtype=torch.int64)
        return world.guarded(torch.Tensor.scatter_, (made, -1, classes.unsqueeze(-1), 1), {})


def _arguments(tensor: Any = None, num_classes: Any = -1, *, input: Any = None) -> tuple[Any, Any]:
    return (input if tensor is None else tensor), num_classes
