"""A graph break in a hook splits the step there: what lies around it is captured, and Lightning's own calls go on."""

from __future__ import annotations

import os

import pytest
import torch
from lightning import pytorch as pl

import sidefx_train
from tests.lightning.harness import Classifier, fit, parity
from tests.support.parity import same


class InTrainingStep(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        os.path.isfile("here")
        self.log("twice", loss * 2)
        self.events.append(self._current_fx_name)
        return loss


class OnAValue(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if loss.item() > 1.1:
            self.events.append(float(loss))
        return loss


class WithoutUpdate(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if loss.item() > 1.15 else loss


class BeforeUpdate(Classifier):
    def on_before_optimizer_step(self, optimizer):
        os.path.isfile("here")
        self.events.append(float(self.net[0].weight.grad.sum()))


class InOptimizerStep(Classifier):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        os.path.isfile("here")
        self.events.append(batch_idx)


class InCallback(pl.Callback):
    def on_before_zero_grad(self, trainer, module, optimizer):
        os.path.isfile("here")
        module.events.append(module._current_fx_name)


CASES = {
    "training_step": (InTrainingStep, {}),
    "value": (OnAValue, {}),
    "without_update": (WithoutUpdate, {}),
    "before_update": (BeforeUpdate, {}),
    "optimizer_step": (InOptimizerStep, {}),
    "callback": (Classifier, {"callbacks": lambda: [InCallback()]}),
    "profiler": (InTrainingStep, {"profiler": "simple"}),
    "scaler": (InTrainingStep, {"precision": "16-mixed"}),
    "accumulation": (InTrainingStep, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
}


SLOW = {"optimizer_step", "profiler", "accumulation"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in CASES])
@pytest.mark.every(2)
def test_captured_around_the_break(tmp_path, name):
    make, options = CASES[name]
    _, ours = parity(make, tmp_path, captured=False, rows=24, epochs=1, **options)
    assert len(ours.report.breaks) == 1 and ours.report.fallback_count == 0
    assert ours.report.graph_count >= 2, ours.report


class Raises(InTrainingStep):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 3:
            raise KeyError("the batch")
        return loss


def test_error_behind_a_break(tmp_path):
    """The error is the user's, and leaves what eager leaves."""
    left = []
    for callback in (None, sidefx_train.SideFXCompile(backend="eager", warmup="now", keep_slower=True)):
        modules = []

        def make(modules=modules):
            modules.append(Raises())
            return modules[0]

        with pytest.raises(KeyError, match="the batch") as caught:
            fit(make, tmp_path, callback=callback, rows=24)
        assert caught.traceback[-1].name == "training_step"
        module = modules[0]
        left.append([dict(module.state_dict()), module.events, module.seen, module._current_fx_name])
        left[-1].append([p.grad for p in module.parameters()])
        same(left[0], left[-1], "what the error left", True)


class LogsByItself(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.logger.log_metrics({"direct": loss, "index": float(batch_idx)}, step=self.global_step)
        return loss

    def on_before_optimizer_step(self, optimizer):
        norms = [torch.linalg.vector_norm(p.grad) for p in self.parameters()]
        self.logger.log_metrics({"norm": torch.stack(norms).sum()}, step=self.global_step)


def test_metrics_given_to_the_logger(tmp_path):
    """``logger.log_metrics`` is called after the graph, with the values that eager gives it."""
    native, ours = parity(LogsByItself, tmp_path, rows=24, captures=2)
    assert [row["norm"] for row in native.rows] == [row["norm"] for row in ours.rows]
