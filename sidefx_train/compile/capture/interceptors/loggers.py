"""Changes of what handles log records: it would hold for records that a step made before, and deferred."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.trace_rules import CHANGE_LOGGERS

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


def _change(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    world.heap.refuse("SFX103", f"changes what {type(args[0]).__qualname__} does with records")


for _function in CHANGE_LOGGERS:
    registry.intercept(_function)(_change)
