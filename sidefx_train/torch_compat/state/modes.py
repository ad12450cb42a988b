"""Function modes and dispatch modes of the thread, and its default device, which is one of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import get_ident
from typing import Any

import torch
from torch.utils._device import DeviceContext

NUMBER_OF_MODES = torch._C._len_torch_dispatch_stack

MODE_AT = torch._C._get_dispatch_stack_at

MODE_OF_TORCH = torch._C._get_dispatch_mode
"""What Python asks of the stack of dispatch modes."""

CHANGES_MODES = (
    torch._C._set_dispatch_mode,
    torch._C._unset_dispatch_mode,
    torch._C._push_on_torch_dispatch_stack,
    torch._C._pop_torch_dispatch_stack,
)
"""What changes that stack."""


def enter_devices(now: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
    """Leaves and enters ``torch.device`` contexts, if the stacks differ in nothing else."""
    same = 0
    while same < min(len(now), len(wanted)) and now[same] == wanted[same]:
        same += 1
    if all(isinstance(each, torch.device) for each in (*now[same:], *wanted[same:])):
        for _ in now[same:]:
            torch.device("cpu").__exit__(None, None, None)
        for device in wanted[same:]:
            device.__enter__()


@contextmanager
def function_state(state: Any) -> Iterator[None]:
    """Context in which torch calls ``__torch_function__`` as it did: captures change that for their own code."""
    before = torch._C._get_torch_function_state()
    torch._C._set_torch_function_state(state)
    try:
        yield
    finally:
        torch._C._set_torch_function_state(before)


def default_devices() -> tuple[Any, ...]:
    """Returns the stack of function modes: devices of ``torch.device`` contexts, and the classes of other modes."""
    return tuple(mode.device if type(mode) is DeviceContext else type(mode) for mode in function_modes())


def function_modes() -> tuple[Any, ...]:
    """Returns the function modes of the thread, the innermost last, also while a capture has taken them away."""
    taken = TAKEN.get(get_ident()) if TAKEN else None
    if taken is not None:
        return taken
    return tuple(map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack())))


TAKEN: dict[int, tuple[Any, ...]] = {}
"""Modes that captures have taken off the stack, by thread."""


class FunctionModeAt:
    """Returns a function mode of the thread when it is called.

    Args:
        index: its place in the stack, from the outermost.
    """

    def __init__(self, index: int) -> None:
        self.index = index

    def __call__(self) -> Any:
        modes = function_modes()
        return modes[self.index] if self.index < len(modes) else None


@contextmanager
def function_modes_taken() -> Iterator[None]:
    """Context in which torch asks none of the function modes around it, unless they are only devices."""
    modes = function_modes()
    if get_ident() in TAKEN or all(type(mode) is DeviceContext for mode in modes):
        yield
        return
    TAKEN[get_ident()] = modes
    for _ in modes:
        torch._C._pop_torch_function_stack()
    try:
        yield
    finally:
        for mode in modes:
            torch._C._push_on_torch_function_stack(mode)
        del TAKEN[get_ident()]


def default_device_cpu() -> Any:
    """Returns a context in which new tensors are on the CPU; a no-op, which is faster, if they are anyway."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def dispatch_mode_active() -> bool:
    """Returns True inside a dispatch mode of the program."""
    return bool(torch._C._len_torch_dispatch_stack())
