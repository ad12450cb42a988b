"""Torch modes and tensor subclasses: torch's dispatcher calls their Python, past the interpreter.

A replayed graph would omit the Python effects of such code. So a step is not captured if it enters a mode of its own or
creates an instance of a tensor subclass. ``with torch.device(...)`` is torch's own mode and has no Python effects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


@registry.intercept_method(TorchFunctionMode, "__enter__")
def _enter_function_mode(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if type(args[0]).__module__ == "torch.utils._device":
        return ABSENT
    world.heap.refuse("SFX111", f"enters {type(args[0]).__qualname__}, a TorchFunctionMode")


@registry.intercept_method(torch.inference_mode, "__enter__")
def _enter_inference_mode(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    world.inference.append(args[0])
    return ABSENT


@registry.intercept_method(TorchDispatchMode, "__enter__")
def _enter_dispatch_mode(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    world.heap.refuse("SFX111", f"enters {type(args[0]).__qualname__}, a TorchDispatchMode")


@registry.late
def register() -> bool:
    """Registers the interceptor after ``torch.compile`` was used: it tags new modules, also those created in a step."""
    tag = compat.module_tagging()
    if tag is None:
        return False
    registry.intercept(tag)(_no_tag)
    return True


def _no_tag(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    return None
