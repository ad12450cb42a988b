"""Defers ``self.log`` in a captured step: the calls are replayed in order after the graph has run.

Logging reads and writes Lightning's result tables, which are not part of a training step. The capture records the call
with a snapshot of its arguments and makes it after the graph, with real values, as if from inside the hook that made
it. Two cases cannot wait and break the graph: a call that Lightning rejects, and reading metrics after a call that
logged. The reduction of ``sync_dist=True`` between processes is part of the graph, at its place among the other
collectives; the deferred call gets its result.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.callbacks.training_step import Lightning
from sidefx_train.compile.capture.shadows.deferred_values import DeferredArray, DeferredValue
from sidefx_train.compile.capture.world.native_call_facts import first_line
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.thread_warnings import no_warnings

_KNOWN: set[str] = set()
_COMMUNICATES = "SFX103"
_READS_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics", "metrics")


def defer_logging_of(pl: Lightning) -> None:
    """Makes captures defer the logging of modules of a Lightning package; idempotent.

    ``log_dict`` and overriding methods are interpreted: they all call ``LightningModule.log`` in the end.
    """
    if pl.package in _KNOWN:
        return
    _KNOWN.add(pl.package)
    connector = pl.module("trainer.connectors.logger_connector.logger_connector")._LoggerConnector
    results = pl.module("trainer.connectors.logger_connector.result")
    log = pl.lightning_module.log  # type: ignore[attr-defined]
    reduction = sys.modules[pl.module("strategies.ddp")._sync_ddp_if_available.__module__]
    registry.intercept(log)(_Log(log, results, reduction))
    getters = [vars(connector)[name].fget for name in _READS_METRICS]
    registry.intercept(*getters, pl.module("trainer").Trainer._results.fget, results._ResultCollection.metrics)(_read)


def _read(world: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if any(call.fn is deferred_log for call in world.deferred):
        world.heap.refuse("SFX106", "reads metrics after self.log in the same step, which logs after the graph")
    return ABSENT


class _Log:
    """Handles ``LightningModule.log`` during a capture.

    Args:
        log: Lightning's function.
        results: Lightning's module of result tables.
        reduction: module of Lightning Fabric by which every strategy reduces logged values between processes.
    """

    def __init__(self, log: Any, results: Any, reduction: ModuleType) -> None:
        self._log, self._results, self._reduction = log, results, reduction
        self._probes: weakref.WeakKeyDictionary[Any, dict[int, _Probe]] = weakref.WeakKeyDictionary()

    def __call__(self, world: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        module, *values = args
        world.touch((values, kwargs))
        hook = world.instance_attr(module, "_current_fx_name")
        hook = None if hook is ABSENT else hook
        if not bool(kwargs.get("enable_graph", False)):
            values = [_detached(value) for value in values]
            kwargs = {key: _detached(value) for key, value in kwargs.items()}
        reductions = _Reductions()
        with _reducing_by(self._reduction, reductions):
            wrong = self._complaint(world, module, hook, values, kwargs)
        if wrong:
            world.heap.refuse(
                "SFX106", f"self.log raises, and its error must not be deferred until after the graph: {wrong}"
            )
        call: list[Any] = [self._log, module, hook, tuple(values), kwargs]
        if reductions.asked:
            call += [self._reduction, self._reduce(world, reductions, values, kwargs)]
        world.defer(deferred_log, tuple(call), {})

    def _reduce(self, world: Any, reductions: _Reductions, values: list[Any], kwargs: dict[str, Any]) -> Any:
        """Returns the logged value after the reduction between processes, which the graph contains."""
        value = values[1] if len(values) > 1 else kwargs.get("value")
        if len(reductions.asked) > 1 or not isinstance(value, (torch.Tensor, bool, int, float, *compat.SYMBOLS)):
            world.heap.refuse(_COMMUNICATES, f"calls self.log(sync_dist=True) with a {type(value).__name__}")
        (dtype, op), group = reductions.asked[0], kwargs.get("sync_dist_group")
        reduce = self._reduction._sync_ddp_if_available
        with torch.no_grad():
            return world.interp.call(_reduced, (reduce, value, dtype, group, op), {})

    def _complaint(self, world: Any, module: Any, hook: str | None, values: list[Any], kwargs: dict[str, Any]) -> str:
        """Returns Lightning's error message for a call after those of the step so far, tried on a copy of its
        tables."""
        record = world.heap.record_of(module)
        if record is None:
            return ""
        probes = self._probes.setdefault(world, {})
        with compat.real_world():
            probe = probes.get(id(record.real)) or _Probe(record.real, self._log, self._results)
            probes[id(record.real)] = probe
            try:
                args = _samples(world, values)
                return probe.complaint(hook, args, _samples(world, kwargs))
            except _Unknown:
                pass
        if kwargs.get("sync_dist"):
            world.heap.refuse(_COMMUNICATES, "calls self.log(sync_dist=True) with a value known after the graph only")
        return ""


class _Probe:
    """Logs for a module without changing its tables.

    Args:
        module: the LightningModule.
        log: Lightning's function.
        results: Lightning's module of result tables.
    """

    def __init__(self, module: Any, log: Any, results: Any) -> None:
        self._log, self._warned = log, results.warning_cache
        self._module = object.__new__(type(module))
        vars(self._module).update(vars(module))
        if module._fabric is not None:
            vars(self._module)["_fabric"] = _NoFabric()
        if module._trainer is not None:
            vars(self._module)["_trainer"] = _Trainer(module._trainer, results)

    def complaint(self, hook: str | None, args: list[Any], kwargs: dict[str, Any]) -> str:
        """Returns the message of the error that ``log`` raises, or an empty string."""
        vars(self._module)["_current_fx_name"] = hook
        before = set(self._warned)
        try:
            with no_warnings():
                self._log(self._module, *args, **kwargs)
        except Exception as error:
            return f"{type(error).__name__}: {first_line(error)[:160]}"
        finally:
            self._warned.clear()
            self._warned.update(before)
        return ""


class _Trainer:
    """Proxy of the trainer with its own result tables and its own name of the hook that logged last."""

    def __init__(self, trainer: Any, results: Any) -> None:
        self._sidefx_trainer = trainer
        self._results = None
        real = trainer._results
        if real is not None:
            self._results = results._ResultCollection(training=real.training)
            self._results.dataloader_idx, self._results.batch_size = real.dataloader_idx, 1
            for key, metric in real.items():
                self._results[key] = results._ResultMetric(metric.meta, metric.is_tensor)
        self._logger_connector = _NoConnector()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sidefx_trainer, name)


class _NoFabric:
    def log_dict(self, metrics: Mapping[str, Any]) -> None:
        """Discards the metrics."""


class _NoConnector:
    _current_fx: str | None = None

    def should_reset_tensors(self, fx: str) -> bool:
        return False


class _Unknown(Exception):
    """A value that is unknown before the graph has run."""


def _samples(world: Any, value: Any) -> Any:
    """Returns a real value of the same kind as a value of the capture."""
    if hasattr(value, "fake"):  # a snapshot of the logged tensor
        value = value.fake
    if isinstance(value, torch.Tensor):
        sizes = [int(compat.hint_of(size)) if isinstance(size, compat.SYMBOLS) else size for size in value.shape]
        return torch.zeros(sizes, dtype=value.dtype, device=value.device)
    if isinstance(value, compat.SYMBOLS):
        return 1.0 if compat.is_unbacked(value) else compat.hint_of(value)
    if isinstance(value, DeferredArray):
        return value.sample
    if isinstance(value, DeferredValue):
        raise _Unknown
    record = world.heap.record_of(value)
    if type(value) in (list, tuple):
        return type(value)(_samples(world, item) for item in value)
    if isinstance(value, dict):
        return {key: _samples(world, item) for key, item in value.items()}
    return value if record is None else record.real


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {key: _detached(item) for key, item in value.items()}
    return value


class _Reductions:
    """Replaces Lightning's reduction between processes while a call is tried.

    Attributes:
        asked: dtype and operation of each reduction.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[torch.dtype, Any]] = []

    def __call__(self, result: torch.Tensor, group: Any = None, reduce_op: Any = None) -> torch.Tensor:
        self.asked.append((result.dtype, reduce_op))
        return result


