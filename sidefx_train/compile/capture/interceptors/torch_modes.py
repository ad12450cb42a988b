"""Torch modes and tensor subclasses: torch's dispatcher calls their Python, past the interpreter.

A replayed graph would omit the Python effects of such code. So a step is not captured if it enters a mode of its own.
``with torch.device(...)`` is torch's own mode and has no effects. The Python of wrapper subclasses is interpreted
(``torch_overrides/wrapper_dispatch.py``); what it calls in C is here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


_LAZY = "_lazy_init_old_dispatch_mode_flags"
"""Method of a mode that creates attributes when it is first entered, in recent torch."""


@registry.intercept_method(torch.inference_mode, "__enter__")
def _enter_inference_mode(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    world.inference.append(args[0])
    return ABSENT


@registry.intercept(TorchDispatchMode.__enter__)
def _enter_dispatch_mode(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mode = args[0]
    if type(mode) not in compat.CHECKPOINT_MODES or world.branching:
        world.heap.refuse("SFX111", f"enters {type(mode).__qualname__}, a TorchDispatchMode")
    if hasattr(TorchDispatchMode, _LAZY):
        world.interp.call(world.interp.getattr(mode, _LAZY), (), {})
    world.modes.enter(mode)
    return mode


@registry.intercept(TorchDispatchMode.__exit__)
def _leave_dispatch_mode(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    world.modes.leave(args[0])


@registry.intercept(compat.NUMBER_OF_MODES)
def _number_of_modes(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Counts the modes of the program: the capture has its own."""
    return len(world.modes.entered)


@registry.intercept(compat.MODE_AT)
def _mode_at(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return world.modes.entered[args[0]][0]


@registry.intercept(compat.MODE_OF_TORCH)
def _no_mode_of_torch(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Answers as in eager, which has no mode of fake or functional tensors, or of proxies."""


def _change_modes(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuses to change the stack of modes past their own methods: the capture's modes are on it."""
    world.heap.refuse("SFX111", "changes torch's stack of dispatch modes")


for _change in compat.CHANGES_MODES:
    registry.intercept(_change)(_change_modes)


def _set_without_getter(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuses what nobody can ask for afterwards: it could be neither kept as an effect nor undone."""
    world.heap.refuse("SFX103", "changes a setting of torch that has no getter (denormal numbers, interop threads...)")


for _set in compat.without_getters():
    registry.intercept(_set)(_set_without_getter)


def _preferred_library(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if any(value is not None for value in (*args, *kwargs.values())):
        world.heap.refuse("SFX103", "changes the library that torch prefers for an operation")
    return ABSENT


for _prefer in compat.PREFERRED_LIBRARIES:
    registry.intercept(_prefer)(_preferred_library)


@registry.intercept(compat.MULTITHREADING)
def _multithreading(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answers as in eager: a capture runs the backward on its own thread."""
    if args or kwargs:
        return ABSENT
    world.queries.note(compat.MULTITHREADING, args, kwargs, False)
    return world.queries.now[compat.MULTITHREADING]


@registry.intercept(compat.SET_MULTITHREADING)
def _set_multithreading(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Notes the setting, which is an effect at the end of the step if it is another than at its start."""
    _multithreading(world, (), {})
    captures = compat.MULTITHREADING()
    world.guarded(compat.SET_MULTITHREADING, args, kwargs)
    world.queries.now[compat.MULTITHREADING] = compat.MULTITHREADING()
    compat.SET_MULTITHREADING(captures)


@registry.intercept(torch.set_default_device)
def _set_default_device(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuses to put a device below the function modes around the step, which the capture has taken off the stack."""
    if world.functions.around:
        world.heap.refuse("SFX111", "sets the default device inside a TorchFunctionMode")
    return ABSENT


@registry.intercept(compat.MAKE_WRAPPER)
def _make_wrapper(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Makes a wrapper as eager does; its storage is empty, so nothing is recorded."""
    cls = args[0]
    made = f"makes a {cls.__qualname__}, a tensor subclass"
    if not compat.is_wrapper_class(cls):
        world.heap.refuse("SFX109", made)
    if not compat.has_plain_functions(cls):
        world.heap.shown.begin(made)
    given = {**dict(zip(compat.WRAPPER_LAYOUT, args[1:], strict=False)), **kwargs}
    if compat.has_own_layout(given) or given.get("layout") not in (None, torch.strided):
        world.heap.refuse("SFX109", f"{made} that computes its sizes, device or layout itself")
    return world.guarded(compat.MAKE_WRAPPER, args, kwargs)


@registry.intercept(compat.CORRECT_ALIASING)
def _correct_aliasing(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs torch's own function on shadows: it gives wrappers the storage of others, past the dispatcher."""
    return world.guarded(compat.CORRECT_ALIASING, args, kwargs)


@registry.intercept(compat.DISABLES_DISPATCH)
def _disable_dispatch(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuses to disable the dispatcher's Python, which records the graph."""
    world.heap.refuse("SFX111", "disables __torch_dispatch__")


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
