"""What ``fully_shard`` keeps of a module's parameters: groups, their states, and the functions that communicate."""

from __future__ import annotations

import sys
from typing import Any

_PACKAGE = "torch.distributed.fsdp._fully_shard"


class FullyShardedNames:
    """Private names of the package of ``fully_shard``, which the program has imported."""

    def __init__(self) -> None:
        groups, params = sys.modules[f"{_PACKAGE}._fsdp_param_group"], sys.modules[f"{_PACKAGE}._fsdp_param"]
        collectives, common = sys.modules[f"{_PACKAGE}._fsdp_collectives"], sys.modules[f"{_PACKAGE}._fsdp_common"]
        api, states = sys.modules[f"{_PACKAGE}._fsdp_api"], sys.modules[f"{_PACKAGE}._fsdp_state"]
        self.State: Any = states.FSDPState
        self.Group: Any = groups.FSDPParamGroup
        self.Param: Any = params.FSDPParam
        self.SHARDED: Any = params.ShardedState.SHARDED
        self.IDLE: Any = common.TrainingState.IDLE
        self.MeshInfo: Any = common.FSDPMeshInfo
        self.OffloadPolicy: Any = api.OffloadPolicy
        self.AllGather: Any = collectives.DefaultAllGather
        self.ReduceScatter: Any = collectives.DefaultReduceScatter
        self.AllGatherResult: Any = collectives.AllGatherResult
        self.start_all_gather: Any = groups.foreach_all_gather
        self.finish_all_gather: Any = groups.foreach_all_gather_copy_out
        self.fill_reduce_scatter: Any = collectives.foreach_reduce_scatter_copy_in
        self.logger: Any = groups.logger


def fully_sharded_names() -> FullyShardedNames | None:
    """Returns the private names of ``fully_shard``, ``None`` while nobody has imported it."""
    return FullyShardedNames() if f"{_PACKAGE}._fsdp_state" in sys.modules else None
