"""Ranks with the same graph: one lowers it, the other takes it from the cache."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sidefx_train
from tests.distributed.processes import agree, in_two_processes


def _trained(rank: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3)))
    optimizer = torch.optim.AdamW(net.parameters())
    torch.manual_seed(rank)

    @sidefx_train.compile
    def step(x: torch.Tensor) -> None:
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        step(torch.randn(4, 6))
    return net, step


def _one_lowers(rank: int, folder: str) -> None:
    os.environ.update(SIDEFX_CACHE_DIR=folder, TORCHINDUCTOR_CACHE_DIR=folder)
    net, step = _trained(rank)
    found: list[Any] = [None, None]
    (capture,) = step.report().captures
    dist.all_gather_object(found, "compiled graph from the cache" in capture.notes)
    assert sorted(found) == [False, True], (found, capture.notes)
    assert step.report().replays == 3 and all(map(agree, net.parameters())), str(step.report())


@pytest.mark.slow
def test_one_rank_lowers_for_both(tmp_path):
    in_two_processes(_one_lowers, str(tmp_path))
