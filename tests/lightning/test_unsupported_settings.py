"""Settings that the callback does not support train as in Lightning, with one warning and every step counted."""

from __future__ import annotations

import warnings

import pytest
import torch
from lightning import pytorch as pl

import sidefx_train
from sidefx_train.callbacks.deferred_log import deferred_log
from tests.lightning.harness import Classifier, data, fit, parity


class Closures(Classifier):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


CASES = {
    "lbfgs": (Closures, {}, "LBFGS"),
    "anomaly": (Classifier, {"detect_anomaly": True}, "detect_anomaly"),
}


@pytest.mark.parametrize("name", CASES)
def test_left_to_lightning(tmp_path, name):
    make, options, word = CASES[name]
    _, ours = parity(make, tmp_path, captured=False, rows=24, epochs=1, **options)
    assert len(ours.warnings) == 1 and word in ours.warnings[0] and "SFX301" in ours.warnings[0], ours.warnings
    (record,) = ours.report.fallbacks
    assert (record.code, record.count) == ("SFX301", 6), str(ours.report)
    assert word in record.reason and ours.report.calls == 6, str(ours.report)
    assert word in str(ours.report), str(ours.report)


def test_training_step_that_takes_the_iterator(tmp_path):
    class Iterating(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(6, 3)

        def training_step(self, dataloader_iter):
            (x, y), _, _ = next(dataloader_iter)
            return torch.nn.functional.cross_entropy(self.net(x), y)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    _, ours = parity(Iterating, tmp_path, captured=False, rows=24, epochs=1)
    assert "iterator" in ours.warnings[0], ours.warnings


def test_pytorch_lightning_trainer(tmp_path):
    """A Trainer of the other package works the same."""
    other = pytest.importorskip("pytorch_lightning")

    class Other(other.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(6, 3)
            self.seen = 0

        def training_step(self, batch, batch_idx):
            loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.seen += 1
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    parity(Other, tmp_path, rows=24, package=other, captures=1)


def test_wrong_options_fail_at_once():
    with pytest.raises(ValueError, match="backend"):
        sidefx_train.SideFXCompile(backend="nonsense")
    with pytest.raises(TypeError):
        sidefx_train.SideFXCompile(bakend="eager")


def test_report_before_any_fit():
    report = sidefx_train.SideFXCompile().report
    assert (report.calls, report.graph_count) == (0, 0), str(report)


def test_validation_and_test_alone_are_untouched(tmp_path):
    trainer = pl.Trainer(
        callbacks=[sidefx_train.SideFXCompile()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (metrics,) = trainer.validate(Classifier(), data(8), verbose=False)
    assert "val_loss" in metrics, metrics


def test_deferred_log_is_the_log_of_the_hook(tmp_path):
    """Logging after the step, as the replay does it, equals logging inside the hook."""

    class Late(Classifier):
        late = False

        def training_step(self, batch, batch_idx):
            loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
            if not self.late:
                self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
            self.kept = loss
            return loss

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.late:
                how = {"on_step": True, "on_epoch": True, "prog_bar": True}
                deferred_log(pl.LightningModule.log, self, "training_step", ("loss", self.kept), how)

    class Later(Late):
        late = True

    one = fit(Late, tmp_path / "one", rows=24)
    two = fit(Later, tmp_path / "two", rows=24)
    assert one.rows == two.rows, "the logged rows differ"
    assert {k: float(v) for k, v in one.trainer.callback_metrics.items()} == {
        k: float(v) for k, v in two.trainer.callback_metrics.items()
    }, "the metrics differ"
