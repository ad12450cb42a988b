"""``fit`` in two processes: the captured loop has the numbers of the eager one."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sidefx_train
from tests.distributed.processes import WORLD, agree, in_two_processes


def _fitted(compile: bool) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    data = DataLoader(TensorDataset(torch.randn(72, 4), torch.randn(72, 2)), batch_size=6)
    result = sidefx_train.fit(
        model,
        data,
        epochs=2,
        val_data=(torch.randn(4, 4), torch.randn(4, 2)),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        accelerator="cpu",
        devices=WORLD,
        strategy="ddp",
        compile=compile,
        progress=False,
    )
    return model, result


def _fits(rank: int) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD}
    started = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0, "TORCHELASTIC_RUN_ID": "test"}
    os.environ.update({name: str(value) for name, value in {**place, **started}.items()})
    plain, expected = _fitted(False)
    captured, found = _fitted(True)
    for name, value in plain.state_dict().items():
        assert torch.allclose(captured.state_dict()[name], value, atol=1e-5), name
    assert all(map(agree, captured.parameters()))
    for name, value in expected.metrics.items():
        assert abs(found.metrics[name] - value) < 1e-4, (found.metrics, expected.metrics)
    report = found.report
    assert (report.calls, report.replays, report.breaks) == (12, 10, []), str(report)


def test_fit_with_two_processes_is_captured():
    in_two_processes(_fits)
