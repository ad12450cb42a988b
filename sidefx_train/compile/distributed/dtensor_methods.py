"""Methods of ``DTensor`` in a step: torch's own Python, with its autograd functions, runs on shadows.

Also ``loss_parallel``, which changes how torch's dispatch of DTensors runs some operators, also during the capture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.distributed_models import CODE, refuse_whole

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld

_NATIVE = ("from_local", "to_local", "full_tensor", "redistribute")


def _natively(method: Any) -> None:
    """Has a method of ``DTensor`` run on shadows."""

    @registry.intercept(method)
    def called(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        world.tracer.proxy_mode.note_differentiated(f"DTensor.{method.__name__}", (args, kwargs))
        return world.guarded(method, args, kwargs)


@registry.late
def _with_loss_parallel() -> bool:
    """Registers the interceptors once the program has imported ``loss_parallel``."""
    switches = compat.loss_parallel_switches()
    if switches is None:
        return False
    begin, end = switches

    @registry.intercept(begin)
    def begun(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if compat.has_loss_rules():
            refuse_whole(CODE, "enters loss_parallel inside another one", world.locate())
        if not world.heap.dtensor_rules:
            world.heap.dtensor_rules = tuple(compat.dtensor_dispatcher()[1])
        begin()
        world.undo_rules = end

    @registry.intercept(end)
    def ended(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if world.undo_rules is None:
            refuse_whole(CODE, "leaves a loss_parallel that was entered before the step", world.locate())
        world.end_rules()

    return True


@registry.AT_END.append
def _check_rules(world: TraceWorld) -> None:
    if world.undo_rules is not None:
        refuse_whole(CODE, "stops inside loss_parallel", world.locate())


@registry.late
def _with_dtensors() -> bool:
    """Registers the interceptors once the program has imported ``DTensor``."""
    cls = compat.dtensor_class()
    if cls is None:
        return False
    for name in _NATIVE:
        _natively(getattr(cls, name))
    return True
