"""Methods of ``DTensor`` in a step: torch's own Python, with its autograd functions, runs on shadows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common import interceptor_registry as registry

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
def _with_dtensors() -> bool:
    """Registers the interceptors once the program has imported ``DTensor``."""
    cls = compat.dtensor_class()
    if cls is None:
        return False
    for name in _NATIVE:
        _natively(getattr(cls, name))
    return True
