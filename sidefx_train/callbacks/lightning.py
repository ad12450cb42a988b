"""``Trainer(callbacks=[SideFXCompile()])``: Lightning's own training, with the step captured as one graph.

The callback takes the place of one method on one loop object while ``fit`` runs: the one that trains on a batch. What
Lightning does around it (hooks, progress, schedulers, logging, checkpoints, validation) stays Lightning's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl_package
import torch

from sidefx_train.callbacks.log import defer_logging_of
from sidefx_train.callbacks.plan import (
    Lightning,
    automatic_step,
    ignores_argument,
    manual_step,
    needs_indices,
    reason_not_to,
)
from sidefx_train.compile.api import compile_step
from sidefx_train.errors import CODES, SideFXWarning
from sidefx_train.report import StepReport

LEFT_TO_LIGHTNING = "SFX301"


class SideFXCompile(pl_package.Callback):
    """Captures the training step of a ``Trainer.fit``.

    The model, its ``state_dict``, optimizers, checkpoints, loggers and other callbacks stay what they are. Where
    something is in use that the callback does not reproduce (several devices, gradient scaling, LBFGS, ...), Lightning
    trains as always; the report counts those steps and one warning says why.

    Works with a Trainer of ``lightning.pytorch`` and of ``pytorch_lightning``.

    Args:
        options: as for :func:`sidefx_train.compile` (``backend``, ``fullgraph``, ``dynamic``, ``cuda_graphs``, ``rng``,
            ``verify``, ``on_failure``, ``warmup``, ...). ``warmup`` is ``"background"`` here: training starts at once,
            and the captured step takes over when it is compiled.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        # Wrong options are an error where they are written, not hours later in fit.
        self._options = {"warmup": "background", **options}
        compile_step(_nothing, **self._options)
        self._compiled: Any = None
        self._native = StepReport(name="training_step", backend="none")
        self._restore: list[Callable[[], None]] = []

    @property
    def report(self) -> StepReport:
        """What was captured in the current or last fit."""
        return self._native if self._compiled is None else self._compiled.report()

    # ------------------------------------------------------------------ Lightning's hooks
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._remove()
        pl = Lightning(trainer)
        reason = reason_not_to(pl, trainer, pl_module)
        if reason is not None:
            self._leave_to_lightning(trainer, pl_module, reason)
        elif pl_module.automatic_optimization:
            self._take_automatic(pl, trainer, pl_module)
        else:
            self._take_manual(pl, trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._remove()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._remove()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._remove()

    # ------------------------------------------------------------------ the three ways to train on a batch
    def _take_automatic(self, pl: Lightning, trainer: Any, module: Any) -> None:
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        optimizer = trainer.optimizers[0]
        step = self._compile(pl, automatic_step(pl, trainer, module), module)
        native = loop.run
        progress = loop.optim_progress.optimizer
        should_accumulate = trainer.fit_loop._should_accumulate
        indices = needs_indices(pl, module)
        hide_index = ignores_argument(module.training_step, 2)
        warn_none = pl.automatic.Closure.warning_cache.warn

        def run(current: Any, batch_idx: int, kwargs: dict[str, Any]) -> dict[str, Any]:
            if loop._skip_backward or current is not optimizer:
                self._count_native("the loop skips backward" if loop._skip_backward else "the optimizer was replaced")
                return native(current, batch_idx, kwargs)
            update = not should_accumulate()
            normalize = trainer.accumulate_grad_batches
            zero = batch_idx % normalize == 0
            where = (trainer.current_epoch, batch_idx) if indices else (0, 0)
            if hide_index and len(kwargs) == 2:
                kwargs["batch_idx"] = 0  # never looked at: a number that moves would only be guarded
            if update:
                progress.step.increment_ready()
            outputs = _inside_training_step(
                trainer, module, lambda: step(zero, update, normalize, *where, *kwargs.values())
            )
            if zero:
                progress.zero_grad.increment_ready()
                progress.zero_grad.increment_started()
                progress.zero_grad.increment_completed()
            if update:
                progress.step.increment_completed()
            if outputs is None:
                warn_none("`training_step` returned `None`. If this was on purpose, ignore this warning...")
                return {}
            return outputs

        self._replace(loop, "run", run)

    def _take_manual(self, pl: Lightning, trainer: Any, module: Any) -> None:
        loop = trainer.fit_loop.epoch_loop.manual_optimization
        step = self._compile(pl, manual_step(pl, trainer, module), module)
        unpack = pl.manual.ManualResult.from_training_step_output
        hide_index = ignores_argument(module.training_step, 2)

        def advance(kwargs: dict[str, Any]) -> None:
            if hide_index and len(kwargs) == 2:
                kwargs["batch_idx"] = 0
            output = _inside_training_step(trainer, module, lambda: step(*kwargs.values()))
            loop._output = unpack(output).asdict()

        self._replace(loop, "advance", advance)
        # Lightning's optimizer wrappers hold the strategy by a weak proxy, which stands for another object; for the
        # time of the fit they hold the strategy itself, so that the step can be followed through it.
        for wrapper in trainer.strategy._lightning_optimizers:
            self._replace(wrapper, "_strategy", trainer.strategy)

    def _leave_to_lightning(self, trainer: Any, module: Any, reason: str) -> None:
        self._compiled, self._native = None, StepReport(name=_name(module), backend="none")
        title, advice = CODES[LEFT_TO_LIGHTNING]
        warnings.warn(
            f"[{LEFT_TO_LIGHTNING}] {title}: {reason}. Training goes on uncaptured. {advice}",
            SideFXWarning,
            stacklevel=2,
        )
        loops = trainer.fit_loop.epoch_loop
        loop = loops.automatic_optimization if module.automatic_optimization else loops.manual_optimization
        native = loop.run

        def run(*args: Any, **kwargs: Any) -> Any:
            self._count_native(reason)
            return native(*args, **kwargs)

        self._replace(loop, "run", run)

    # ------------------------------------------------------------------ plumbing
    def _compile(self, pl: Lightning, step: Callable[..., Any], module: Any) -> Callable[..., Any]:
        step.__qualname__ = step.__name__ = _name(module)
        defer_logging_of(pl.lightning_module)
        self._compiled = compile_step(step, **self._options)
        return self._compiled

    def _count_native(self, reason: str) -> None:
        self.report.calls += 1
        self.report.record_fallback(LEFT_TO_LIGHTNING, reason)

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        """Sets an instance attribute until the fit is over."""
        had = name in vars(owner)
        old = vars(owner).get(name)
        setattr(owner, name, value)
        self._restore.append(lambda: setattr(owner, name, old) if had else delattr(owner, name))

    def _remove(self) -> None:
        """Puts everything back; the report stays, the captured step and what it holds of the model go."""
        while self._restore:
            self._restore.pop()()
        if self._compiled is not None:
            self._native, self._compiled = self._compiled.report(), None


def _inside_training_step(trainer: Any, module: Any, call: Callable[[], Any]) -> Any:
    """Calls with ``self.log`` knowing that it is in ``training_step``, gradients enabled, under the profiler."""
    previous = module._current_fx_name
    module._current_fx_name = "training_step"
    try:
        with trainer.profiler.profile("[SideFXCompile]training_step"):
            if torch.is_grad_enabled():
                return call()
            with torch.enable_grad():
                return call()
    finally:
        module._current_fx_name = previous


def _name(module: Any) -> str:
    return f"{type(module).__name__}.training_step"


def _nothing() -> None:
    return None
