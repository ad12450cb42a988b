"""``fit``: a training loop over Lightning Fabric, with the step captured as one graph.

Fabric places model and data, applies strategy and precision, and writes checkpoints. This module adds epochs, progress,
metrics, validation and exact resume. On one device, and in several processes on the CPU, a step is a plain function
(forward, loss, backward, update, zero_grad) passed to :func:`sidefx_train.compile`. Otherwise Fabric's own wrappers run
it and the report says so (``train_step.py``).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning
import torch
from torch import nn

from sidefx_train.callbacks.registration import intercept_logging
from sidefx_train.callbacks.training_step import Lightning, ignores_argument
from sidefx_train.compile.api import compile_step, loop_prefetch
from sidefx_train.errors import CODES, SideFXWarning
from sidefx_train.fit.inputs import (
    Loss,
    configured_optimizers,
    loaders,
    loss_and_output,
    loss_in,
    metric_collection,
    rows,
    takes_index,
)
from sidefx_train.fit.state import (
    Bar,
    Logged,
    Mean,
    Position,
    begin_at_epoch,
    checkpoint_to_resume,
    of_all_processes,
    own_position,
    progress_bar,
    random_state,
    set_random_state,
)
from sidefx_train.fit.train_step import TrainStep
from sidefx_train.report import StepReport

if TYPE_CHECKING:
    from sidefx_train.compile.gpu.prefetch import LoopPrefetch

LEFT_TO_FABRIC = "SFX301"

_END = object()
"""Stands for the batch after the last one."""


@dataclass
class FitResult:
    """The result of :func:`fit`.

    Attributes:
        history: one dict per step (``step``, ``epoch``, ``loss``, and what the model logged); the last step of an epoch
            also has that epoch's metrics.
        metrics: the last epoch's metrics: ``loss`` (its mean), training metrics by name, validation as ``val_...``.
        report: what was captured, what was not, and why.
    """

    history: list[dict[str, float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    report: StepReport = field(default_factory=StepReport)


def fit(
    model: nn.Module,
    data: Any,
    *,
    epochs: int = 1,
    max_steps: int | None = None,
    optimizer: Any = None,
    loss: Loss | None = None,
    val_data: Any = None,
    metrics: Any = None,
    precision: str = "32-true",
    accelerator: str = "auto",
    devices: Any = 1,
    strategy: Any = "auto",
    compile: bool = True,
    warmup: Literal["now", "background"] = "background",
    seed: int | None = None,
    keep_slower: bool = False,
    progress: bool = True,
    checkpoint_dir: str | Path | None = None,
    resume: str | Path | bool | None = None,
) -> FitResult:
    """Trains a model.

    Args:
        model: an ``nn.Module``, or a LightningModule, whose ``training_step``, ``validation_step`` and
            ``configure_optimizers`` (schedulers included) are used.
        data: DataLoader, Dataset, LightningDataModule, or a tuple of tensors. A Dataset or tensors are split into
            shuffled batches of :data:`~sidefx_train.fit.inputs.BATCH_SIZE`.
        epochs: passes over the data.
        max_steps: number of steps; overrides ``epochs``: the data is repeated as often as needed.
        optimizer: an optimizer, a function of the parameters, or anything ``configure_optimizers`` may return.
            Default: the LightningModule's, or AdamW with learning rate 1e-3.
        loss: ``loss(output, target) -> scalar``, for batches ``(input, target)`` of a plain module. Default: cross
            entropy for integer targets, mean squared error for floating ones. Any other batch is passed to the model as
            it is, and the model returns the loss, alone or as ``.loss`` or ``["loss"]``.
        val_data: like ``data``; validation runs eagerly after every epoch, without gradients, in eval mode.
        metrics: a torchmetrics Metric, MetricCollection, or dict of Metrics, updated with ``(output, target)``.
        precision: as for Fabric: ``"32-true"``, ``"bf16-mixed"``, ``"64-true"``, ...
        accelerator: as for Fabric.
        devices: as for Fabric; with several, steps are captured on the CPU with the strategy "ddp".
        strategy: as for Fabric.
        compile: capture the step; ``False`` runs it eagerly.
        warmup: ``"background"``: training starts at once, and the captured step takes over when it is compiled;
            ``"now"``: the first step waits for that.
        seed: seeds Python, NumPy and torch at the start. Two runs on one machine then end with the same bits, even if
            one was killed and resumed: the first step waits until it is compiled, whatever ``warmup`` says, and no
            kernel is chosen by timing.
        keep_slower: keep a captured step that is slower than eager; see :func:`sidefx_train.compile`.
        progress: show a progress bar.
        checkpoint_dir: where ``epoch-N.ckpt`` (after every epoch) and ``last.ckpt`` are written.
        resume: a checkpoint's path, or True for ``checkpoint_dir/last.ckpt``. Training continues exactly:
            weights, optimizer, schedulers, position in the data and random state.

    Returns:
        The history of losses, the last metrics and the capture report.

    Raises:
        TypeError: for data or an optimizer of a kind not listed here.
        FileNotFoundError: if there is no checkpoint to resume from.
        ValueError: if another number of processes wrote the checkpoint.
    """
    logged = Logged()
    fabric = lightning.Fabric(
        accelerator=accelerator, devices=devices, strategy=strategy, precision=precision, loggers=[logged]
    )
    fabric.launch()
    if seed is not None:
        fabric.seed_everything(seed, verbose=False)
    options = {"warmup": warmup, "deterministic": seed is not None, "keep_slower": keep_slower}
    run = _Run(fabric, logged, model, optimizer, loss, metrics, options if compile else None)
    loader, val_loader = loaders(fabric, data, val_data, move=run.ahead is None)
    checkpoints = Path(checkpoint_dir) if checkpoint_dir is not None else None
    position = Position()
    if resume:
        position = run.load(checkpoint_to_resume(resume, checkpoints))
    try:
        with progress_bar(progress and fabric.is_global_zero) as bar, run.attached():
            _train(run, loader, val_loader, position, epochs, max_steps, checkpoints, bar)
    finally:
        if run.compiled is not None:
            run.compiled.end()
    run.result.report = run.report if run.compiled is None else run.compiled.report()
    return run.result


# ---------------------------------------------------------------------- the loop
def _train(
    run: _Run,
    loader: Any,
    val_loader: Any,
    position: Position,
    epochs: int,
    max_steps: int | None,
    checkpoints: Path | None,
    bar: Bar,
) -> None:
    try:
        length = len(loader)
    except (TypeError, NotImplementedError):  # an iterable dataset
        length = None
    run.hook("on_train_start")
    while (position.step < max_steps) if max_steps is not None else (position.epoch < epochs):
        left = None if max_steps is None else max_steps - position.step
        bar.start(position.epoch, length if left is None or length is None else min(length, position.batch + left))
        before = position.step
        _train_epoch(run, loader, position, left, bar)
        if position.step == before and position.batch == 0:
            raise ValueError("the data holds no batch")
        finished = position.batch == 0
        if finished:
            run.finish_epoch(val_loader)
        if checkpoints is not None:
            position.random = random_state(loader)
            names = [f"epoch-{position.epoch - 1}.ckpt"] if finished else []
            for name in [*names, "last.ckpt"]:
                run.save(checkpoints / name, position)
            position.random = {}
    run.settle()
    run.hook("on_train_end")


def _train_epoch(run: _Run, loader: Any, position: Position, left: int | None, bar: Bar) -> None:
    """Trains from ``position`` to the end of the epoch, or until ``left`` steps are done."""
    resuming = bool(position.random)
    if position.batch and resuming:
        set_random_state(position.epoch_random, loader)
    else:
        if resuming:
            set_random_state(position.random, loader)
        position.epoch_random = random_state(loader)
        run.hook("on_train_epoch_start")
    if resuming:
        begin_at_epoch(loader, position.epoch)
    batches = iter(loader)
    for _ in range(position.batch):
        next(batches)
    if position.batch and resuming:
        set_random_state(position.random, loader)
    position.random = {}
    run.model.train()
    batch = next(batches, _END)
    while batch is not _END:
        if left is not None and left <= 0:
            return
        loss = run.train_on(batch, position)
        position.batch += 1
        position.step += 1
        left = None if left is None else left - 1
        try:
            batch = next(batches, _END)
            if run.ahead is not None and batch is not _END and left != 0:
                run.ahead.prefetch(batch)
        finally:
            bar.advance(loss)  # it may wait for the device
    position.epoch += 1
    position.batch = 0


class _Run:
    """Model, optimizers and step of one :func:`fit`.

    Attributes:
        ahead: moves batches to the device, the next one while a step runs there; ``None`` if the loader moves them.
    """

    def __init__(
        self,
        fabric: lightning.Fabric,
        logged: Logged,
        model: nn.Module,
        optimizer: Any,
        loss: Loss | None,
        metrics: Any,
        options: dict[str, Any] | None,
    ) -> None:
        self.fabric, self.logged, self.loss = fabric, logged, loss
        self.is_lightning = isinstance(model, lightning.LightningModule)
        self.original = model
        self.metrics = metric_collection(metrics).to(fabric.device)
        self.val_metrics = self.metrics.clone(prefix="val_")
        self.result = FitResult()
        self.report = StepReport(name=type(model).__name__, backend="none")
        self._epoch_start = 0

        self.manual = self.is_lightning and not model.automatic_optimization
        configured = optimizer
        if configured is None:
            configured = model.configure_optimizers() if self.is_lightning else torch.optim.AdamW(model.parameters())
        elif callable(configured) and not isinstance(configured, torch.optim.Optimizer):
            configured = configured(model.parameters())
        self.optimizers, self.schedulers = configured_optimizers(configured)
        if not self.manual and (len(self.optimizers) != 1 or isinstance(self.optimizers[0], torch.optim.LBFGS)):
            names = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers) or "none"
            raise TypeError(
                f"optimizers ({names}): one that updates once per step is expected. For several, or closures, use a "
                "LightningModule with automatic_optimization=False"
            )
        wrapped = fabric.setup(model, *self.optimizers)
        self.wrapped, self.wrapped_optimizers = wrapped[0], list(wrapped[1:])

        train_step = self.train_step = TrainStep(
            fabric,
            model,
            self.wrapped,
            self.optimizers,
            self.wrapped_optimizers,
            loss,
            keeps_output=len(self.metrics) > 0,
            compiles=options is not None,
        )
        self.model, reason = train_step.model, train_step.left
        step = train_step.make()
        self.compiled: Any = None
        self.ahead: LoopPrefetch | None = None
        if options is not None and reason is None:
            if self.model is not model:  # all processes change over to the captured step at the same call
                options = {**options, "warmup": "now"}
            if self.is_lightning:
                intercept_logging(Lightning(model))
            step = self.compiled = compile_step(step, **options)
            self.ahead = loop_prefetch(fabric.device, self.compiled.report().prefetches)
        elif reason is not None:
            title, advice = CODES[LEFT_TO_FABRIC]
            warnings.warn(f"[{LEFT_TO_FABRIC}] {title}: {reason}. {advice}", SideFXWarning, stacklevel=3)
        self._step = step
        self._indexed = self.is_lightning and not ignores_argument(model.training_step, 2)

    # ------------------------------------------------------------------ the step
    def train_on(self, batch: Any, position: Position) -> torch.Tensor | None:
        """Runs one step and adds its loss and logs to the history."""
        if self.ahead is not None:
            batch = self.fabric.to_device(self.ahead.moved(batch))
        batch = self._convert(batch)
        if self.train_step.left is not None:
            self.report.calls += 1
            self.report.record_fallback(LEFT_TO_FABRIC, self.train_step.left)
        loss, output = self._step(batch, position.batch if self._indexed else 0)
        if len(self.metrics) and output is not None:
            self.metrics.update(output, batch[1])
        entry: dict[str, Any] = {"step": position.step, "epoch": position.epoch}
        if loss is not None:
            entry["loss"] = loss
        entry.update(self.logged.take())
        self.result.history.append(entry)
        if not self.manual:
            self._step_schedulers("step", position.step + 1)
        return loss

    def _convert(self, batch: Any) -> Any:
        return self.fabric.strategy.precision.convert_input(batch) if self.train_step.plain else batch

    # ------------------------------------------------------------------ epochs
    def finish_epoch(self, val_loader: Any) -> None:
        """Computes metrics, validates and steps the schedulers at the end of an epoch."""
        self.settle()
        epoch = self.result.history[self._epoch_start :]
        values: dict[str, float] = {}
        losses = [entry["loss"] for entry in epoch if "loss" in entry]
        if losses:
            values["loss"] = sum(losses) / len(losses)
        if len(self.metrics):
            values.update({name: float(value) for name, value in self.metrics.compute().items()})
            self.metrics.reset()
        self.hook("on_train_epoch_end")
        if val_loader is not None:
            values.update(self._validate(val_loader))
        if epoch:
            epoch[-1].update({name: value for name, value in values.items() if name != "loss"})
            epoch[-1]["epoch_loss"] = values.get("loss", float("nan"))
        self.result.metrics = values
        self._epoch_start = len(self.result.history)
        if not self.manual:
            self._step_schedulers("epoch", int(epoch[-1]["epoch"]) + 1 if epoch else 1)

    @torch.no_grad()
    def _validate(self, val_loader: Any) -> dict[str, float]:
        """Returns mean loss and metrics over the validation data; restores the model's mode."""
        self.model.eval()
        self.hook("on_validation_epoch_start")
        total, seen, logs = 0.0, 0, Mean()
        for index, batch in enumerate(val_loader):
            batch = self._convert(batch)
            count = rows(batch)
            with self.fabric.autocast():
                if self.is_lightning:
                    indexed = takes_index(self.original.validation_step)
                    step = self.train_step.method("validation_step")
                    output = step(batch, index) if indexed else step(batch)
                    loss = loss_in(output) if isinstance(output, (torch.Tensor, Mapping)) else None
                else:
                    loss, output = loss_and_output(self.model, batch, self.loss)
            logs.add(self.logged.take(), count)
            if loss is not None:
                total, seen = total + float(loss) * count, seen + count
            if len(self.val_metrics) and not self.is_lightning and isinstance(output, torch.Tensor):
                self.val_metrics.update(output, batch[1])
        self.hook("on_validation_epoch_end")
        logs.add(self.logged.take(), 1)
        values = {"val_loss": total / seen} if seen else {}
        values.update(logs.values())
        if len(self.val_metrics) and not self.is_lightning:
            values.update({name: float(value) for name, value in self.val_metrics.compute().items()})
            self.val_metrics.reset()
        self.model.train()
        return values

    def _step_schedulers(self, interval: str, count: int) -> None:
        for config in self.schedulers:
            if config["interval"] != interval or count % config["frequency"]:
                continue
            scheduler = config["scheduler"]
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step(self.result.metrics[config["monitor"]])
            else:
                scheduler.step()

    def settle(self) -> None:
        """Converts the losses of the history to floats; nothing synchronizes with the device before."""
        for entry in self.result.history[self._epoch_start :]:
            for name, value in entry.items():
                if isinstance(value, torch.Tensor):
                    entry[name] = float(value)

    def hook(self, name: str) -> None:
        """Calls a hook of a LightningModule; other modules have none."""
        if self.is_lightning:
            getattr(self.original, name)()

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Attaches the LightningModule during the fit; a Trainer can use it again afterwards."""
        try:
            yield
        finally:
            if self.is_lightning:
                self.original._fabric = None
                self.original._fabric_optimizers = []

    # ------------------------------------------------------------------ checkpoints
    def save(self, path: Path, position: Position) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        positions = of_all_processes(vars(position).copy())
        state = {"model": self.wrapped, **self._optimizer_entries(), "positions": positions}
        state["schedulers"] = [config["scheduler"].state_dict() for config in self.schedulers]
        self.fabric.save(path, state)

    def load(self, path: Path) -> Position:
        rest = self.fabric.load(path, {"model": self.wrapped, **self._optimizer_entries()}, weights_only=True)
        for config, state in zip(self.schedulers, rest["schedulers"], strict=True):
            config["scheduler"].load_state_dict(state)
        return own_position(rest["positions"], self.fabric, path)

    def _optimizer_entries(self) -> dict[str, Any]:
        return {f"optimizer_{index}": wrapped for index, wrapped in enumerate(self.wrapped_optimizers)}
