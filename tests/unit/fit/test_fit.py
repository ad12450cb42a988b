"""``fit``: the same training with and without capture, exact resume, metrics, validation, every kind of data."""

from __future__ import annotations

import lightning
import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from sidefx_train.fit.loop import fit
from tests.support.parity import photograph, same


def tensors(rows: int = 96, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def net(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3))


class Lit(lightning.LightningModule):
    """A LightningModule with a scheduler, logging and a validation step."""

    def __init__(self, interval: str = "step"):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.interval, self.seen, self.hooks = net(), interval, 0, []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.seen += x.shape[0]
        self.log("twice", loss * 2)
        return {"loss": loss, "rows": x.shape[0]}

    def validation_step(self, batch):
        self.log("val_error", (self.net(batch[0]).argmax(-1) != batch[1]).float().mean())

    def on_train_epoch_end(self):
        self.hooks.append("epoch end")

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


def losses(result) -> list[float]:
    return [entry["loss"] for entry in result.history]


def compare(make, data, **options):
    """Fits eagerly and captured; parameters and losses must agree to 1e-5. Returns both results."""
    eager_model, model = make(), make()
    eager = fit(eager_model, data, compile=False, seed=3, progress=False, **options)
    ours = fit(model, data, compile=True, warmup="now", seed=3, progress=False, **options)
    same(photograph(dict(eager_model.state_dict())), photograph(dict(model.state_dict())), "parameters", False)
    same(losses(eager), losses(ours), "losses", False)
    assert ours.report.calls == len(ours.history) and ours.report.fallback_count == 0, str(ours.report)
    return eager, ours


def test_by_default_training_starts_at_once():
    """The first steps run eagerly; whether the captured step takes over in so short a fit depends on the machine."""
    eager_model, model = net(), net()
    torch.manual_seed(3)
    eager = fit(eager_model, tensors(), epochs=4, compile=False, progress=False)
    torch.manual_seed(3)
    ours = fit(model, tensors(), epochs=4, progress=False)
    same(photograph(dict(eager_model.state_dict())), photograph(dict(model.state_dict())), "parameters", False)
    same(losses(eager), losses(ours), "losses", False)
    assert "SFX206" in {record.code for record in ours.report.fallbacks} <= {"SFX206", "SFX210"}, str(ours.report)
    assert ours.report.replays + ours.report.fallback_count == ours.report.calls == len(ours.history), str(ours.report)


def test_module_and_tensors():
    eager, ours = compare(net, tensors(), epochs=2)
    assert len(ours.history) == 6, f"{len(ours.history)} steps"
    assert [entry["epoch"] for entry in ours.history] == [0, 0, 0, 1, 1, 1], "epochs"
    assert losses(ours)[-1] < losses(ours)[0], "the loss does not fall"
    assert len(ours.report.captures) == 1, str(ours.report)


def test_fit_is_what_a_plain_loop_does():
    """A loop written by hand results in the same parameters."""
    x, y = tensors()
    loader = DataLoader(TensorDataset(x, y), batch_size=16)
    model = net()
    fit(model, loader, epochs=2, compile=False, progress=False, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    other = net()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(2):
        for a, b in loader:
            F.cross_entropy(other(a), b).backward()
            optimizer.step()
            optimizer.zero_grad()
    same(photograph(dict(other.state_dict())), photograph(dict(model.state_dict())), "parameters", True)


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_lightning_module(interval):
    eager, ours = compare(lambda: Lit(interval), tensors(), epochs=2, val_data=tensors(40, seed=9))
    assert ours.metrics["val_error"] == pytest.approx(eager.metrics["val_error"]), "validation"
    assert all(entry["twice"] == pytest.approx(2 * entry["loss"], rel=1e-5) for entry in ours.history), "self.log"


def test_lightning_module_can_be_trained_by_a_trainer_afterwards():
    model = Lit()
    fit(model, tensors(), compile=False, progress=False)
    assert model._fabric is None and model.hooks == ["epoch end"] and model.seen == 96, "the module was left attached"
    model.interval = "epoch"
    trainer = lightning.Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
    )
    trainer.fit(model, DataLoader(TensorDataset(*tensors()), batch_size=32))
    assert trainer.global_step == 3, f"{trainer.global_step} steps"


