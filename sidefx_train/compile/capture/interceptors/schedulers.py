"""Learning rate schedulers: the prologue computes their steps, or they run natively, behind the graph."""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

from torch.optim import lr_scheduler

from sidefx_train.compile.capture.interceptors import scheduler_steps
from sidefx_train.compile.capture.interpreter.frame_objects import Place
from sidefx_train.compile.capture.shadows.deferred_values import DeferredCall
from sidefx_train.compile.capture.world.deferred.argument_snapshot import ArgumentSnapshot
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


def _step(fn: types.FunctionType, world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not args:
        return ABSENT
    begun = world.decisions.has_begun()
    computed = functools.partial(scheduler_steps.step, world, fn, args)
    natively = begun or type(args[0]) in scheduler_steps.SEQUENCES  # which take a capture for each of their parts
    if not kwargs and not natively and computed():
        return None
    if not world.decisions.calls_scheduler():
        return None if not kwargs and not begun and natively and computed() else ABSENT
    frame = world.interp.current_frame
    assert frame is not None, "the program calls the scheduler"
    if world.heap.record_of(args[0]) is None:
        world.heap.refuse("SFX104", "defers a call of a scheduler that the step creates")
    snapshot = ArgumentSnapshot(world, shown=False)
    method, given, named = types.MethodType(fn, args[0]), snapshot.many(args[1:]), snapshot.named(kwargs)
    world.deferred.append(DeferredCall(method, given, named, world.locate(), Place(frame)))
    return None


for _cls in vars(lr_scheduler).values():
    if isinstance(_cls, type) and isinstance(vars(_cls).get("step"), types.FunctionType):
        registry.intercept(vars(_cls)["step"])(functools.partial(_step, vars(_cls)["step"]))
