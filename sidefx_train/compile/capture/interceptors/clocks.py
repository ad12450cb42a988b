"""Clocks that the step reads before its first tensor operation: its prologue reads them."""

from __future__ import annotations

import functools
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.draws.draw import CLOCKS, NOW
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


def _read(clock: Any, world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return ABSENT if args or kwargs else _read_early(world, clock, ())


def _read_early(world: TraceWorld, clock: Any, args: tuple[Any, ...]) -> Any:
    """Reads a clock early, but not after a tensor operation, which the step may want to time."""
    calls = (node for node in world.tracer.graph.nodes if node.op == "call_function")
    if any(not safe_isinstance(node.meta.get("val"), compat.SYMBOLS) for node in calls):
        return ABSENT
    return world.random_draws.read_clock(clock, args)


for _clock in CLOCKS:
    if _clock is not NOW:
        registry.intercept(_clock)(functools.partial(_read, _clock))


@registry.intercept(vars(datetime)["now"])
def _now(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    cls, *zone = args
    if cls is not datetime or kwargs or any(type(each) is not timezone for each in zone):
        return ABSENT
    return _read_early(world, NOW, tuple(zone))
