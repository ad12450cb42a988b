"""Communication that is not captured: each call is a graph break, and runs natively as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common import interceptor_registry as registry

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld

_NAMES = (
    "all_gather_coalesced",
    "all_gather_object",
    "all_reduce_coalesced",
    "all_to_all",
    "batch_isend_irecv",
    "broadcast_object_list",
    "destroy_process_group",
    "gather",
    "gather_object",
    "init_process_group",
    "irecv",
    "isend",
    "monitored_barrier",
    "new_group",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "split_group",
)


def _break_at(fn: Any, name: str) -> None:
    @registry.intercept(fn)
    def refuse(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        world.heap.refuse("SFX103", f"calls torch.distributed.{name}, which communicates outside of a graph")


for _name in _NAMES:
    if hasattr(dist, _name):
        _break_at(getattr(dist, _name), _name)
if dist.is_available():
    _break_at(compat.coalescing_manager(), "_coalescing_manager")
