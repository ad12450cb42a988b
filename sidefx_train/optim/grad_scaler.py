"""``GradScaler`` during a capture: the graph decides whether an update is kept.

Eager reads on the host whether a gradient is infinite, and then calls ``optimizer.step()``, or not. The capture calls
it, and predicates what it writes. Where the call also changes Python objects, which the graph cannot take back, that no
gradient is infinite is an assumed condition instead, and a step for which it does not hold runs eagerly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from sidefx_train.compile.capture.recording.predicated_writes import PredicatedRegion
from sidefx_train.compile.capture.shadows.records import InstanceRecord
from sidefx_train.compile.capture.side_effects.collect import observe
from sidefx_train.compile.capture.side_effects.compare import difference
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.errors import FIRST_STEP, Unsupported

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


_FOUND = "found_inf_per_device"


@registry.intercept(torch.amp.GradScaler._lazy_init_scale_growth_tracker)
def _first_scale(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if world.heap.record_of(args[0]) is None:
        return ABSENT  # the step creates it
    return _first_step(world, "the scaler creates its scale")


@registry.intercept(torch.amp.GradScaler._maybe_opt_step)
def _step_if_finite(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls ``optimizer.step()``, and predicates its writes by the flag that no gradient is infinite."""
    _, optimizer, state, *rest = args
    found = world.interp.iterate(world.interp.call(dict.values, (world.interp.getitem(state, _FOUND),), {}))
    record = world.heap.record_of(optimizer)
    if len(found) != 1 or world.branching or not isinstance(record, InstanceRecord) or found[0].numel() != 1:
        return ABSENT
    if not isinstance(record.real, Optimizer):
        return ABSENT
    step = world.interp.getattr(optimizer, "step")
    _refuse_first_call(world, optimizer, record)
    with torch.no_grad():
        flag = world.guarded(torch.eq, (found[0], 0), {})
    before, states = observe(world, [flag, *args, *kwargs.values()]), len(world.pending_state)
    region, rebound = PredicatedRegion(world.tracer, flag), world.heap.memory.count
    returned = world.interp.call(step, tuple(rest), kwargs)
    if len(world.pending_state) != states:
        return _first_step(world, "the optimizer creates its state")
    changes = difference(before, observe(world, [flag, returned, *args, *kwargs.values()]), writes=False)
    reason = region.why_not() or ("changes Python objects" if changes or returned is not None else "")
    if world.heap.memory.count != rebound:
        reason = "replaces the storage of a tensor"
    if not reason:
        region.close()
        return returned
    if world.specialization.assumes_nothing:
        world.heap.refuse("SFX101", f"optimizer.step() {reason}, and GradScaler decides on the host whether to call it")
    region.assume()
    location = world.locate()
    if location is not None:
        world.assumptions.setdefault(location)
    return returned


def _refuse_first_call(world: TraceWorld, optimizer: Any, record: InstanceRecord) -> None:
    """Refuses the first call of a step that a scheduler has wrapped: the scheduler is told of it."""
    if not hasattr(vars(record.real).get("step"), "_wrapped_by_lr_sched"):
        return
    if vars(record.real).get("_opt_called") is not True:
        _first_step(world, "the scheduler waits for the optimizer's first step")
    world.interp.getattr(optimizer, "_opt_called")  # guarded: the call changes nothing then


def _first_step(world: TraceWorld, reason: str) -> Any:
    stop = Unsupported(FIRST_STEP, reason, world.locate())
    stop.whole = True
    raise stop
