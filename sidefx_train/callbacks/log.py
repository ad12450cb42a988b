"""``self.log`` and ``self.log_dict`` inside a captured step: replayed, in order, once the graph has run.

Logging reads and writes Lightning's result tables, which are no part of a training step. The call is therefore kept
with its arguments as they were and made afterwards, on real values, as if from inside the hook that made it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sidefx_train.compile import registry
from sidefx_train.compile.capture.world import ABSENT

_KNOWN: set[type] = set()


def defer_logging_of(cls: type) -> None:
    """Makes captures defer ``log`` and ``log_dict`` of a LightningModule class and its subclasses; idempotent."""
    if cls in _KNOWN:
        return
    _KNOWN.add(cls)
    for name in ("log", "log_dict"):
        registry.intercept_method(cls, name)(_deferring(name))


def _deferring(name: str) -> registry.Interceptor:
    def handler(world: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        module, *values = args
        hook = world.instance_attr(module, "_current_fx_name")
        keep_graph = bool(kwargs.get("enable_graph", False))
        if not keep_graph:
            values = [_detached(value) for value in values]
            kwargs = {key: _detached(value) for key, value in kwargs.items()}
        hook = None if hook is ABSENT else hook
        world.defer(deferred_log, (module, hook, tuple(values), kwargs, name, torch.get_default_dtype()), {})

    return handler


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {key: _detached(item) for key, item in value.items()}
    return value


def deferred_log(
    module: Any,
    hook: str | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    method: str = "log",
    dtype: torch.dtype | None = None,
) -> None:
    """Calls ``module.log(*args, **kwargs)`` after the graph has run, as if from inside ``hook``.

    Args:
        module: the LightningModule.
        hook: name of the hook that logged.
        args: arguments of the call.
        kwargs: likewise.
        method: ``"log"`` or ``"log_dict"``.
        dtype: default dtype at the call, in which Lightning keeps logged Python numbers.
    """
    previous, default = module._current_fx_name, torch.get_default_dtype()
    module._current_fx_name = hook
    if dtype is not None and dtype is not default:
        torch.set_default_dtype(dtype)
    try:
        getattr(module, method)(*args, **kwargs)
    finally:
        module._current_fx_name = previous
        if torch.get_default_dtype() is not default:
            torch.set_default_dtype(default)
