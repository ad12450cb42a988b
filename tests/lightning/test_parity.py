"""A fit with the callback equals the fit without it: weights, logs, metrics, counters, checkpoints, hooks."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torchmetrics
from lightning import pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.nn import functional as F

import sidefx_train
from tests.lightning.harness import Classifier, fit, parity
from tests.support.parity import photograph, same

EVEN = 24
"""Rows for six batches of one size."""


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_plain(tmp_path, backend):
    """One graph: counters, logging and ``batch_idx`` never recapture."""
    parity(Classifier, tmp_path, backend=backend, rows=EVEN, captures=1)


def test_ragged_last_batch(tmp_path):
    parity(Classifier, tmp_path, captures=2)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "RMSprop"])
def test_optimizers(tmp_path, optimizer):
    parity(lambda: Classifier(optimizer=optimizer), tmp_path, rows=EVEN)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradient_clipping(tmp_path, algorithm):
    value = 0.1 if algorithm == "norm" else 0.01
    parity(Classifier, tmp_path, rows=EVEN, captures=1, gradient_clip_val=value, gradient_clip_algorithm=algorithm)


def test_accumulation(tmp_path):
    """Three batches per update, and Lightning's extra update at the end of an epoch of seven."""
    parity(Classifier, tmp_path, rows=28, accumulate_grad_batches=3)


def test_accumulation_with_clipping(tmp_path):
    parity(Classifier, tmp_path, rows=EVEN, accumulate_grad_batches=2, gradient_clip_val=0.1)


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_scheduler(tmp_path, interval):
    class Scheduled(Classifier):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2 if interval == "step" else 1, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval}}

    parity(Scheduled, tmp_path, rows=EVEN, captures=1, callbacks=lambda: [LearningRateMonitor()])


def test_one_cycle(tmp_path):
    class Scheduled(Classifier):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    parity(Scheduled, tmp_path, rows=EVEN, captures=1)


def test_plateau(tmp_path):
    class Scheduled(Classifier):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    parity(Scheduled, tmp_path, rows=EVEN, validate=True, epochs=4)


def test_validation_inside_the_epoch(tmp_path):
    parity(Classifier, tmp_path, rows=EVEN, validate=True, val_check_interval=2, captures=1)


class Measured(Classifier):
    """torchmetrics objects: one logged as an object, one computed by hand."""

    def __init__(self):
        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.mean.update(loss.detach())
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log_dict({"loss": loss, "twice": loss * 2})
        return loss

    def on_train_epoch_end(self):
        self.log("mean", self.mean.compute())
        self.mean.reset()


class Unmeasured(Measured):
    """Iterates over modules that define ``__hash__`` in Python, and that the step does not use."""

    def training_step(self, batch, batch_idx):
        return Classifier.training_step(self, batch, batch_idx)

    def on_train_epoch_end(self):
        pass

    def on_before_optimizer_step(self, optimizer):
        self.log("norm", sum(p.grad.norm() for p in self.parameters()))


def test_parameters_of_a_model_with_metrics(tmp_path):
    parity(Unmeasured, tmp_path, rows=EVEN)


def test_metric_objects(tmp_path):
    parity(Measured, tmp_path, rows=EVEN)


def test_dict_output_reaches_the_hooks(tmp_path):
    class Extra(Classifier):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return {"loss": loss, "double": loss.detach() * 2, "n": [batch[0].shape[0]]}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.events.append((outputs["loss"], outputs["double"], outputs["n"], batch_idx))

    parity(Extra, tmp_path, rows=EVEN)


def test_dropout(tmp_path):
    class Dropping(Classifier):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))

    parity(Dropping, tmp_path, rows=EVEN)


def test_batch_idx_that_is_used(tmp_path):
    class Using(Classifier):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (1 + batch_idx)

    parity(Using, tmp_path, rows=EVEN)


