"""``Trainer(callbacks=[SideFXCompile()])``: Lightning trains as usual, with the step captured as one graph.

While ``fit`` runs, the callback replaces one method of one loop object: the one that trains on a batch. Everything that
Lightning does around it (hooks, progress, schedulers, logging, checkpoints, validation) stays Lightning's.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any, Literal

import lightning.pytorch as pl_package

from sidefx_train.callbacks.next_batch import NextBatch
from sidefx_train.callbacks.registration import intercept_hooks, intercept_logging
from sidefx_train.callbacks.training_step import (
    Batch,
    Lightning,
    automatic_step,
    manual_step,
    reason_not_to,
)
from sidefx_train.compile.api import compile_step
from sidefx_train.config import Backend
from sidefx_train.errors import CODES, SideFXWarning
from sidefx_train.report import StepReport

LEFT_TO_LIGHTNING = "SFX301"


class SideFXCompile(pl_package.Callback):
    """Captures the training step of a ``Trainer.fit``.

    The model, its ``state_dict``, optimizers, checkpoints, loggers and other callbacks stay unchanged. If a feature is
    in use that the callback does not reproduce (several GPUs, LBFGS, ...), Lightning trains as always; the report
    counts those steps and one warning says why.

    Works with a Trainer of ``lightning.pytorch`` and of ``pytorch_lightning``.

    Args:
        backend: compiles the graph; this and all other options are those of :func:`sidefx_train.compile`.
        fullgraph: raise at a graph break.
        dynamic: when sizes become symbolic.
        cuda_graphs: record the kernels of a step on a CUDA device, and launch them together.
        cuda_graph_limit: recordings kept for one graph.
        cuda_graph_memory_mb: MiB of results that recordings of one graph may keep.
        rng: which random stream is used.
        verify: how many first runs are compared with the captured graph.
        on_failure: run eagerly what cannot be captured, or raise.
        warmup: ``"background"``: training starts at once, and the captured step takes over when it is compiled.
            ``"now"``: the first step waits for that.
        partition: what is saved for a backward that runs outside the step.
        recapture_limit: captures kept for the step.
        autotune: choose kernels by measuring.
        autotune_seconds: time limit of autotuning for one graph.
        deterministic: two runs give the same bits; ``Trainer(deterministic=True)`` has the same effect.
        keep_slower: keep a captured step that is slower than eager.
        disabled_passes: changes to Inductor's compilation to leave out.

    Raises:
        ValueError: an option has an unknown value.
    """

    def __init__(
        self,
        backend: Backend = "inductor",
        fullgraph: bool = False,
        dynamic: bool | None = None,
        cuda_graphs: Literal["auto", "on", "off"] = "auto",
        cuda_graph_limit: int = 8,
        cuda_graph_memory_mb: float = 8192.0,
        rng: Literal["fast", "eager"] = "fast",
        verify: int | Literal["first"] = "first",
        on_failure: Literal["eager", "raise"] = "eager",
        warmup: Literal["now", "background"] = "background",
        partition: Literal["min_cut", "default"] = "min_cut",
        recapture_limit: int = 16,
        autotune: Literal["on", "off"] = "on",
        autotune_seconds: float = 2.0,
        deterministic: bool = False,
        keep_slower: bool = False,
        disabled_passes: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self._options: dict[str, Any] = {
            "backend": backend,
            "fullgraph": fullgraph,
            "dynamic": dynamic,
            "cuda_graphs": cuda_graphs,
            "cuda_graph_limit": cuda_graph_limit,
            "cuda_graph_memory_mb": cuda_graph_memory_mb,
            "rng": rng,
            "verify": verify,
            "on_failure": on_failure,
            "warmup": warmup,
            "partition": partition,
            "recapture_limit": recapture_limit,
            "autotune": autotune,
            "autotune_seconds": autotune_seconds,
            "deterministic": deterministic,
            "keep_slower": keep_slower,
            "disabled_passes": disabled_passes,
        }
        self._copies = _Copies()
        compile_step(_nothing, **self._options)  # wrong options raise here, where they are written, not hours later
        self._forget()

    def _forget(self) -> None:
        self._compiled: Any = None
        self._second: Any = None
        self._native = StepReport(name="training_step", backend="none")
        self._restore: list[Callable[[], None]] = []
        self._warned: set[str] = set()
        self._prefetches = self._native.prefetches

    def __getstate__(self) -> dict[str, Any]:
        """Drops the captured step from copies: it belongs to one fit."""
        state = dict(vars(self))
        for name in ("_compiled", "_second", "_native", "_restore", "_warned", "_prefetches"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._copies = _Copies((self._copies, *self._copies.originals))
        self._forget()

    @property
    def report(self) -> StepReport:
        """The report of the current or last fit; if a copy of the callback trained instead, that of the copy."""
        if self._second is not None:
            self._second.report()
        if self._compiled is not None:
            return self._compiled.report()  # type: ignore[no-any-return]
        elsewhere = None if self._native.calls else self._copies.report()
        return self._native if elsewhere is None else elsewhere

    # ------------------------------------------------------------------ Lightning's hooks
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._remove()
        self._forget()
        self._copies.train(weakref.ref(self))
        self._native.name = _name(pl_module)
        taken = _Training(self, trainer, pl_module)
        loops = trainer.fit_loop.epoch_loop
        self._take(loops.automatic_optimization, "run", taken.run)
        self._take(loops.manual_optimization, "advance", taken.advance)
        taken.settle(trainer.optimizers[0] if trainer.optimizers else None)
        if taken.next_batch.ahead is not None:
            self._take(trainer.strategy, "batch_to_device", taken.next_batch.to_device)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._remove()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._remove()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._remove()

    # ------------------------------------------------------------------ plumbing
    def _compile(self, step: Callable[..., Any], module: Any, at_once: bool) -> Callable[..., Any]:
        """Compiles a step; ``at_once`` where all processes must change over to the captured step at one call."""
        step.__qualname__ = step.__name__ = _name(module)
        compiled = compile_step(step, **{**self._options, "warmup": "now"} if at_once else self._options)
        report = compiled.report()
        if self._compiled is None:
            self._compiled = compiled
            report.calls, report.fallbacks = self._native.calls, self._native.fallbacks  # steps left to Lightning
            report.prefetches = self._prefetches
        else:  # the module went from automatic to manual optimization, or back
            self._second = compiled
            self._compiled.report().parts.append(report)
        return compiled  # type: ignore[no-any-return]

    def _count_native(self, reason: str) -> None:
        self.report.calls += 1
        self.report.record_fallback(LEFT_TO_LIGHTNING, reason)

    def _warn_native(self, reason: str) -> None:
        if reason in self._warned:
            return
        self._warned.add(reason)
        title, advice = CODES[LEFT_TO_LIGHTNING]
        warnings.warn(
            f"[{LEFT_TO_LIGHTNING}] {title}: {reason}. Training continues uncaptured. {advice}",
            SideFXWarning,
            stacklevel=4,
        )

    def _take(self, loop: Any, method: str, call: Callable[..., Any]) -> None:
        self._replace(loop, method, _InPlaceOf(loop, method, call))

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        """Sets an instance attribute until the fit is over."""
        had = name in vars(owner)
        old = vars(owner).get(name)
        setattr(owner, name, value)
        self._restore.append(lambda: setattr(owner, name, old) if had else delattr(owner, name))

    def _remove(self) -> None:
        """Restores everything; keeps the report, drops the captured step and its references to the model."""
        while self._restore:
            self._restore.pop()()
        self._native = self.report
        if self._native.calls:
            self._copies.end(self._native)
        for compiled in (self._compiled, self._second):
            if compiled is not None:
                compiled.end()
        self._compiled = self._second = None


class _Training:
    """Replacements of Lightning's two methods that train on a batch, for one fit."""

    def __init__(self, callback: SideFXCompile, trainer: Any, module: Any) -> None:
        self._callback, self._trainer, self._module = callback, trainer, module
        self._pl = pl = Lightning(trainer)
        intercept_logging(pl)
        intercept_hooks(pl)
        loops = trainer.fit_loop.epoch_loop
        self._automatic, self._manual = loops.automatic_optimization, loops.manual_optimization
        self._run_natively, self._advance_natively = self._automatic.run, self._manual.advance
        self._unpack_manual = pl.manual.ManualResult.from_training_step_output
        self._should_accumulate = trainer.fit_loop._should_accumulate
        self._batch = Batch()
        self._steps: dict[str, Callable[..., Any]] = {}
        self.next_batch = NextBatch(pl, trainer, callback._prefetches)
        self._looked_at: tuple[Any, ...] = ()
        self._reason: str | None = None

    def settle(self, optimizer: Any) -> str | None:
        """Returns why this batch is left to Lightning; decided again when one of the relevant objects is replaced."""
        trainer, module = self._trainer, self._module
        strategy = trainer.strategy
        looked_at = (
            strategy,
            strategy.model,
            optimizer,
            strategy._lightning_optimizers,
            strategy.precision_plugin,
            trainer._detect_anomaly,
            module.training_step,
            self._automatic._skip_backward,
        )
        if looked_at != self._looked_at:
            self._looked_at = looked_at
            self._reason = reason_not_to(self._pl, trainer, module)
            if self._reason is not None:
                self._callback._warn_native(self._reason)
            elif self._automatic._skip_backward:
                self._reason = "the loop skips backward"
            else:
                self._follow_strategy()
        return self._reason

    def _follow_strategy(self) -> None:
        """Makes Lightning's optimizer wrappers hold the strategy itself during the fit.

        They hold a weak proxy of it, which a capture cannot follow.
        """
        for wrapper in self._trainer.strategy._lightning_optimizers:
            if type(wrapper._strategy) in weakref.ProxyTypes:
                self._callback._replace(wrapper, "_strategy", self._trainer.strategy)

    def run(self, optimizer: Any, batch_idx: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Replaces ``_AutomaticOptimization.run``."""
        reason = self.settle(optimizer)
        if reason is not None:
            self._callback._count_native(reason)
            return self._run_natively(optimizer, batch_idx, kwargs)  # type: ignore[no-any-return]
        trainer = self._trainer
        step = self._steps.get("automatic") or self._captured("automatic", automatic_step)
        zero = batch_idx % trainer.accumulate_grad_batches == 0
        update = not self._should_accumulate()
        self._batch.begin(self._module, trainer.current_epoch, batch_idx, kwargs)
        counted = self._automatic.optim_progress.optimizer.step
        if update:
            counted.increment_ready()
        with trainer.profiler.profile("[SideFXCompile]training_step"):
            output = step(zero, update, *kwargs.values())
        self.next_batch.prefetch()
        if update:
            counted.increment_completed()
        return output  # type: ignore[no-any-return]

    def advance(self, kwargs: dict[str, Any]) -> None:
        """Replaces ``_ManualOptimization.advance``."""
        reason = self.settle(self._trainer.optimizers[0] if self._trainer.optimizers else None)
        if reason is not None:
            self._callback._count_native(reason)
            return self._advance_natively(kwargs)  # type: ignore[no-any-return]
        trainer = self._trainer
        step = self._steps.get("manual") or self._captured("manual", manual_step)
        batch_idx = kwargs.get("batch_idx", 0)
        self._batch.begin(self._module, trainer.current_epoch, batch_idx, kwargs)
        with trainer.profiler.profile("[SideFXCompile]training_step"):
            output = step(*kwargs.values())
        self.next_batch.prefetch()
        self._manual._output = self._unpack_manual(output).asdict()
        return None

    def _captured(self, kind: str, make: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
        step = make(self._pl, self._trainer, self._module, self._batch)
        alone = type(self._trainer.strategy) is self._pl.module("strategies").SingleDeviceStrategy
        self._steps[kind] = self._callback._compile(step, self._module, at_once=not alone)
        return self._steps[kind]


class _InPlaceOf:
    """Replaces a method of a loop or strategy while a fit runs; a copy or pickle of it gets its own method back."""

    def __init__(self, loop: Any, name: str, call: Callable[..., Any]) -> None:
        self._loop, self._name, self._call = loop, name, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _own_method, (self._loop, self._name)


class _Copies:
    """What the copies of a callback tell it: libraries copy callbacks that they are given, and train with the copies.

    Args:
        originals: the same of what the callback is a copy of, and of what that is a copy of.
    """

    def __init__(self, originals: tuple[_Copies, ...] = ()) -> None:
        self.originals = originals
        self._training: Callable[[], SideFXCompile | None] = _nothing
        self._last: StepReport | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Copies:
        return self  # the copied callback makes its own

    def __reduce__(self) -> tuple[Any, ...]:
        return _Copies, ()

    def train(self, copied: Callable[[], SideFXCompile | None]) -> None:
        """Tells the originals that a copy trains."""
        for original in self.originals:
            original._training = copied

    def end(self, report: StepReport) -> None:
        """Tells the originals the report of a fit that has ended."""
        for original in self.originals:
            original._last = report

    def report(self) -> StepReport | None:
        """Returns the report of the copy that trains, or trained last."""
        training = self._training()
        return self._last if training is None else training.report


def _own_method(loop: Any, name: str) -> Any:
    return getattr(type(loop), name).__get__(loop)


def _name(module: Any) -> str:
    return f"{type(module).__name__}.training_step"


def _nothing() -> None:
    return None
