"""Models of libraries that train with Lightning, on small synthetic data.

``MODELS`` maps ``library.model`` to ``fit(callbacks)``, which trains for a few steps and returns the trained module.
Libraries are imported by the function that needs them.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

Callbacks = list[Any]
Fit = Callable[[Callbacks], nn.Module]

MODELS: dict[str, Fit] = {}

STEPS = 120
"""About as many; a captured step is compared with eager in at most 49 of them, of which some run eagerly."""
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def model(fit: Fit) -> Fit:
    """Registers a function named ``library__model``."""
    MODELS[fit.__name__.replace("__", ".")] = fit
    return fit


class _Items(Dataset[Any]):
    """A list as a dataset."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self._items[index]


def _trained(module: Any, loader: Any, callbacks: Callbacks, package: str = "lightning.pytorch") -> nn.Module:
    import importlib

    trainer = importlib.import_module(package).Trainer(
        max_steps=STEPS, max_epochs=-1, callbacks=callbacks, num_sanity_val_steps=0, **QUIET
    )
    trainer.fit(module, loader)
    return module


def _series(count: int = 8, length: int = 80) -> np.ndarray:
    """Returns seasonal series with noise, ``[count, length]``."""
    random = np.random.default_rng(0)
    time = np.arange(length)
    phases = random.uniform(0, 6, (count, 1))
    return np.sin(time / 4 + phases) + 0.1 * random.standard_normal((count, length)) + 2


