"""``zero_grad(set_to_none=True)`` sets gradients to None without reading them.

torch first checks whether there is a gradient. A captured step that checked would be guarded by the answer, and the
first step (no gradients yet) would need a capture of its own. A ``__torch_function__`` of the program is told of reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import has_torch_function_unary

from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import hooks_loads

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


@registry.intercept(torch.optim.Optimizer.zero_grad)
def _optimizer_zero_grad(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _reset(world, _forget_of_optimizer, args[0]) if _forgets(args, kwargs) else ABSENT


@registry.intercept(torch.nn.Module.zero_grad)
def _module_zero_grad(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    plain = type(args[0]).__getattr__ is torch.nn.Module.__getattr__ and not hooks_loads(type(args[0]))
    return _reset(world, _forget_of_module, args[0]) if plain and _forgets(args, kwargs) else ABSENT


def _reset(world: TraceWorld, forget: Callable[[Any], None], owner: Any) -> None:
    world.decisions.begin_reset()
    world.interp.call(forget, (owner,), {})
    world.decisions.end_reset()


def _forgets(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return (args[1] if len(args) > 1 else kwargs.get("set_to_none", True)) is True


def _forget_of_optimizer(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not has_torch_function_unary(p) or p.grad is not None:
                p.grad = None


def _forget_of_module(module: torch.nn.Module) -> None:
    for p in module.parameters():
        if not has_torch_function_unary(p) or p.grad is not None:
            p.grad = None
