"""Parameters, buffers and storages that a step creates: ``nn.Parameter(data)``, a module built in the step.

The first two are tensors detached from their data, with a mark that ``isinstance`` reads. For fake tensors torch itself
creates them this way, as for any other tensor subclass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.shadows.objects.tensors import PLAIN_TENSORS
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


def _made(cls: type, world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    data = args[0] if args else kwargs.get("data")
    if type(data) is not compat.FakeTensor:
        return ABSENT
    shown = world.interp.type_of(data)
    if shown not in PLAIN_TENSORS:
        world.heap.refuse("SFX109", f"makes a {cls.__name__} of a {shown.__qualname__}, a tensor subclass")
    return world.guarded(cls, args, kwargs)


@registry.intercept(torch.nn.Parameter)
def _parameter(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _made(torch.nn.Parameter, world, args, kwargs)


@registry.intercept(torch.nn.Buffer)
def _buffer(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _made(torch.nn.Buffer, world, args, kwargs)


@registry.intercept(torch.utils.swap_tensors)
def _swap(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    world.heap.refuse("SFX108", "swaps two tensors (torch.utils.swap_tensors)")


@registry.intercept(torch.UntypedStorage.__new__)
def _storage(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuses a copy of a storage: the process crashes when an error of the dispatcher reaches that constructor."""
    if any(isinstance(value, torch.UntypedStorage) for value in args[1:]):
        world.heap.refuse("SFX108", "creates a storage from another one")
    return ABSENT
