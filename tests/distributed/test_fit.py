"""``fit`` in two processes: the captured loop has the numbers of the eager one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sidefx_train
from tests.distributed.processes import WORLD, agree, in_two_processes


def _plain_module() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


class Module(lightning.LightningModule):
    """The same model with steps of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _plain_module()

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("logged", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])


def _fitted(make: Callable[[], nn.Module], compile: bool) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = make()
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


def _in_a_launched_process(rank: int) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD}
    started = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0, "TORCHELASTIC_RUN_ID": "test"}
    os.environ.update({name: str(value) for name, value in {**place, **started}.items()})


def _fits(rank: int) -> None:
    _in_a_launched_process(rank)
    for make in (_plain_module, Module):
        plain, expected = _fitted(make, False)
        captured, found = _fitted(make, True)
        for name, value in plain.state_dict().items():
            assert torch.allclose(captured.state_dict()[name], value, atol=1e-5), name
        assert all(map(agree, captured.parameters())) and "forward" not in vars(captured)
        for a, b in zip(found.history, expected.history, strict=True):
            assert a.keys() == b.keys() and all(abs(a[name] - b[name]) < 1e-4 for name in a), (a, b)
        report = found.report
        calls = 24 // WORLD
        assert (report.calls, report.replays, report.breaks) == (calls, calls - 2, []), str(report)


def _resumes(rank: int, folder: Path) -> None:
    """Each process has dropout masks and shuffled batches of its own; a stop after five steps changes nothing."""
    _in_a_launched_process(rank)
    options = {"accelerator": "cpu", "strategy": "ddp", "compile": False, "progress": False}
    data = TensorDataset(torch.randn(72, 4), torch.randn(72, 2))

    def train(steps: int, **more: Any) -> nn.Module:
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.1)
        sidefx_train.fit(model, data, max_steps=steps, devices=WORLD, **options, **more)
        return model

    whole = train(8)
    train(5, checkpoint_dir=folder)
    rest = train(8, checkpoint_dir=folder, resume=True)
    assert all(map(torch.equal, whole.parameters(), rest.parameters()))


def test_random_numbers_of_each_process_continue(tmp_path):
    in_two_processes(_resumes, tmp_path)
    data = TensorDataset(torch.randn(72, 4), torch.randn(72, 2))
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    with pytest.raises(ValueError, match=f"was written by {WORLD} processes, and 1 run now"):
        sidefx_train.fit(model, data, max_steps=8, checkpoint_dir=tmp_path, resume=True, compile=False, progress=False)


def test_fit_with_two_processes_is_captured():
    in_two_processes(_fits)
