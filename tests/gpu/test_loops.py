"""Lightning and the training loop on a device."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import sidefx_train

pytestmark = pytest.mark.gpu

ACCELERATOR = "gpu"


class Classifier(L.LightningModule):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(drop), nn.Linear(16, 3))
        self.seen: list[float] = []

    def training_step(self, batch: Any, index: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.seen.append(outputs["loss"].detach())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)]


def loader() -> Any:
    make = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(40, 8, generator=make), torch.randint(0, 3, (40,), generator=make))
    return DataLoader(data, batch_size=8, pin_memory=ACCELERATOR == "gpu")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("warmup", ["now", "background"])
def test_lightning(tmp_path, warmup, precision):
    runs = []
    for callback in ([], [sidefx_train.SideFXCompile(warmup=warmup, rng="eager")]):
        model = Classifier()
        trainer = L.Trainer(
            max_epochs=8,
            accelerator=ACCELERATOR,
            devices=1,
            precision=precision,
            callbacks=callback,
            default_root_dir=tmp_path,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            gradient_clip_val=1.0,
            accumulate_grad_batches=2,
        )
        trainer.fit(model, loader())
        runs.append((torch.stack(model.seen).cpu(), *(p.detach().cpu() for p in model.parameters())))
    tolerance = 1e-3 if precision == "32-true" else 5e-2
    for expected, found in zip(*runs, strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    if warmup == "now":
        report = callback[0].report
        assert report.replays > report.calls - 6, report


def test_the_loop(tmp_path):
    runs = []
    for keep in (False, True):
        torch.manual_seed(0)
        model = Classifier()
        if not keep:
            trainer = L.Trainer(
                max_epochs=4, accelerator=ACCELERATOR, devices=1, default_root_dir=tmp_path, logger=False,
                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            )  # fmt: skip
            trainer.fit(model, loader())
        else:
            sidefx_train.fit(model, loader(), epochs=4, accelerator=ACCELERATOR, devices=1, progress=False)
        runs.append([p.detach().cpu() for p in model.parameters()])
    for expected, found in zip(*runs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_the_doctor_trains_on_the_device():
    from sidefx_train import doctor

    good, text = doctor._step("inductor", "cuda" if ACCELERATOR == "gpu" else "cpu")
    assert good, text
    assert ACCELERATOR == "cpu" or "by CUDA graph" in text
