"""Where a tensor lies in its storage, which differs between tensors of equal metadata: guarded where a step asks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


@registry.intercept(torch.Tensor.storage_offset)
def _storage_offset(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _asked(world, args, "storage_offset")


@registry.intercept(torch.Tensor._is_view)
def _is_view(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _asked(world, args, "_is_view")


@registry.intercept(torch.Tensor.is_set_to)
def _is_set_to(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not any(type(arg) is compat.FakeTensor for arg in args):
        return ABSENT
    world.heap.refuse("SFX106", "Tensor.is_set_to compares storages, which exist only when the graph runs")


def _asked(world: TraceWorld, args: tuple[Any, ...], name: str) -> Any:
    """Guards the answers of the tensors from outside that share the storage of the one that is asked."""
    if not args or type(args[0]) is not compat.FakeTensor:
        return ABSENT
    storage, sources = compat.storage_id(args[0]), world.heap.sources
    for records in world.heap.in_memory.values():
        for record in records:
            if compat.storage_id(record.memory) == storage:
                answer = getattr(record.real, name)()
                world.heap.guard("equal", sources.call(sources.slot(record.base, name)), answer)
    return ABSENT
