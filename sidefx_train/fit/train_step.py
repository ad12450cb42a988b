"""The step of a fit: forward, loss, backward, update and ``zero_grad`` of one batch, as one function.

Where Fabric only places the model, the step calls the model itself, so that it can be captured; otherwise it calls
Fabric's wrappers, and says why.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import lightning
import torch
from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sidefx_train.callbacks.training_step import plain_scaler
from sidefx_train.fit.inputs import Loss, loss_and_output, loss_in, takes_index, through_wrapper


class TrainStep:
    """How one batch is trained on.

    Args:
        fabric: has set up the model.
        original: the model as the program made it.
        wrapped: the model as Fabric wraps it.
        optimizers: the optimizers.
        wrapped_optimizers: the same as Fabric wraps them.
        loss: the loss of a plain module.
        keeps_output: the output of the model is needed as well.
        compiles: the step is to be captured.

    Attributes:
        is_lightning: the model is a LightningModule.
        manual: it updates its weights itself.
        model: what the step calls.
        plain: that is not one of Fabric's wrappers.
        left: why the step cannot be captured, ``None`` if it can, or is not to be.
    """

    def __init__(
        self,
        fabric: lightning.Fabric,
        original: nn.Module,
        wrapped: Any,
        optimizers: list[Any],
        wrapped_optimizers: list[Any],
        loss: Loss | None,
        *,
        keeps_output: bool,
        compiles: bool,
    ) -> None:
        self.fabric, self.original, self.wrapped, self.loss = fabric, original, wrapped, loss
        self.optimizers, self.wrapped_optimizers = optimizers, wrapped_optimizers
        self.keeps_output = keeps_output
        self.is_lightning = isinstance(original, lightning.LightningModule)
        self.manual = self.is_lightning and not original.automatic_optimization
        self.left = self._reason_not_to_compile() if compiles else None
        plain = self._plain_module() if self.left is None else None
        self.plain = plain is not None
        self.model = wrapped if plain is None else plain

    def make(self) -> Callable[..., Any]:
        """Returns ``step(batch, batch_idx) -> (loss, output)``, detached; a plain one without Fabric's wrappers."""
        compute, zero_after = self._compute(self.model, self.plain), not self.manual
        optimizer = (self.optimizers if self.plain else self.wrapped_optimizers)[0]
        scaler = getattr(self.fabric.strategy.precision, "scaler", None) if self.plain else None
        if self.plain:

            def backward(loss: torch.Tensor) -> None:
                (loss if scaler is None else scaler.scale(loss)).backward()

        else:
            backward = self.fabric.backward

        def update() -> None:
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()

        def train_step(batch: Any, batch_idx: int) -> tuple[torch.Tensor | None, Any]:
            loss, output = compute(batch, batch_idx)
            if zero_after and loss is not None:
                backward(loss)
                update()
                optimizer.zero_grad()
            return None if loss is None else loss.detach(), output

        train_step.__name__ = train_step.__qualname__ = f"{type(self.original).__name__}.train_step"
        return train_step

    def _compute(self, model: Any, plain: bool) -> Callable[[Any, int], tuple[torch.Tensor | None, Any]]:
        """Returns ``compute(batch, batch_idx) -> (loss, output)``; the detached output only if metrics need it."""
        keep, loss_of = self.keeps_output, self.loss
        context: Callable[[], AbstractContextManager[Any]] = self.fabric.autocast
        in_context = plain and type(self.fabric.strategy.precision).__name__ != "Precision"
        if self.is_lightning:
            indexed, training_step = takes_index(self.original.training_step), self.method("training_step")

            def forward(batch: Any, batch_idx: int) -> tuple[Any, Any]:
                output = training_step(batch, batch_idx) if indexed else training_step(batch)
                return loss_in(output), output

        else:

            def forward(batch: Any, batch_idx: int) -> tuple[Any, Any]:
                return loss_and_output(model, batch, loss_of)

        def compute(batch: Any, batch_idx: int) -> tuple[Any, Any]:
            if in_context:
                with context():
                    loss, output = forward(batch, batch_idx)
            else:
                loss, output = forward(batch, batch_idx)
            return loss, (output.detach() if keep and isinstance(output, torch.Tensor) else None)

        return compute

    def method(self, name: str) -> Callable[..., Any]:
        """Returns a function that calls a method of the LightningModule as the wrapper's forward, if it has one."""
        model = self.model
        if type(model) is DistributedDataParallel:
            return through_wrapper(model, self.original, name)
        return lambda *args: getattr(model, name)(*args)

    def _plain_module(self) -> nn.Module | None:
        """Returns what a step without Fabric's wrappers calls: the model, or its DistributedDataParallel on the CPU."""
        strategy = self.fabric.strategy
        if self.wrapped.module is not self.original:
            return None
        if type(strategy) is SingleDeviceStrategy:
            return self.original
        wrapper = self.wrapped._forward_module
        on_cpu = type(strategy) is DDPStrategy and self.fabric.device.type == "cpu"
        return wrapper if on_cpu and not self.manual and type(wrapper) is DistributedDataParallel else None

    def _reason_not_to_compile(self) -> str | None:
        if self._plain_module() is None:
            return f"strategy {type(self.fabric.strategy).__name__} wraps the model"
        precision = self.fabric.strategy.precision
        if not plain_scaler(precision):
            return f"gradient scaler {type(precision.scaler).__name__} has its own update"
        if self.manual and getattr(precision, "scaler", None) is not None:
            return "manual optimization with 16-mixed precision scales gradients in Fabric's own backward"
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in self.optimizers):
            return "LBFGS runs the step several times for one update"
        return None
