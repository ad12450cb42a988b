"""``math.isfinite(loss.item())`` and similar: the usual answer is assumed for a number that only the graph knows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


def _assumed(answer: bool, infinite: bool, nan: bool) -> Callable[..., Any]:
    def asked(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) != 1 or kwargs or not world.grant_finite(args[0], infinite=infinite, nan=nan):
            return ABSENT
        return answer

    return asked


registry.intercept(math.isfinite)(_assumed(True, infinite=True, nan=True))
registry.intercept(math.isinf)(_assumed(False, infinite=True, nan=False))
registry.intercept(math.isnan)(_assumed(False, infinite=False, nan=True))