def test_metrics_and_validation():
    metrics = {"accuracy": torchmetrics.classification.MulticlassAccuracy(3, average="micro")}
    model = net()
    x, y = tensors(40, seed=9)
    result = fit(model, tensors(), metrics=metrics, val_data=(x, y), compile=False, progress=False, epochs=2)
    assert set(result.metrics) == {"loss", "accuracy", "val_loss", "val_accuracy"}, result.metrics
    model.eval()
    with torch.no_grad():
        want = (model(x).argmax(-1) == y).float().mean().item()
        loss = F.cross_entropy(model(x), y).item()
    assert result.metrics["val_accuracy"] == pytest.approx(want), result.metrics
    assert result.metrics["val_loss"] == pytest.approx(loss, rel=1e-5), result.metrics
    assert result.metrics["loss"] == pytest.approx(sum(losses(result)[3:]) / 3), result.metrics
    model.train()


def test_validation_puts_the_mode_back():
    model = net(dropout=0.5)
    fit(model, tensors(), val_data=tensors(40), compile=False, progress=False)
    assert model.training and model[2].training, "the model was left in eval mode"


@pytest.mark.parametrize("steps", [3, 4])
def test_resume_is_exact(tmp_path, steps):
    """Stopped after an epoch or within one, with dropout and shuffling: the same losses as without a stop."""
    options = {"progress": False, "compile": False}
    straight_model, model, resumed_model = (net(dropout=0.3) for _ in range(3))
    straight = fit(straight_model, tensors(), max_steps=8, seed=5, **options)
    first = fit(model, tensors(), max_steps=steps, seed=5, checkpoint_dir=tmp_path, **options)
    rest = fit(resumed_model, tensors(), max_steps=8, checkpoint_dir=tmp_path, resume=True, **options)
    same(losses(straight), losses(first) + losses(rest), "losses", True)
    want, have = (photograph(dict(m.state_dict())) for m in (straight_model, resumed_model))
    same(want, have, "parameters", True)


def test_resume_of_a_captured_fit(tmp_path):
    options = {"progress": False, "warmup": "now"}
    straight = fit(net(), tensors(), max_steps=6, seed=5, **options)
    first = fit(net(), tensors(), max_steps=4, seed=5, checkpoint_dir=tmp_path, **options)
    rest = fit(net(), tensors(), max_steps=6, resume=tmp_path / "last.ckpt", **options)
    same(losses(straight), losses(first) + losses(rest), "losses", False)
    assert rest.report.fallback_count == 0, str(rest.report)


def test_resume_of_schedulers(tmp_path):
    a, b, c = Lit(), Lit(), Lit()
    straight = fit(a, tensors(), epochs=3, compile=False, progress=False, seed=5)
    first = fit(b, tensors(), epochs=1, compile=False, progress=False, seed=5, checkpoint_dir=tmp_path)
    rest = fit(c, tensors(), epochs=3, compile=False, progress=False, resume=tmp_path / "epoch-0.ckpt")
    same(losses(straight), losses(first) + losses(rest), "losses", True)


def test_max_steps_repeats_the_data():
    result = fit(net(), tensors(), max_steps=7, compile=False, progress=False)
    assert [entry["step"] for entry in result.history] == list(range(7)), "steps"
    assert result.history[-1]["epoch"] == 2, result.history[-1]


def test_data_module():
    class Data(lightning.LightningDataModule):
        def setup(self, stage):
            self.made = TensorDataset(*tensors())

        def train_dataloader(self):
            return DataLoader(self.made, batch_size=24)

        def val_dataloader(self):
            return DataLoader(self.made, batch_size=24)

    result = fit(net(), Data(), compile=False, progress=False)
    assert len(result.history) == 4 and "val_loss" in result.metrics, result.metrics