@contextmanager
def _reducing_by(reduction: ModuleType, reduce: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Context in which another function reduces logged values between processes."""
    before = reduction._sync_ddp
    reduction._sync_ddp = reduce  # type: ignore[attr-defined]
    try:
        yield
    finally:
        reduction._sync_ddp = before  # type: ignore[attr-defined]


def _reduced(reduce: Callable[..., torch.Tensor], value: Any, dtype: torch.dtype, group: Any, op: Any) -> torch.Tensor:
    """Returns a logged value that Lightning's function has reduced; interpreted by the capture."""
    result = value.detach().clone() if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=dtype)
    return reduce(result.squeeze().to(dtype), group, reduce_op=op)


def deferred_log(
    log: Callable[..., None],
    module: Any,
    hook: str | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    reduction: ModuleType | None = None,
    reduced: torch.Tensor | None = None,
) -> None:
    """Calls ``log(module, *args, **kwargs)`` after the graph has run, as if from inside ``hook``.

    Args:
        log: Lightning's function; overriding methods of the module have already run in the step.
        module: the LightningModule.
        hook: name of the hook that logged.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        reduction: the module whose function reduces the value between processes, if the graph has done that.
        reduced: the value reduced between processes.
    """
    previous = module._current_fx_name
    module._current_fx_name = hook
    try:
        with nullcontext() if reduction is None else _reducing_by(reduction, lambda own, *_, **__: own.copy_(reduced)):
            log(module, *args, **kwargs)
    finally:
        module._current_fx_name = previous
