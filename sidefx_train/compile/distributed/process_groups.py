"""Process groups during a capture: constants of the step, guarded by identity."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


def group_of(world: TraceWorld, group: Any) -> Any:
    """Returns the process group that an argument ``group`` stands for, guarded; ``None`` if there is none.

    Args:
        world: the capturing world.
        group: ``None`` for the default group, or a process group, which has been guarded where it was read.
    """
    if group is None or group is compat.default_group():
        sources = world.heap.sources
        number = compat.default_group_number()
        source = sources.call(sources.const(compat.default_group_number, "torch.distributed.group.WORLD"))
        world.heap.guard("is" if number is None else "equal", source, number)
        return compat.default_group()
    return group if safe_isinstance(group, dist.ProcessGroup) else None


def guard_named(world: TraceWorld, name: str) -> None:
    """Guards that a name stands for the same process group."""
    sources = world.heap.sources
    ask = functools.partial(compat.group_number_of_name, name)
    source = sources.call(sources.const(ask, f"the process group {name!r}"))
    world.heap.guard("equal", source, compat.group_number_of_name(name))


def _group_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs.get("group")


def _constant(ask: Any) -> None:
    """Has a query of a process group answered during the capture."""

    @registry.intercept(ask)
    def asked(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        group = group_of(world, _group_argument(args, kwargs))
        if group is None or len(args) + len(kwargs) > 1:
            return ABSENT
        with compat.real_world():
            return ask(group)


if dist.is_available():
    _constant(dist.get_rank)
    _constant(dist.get_world_size)
    _constant(dist.get_backend)

    @registry.intercept(dist.is_initialized)
    def _is_initialized(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return group_of(world, None) is not None

    @registry.intercept(compat.size_of_named_group())
    def _size_of_named(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        (name,) = args
        if type(name) is not str:
            return ABSENT
        guard_named(world, name)
        with compat.real_world():
            return compat.size_of_named_group()(name)


@registry.late
def _with_functional_collectives() -> bool:
    """Registers what needs the module of functional collectives, once the program has imported it."""
    resolver = compat.group_resolver()
    if resolver is not None:
        registry.intercept(resolver)(_resolve_group)
        registry.intercept(compat.asks_whether_traced())(_is_traced)
    return resolver is not None


def _is_traced(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Has results waited for at once: eager's are tensor subclasses that wait at their first use."""
    return True


def _resolve_group(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the name of a process group given as such; the graph contains names."""
    group = args[0] if args else kwargs.get("group")
    return group.group_name if safe_isinstance(group, dist.ProcessGroup) else ABSENT
