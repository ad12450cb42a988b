"""Replacements of Lightning's hook-calling functions for captured steps: same lookups, without the bookkeeping.

Lightning calls every hook through one of three functions, which write a debug message and time the call. A capture
interprets the functions of this module instead. They look up the same attributes in the same order, so that replacing a
hook, callback or method later fails a guard. A profiler that records something is called after the graph.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import torch

from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.distributed.data_parallel import wrapper_of
from sidefx_train.torch_compat import has_step_hooks

_KNOWN: set[str] = set()
_TORCHS = os.path.dirname(torch.optim.__file__)
_ONE_CLOSURE_CALL: frozenset[type] = frozenset(
    getattr(torch.optim, name)
    for name in (
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "ASGD",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    )
    if hasattr(torch.optim, name)
)
"""Optimizers whose ``step(closure)`` calls the closure first, and once: it may run before ``step()`` instead."""


def follow_calls_of(
    package: str, call: ModuleType, precision: ModuleType, profilers: ModuleType, distributed: ModuleType
) -> None:
    """Makes captures follow the hooks that a Lightning package calls; idempotent.

    Args:
        package: name of the package.
        call: its module ``trainer.call``.
        precision: its module ``plugins.precision``.
        profilers: its module ``profilers``.
        distributed: its module ``overrides.distributed``.
    """
    if package in _KNOWN:
        return
    _KNOWN.add(package)
    silent = profilers.PassThroughProfiler

    def profiled(trainer: Any, action: Callable[[], str]) -> AbstractContextManager[Any]:
        profiler = trainer.profiler
        return nullcontext() if type(profiler) is silent else profiler.profile(action())

    def module_hook(trainer: Any, hook_name: str, *args: Any, pl_module: Any = None, **kwargs: Any) -> Any:
        module = pl_module or trainer.lightning_module
        if module is None:
            raise TypeError("No `LightningModule` is available to call hooks on.")
        hook = getattr(module, hook_name)
        if not callable(hook):
            return None
        previous = module._current_fx_name
        module._current_fx_name = hook_name
        with profiled(trainer, lambda: f"[LightningModule]{module.__class__.__name__}.{hook_name}"):
            output = hook(*args, **kwargs)
        module._current_fx_name = previous
        return output

    def callback_hooks(
        trainer: Any, hook_name: str, *args: Any, monitoring_callbacks: bool | None = None, **kwargs: Any
    ) -> None:
        module = trainer.lightning_module
        if module:
            previous = module._current_fx_name
            module._current_fx_name = hook_name
        for callback in trainer.callbacks:
            hook = getattr(callback, hook_name)
            if callable(hook):
                with profiled(trainer, lambda callback=callback: f"[Callback]{callback.state_key}.{hook_name}"):  # type: ignore[misc]
                    hook(trainer, trainer.lightning_module, *args, **kwargs)
        if module:
            module._current_fx_name = previous

    def strategy_hook(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
        module = trainer.lightning_module
        previous = module._current_fx_name
        module._current_fx_name = hook_name
        hook = getattr(trainer.strategy, hook_name)
        if not callable(hook):
            return None
        with profiled(trainer, lambda: f"[Strategy]{trainer.strategy.__class__.__name__}.{hook_name}"):
            output = hook(*args, **kwargs)
        module._current_fx_name = previous
        return output

    registry.interpret_instead(call._call_lightning_module_hook, module_hook)
    registry.interpret_instead(call._call_strategy_hook, strategy_hook)
    registry.interpret_instead(call._call_callback_hooks, callback_hooks, unless="monitoring_callbacks")

    def optimizer_step(self: Any, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Runs the closure before the update if no one can observe that; a break in it then does not split the
        update."""
        plain = (
            type(optimizer) in _ONE_CLOSURE_CALL
            and not kwargs
            and not has_step_hooks(optimizer)
            and _is_torchs(optimizer.step)
        )
        if plain:
            with torch.enable_grad():
                result = self._wrap_closure(model, optimizer, closure)
            optimizer.step()
            return result
        return optimizer.step(closure=partial(self._wrap_closure, model, optimizer, closure), **kwargs)

    registry.interpret_instead(precision.Precision.optimizer_step, optimizer_step)
    registry.intercept(distributed.prepare_for_backward)(_prepare_reduction)
    for name in ("start", "stop"):
        registry.intercept_method(profilers.Profiler, name)(_called_after_step(silent, name))


def _prepare_reduction(world: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Has a backward of manual optimization reduce gradients between processes, as the wrapper's forward does."""
    wrapper_of(world, args[0]).before_backward(args[1])


def _is_torchs(step: Any) -> bool:
    """Returns True if a bound ``step`` is one of torch's own, or a scheduler's counting wrapper of it."""
    code = getattr(getattr(step, "__func__", None), "__code__", None)
    return code is not None and code.co_filename.startswith(_TORCHS)


def _called_after_step(silent: type, name: str) -> registry.Interceptor:
    """Calls a profiler after the graph with what ran, in order: it measures the times of the replay."""

    def handler(world: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if type(args[0]) is silent:
            return ABSENT
        world.defer(_tell, (args[0], name, *args[1:]), kwargs)
        return None

    return handler


def _tell(profiler: Any, name: str, *args: Any, **kwargs: Any) -> None:
    getattr(profiler, name)(*args, **kwargs)
