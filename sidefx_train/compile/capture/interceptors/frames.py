"""``sys._getframe`` in a step: interpreted frames have frame objects; callers' frames are read at a graph break."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.world.native_calls.caller_frames import BEYOND, refuse_callers
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


@registry.intercept(sys._getframe)
def getframe(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    frame, depth = world.interp.current_frame, args[0] if args else 0
    while frame is not None and depth > 0:
        frame, depth = frame.back, depth - 1
    if frame is None or BEYOND in world.specialization.opaque_classes:
        refuse_callers(world)
    return ABSENT
