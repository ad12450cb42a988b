"""State that Lightning reads at each call may change between two batches, or in the step: a captured fit follows."""

from __future__ import annotations

import functools
import traceback
import warnings
from unittest.mock import Mock

import pytest
import torch
from lightning import pytorch as pl
from lightning.pytorch.loops.optimization.automatic import Closure
from torch.nn import functional as F

import sidefx_train
from tests.lightning.harness import Classifier, data, parity, quiet_trainer
from tests.support.parity import photograph, same

ROWS = 24
"""Rows for six batches of one size."""


class Late(pl.Callback):
    def on_before_optimizer_step(self, trainer, module, optimizer):
        module.events.append("late")


class ClipsFromBatch3(Classifier):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 3:
            self.trainer.gradient_clip_val = 1e-3


class ClipsFromTheStart(Classifier):
    def on_train_start(self):
        self.trainer.gradient_clip_val = 1e-3


class ClipsByValueFromBatch3(Classifier):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 3:
            self.trainer.gradient_clip_algorithm = "value"


class ClipsOnceDecidedInTheStep(Classifier):
    def on_before_backward(self, loss):
        if self.seen > 12:
            self.trainer.gradient_clip_val = 1e-3


class AddsACallback(Classifier):
    def on_train_start(self):
        self.trainer.callbacks.append(Late())


class AddsAndRemovesACallback(Classifier):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2:
            self.trainer.callbacks.append(Late())
        if batch_idx == 4:
            self.trainer.callbacks.pop()


class AddsACallbackInTheStep(Classifier):
    def on_before_backward(self, loss):
        if self.seen == 12:
            self.trainer.callbacks.append(Late())


class SetsAHook(Classifier):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2:
            self.on_after_backward = lambda: self.events.append("set")


class Phases(Classifier):
    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.training_step = self.second_phase

    def second_phase(self, batch, batch_idx):
        self.events.append(("second", batch_idx))
        return 0.5 * F.cross_entropy(self(batch[0]), batch[1])


class PhasesInTheStep(Classifier):
    """The new step receives its own batch index, which the replaced one never read."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if self.seen == 12:
            self.training_step = self.second_phase
        optimizer.step(closure=optimizer_closure)

    second_phase = Phases.second_phase


class ManualPhases(Phases):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self._train(F.cross_entropy(self(batch[0]), batch[1]))

    def second_phase(self, batch, batch_idx):
        self.events.append("second")
        self._train(0.5 * F.cross_entropy(self(batch[0]), batch[1]))

    def _train(self, loss):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class BecomesManual(Classifier):
    def on_train_epoch_start(self):
        self.automatic_optimization = self.current_epoch == 0

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        if self.automatic_optimization:
            return loss
        self.events.append("manual")
        return ManualPhases._train(self, loss)


class NewOptimizer(Classifier):
    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.trainer.strategy.optimizers = [torch.optim.Adam(self.parameters(), lr=0.01)]


class OwnClipping(Classifier):
    def clip_gradients(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.events.append(gradient_clip_val)
        for parameter in self.parameters():
            parameter.grad.clamp_(-1e-3, 1e-3)


class SeesItsClosure(Classifier):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        self.events.append((isinstance(optimizer_closure, Closure), type(optimizer).__name__, epoch, batch_idx))
        loss = optimizer.step(closure=optimizer_closure)
        self.events.append((type(loss).__name__, loss.requires_grad))


class SharpnessAware(Classifier):
    """Calls the closure twice."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        first = optimizer_closure()
        with torch.no_grad():
            saved = [p.clone() for p in self.parameters()]
            for p in self.parameters():
                p.add_(p.grad, alpha=0.05)
        second = optimizer_closure()
        with torch.no_grad():
            for p, s in zip(self.parameters(), saved, strict=True):
                p.copy_(s)
        optimizer.step()
        self.last = (first, second)


class LogsInItsOptimizerStep(Classifier):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        self.log("rows", 5.0, reduce_fx="max")

    def on_train_epoch_end(self):
        self.events.append(sorted(map(str, self.trainer.fit_loop.epoch_loop._results)))


class LogsADict(Classifier):
    def __init__(self):
        super().__init__()
        self.stats = {"a": 1.5, "b": 2.5}

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log_dict(self.stats)
        self.log_dict(SHARED, on_epoch=True)
        self.log_dict({key + "_": value for key, value in self.stats.items()})
        self.stats["loss"] = loss.detach()
        return loss


