"""What the Python of wrapper subclasses calls: their constructor in C, and torch's correction of aliases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common import interceptor_registry as registry

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


@registry.intercept(compat.MAKE_WRAPPER)
def _make_wrapper(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Makes a wrapper as eager does; its storage is empty, so nothing is recorded."""
    cls = args[0]
    made = f"makes a {cls.__qualname__}, a tensor subclass"
    if not compat.is_wrapper_class(cls):
        world.heap.refuse("SFX109", made)
    if not compat.has_plain_functions(cls):
        world.heap.refuse("SFX109", f"{made} with a __torch_function__ of its own")
    layout = kwargs.get("layout", torch.strided)
    if len(args) > 2 or compat.has_own_layout(kwargs) or layout not in (None, torch.strided):
        world.heap.refuse("SFX109", f"{made} that computes its sizes, device or layout itself")
    return world.guarded(compat.MAKE_WRAPPER, args, kwargs)


@registry.intercept(compat.CORRECT_ALIASING)
def _correct_aliasing(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs torch's own function on shadows: it gives wrappers the storage of others, past the dispatcher."""
    return world.guarded(compat.CORRECT_ALIASING, args, kwargs)


@registry.intercept(compat.DISABLES_DISPATCH)
def _disable_dispatch(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuses to disable the dispatcher's Python, which records the graph."""
    world.heap.refuse("SFX111", "disables __torch_dispatch__")
