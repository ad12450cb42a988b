"""Defers ``self.log`` in a captured step: the calls are replayed in order after the graph has run.

Logging reads and writes Lightning's result tables, which are not part of a training step. The capture records the call
with a snapshot of its arguments and makes it after the graph, with real values, as if from inside the hook that made
it. Two cases cannot wait and break the graph: a call that Lightning rejects, and reading metrics after a call that
logged.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.callbacks.training_step import Lightning
from sidefx_train.compile.capture.shadows.deferred_values import DeferredValue
from sidefx_train.compile.capture.world.native_call_facts import first_line
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT

_KNOWN: set[str] = set()
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
    registry.intercept(log)(_Log(log, results))
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
    """

    def __init__(self, log: Any, results: Any) -> None:
        self._log, self._results = log, results
        self._probes: weakref.WeakKeyDictionary[Any, dict[int, _Probe]] = weakref.WeakKeyDictionary()

    def __call__(self, world: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        module, *values = args
        world.touch((values, kwargs))
        hook = world.instance_attr(module, "_current_fx_name")
        hook = None if hook is ABSENT else hook
        if not bool(kwargs.get("enable_graph", False)):
            values = [_detached(value) for value in values]
            kwargs = {key: _detached(value) for key, value in kwargs.items()}
        wrong = self._complaint(world, module, hook, values, kwargs)
        if wrong:
            world.heap.refuse(
                "SFX106", f"self.log raises, and its error must not be deferred until after the graph: {wrong}"
            )
        world.defer(deferred_log, (self._log, module, hook, tuple(values), kwargs, torch.get_default_dtype()), {})

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
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
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


def deferred_log(
    log: Callable[..., None],
    module: Any,
    hook: str | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype | None = None,
) -> None:
    """Calls ``log(module, *args, **kwargs)`` after the graph has run, as if from inside ``hook``.

    Args:
        log: Lightning's function; overriding methods of the module have already run in the step.
        module: the LightningModule.
        hook: name of the hook that logged.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        dtype: default dtype at the time of the call; Lightning stores logged Python numbers in it.
    """
    previous, default = module._current_fx_name, torch.get_default_dtype()
    module._current_fx_name = hook
    if dtype is not None and dtype is not default:
        torch.set_default_dtype(dtype)
    try:
        log(module, *args, **kwargs)
    finally:
        module._current_fx_name = previous
        if torch.get_default_dtype() is not default:
            torch.set_default_dtype(default)
