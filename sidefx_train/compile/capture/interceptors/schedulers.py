"""Learning rate schedulers: a step may run natively from the call of a scheduler on that is its last work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


@registry.intercept_method(torch.optim.lr_scheduler.LRScheduler, "step")
def _step(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    world.decisions.note(of_scheduler=True)
    return ABSENT