def test_regression_and_own_loss():
    x, _ = tensors()
    model = nn.Linear(6, 1)
    options = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "compile": False, "progress": False}
    result = fit(model, (x, x.sum(1, keepdim=True)), epochs=4, **options)
    assert losses(result)[-1] < losses(result)[0], "mean squared error is the default for floating targets"
    own = fit(nn.Linear(6, 3), tensors(), loss=lambda out, y: F.cross_entropy(out, y) * 0 + 2, **options)
    assert losses(own) == [2.0, 2.0, 2.0], losses(own)


def test_model_that_returns_its_loss():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 1)

        def forward(self, x):
            return {"loss": self.layer(x).pow(2).mean()}

    x, _ = tensors()
    result = fit(Own(), x, compile=False, progress=False)
    assert len(result.history) == 3, "steps"


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_precision(precision):
    model = net()
    result = fit(model, tensors(), precision=precision, compile=False, progress=False)
    want = torch.float64 if precision == "64-true" else torch.float32
    assert model[0].weight.dtype is want and losses(result)[-1] < 2, f"{model[0].weight.dtype}"


def test_bf16_mixed_captured():
    compare(net, tensors(), precision="bf16-mixed")


def half_precision_with_scaler(monkeypatch):
    """Fabric takes bfloat16 on the CPU instead."""
    connector, made = lightning.fabric.connector, lightning.fabric.connector.MixedPrecision

    def plugin(precision, device):
        return made("16-mixed", device, torch.amp.GradScaler(device, init_scale=2.0**18, growth_interval=2))

    monkeypatch.setattr(connector, "MixedPrecision", plugin)


@pytest.mark.slow
def test_gradient_scaler(monkeypatch):
    """The first steps overflow; the scale is halved until they do not."""
    half_precision_with_scaler(monkeypatch)
    eager_model, model = net(), net()
    options = {"precision": "bf16-mixed", "seed": 3, "progress": False}
    eager = fit(eager_model, tensors(), compile=False, epochs=3, **options)
    ours = fit(model, tensors(), warmup="now", epochs=3, **options)
    same(photograph(dict(eager_model.state_dict())), photograph(dict(model.state_dict())), "parameters", False)
    same(losses(eager), losses(ours), "losses", False)
    report = ours.report
    assert {record.code for record in report.fallbacks} == {"SFX211"} and report.replays, f"{report}"
    assert not torch.equal(model[0].weight, net()[0].weight), "nothing was trained"


def test_manual_optimization():
    class Manual(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.net = net()

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    result = fit(Manual(), tensors(), epochs=3, compile=False, progress=False)
    assert losses(result)[-1] < losses(result)[0], losses(result)


def test_mistakes_are_named(tmp_path):
    with pytest.raises(TypeError, match="DataLoader"):
        fit(net(), 3, progress=False)
    with pytest.raises(TypeError, match="not a torch optimizer"):
        fit(net(), tensors(), optimizer=lambda p: 3, progress=False)
    with pytest.raises(TypeError, match="automatic_optimization=False"):
        fit(net(), tensors(), optimizer=torch.optim.LBFGS, progress=False)
    with pytest.raises(FileNotFoundError, match="resume"):
        fit(net(), tensors(), resume=tmp_path / "none.ckpt", progress=False, compile=False)
    with pytest.raises(ValueError, match="checkpoint_dir"):
        fit(net(), tensors(), resume=True, progress=False, compile=False)


def test_progress_bar_shows_loss_and_speed(capsys):
    fit(net(), tensors(), compile=False, progress=True)
    shown = capsys.readouterr().out
    assert "epoch 0" in shown and "3/3" in shown, shown


def test_the_public_name_is_a_function_and_a_package():
    """Importing one of its modules sets ``sidefx_train.fit`` to the package, which can be called as the function."""
    import sidefx_train
    import sidefx_train.fit.inputs

    result = sidefx_train.fit(net(), tensors(), max_steps=1, compile=False, progress=False)
    assert len(result.history) == 1
    with pytest.raises(TypeError):
        sidefx_train.fit(net(), tensors(), no_such_option=1)
