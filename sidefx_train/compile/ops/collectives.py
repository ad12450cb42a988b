"""Operators that communicate: a barrier for graphs, and collectives for their generated C++."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.fx.node import has_side_effect

from sidefx_train import torch_compat as compat
from sidefx_train.compile.ops.registration import define_operator


def _wait(group: str) -> torch.Tensor:
    dist.barrier(compat.group_of_name(group))
    return _nothing(group)


def _nothing(group: str) -> torch.Tensor:
    return torch.empty(0, dtype=torch.float32)  # whatever the default dtype is


define_operator("barrier(str group) -> Tensor", _wait, _nothing, key="CompositeExplicitAutograd")

BARRIER = has_side_effect(torch.ops.sidefx.barrier.default)
"""``barrier(group)`` waits until all processes of the group of that name have called it. Its result is empty, but it
takes part in the order of the collectives."""

for _schema, _collective in compat.collectives_by_group_name():
    define_operator(_schema, _collective, key="CompositeExplicitAutograd")
