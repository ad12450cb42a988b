"""Lazy modules that become another class: the step in which one sees its first batch runs eagerly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn.modules.lazy import LazyModuleMixin

from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.distributed_models import refuse_whole
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.errors import LAZY

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


@registry.intercept(LazyModuleMixin._infer_parameters)
def _initialized(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuses a step whose hook sets the module's class, which is there at the next call; others are interpreted."""
    record = world.heap.record_of(args[0]) if args else None
    if record is None or world.interp.getattr(args[0], "cls_to_become") is None:  # made in the step, or keeps its class
        return ABSENT
    refuse_whole(LAZY, f"{record.source.label} is initialized with the first batch", world.heap.locate())
