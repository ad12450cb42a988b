"""``Trainer(devices=2, strategy="ddp")``: weights, optimizer state, logs and metrics of every rank are eager's."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from lightning import pytorch as pl
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import sidefx_train
from tests.distributed.processes import WORLD, agree, in_two_processes
from tests.lightning.harness import Classifier, data, fit, quiet_trainer
from tests.support.parity import same

OPTIONS: dict[str, Any] = {"devices": WORLD, "strategy": "ddp", "rows": 32, "validate": True}


class Synchronized(Classifier):
    """Logs with and without reduction between processes, in a forward and in a hook of the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        output = self(x)
        loss = F.cross_entropy(output, y)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True, sync_dist=True)
        self.log("rows", float(x.shape[0]), sync_dist=True, reduce_fx="max")
        self.log("epoch", loss * 2, on_step=False, on_epoch=True, sync_dist=True)
        self.log("half", loss.bfloat16(), sync_dist=True, reduce_fx="sum")
        self.log("own", loss * 3)
        self.accuracy(output, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return loss

    def on_after_backward(self):
        self.log("norm", self.net[0].weight.grad.norm(), sync_dist=True)


def _optimize(module: pl.LightningModule, loss: torch.Tensor) -> None:
    optimizer = module.optimizers()
    optimizer.zero_grad()
    module.manual_backward(loss)
    optimizer.step()


class Manual(Synchronized):
    """Runs its backward inside the wrapper's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        _optimize(self, super().training_step(batch, batch_idx))


class Descending(Synchronized):
    """Updates by the gradients themselves, so that rounding stays small."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Branching(Descending):
    """Branches on the loss in ``training_step``, which Lightning calls in the wrapper's forward."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if loss > 1:
            loss = loss / 2
        self.log("after", loss, sync_dist=True)
        return loss


class Sharded(Descending):
    """Its layers are sharded by FSDP2."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    def configure_model(self):
        if not isinstance(self.net[0].weight, DTensor):
            for layer in (self.net[0], self.net[2], self.net):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def on_after_backward(self):
        self.log("norm", self.net[0].weight.grad.to_local().norm(), sync_dist=True)


class ShardedManually(Sharded):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        _optimize(self, super().training_step(batch, batch_idx))


class Parallel(Classifier):
    """Its layers are split over the processes by tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    def configure_model(self):
        if not isinstance(self.net[0].weight, DTensor):
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)


def _in_a_launched_process(rank: int) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD}
    started = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0, "TORCHELASTIC_RUN_ID": "test"}
    os.environ.update({name: str(value) for name, value in {**place, **started}.items()})


def _parity(
    rank: int, make: Any, folder: Path, capturing: tuple[int, ...] = (0, 1), warnings: int = 0, **options: Any
) -> Any:
    """Fits eagerly and captured, compares all state, and returns the report."""
    callback = sidefx_train.SideFXCompile(backend="eager") if rank in capturing else None
    options = {**OPTIONS, **options}
    strategy = options.pop("strategy")
    strategies = [strategy, strategy] if isinstance(strategy, str) else [strategy(), strategy()]
    found = fit(make, folder / f"captured {rank}", callback=callback, strategy=strategies[0], **options)
    expected = fit(make, folder / f"eager {rank}", strategy=strategies[1], **options)
    same(expected.state(), found.state(), "fit", True)
    same(expected.rows, found.rows, "logged rows", True)
    replicated = (each for each in found.module.parameters() if not isinstance(each, DTensor))
    assert len(found.warnings) == (warnings if rank in capturing else 0), found.warnings
    assert all(map(agree, replicated))
    return found.report


def _captured(report: Any) -> bool:
    """Returns True if every step is captured once the wrapper's buckets are final."""
    return report.replays > 0 and not report.breaks and {each.code for each in report.fallbacks} == {"SFX212"}


def _fits(rank: int, folder: Path) -> None:
    _in_a_launched_process(rank)
    for make, options in [(Synchronized, {"gradient_clip_val": 0.1}), (Manual, {"epochs": 1})]:
        report = _parity(rank, make, folder / make.__name__, **options)
        assert _captured(report) and report.replays == report.calls - 2, str(report)
    accumulated = {"accumulate_grad_batches": 2, "capturing": (1,)}
    report = _parity(rank, Synchronized, folder / "accumulated", **accumulated)
    assert rank == 0 or _captured(report), str(report)
    report = _parity(rank, Branching, folder / "branching", capturing=(1,), warnings=1)
    assert rank == 0 or (report.replays == report.calls - 2 and len(report.breaks) == 1), str(report)
    _left(rank, folder)


SHARDED = [
    (Sharded, {"gradient_clip_val": 0.1}),
    (Sharded, {"accumulate_grad_batches": 2, "capturing": (1,)}),
    (Sharded, {"precision": "bf16-true"}),
    (ShardedManually, {"capturing": (0,)}),
    (Parallel, {"size": WORLD}),
]


def _sharded(rank: int, folder: Path, numbers: tuple[int, ...]) -> None:
    _in_a_launched_process(rank)
    for number in numbers:
        make, given = SHARDED[number]
        options = {"capturing": (0, 1), **given}
        size = options.pop("size", 1)
        strategy = functools.partial(ModelParallelStrategy, WORLD // size, size)
        report = _parity(rank, make, folder / str(number), strategy=strategy, **options)
        if rank in options["capturing"]:
            assert report.replays >= report.calls - 2 and not report.breaks, f"{make} {given}: {report}"
            assert {each.code for each in report.fallbacks} <= {"SFX212"}, f"{make} {given}: {report}"


@pytest.mark.parametrize("numbers", [(1, 4), pytest.param((0, 2, 3), marks=pytest.mark.slow)], ids=str)
def test_a_model_that_lightning_shards(tmp_path, numbers):
    in_two_processes(_sharded, tmp_path, numbers)


def _resumes(rank: int, folder: Path) -> None:
    """Two processes, then one, then two again, each continuing from the checkpoint before."""
    _in_a_launched_process(rank)
    counts = WORLD, 1, WORLD
    states = []
    for compiled in (False, True):
        last = None
        for epochs, devices in enumerate(counts, start=1):
            callback = sidefx_train.SideFXCompile(backend="eager") if compiled else None
            options = {"devices": devices, "strategy": "ddp" if devices > 1 else "auto", "resume": last}
            fitted = fit(Classifier, folder, callback=callback, epochs=epochs, rows=24, **options)
            assert not compiled or fitted.report.replays > 0, str(fitted.report)
            last = str(folder / f"{compiled} {epochs} {rank if devices == 1 else 0}.ckpt")
            fitted.trainer.save_checkpoint(last)
        states.append(fitted.state())
    same(*states, "resumed", True)


def _left(rank: int, folder: Path) -> None:
    """What torch or Lightning refuse is refused."""
    for compiled in (False, True):
        callbacks = [sidefx_train.SideFXCompile(backend="eager")] if compiled else []
        trainer = quiet_trainer(folder, callbacks=callbacks, devices=WORLD, strategy="ddp", sync_batchnorm=True)
        with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):
            trainer.fit(Synchronized(), data(16))


def test_every_rank_has_eagers_state(tmp_path):
    in_two_processes(_fits, tmp_path)


@pytest.mark.slow
def test_another_number_of_processes_resumes(tmp_path):
    in_two_processes(_resumes, tmp_path)


def _through_inductor(rank: int, folder: Path) -> None:
    """One process compiles, the other runs eagerly; what is logged is what eager logs, up to rounding."""
    _in_a_launched_process(rank)
    callback = sidefx_train.SideFXCompile() if rank == 0 else None
    found = fit(Descending, folder / f"captured {rank}", callback=callback, **OPTIONS)
    expected = fit(Descending, folder / f"eager {rank}", **OPTIONS)
    assert rank or _captured(found.report), str(found.report)
    for name, value in expected.trainer.callback_metrics.items():
        assert torch.allclose(found.trainer.callback_metrics[name], value, atol=1e-2 if name == "half" else 1e-4), name


@pytest.mark.slow
def test_logged_values_go_through_inductor(tmp_path):
    in_two_processes(_through_inductor, tmp_path, seconds=300)


class Tell(pl.Callback):
    """Prints in each process what was captured there: the report stays in the process."""

    def __init__(self, told: Any) -> None:
        self.told = told

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        report = self.told.report
        weight = float(pl_module.net[0].weight.double().sum())
        sys.stdout.write(f"rank {trainer.global_rank}: {report.calls} calls, {report.replays} replays, {weight!r}\n")


def _launch(strategy: str, backend: str) -> None:
    torch.manual_seed(0)
    callback = sidefx_train.SideFXCompile(backend=backend)
    trainer = quiet_trainer(Path(), callbacks=[callback, Tell(callback)], devices=WORLD, strategy=strategy)
    trainer.fit(Classifier(), data(40))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "backend"),
    [("ddp", "eager"), ("ddp_spawn", "eager"), ("ddp_fork", "inductor"), ("ddp_notebook", "eager")],
)
def test_lightning_starts_the_processes(strategy, backend):
    command = [sys.executable, "-m", __name__, strategy, backend]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    for rank in range(WORLD):
        assert f"rank {rank}: 5 calls, 3 replays" in run.stdout, run.stdout
    assert len({line.split()[-1] for line in run.stdout.splitlines() if line.startswith("rank")}) == 1, run.stdout


if __name__ == "__main__":
    _launch(*sys.argv[1:])
