"""What ``fully_shard`` keeps of a module's parameters: groups, their states, and the functions that communicate."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from typing import Any

import torch

_PACKAGE = "torch.distributed.fsdp._fully_shard"
_START = [
    "fsdp_params",
    "group",
    "async_op",
    "all_gather_copy_in_stream",
    "all_gather_stream",
    "device",
    "all_gather_comm",
]
_FINISH = ["all_gather_result", "fsdp_params", "group"]
_FILL = ["unsharded_grads", "reduce_scatter_input", "world_size"]
"""Parameters of the functions that are replaced."""


class FullyShardedNames:
    """Private names of the package of ``fully_shard``, which the program has imported.

    Attributes:
        known: the functions that communicate have the parameters that this library knows.
    """

    package = _PACKAGE

    def __init__(self) -> None:
        groups, params = sys.modules[f"{_PACKAGE}._fsdp_param_group"], sys.modules[f"{_PACKAGE}._fsdp_param"]
        collectives, common = sys.modules[f"{_PACKAGE}._fsdp_collectives"], sys.modules[f"{_PACKAGE}._fsdp_common"]
        api, states = sys.modules[f"{_PACKAGE}._fsdp_api"], sys.modules[f"{_PACKAGE}._fsdp_state"]
        self.State: Any = states.FSDPState
        self.Group: Any = groups.FSDPParamGroup
        self.Param: Any = params.FSDPParam
        self.SHARDED: Any = params.ShardedState.SHARDED
        self.IDLE: Any = common.TrainingState.IDLE
        self.meshes: tuple[Any, ...] = (common.FSDPMeshInfo, common.HSDPMeshInfo)
        self.OffloadPolicy: Any = api.OffloadPolicy
        self.AllGather: Any = collectives.DefaultAllGather
        self.ReduceScatter: Any = collectives.DefaultReduceScatter
        self.AllGatherResult: Any = collectives.AllGatherResult
        self.start_all_gather: Any = groups.foreach_all_gather
        self.finish_all_gather: Any = groups.foreach_all_gather_copy_out
        self.default_copy_out: Any = getattr(collectives, "_default_all_gather_output_fn", None)
        self.fill_reduce_scatter: Any = collectives.foreach_reduce_scatter_copy_in
        self.logger: Any = groups.logger
        self.is_logged = functools.partial(self.logger.isEnabledFor, logging.DEBUG)
        self.known = (
            _parameters(self.start_all_gather) == _START
            and _parameters(self.finish_all_gather)[:3] == _FINISH
            and _parameters(self.fill_reduce_scatter) == _FILL
        )


def chunk_cat(tensors: list[torch.Tensor], chunks: int) -> torch.Tensor:
    """Returns rows of joined chunks: the first of each tensor, then the second; short ones are padded with zeros."""
    return torch._chunk_cat(tensors, 0, chunks)  # type: ignore[no-any-return, unused-ignore]


def _parameters(fn: Any) -> list[str]:
    return list(inspect.signature(fn).parameters)


def fully_sharded_names() -> FullyShardedNames | None:
    """Returns the private names of ``fully_shard``, ``None`` while nobody has imported it."""
    return FullyShardedNames() if f"{_PACKAGE}._fsdp_state" in sys.modules else None