def test_training_step_without_batch_idx(tmp_path):
    class Short(Classifier):
        def training_step(self, batch):
            return super().training_step(batch, 0)

    parity(Short, tmp_path, rows=EVEN, captures=1)


def test_none_skips_the_step(tmp_path):
    class Skipping(Classifier):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 2 else super().training_step(batch, batch_idx)

    parity(Skipping, tmp_path, rows=EVEN)


class Hooked(Classifier):
    """Every hook around backward and update, with side effects and logging."""

    def on_before_zero_grad(self, optimizer):
        self.events.append(("zero_grad", len(optimizer.param_groups)))

    def on_before_backward(self, loss):
        self.events.append(("backward", loss.detach()))

    def on_after_backward(self):
        self.events.append(("after", self.net[0].weight.grad.norm()))

    def on_before_optimizer_step(self, optimizer):
        norm = torch.stack([p.grad.norm() for p in self.parameters()]).norm()
        self.log("norm", norm)
        self.events.append(("step", norm))

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)

    def on_train_batch_start(self, batch, batch_idx):
        self.events.append(("start", batch_idx))


def test_module_hooks(tmp_path):
    parity(Hooked, tmp_path, rows=EVEN)


def test_module_hooks_with_accumulation(tmp_path):
    parity(Hooked, tmp_path, rows=EVEN, accumulate_grad_batches=2)


class Recorder(pl.Callback):
    """Another user's callback, in the middle of the step."""

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        pl_module.events.append("callback zero_grad")

    def on_before_backward(self, trainer, pl_module, loss):
        pl_module.events.append(("callback backward", loss.detach()))

    def on_after_backward(self, trainer, pl_module):
        pl_module.events.append("callback after")

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        pl_module.log("grad", pl_module.net[0].weight.grad.norm())

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.events.append((outputs["loss"], trainer.global_step))


def test_callback_hooks(tmp_path):
    parity(Hooked, tmp_path, rows=EVEN, callbacks=lambda: [Recorder()])


def test_lambda_callback(tmp_path):
    def callbacks():
        return [LambdaCallback(on_after_backward=lambda trainer, module: module.events.append("lambda"))]

    parity(Classifier, tmp_path, rows=EVEN, callbacks=callbacks)


def test_overridden_backward(tmp_path):
    class Scaled(Classifier):
        def backward(self, loss):
            (loss * 2).backward()

    parity(Scaled, tmp_path, rows=EVEN)


def test_overridden_optimizer_step(tmp_path):
    """Learning-rate warm-up as the Lightning documentation writes it."""

    class Warming(Classifier):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            optimizer.step(closure=optimizer_closure)
            for group in optimizer.param_groups:
                group["lr"] = 0.01 / (1 + batch_idx)
            self.events.append((epoch, batch_idx))

    parity(Warming, tmp_path, rows=EVEN, captured=False)


def test_optimizer_step_that_skips_updates(tmp_path):
    class Alternating(Classifier):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            if batch_idx % 2 == 0:
                optimizer.step(closure=optimizer_closure)
            else:
                optimizer_closure()

    parity(Alternating, tmp_path, rows=EVEN, captured=False)


def test_optimizer_of_the_user(tmp_path):
    class Sign(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.01})

        @torch.no_grad()
        def step(self, closure=None):
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.add_(p.grad.sign(), alpha=-group["lr"])
            return loss

    class Own(Classifier):
        def configure_optimizers(self):
            return Sign(self.parameters())

    parity(Own, tmp_path, rows=EVEN, captured=False)


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true", "bf16-true", "16-true"])
def test_precision(tmp_path, precision):
    parity(Classifier, tmp_path, rows=EVEN, precision=precision)


