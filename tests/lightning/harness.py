"""Fits one LightningModule twice, without and with the callback, and compares the resulting states."""

from __future__ import annotations

import csv
import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning import pytorch as pl
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import sidefx_train
from tests.support.parity import photograph, same


def data(rows: int = 26, seed: int = 3) -> DataLoader:
    """Batches of 4 (the last one of 2 where ``rows`` is 26)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=generator)
    y = torch.randint(0, 3, (rows,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=4)


class Classifier(pl.LightningModule):
    """A small classifier that logs, counts and keeps Python state."""

    def __init__(self, lr: float = 0.05, optimizer: str = "AdamW") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        self.seen = 0
        self.events: list[Any] = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.seen += x.shape[0]
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("rows", float(x.shape[0]), on_step=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self):
        return getattr(torch.optim, self.hparams.optimizer)(self.parameters(), lr=self.hparams.lr)


@dataclasses.dataclass
class Fitted:
    """A finished fit."""

    trainer: Any
    module: Any
    rows: list[dict[str, str]]
    warnings: list[str]
    report: Any = None

    def state(self) -> dict[str, Any]:
        trainer, module = self.trainer, self.module
        progress = trainer.fit_loop.state_dict()
        return photograph(
            {
                "weights": dict(module.state_dict()),
                "optimizers": [o.state_dict() for o in trainer.optimizers],
                "schedulers": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
                "callback_metrics": dict(trainer.callback_metrics),
                "logged_metrics": dict(trainer.logged_metrics),
                "progress_bar_metrics": dict(trainer.progress_bar_metrics),
                "global_step": trainer.global_step,
                "current_epoch": trainer.current_epoch,
                "progress": progress,
                "seen": getattr(module, "seen", None),
                "events": getattr(module, "events", None),
                "grads": [p.grad for p in module.parameters()],
            }
        )


def fit(
    make: Callable[[], Any],
    folder: Path,
    *,
    callback: Any = None,
    callbacks: Callable[[], list[Any]] = list,
    epochs: int = 2,
    rows: int = 26,
    validate: bool = False,
    resume: str | None = None,
    package: Any = pl,
    plugins: Callable[[], list[Any]] = list,
    **options: Any,
) -> Fitted:
    """Runs one fit from a fixed seed. ``options`` go to the Trainer."""
    torch.manual_seed(0)
    module = make()
    logger = options.pop("logger", None) or CSVLogger(folder, name="", version="", flush_logs_every_n_steps=1)
    extra = [callback] if callback is not None else []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = package.Trainer(
            max_epochs=epochs,
            logger=logger,
            callbacks=[*extra, *callbacks()],
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=1,
            default_root_dir=folder,
            accelerator="cpu",
            plugins=plugins(),
            **{"enable_checkpointing": False, "num_sanity_val_steps": 0, **options},
        )
        trainer.fit(module, data(rows), data(12, seed=5) if validate else None, ckpt_path=resume)
    file = folder / "metrics.csv"
    logged = list(csv.DictReader(file.open())) if file.exists() else []
    messages = [str(w.message) for w in caught if issubclass(w.category, sidefx_train.errors.SideFXWarning)]
    return Fitted(trainer, module, logged, messages, getattr(callback, "report", None))


def parity(
    make: Callable[[], Any],
    folder: Path,
    *,
    backend: str = "eager",
    captured: bool = True,
    captures: int | None = None,
    **options: Any,
) -> tuple[Fitted, Fitted]:
    """Fits natively and with the callback and compares weights, logs, metrics, counters, Python state.

    Args:
        make: builds the module.
        folder: folder for the logs.
        backend: ``"eager"`` is compared bitwise.
        captured: every step must have been captured.
        captures: largest number of captures allowed.
        options: as for :func:`fit`.
    """
    (folder / "native").mkdir()
    (folder / "ours").mkdir()
    native = fit(make, folder / "native", **options)
    strict = {"fullgraph": True, "on_failure": "raise"} if captured else {}
    callback = sidefx_train.SideFXCompile(backend=backend, warmup="now", keep_slower=True, **strict)
    ours = fit(make, folder / "ours", callback=callback, **options)
    exact = backend == "eager"
    same(native.state(), ours.state(), "fit", exact)
    same([_numbers(row) for row in native.rows], [_numbers(row) for row in ours.rows], "logged rows", exact)
    report = ours.report
    assert report.calls > 0, "the callback saw no step"
    if captured:
        assert report.fallback_count == 0, f"steps ran eagerly:\n{report}"
        assert not ours.warnings, ours.warnings
    if captures is not None:
        assert len(report.captures) <= captures, f"{len(report.captures)} captures, at most {captures}:\n{report}"
    return native, ours


def quiet_trainer(folder: Path, **options: Any) -> Any:
    """A Trainer of one epoch that shows and keeps nothing."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "num_sanity_val_steps": 0}
    quiet |= {"enable_model_summary": False, "default_root_dir": folder, "accelerator": "cpu", "max_epochs": 1}
    return pl.Trainer(**{**quiet, **options})


def _numbers(row: dict[str, str]) -> dict[str, Any]:
    return {key: float(value) if value else None for key, value in row.items()}
