"""torchmetrics during a capture: metrics run in the graph if possible, else as opaque calls after it.

A metric that branches on its values (curve metrics select, some check their inputs) cannot be in a graph. Its
``forward``, ``update``, ``compute`` and ``reset`` are then called after the graph on the step's real tensors, in the
step's order: state and results are eager's, at eager's speed.
"""

from __future__ import annotations

import copy
import sys
import types
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.errors import Unsupported

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld

METHODS = ("forward", "update", "compute", "reset")


def _stub(name: str) -> Any:
    """Returns a function that replaces a metric's method during a capture."""

    def method(metric: Any, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"the substitute of Metric.{name} was called outside a capture")

    method.__name__, method.__qualname__ = name, f"Metric.{name}"
    registry.LOOKED_UP[method] = name

    @registry.intercept(method)
    def call(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        metric = args[0]
        kind = type(metric).__qualname__
        if kind in world.specialization.opaque_classes:
            if _communicates(world, metric, name):
                world.heap.refuse("SFX103", f"calls {kind}.{name}, which synchronizes the metric between processes")
            return world.defer_for_result(types.MethodType(method, metric), args[1:], kwargs)
        world.running.add(id(metric))
        try:
            return world.interp.call(world.interp.getattr(metric, name), args[1:], kwargs)
        except Unsupported as stop:
            stop.defer = kind
            raise
        finally:
            world.running.discard(id(metric))

    return method


def _communicates(world: TraceWorld, metric: Any, name: str) -> bool:
    """Returns True if a metric's method may call collectives: an opaque call would issue them after the graph's."""
    if name not in ("forward", "compute") or not torch.distributed.is_available():
        return False
    if not world.interp.call(torch.distributed.is_initialized, (), {}):
        return False
    return name == "compute" or bool(world.interp.getattr(metric, "dist_sync_on_step"))


@registry.late
def register() -> bool:
    """Registers the interceptors after torchmetrics was imported; a step with a metric has imported it."""
    metric = getattr(sys.modules.get("torchmetrics"), "Metric", None)
    if metric is None:
        return False
    stubs = {name: _stub(name) for name in METHODS}

    def load(world: TraceWorld, obj: Any, name: str) -> Any:
        if id(obj) in world.running or world.heap.record_of(obj) is None:
            return ABSENT
        return types.MethodType(stubs[name], obj)

    for name in METHODS:
        registry.ATTRIBUTE_HOOKS.append((metric, name, load))
    from lightning_utilities.core.imports import RequirementCache

    registry.METHOD_INTERCEPTORS.append((RequirementCache, "__bool__", _is_installed))
    return True


def _is_installed(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Checks once, on a copy, whether a package is installed: the result is a process constant."""
    record = world.heap.record_of(args[0])
    return ABSENT if record is None else bool(copy.copy(record.real))