class Overflowing(Classifier):
    """Half precision overflows in some batches: the scaler skips their update."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss * (1 + 1e38 * (x[0, 0] > 0.5))


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_gradient_scaler(tmp_path, optimizer):
    def plugins():
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        return [MixedPrecision("16-mixed", "cpu", scaler=scaler)]

    class Scaled(Overflowing):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.events.append(self.trainer.precision_plugin.scaler.state_dict())

    options = {"rows": EVEN, "gradient_clip_val": 0.5, "captured": False}
    _, ours = parity(lambda: Scaled(optimizer=optimizer), tmp_path, plugins=plugins, **options)
    scales = [event["scale"] for event in ours.module.events]
    assert any(after < before for before, after in zip(scales, scales[1:], strict=False)), scales
    report = ours.report
    assert {record.code for record in report.fallbacks} == {"SFX211"} and not report.breaks, f"{report}"
    assert len(report.captures) == 1 and report.replays >= report.calls - 3, f"{report}"


class Manual(Classifier):
    """Two optimizers, manual optimization."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        one, two = self.optimizers()
        loss = F.cross_entropy(self(x), y)
        one.zero_grad()
        two.zero_grad()
        self.manual_backward(loss)
        one.step()
        two.step()
        self.seen += 1
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        first = torch.optim.SGD(self.net[0].parameters(), lr=0.1)
        return [first, torch.optim.AdamW(self.net[2].parameters(), lr=0.01)]


def test_manual_optimization(tmp_path):
    parity(Manual, tmp_path, rows=EVEN, captured=False)


def test_checkpoints_and_resume(tmp_path):
    """Same checkpoint keys and contents; a resumed fit continues exactly, with either kind of checkpoint."""

    def callbacks(folder):
        return lambda: [ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, monitor="loss")]

    def run(name, callback, **options):
        folder = tmp_path / name
        return folder, fit(
            Classifier,
            folder,
            callback=callback,
            callbacks=callbacks(folder),
            enable_checkpointing=True,
            rows=EVEN,
            validate=True,
            **options,
        )

    def ours():
        return sidefx_train.SideFXCompile(backend="eager", warmup="now", fullgraph=True, on_failure="raise")

    plain, _ = run("plain", None, epochs=2)
    captured, _ = run("captured", ours(), epochs=2)
    a, b = (torch.load(folder / "epoch=0.ckpt", weights_only=False) for folder in (plain, captured))
    assert list(a) == list(b), f"checkpoint keys {list(b)}, Lightning writes {list(a)}"
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "loops", "global_step", "epoch"):
        same(photograph(a[key]), photograph(b[key]), f"checkpoint[{key}]", True)
    assert list(a["callbacks"]) and len(a["callbacks"]) == len(b["callbacks"]), "the callback saved state of its own"

    _, straight = run("straight", None, epochs=3)
    for name, start, callback in (
        ("native from ours", captured, None),
        ("ours from native", plain, ours()),
        ("ours from ours", captured, ours()),
    ):
        _, resumed = run(name, callback, epochs=3, resume=str(start / "epoch=1.ckpt"))
        for name_of_part, part in photographs(straight, resumed).items():
            same(*part, f"{name}: {name_of_part}", True)


def photographs(*fits):
    """Returns the state that must agree at the end of a resumed fit, by name: one snapshot per fit."""
    parts = {
        "weights": lambda f: dict(f.module.state_dict()),
        "optimizer": lambda f: f.trainer.optimizers[0].state_dict(),
        "global_step": lambda f: f.trainer.global_step,
        "epoch": lambda f: f.trainer.current_epoch,
        "metrics": lambda f: dict(f.trainer.callback_metrics),
    }
    return {name: [photograph(part(f)) for f in fits] for name, part in parts.items()}


def test_early_stopping(tmp_path):
    def callbacks():
        return [EarlyStopping("val_loss", patience=1, min_delta=10.0)]

    native, ours = parity(Classifier, tmp_path, rows=EVEN, epochs=6, validate=True, callbacks=callbacks)
    assert ours.trainer.current_epoch < 5, "early stopping did not stop"


