"""Operators of torch that a step registers: the dispatcher keeps their Python functions, so the step runs eagerly."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.distributed_models import refuse_whole

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


def _registers(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    refuse_whole("SFX111", "registers an operator of torch, or a function for one", world.locate())


for _name, _method in vars(torch.library.Library).items():
    if isinstance(_method, types.FunctionType) and _name != "__repr__":
        registry.intercept(_method)(_registers)