SHARED = {"c": 3.0}


class OverridesLog(Classifier):
    """Its own ``log`` runs in the step."""

    def log(self, name, value, **options):
        self.seen += 1
        super().log(f"train/{name}", value, **options)


STEPS = {
    name: (make, options)
    for name, make, options in [
        ("clip value", ClipsFromBatch3, {"gradient_clip_val": 10.0}),
        ("clipping begins", ClipsFromBatch3, {}),
        ("clipping begins in on_train_start", ClipsFromTheStart, {}),
        ("clip algorithm", ClipsByValueFromBatch3, {"gradient_clip_val": 0.01}),
        ("clipping begins in the step", ClipsOnceDecidedInTheStep, {}),
        ("callback", AddsACallback, {}),
        ("callback comes and goes", AddsAndRemovesACallback, {}),
        ("callback in the step", AddsACallbackInTheStep, {}),
        ("hook", SetsAHook, {}),
        ("training_step", Phases, {}),
        ("training_step in the step", PhasesInTheStep, {}),
        ("manual training_step", ManualPhases, {}),
        ("automatic, then manual", BecomesManual, {}),
        ("optimizer", NewOptimizer, {}),
        ("clip_gradients", OwnClipping, {}),
        ("clip_gradients with a value", OwnClipping, {"gradient_clip_val": 0.5}),
        ("clip value 0", Classifier, {"gradient_clip_val": 0.0, "gradient_clip_algorithm": "value"}),
        ("closure", SeesItsClosure, {}),
        ("closure called twice", SharpnessAware, {}),
        ("log in optimizer_step", LogsInItsOptimizerStep, {}),
        ("log_dict", LogsADict, {}),
        ("own log", OverridesLog, {}),
    ]
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.every(4)
def test_followed(tmp_path, name):
    make, options = STEPS[name]
    parity(make, tmp_path, rows=ROWS, **options)


def test_clip_value_changed_by_a_callback(tmp_path):
    class Schedule(pl.Callback):
        def on_train_epoch_start(self, trainer, module):
            trainer.gradient_clip_val = (1.0, 0.01)[trainer.current_epoch]

    parity(Classifier, tmp_path, rows=ROWS, gradient_clip_val=1.0, callbacks=lambda: [Schedule()])


WRAPPED = (
    "backward",
    "optimizer_step",
    "on_before_backward",
    "on_after_backward",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "on_before_optimizer_step",
    "training_step",
    "clip_gradients",
)


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.every(4)
def test_hook_wrapped_on_the_instance(tmp_path, name):
    def make():
        module = Classifier()
        hook = getattr(module, name)

        @functools.wraps(hook)
        def timed(*args, **kwargs):
            module.events.append(name)
            return hook(*args, **kwargs)

        object.__setattr__(module, name, timed)
        return module

    native, _ = parity(make, tmp_path, rows=ROWS)
    assert len(native.module.events) == 12


class Called:
    """A callable hook that is not a function."""

    def __init__(self, module):
        self.module = module

    def __call__(self, *args, **kwargs):
        self.module.events.append(len(args))


def test_hook_that_is_an_object(tmp_path):
    def make():
        module = Classifier()
        object.__setattr__(module, "on_before_zero_grad", Called(module))
        return module

    class Owner(pl.Callback):
        def __init__(self):
            self.events = []
            self.on_before_optimizer_step = Called(self)

        def on_train_epoch_end(self, trainer, module):
            module.events += self.events

    native, _ = parity(make, tmp_path, rows=ROWS, callbacks=lambda: [Owner()])
    assert len(native.module.events) == 12 + 6 + 12


def test_hook_that_is_a_mock(tmp_path):
    def make():
        module = Classifier()
        hook = Mock(side_effect=lambda *args: module.events.append("mock"))
        object.__setattr__(module, "on_after_backward", hook)
        return module

    native, _ = parity(make, tmp_path, captured=False, rows=ROWS)
    assert native.module.events == ["mock"] * 12


class ReadsInTheStep(Classifier):
    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("v", float(batch_idx))
        self.events.append({key: float(value) for key, value in self.trainer.callback_metrics.items()})
        return loss


class DecidesOnMetrics(pl.Callback):
    """The learning rate of the update depends on values that the step has logged."""

    def on_before_optimizer_step(self, trainer, module, optimizer):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 if trainer.callback_metrics["loss_step"] > 1.1 else 0.01


class ReadsTables(pl.Callback):
    def on_after_backward(self, trainer, module):
        module.events.append(sorted(trainer.logged_metrics) + sorted(trainer.progress_bar_metrics))
        module.events.append(len(trainer._results))


@pytest.mark.parametrize(
    ("make", "callbacks"), [(ReadsInTheStep, list), (Classifier, DecidesOnMetrics), (Classifier, ReadsTables)]
)
def test_metrics_read_behind_log(tmp_path, make, callbacks):
    """They have the values of the same step: the part after the read is captured separately, by name."""
    read = list if callbacks is list else lambda: [callbacks()]
    _, ours = parity(make, tmp_path, captured=False, rows=ROWS, callbacks=read)
    assert ours.report.breaks[0].code == "SFX106", str(ours.report)
    assert "after self.log" in ours.report.breaks[0].reason


class LooksAtCounters(Classifier):
    def on_before_zero_grad(self, optimizer):
        counted = self.trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer
        total = counted.zero_grad.total
        self.events.append((total.ready, total.started, total.completed, counted.step.total.ready))


def test_progress_seen_by_a_hook(tmp_path):
    native, _ = parity(LooksAtCounters, tmp_path, captured=False, rows=ROWS)
    assert native.module.events[1] == (2, 1, 1, 2)


class GlobalStep(Classifier):
    def on_before_optimizer_step(self, optimizer):
        self.events.append(self.trainer.global_step)


def test_global_step_seen_by_a_hook(tmp_path):
    parity(GlobalStep, tmp_path, rows=ROWS)


class GivesUp(Classifier):
    def on_after_backward(self):
        if self.trainer.global_step == 3:
            raise ArithmeticError("given up")


class LogsAMatrix(Classifier):
    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("matrix", self(batch[0]))  # the faulty line
        return loss


class LogsTwice(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=False, on_epoch=True)  # the faulty line
        return loss


class LogsWhereNobodyMay(Classifier):
    def on_before_optimizer_step(self, optimizer):
        self.trainer.lightning_module._current_fx_name = "on_fit_start"
        self.log("v", 1.0)  # the faulty line


ERRORS = {
    "hook": (GivesUp, ArithmeticError, ""),
    "matrix": (LogsAMatrix, ValueError, "the faulty line"),
    "twice": (LogsTwice, Exception, "the faulty line"),
    "hook that may not": (LogsWhereNobodyMay, Exception, "the faulty line"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_error(tmp_path, name):
    """It is raised where eager raises it, before the update, by the user's line; the counters equal eager's."""
    make, kind, line = ERRORS[name]
    outcomes = []
    for where in ("native", "ours"):
        (tmp_path / where).mkdir()
        made = []
        callback = [] if where == "native" else [sidefx_train.SideFXCompile(backend="eager", warmup="now")]
        trainer = quiet_trainer(tmp_path / where, callbacks=callback)
        torch.manual_seed(0)
        made.append(make())
        with warnings.catch_warnings(), pytest.raises(kind) as caught:
            warnings.simplefilter("ignore")
            trainer.fit(made[0], data(ROWS))
        told = [entry.line for entry in traceback.extract_tb(caught.tb)]
        assert not line or any(line in entry for entry in told), f"{where}: {told}"
        state = {"progress": trainer.fit_loop.state_dict(), "weights": dict(made[0].state_dict()), "seen": made[0].seen}
        outcomes.append((photograph(state), type(caught.value), str(caught.value)))
    same(outcomes[0][0], outcomes[1][0], "fit", True)
    assert outcomes[0][1:] == outcomes[1][1:]


class CatchesAWrongLog(Classifier):
    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        try:
            self.log("v", {"a": {"b": 1}})
        except ValueError as error:
            self.events.append(str(error))
        return loss


def test_wrong_log_that_the_step_catches(tmp_path):
    _, ours = parity(CatchesAWrongLog, tmp_path, captured=False, rows=ROWS)
    assert ours.report.breaks[0].code == "SFX106", str(ours.report)
