"""The default random generator during a capture: a step may save and restore its state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sidefx_train.compile.capture.recording.dispatch_mode import RandomState
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


def _getter(kind: str) -> registry.Interceptor:
    def get(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RandomState:
        return world.tracer.proxy_mode.save(kind)

    return get


def _set_rng_state(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    state = args[0] if args else kwargs["new_state"]
    if not safe_isinstance(state, RandomState):
        world.heap.refuse("SFX110", "sets a random state that was not saved in the step")
    world.tracer.proxy_mode.restore(state)


for _kind, _module in (("cpu", torch.random), ("cuda", torch.cuda.random)):
    registry.intercept(_module.get_rng_state)(_getter(_kind))
    registry.intercept(_module.set_rng_state)(_set_rng_state)


def _seeds(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    world.heap.refuse("SFX110", "seeds the random generator inside the step")


for _name in ("seed", "initial_seed"):
    registry.intercept(getattr(torch.random, _name))(_seeds)


@registry.intercept(torch.random.manual_seed)
def _manual_seed(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Seeds before the graph runs, if the step has not drawn yet."""
    given = (*args, *kwargs.values())
    if len(given) != 1 or type(given[0]) not in (int, torch.SymInt) or not world.random_draws.seed_default(given[0]):
        _seeds(world, args, kwargs)
    heap = world.heap
    return heap.shadow(torch.default_generator, heap.sources.const(torch.default_generator, "torch.default_generator"))