def test_max_steps(tmp_path):
    parity(Classifier, tmp_path, rows=EVEN, epochs=5, max_steps=9)


def test_nothing_of_the_users_is_changed(tmp_path):
    """type(model), state_dict, attributes, loop objects: after the fit in the state Lightning leaves them."""
    fitted = fit(Classifier, tmp_path, callback=sidefx_train.SideFXCompile(backend="eager", warmup="now"), rows=EVEN)
    module, loops = fitted.module, fitted.trainer.fit_loop.epoch_loop
    assert type(module) is Classifier, f"the module became a {type(module)}"
    assert list(module.state_dict()) == ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"], "state_dict"
    assert "training_step" not in vars(module) and "forward" not in vars(module.net), "methods were replaced"
    assert type(fitted.trainer.optimizers[0]) is torch.optim.AdamW, "the optimizer was replaced"
    assert "run" not in vars(loops.automatic_optimization), "the loop's method was not put back"
    assert module._current_fx_name is None, "the hook's name was left behind"


def test_the_callback_does_not_keep_the_model(tmp_path):
    """After the fit the report remains and the model can be freed."""
    callback = sidefx_train.SideFXCompile(backend="eager", warmup="now")
    fitted = fit(Classifier, tmp_path, callback=callback, rows=EVEN)
    model = weakref.ref(fitted.module)
    callback.log = callback.log_dict = None  # Lightning gives every callback the model's methods
    del fitted
    while gc.collect():  # cycles through nodes of autograd take several
        pass
    assert model() is None, "something holds the model after the fit"
    assert callback.report.replays == 12, str(callback.report)


def test_exception_puts_everything_back(tmp_path):
    class Failing(Classifier):
        def training_step(self, batch, batch_idx):
            if self.trainer.global_step == 3:
                raise RuntimeError("on purpose")
            return super().training_step(batch, batch_idx)

    callback = sidefx_train.SideFXCompile(backend="eager", warmup="now")
    trainer = pl.Trainer(
        max_epochs=1,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    from tests.lightning.harness import data

    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.fit(Failing(), data())
    assert "run" not in vars(trainer.fit_loop.epoch_loop.automatic_optimization), "the loop's method was not put back"


def test_second_fit(tmp_path):
    """A second fit of the same module, trainer and callback continues like Lightning's own."""

    def twice(callback):
        torch.manual_seed(0)
        module = Classifier()
        from tests.lightning.harness import data

        for _ in range(2):
            trainer = pl.Trainer(
                max_epochs=1,
                callbacks=[callback] if callback else [],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                accelerator="cpu",
            )
            trainer.fit(module, data(EVEN))
        return photograph((dict(module.state_dict()), module.seen))

    same(twice(None), twice(sidefx_train.SideFXCompile(backend="eager", warmup="now")), "two fits", True)


class Waiting(pl.Callback):
    """Waits after every batch for the worker of the compiling callback to finish."""

    def __init__(self, compiler):
        self.compiler = compiler

    def on_train_batch_end(self, *given):
        self.compiler._compiled.wait(60)


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}], ids=["plain", "accumulating"])
def test_by_default_training_starts_at_once(tmp_path, options):
    """The first steps are eager, then the captured step takes over; the fit equals Lightning's bit for bit."""
    compiler = sidefx_train.SideFXCompile(backend="eager", fullgraph=True, on_failure="raise")
    (tmp_path / "native").mkdir()
    (tmp_path / "ours").mkdir()
    native = fit(Classifier, tmp_path / "native", **options)
    ours = fit(Classifier, tmp_path / "ours", callback=compiler, callbacks=lambda: [Waiting(compiler)], **options)
    same(native.state(), ours.state(), "fit", True)
    assert {record.code for record in ours.report.fallbacks} == {"SFX206"}, str(ours.report)
    assert ours.report.replays > 0 and not ours.report.breaks, str(ours.report)
    assert not ours.warnings, ours.warnings