def import_torchvision() -> None:
    """Imports torchvision, also where its operators are built for another build of torch; no model here uses them."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision  # noqa: F401


# --- lightly: self-supervised learning ---------------------------------------------------------------------------


def _two_views(rows: int = 8) -> DataLoader[Any]:
    images = torch.randn(16, rows, 3, 16, 16)
    return DataLoader(_Items([((x, x + 0.1 * torch.randn_like(x)), 0) for x in images]), batch_size=None)


def _backbone() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, 2, 1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


@model
def lightly__simclr(callbacks: Callbacks) -> nn.Module:
    import lightning.pytorch as pl
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead

    class SimCLR(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head = _backbone(), SimCLRProjectionHead(16, 16, 8)
            self.criterion = NTXentLoss()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            first, second = batch[0]
            loss = self.criterion(self.head(self.backbone(first)), self.head(self.backbone(second)))
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    return _trained(SimCLR(), _two_views(), callbacks)


@model
def lightly__byol(callbacks: Callbacks) -> nn.Module:
    import copy

    import lightning.pytorch as pl
    from lightly.loss import NegativeCosineSimilarity
    from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead
    from lightly.models.utils import deactivate_requires_grad, update_momentum
    from lightly.utils.scheduler import cosine_schedule

    class BYOL(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.projection = _backbone(), BYOLProjectionHead(16, 16, 8)
            self.prediction = BYOLPredictionHead(8, 16, 8)
            self.momentum_backbone = copy.deepcopy(self.backbone)
            self.momentum_projection = copy.deepcopy(self.projection)
            deactivate_requires_grad(self.momentum_backbone)
            deactivate_requires_grad(self.momentum_projection)
            self.criterion = NegativeCosineSimilarity()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            momentum = cosine_schedule(self.current_epoch, 10, 0.996, 1)
            update_momentum(self.backbone, self.momentum_backbone, m=momentum)
            update_momentum(self.projection, self.momentum_projection, m=momentum)
            first, second = batch[0]
            loss = 0.0
            for one, other in ((first, second), (second, first)):
                predicted = self.prediction(self.projection(self.backbone(one)))
                target = self.momentum_projection(self.momentum_backbone(other)).detach()
                loss = loss + 0.5 * self.criterion(predicted, target)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    return _trained(BYOL(), _two_views(), callbacks)


@model
def lightly__dino(callbacks: Callbacks) -> nn.Module:
    import copy

    import lightning.pytorch as pl
    from lightly.loss import DINOLoss
    from lightly.models.modules import DINOProjectionHead
    from lightly.models.utils import deactivate_requires_grad, update_momentum

    class DINO(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.student_head = _backbone(), DINOProjectionHead(16, 16, 8, 32, freeze_last_layer=1)
            self.teacher, self.teacher_head = copy.deepcopy(self.student), DINOProjectionHead(16, 16, 8, 32)
            deactivate_requires_grad(self.teacher)
            deactivate_requires_grad(self.teacher_head)
            self.criterion = DINOLoss(output_dim=32, warmup_teacher_temp_epochs=2)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            update_momentum(self.student, self.teacher, m=0.99)
            update_momentum(self.student_head, self.teacher_head, m=0.99)
            views = batch[0]
            teacher = [self.teacher_head(self.teacher(view)) for view in views]
            student = [self.student_head(self.student(view)) for view in views]
            loss = self.criterion(teacher, student, epoch=self.current_epoch)
            self.log("loss", loss)
            return loss

        def on_after_backward(self) -> None:
            self.student_head.cancel_last_layer_gradients(current_epoch=self.current_epoch)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.001)

    return _trained(DINO(), _two_views(), callbacks)


# --- MONAI: medical imaging --------------------------------------------------------------------------------------


def _segmenting(net: nn.Module, loss_function: Any, shape: tuple[int, ...], callbacks: Callbacks) -> nn.Module:
    import lightning.pytorch as pl

    class Segmentation(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = loss_function(self.net(batch["image"]), batch["label"])
            self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.001)

    items = [
        {"image": torch.randn(2, 1, *shape), "label": torch.randint(0, 2, (2, 1, *shape)).float(), "name": str(index)}
        for index in range(8)
    ]
    return _trained(Segmentation(), DataLoader(_Items(items), batch_size=None), callbacks)


@model
def monai__unet(callbacks: Callbacks) -> nn.Module:
    from monai.losses import DiceLoss
    from monai.networks.nets import UNet

    net = UNet(2, in_channels=1, out_channels=2, channels=(8, 16, 32), strides=(2, 2), num_res_units=1)
    return _segmenting(net, DiceLoss(to_onehot_y=True, softmax=True), (32, 32), callbacks)


@model
def monai__unet_3d(callbacks: Callbacks) -> nn.Module:
    from monai.losses import DiceCELoss
    from monai.networks.nets import BasicUNet

    net = BasicUNet(3, in_channels=1, out_channels=2, features=(4, 4, 8, 8, 8, 4))
    return _segmenting(net, DiceCELoss(to_onehot_y=True, softmax=True), (32, 32, 32), callbacks)


@model
def monai__unetr(callbacks: Callbacks) -> nn.Module:
    from monai.losses import DiceFocalLoss
    from monai.networks.nets import UNETR

    net = UNETR(1, 2, (32, 32), feature_size=8, hidden_size=24, mlp_dim=48, num_heads=4, spatial_dims=2)
    return _segmenting(net, DiceFocalLoss(to_onehot_y=True, softmax=True), (32, 32), callbacks)


# --- chemprop: molecules -----------------------------------------------------------------------------------------

_MOLECULES = "CCO c1ccccc1 CC(=O)O CCN CCC#N c1ccncc1 CC(C)O COC CCCl OCCO CC=O CCCC Cc1ccccc1 NCC=O C1CCC1 CCS".split()


def _chemprop(callbacks: Callbacks, task: str) -> nn.Module:
    from chemprop import data, models
    from chemprop import nn as layers

    random = np.random.default_rng(0)
    targets = random.standard_normal((len(_MOLECULES), 1)) if task == "regression" else random.integers(0, 2, (16, 1))
    points = [data.MoleculeDatapoint.from_smi(smi, y) for smi, y in zip(_MOLECULES, targets, strict=True)]
    loader = data.build_dataloader(data.MoleculeDataset(points), batch_size=4, num_workers=0, shuffle=False)
    heads = {"regression": layers.RegressionFFN, "classification": layers.BinaryClassificationFFN}
    net = models.MPNN(
        layers.BondMessagePassing(d_h=32), layers.MeanAggregation(), heads[task](input_dim=32), batch_norm=True
    )
    return _trained(net, loader, callbacks)


@model
def chemprop__regression(callbacks: Callbacks) -> nn.Module:
    return _chemprop(callbacks, "regression")


@model
def chemprop__classification(callbacks: Callbacks) -> nn.Module:
    return _chemprop(callbacks, "classification")


# --- pytorch-forecasting -----------------------------------------------------------------------------------------


def _forecasting(callbacks: Callbacks, network: str, **options: Any) -> nn.Module:
    import pandas as pd
    import pytorch_forecasting as forecasting

    series = _series()
    frame = pd.DataFrame(
        {
            "value": series.ravel(),
            "time": np.tile(np.arange(series.shape[1]), len(series)),
            "group": np.repeat([f"g{index}" for index in range(len(series))], series.shape[1]),
        }
    )
    dataset = forecasting.TimeSeriesDataSet(
        frame,
        time_idx="time",
        target="value",
        group_ids=["group"],
        max_encoder_length=12,
        max_prediction_length=4,
        time_varying_unknown_reals=["value"],
        static_categoricals=["group"],
        time_varying_known_reals=["time"],
        add_relative_time_idx=network == "TemporalFusionTransformer",
        add_target_scales=False,
    )
    net = getattr(forecasting, network).from_dataset(dataset, learning_rate=0.01, **options)
    loader = dataset.to_dataloader(train=True, batch_size=16, num_workers=0, shuffle=False)
    return _trained(net, loader, callbacks)


@model
def pytorch_forecasting__tft(callbacks: Callbacks) -> nn.Module:
    return _forecasting(callbacks, "TemporalFusionTransformer", hidden_size=8, attention_head_size=2, dropout=0.1)


@model
def pytorch_forecasting__nhits(callbacks: Callbacks) -> nn.Module:
    return _forecasting(callbacks, "NHiTS", hidden_size=16)


@model
def pytorch_forecasting__deepar(callbacks: Callbacks) -> nn.Module:
    return _forecasting(callbacks, "DeepAR", hidden_size=8, rnn_layers=1)


# --- GluonTS -----------------------------------------------------------------------------------------------------


def _gluonts(callbacks: Callbacks, name: str, **options: Any) -> nn.Module:
    import pandas as pd
    from gluonts import torch as models
    from gluonts.dataset.common import ListDataset

    folder = tempfile.mkdtemp()  # the estimator always keeps its best checkpoint
    kept = {**QUIET, "enable_checkpointing": True, "default_root_dir": folder}

    data = ListDataset([{"start": pd.Period("2020-01-01", "D"), "target": row} for row in _series()], freq="D")
    estimator = getattr(models, name)(
        prediction_length=4,
        num_batches_per_epoch=20,
        batch_size=8,
        trainer_kwargs={**kept, "max_epochs": STEPS // 20, "callbacks": callbacks},
        **options,
    )
    trained = estimator.train_model(data).trained_net
    shutil.rmtree(folder)
    return trained


@model
def gluonts__simple_feed_forward(callbacks: Callbacks) -> nn.Module:
    return _gluonts(callbacks, "SimpleFeedForwardEstimator")


@model
def gluonts__deepar(callbacks: Callbacks) -> nn.Module:
    return _gluonts(callbacks, "DeepAREstimator", freq="D", hidden_size=8)


@model
def gluonts__patch_tst(callbacks: Callbacks) -> nn.Module:
    return _gluonts(callbacks, "PatchTSTEstimator", patch_len=4, context_length=16, d_model=16, nhead=2)


# --- Darts -------------------------------------------------------------------------------------------------------


def _darts(callbacks: Callbacks, name: str, **options: Any) -> nn.Module:
    import darts.models
    from darts import TimeSeries

    series = [TimeSeries.from_values(row.astype(np.float32)) for row in _series(4)]
    network = getattr(darts.models, name)(
        input_chunk_length=12,
        output_chunk_length=4,
        n_epochs=STEPS // 17,
        batch_size=16,
        random_state=0,
        pl_trainer_kwargs={
            "accelerator": "cpu",
            "callbacks": callbacks,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        },
        **options,
    )
    network.fit(series)
    return network.model


@model
def darts__nbeats(callbacks: Callbacks) -> nn.Module:
    return _darts(callbacks, "NBEATSModel", num_stacks=2, num_blocks=1, layer_widths=16)


@model
def darts__block_rnn(callbacks: Callbacks) -> nn.Module:
    return _darts(callbacks, "BlockRNNModel", model="LSTM", hidden_dim=8)


@model
def darts__tcn(callbacks: Callbacks) -> nn.Module:
    return _darts(callbacks, "TCNModel", num_filters=4, dropout=0.1)


# --- scvi-tools: single cells ------------------------------------------------------------------------------------


def _cells() -> Any:
    import anndata

    random = np.random.default_rng(0)
    cells = anndata.AnnData(random.poisson(2.0, (320, 30)).astype(np.float32))
    cells.obs["batch"] = random.choice(["one", "two"], 320)
    cells.obs["label"] = random.choice(["a", "b", "unknown"], 320)
    return cells


_SCVI: dict[str, Any] = {
    "max_epochs": STEPS // 8,
    "batch_size": 32,
    "train_size": 0.8,
    "datasplitter_kwargs": {"drop_last": True},
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "logger": False,
}


@model
def scvi__scvi(callbacks: Callbacks) -> nn.Module:
    import scvi

    scvi.settings.seed = 0
    cells = _cells()
    scvi.model.SCVI.setup_anndata(cells, batch_key="batch")
    net = scvi.model.SCVI(cells, n_hidden=16, n_latent=4)
    net.train(callbacks=callbacks, **_SCVI)
    return net.module


@model
def scvi__scanvi(callbacks: Callbacks) -> nn.Module:
    import scvi

    scvi.settings.seed = 0
    cells = _cells()
    scvi.model.SCANVI.setup_anndata(cells, labels_key="label", unlabeled_category="unknown", batch_key="batch")
    net = scvi.model.SCANVI(cells, n_hidden=16, n_latent=4)
    net.train(callbacks=callbacks, **_SCVI)
    return net.module


# --- neuralforecast ----------------------------------------------------------------------------------------------


def _neural(callbacks: Callbacks, name: str, **options: Any) -> nn.Module:
    import pandas as pd
    from neuralforecast import NeuralForecast, models

    series = _series()
    frame = pd.DataFrame(
        {
            "unique_id": np.repeat([f"g{index}" for index in range(len(series))], series.shape[1]),
            "ds": np.tile(np.arange(series.shape[1]), len(series)),
            "y": series.ravel(),
        }
    )
    net = getattr(models, name)(
        h=4, input_size=12, max_steps=STEPS, callbacks=callbacks, random_seed=0, **QUIET, **options
    )
    forecast = NeuralForecast(models=[net], freq=1)
    forecast.fit(frame)
    trained: nn.Module = forecast.models[0]  # a copy
    return trained


@model
def neuralforecast__nhits(callbacks: Callbacks) -> nn.Module:
    return _neural(callbacks, "NHITS", mlp_units=3 * [[16, 16]])


@model
def neuralforecast__lstm(callbacks: Callbacks) -> nn.Module:
    return _neural(callbacks, "LSTM", encoder_hidden_size=8, decoder_hidden_size=8)


@model
def neuralforecast__tft(callbacks: Callbacks) -> nn.Module:
    return _neural(callbacks, "TFT", hidden_size=8, n_head=2)


# --- pytorch-tabular -----------------------------------------------------------------------------------------------


def _tabular(callbacks: Callbacks, name: str, **options: Any) -> nn.Module:
    import pandas as pd
    from pytorch_tabular import TabularModel
    from pytorch_tabular import models as configs
    from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig

    random = np.random.default_rng(0)
    rows = 16 * STEPS // 4
    frame = pd.DataFrame({f"x{index}": random.standard_normal(rows).astype(np.float32) for index in range(4)})
    frame["kind"] = random.choice(["a", "b", "c"], rows)
    frame["target"] = random.choice(["yes", "no"], rows)
    network = TabularModel(
        data_config=DataConfig(
            target=["target"], continuous_cols=[f"x{index}" for index in range(4)], categorical_cols=["kind"]
        ),
        model_config=getattr(configs, name)(task="classification", **options),
        optimizer_config=OptimizerConfig(),
        trainer_config=TrainerConfig(
            batch_size=16,
            max_epochs=4,
            early_stopping=None,
            checkpoints=None,
            load_best=False,
            accelerator="cpu",
            progress_bar="none",
            auto_lr_find=False,
        ),
        verbose=False,
    )
    network.fit(train=frame, validation=frame[:32], callbacks=callbacks)
    return network.model


@model
def pytorch_tabular__category_embedding(callbacks: Callbacks) -> nn.Module:
    return _tabular(callbacks, "CategoryEmbeddingModelConfig", layers="16-16")


@model
def pytorch_tabular__ft_transformer(callbacks: Callbacks) -> nn.Module:
    return _tabular(
        callbacks, "FTTransformerConfig", input_embed_dim=8, num_heads=2, num_attn_blocks=2, ff_hidden_multiplier=2
    )
