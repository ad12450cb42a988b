"""Torch's thread-wide state: its guard, its restoration, and ambient modes that are not captured."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from sidefx_train.torch_compat.state.autocast import AutocastState
from sidefx_train.torch_compat.state.modes import (
    TAKEN,
    default_devices,
    dispatch_mode_active,
    function_modes,
    function_state,
)
from sidefx_train.torch_compat.state.python_kernels import overriding_kernel
from sidefx_train.torch_compat.state.settings import Settings, setting_name, switches


class GlobalState:
    """Torch's current thread-wide state: grad mode, autocast, determinism, default dtype and device, threads, modes."""

    def __init__(self) -> None:
        _no_replays_under_dynamo()
        self._settings = torch._C._dynamo.guards.GlobalStateGuard()
        self.overriding = torch._C._get_torch_function_state()
        self._devices = default_devices()
        self._contexts = _entered_contexts()
        self._switches = [ask() for ask, _ in switches()]

    @property
    def under_function_modes(self) -> bool:
        """True if there were function modes other than devices."""
        return any(not isinstance(mode, torch.device) for mode in self._devices)

    def changed_settings(self) -> list[str]:
        """Returns the settings that have changed, and the kinds of torch contexts that have not been left."""
        with function_state(self.overriding):
            found = [] if self._settings.check() else [f"of {self._settings.reason()}"]
        found += [] if default_devices() == self._devices else ["the default device, or a mode of functions"]
        asked = zip(switches(), self._switches, strict=True)
        found += [setting_name(ask) for (ask, _), before in asked if ask() != before]
        return found if _entered_contexts() == self._contexts else [*found, "an autograd context"]

    def check(self) -> bool:
        """Returns True if the state is unchanged, and neither a mode of the caller nor a kernel of the program observes
        tensor operations."""
        return (
            self._settings.check()
            and not torch._C._len_torch_dispatch_stack()
            and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            and forward_ad._current_level < 0
            and not overriding_kernel()
            and (
                default_devices() == self._devices
                if torch._C._len_torch_function_stack() or TAKEN
                else not self._devices
            )
        )


@cache
def _no_replays_under_dynamo() -> None:
    """Makes no entry fit while torch's own compiler traces a compiled step (as ``torch.cond`` does).

    It is registered once, so that replays need not check.
    """
    substitute = torch.compiler.substitute_in_graph(GlobalState.check, skip_signature_check=True)
    substitute(lambda self: False)


def _entered_contexts() -> tuple[Any, ...]:
    """Returns the entered torch contexts, except those that set one of the common settings."""
    return (
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled(),
        forward_ad._current_level,
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
        torch._C._functorch.peek_interpreter_stack() is None,
        torch._C._is_fwd_grad_enabled(),
        torch.utils._device.CURRENT_DEVICE,  # of set_default_device
    )


def without_functions(replay: Callable[..., Any], state: GlobalState, missed: Any) -> Callable[..., Any]:
    """Returns ``replay`` such that no ``__torch_function__`` is asked meanwhile: the capture asked them."""

    def replayed(*args: Any) -> Any:
        before = torch._C._get_torch_function_state()
        if before != state.overriding:
            return missed
        torch._C._set_torch_function_state(torch._C._TorchFunctionState.ALL_DISABLED)
        try:
            return replay(*args)
        finally:
            torch._C._set_torch_function_state(before)

    return replayed


def with_functions(function: Callable[..., Any], state: GlobalState) -> Callable[..., Any]:
    """Returns ``function`` such that ``__torch_function__`` is asked as it was when the state was noted."""

    def called(*args: Any) -> Any:
        with function_state(state.overriding):
            return function(*args)

    return called


def _drop_guards_of_torch(error: BaseException | None) -> None:
    """Clears the local variables of torch's own functions that raised an error or one of its causes.

    Some hold a guard on the thread's dispatch keys without a ``finally`` (``torch._tensor_str._str``). It sets the keys
    of its own scope when the last reference to the traceback is dropped, whenever that is.
    """
    done: set[int] = set()
    while error is not None and id(error) not in done:
        done.add(id(error))
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if str(frame.f_globals.get("__name__")).partition(".")[0] == "torch":
                with suppress(RuntimeError):  # it is still running
                    frame.clear()
        error = error.__cause__ or error.__context__


@contextmanager
def restoring_state() -> Iterator[None]:
    """Context that restores torch's thread-wide state, whatever a capture that stopped halfway has changed."""
    grad, settings, forward = torch.is_grad_enabled(), Settings.now(), torch._C._is_fwd_grad_enabled()
    anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    level = forward_ad._current_level
    overriding = torch._C._get_torch_function_state()
    autocast, functions = AutocastState.now(), torch._C._len_torch_function_stack()
    disabled = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    keys = torch._C._ForceDispatchKeyGuard(
        torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    )
    keys.__enter__()
    try:
        yield
    except BaseException as error:
        _drop_guards_of_torch(error)
        raise
    finally:
        while torch._C._functorch.peek_interpreter_stack() is not None:
            torch._C._functorch.pop_dynamic_layer_stack()
        keys.__exit__(None, None, None)
        while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() != disabled:
            torch._C._autograd._saved_tensors_hooks_enable()
            if disabled is not None:
                torch._C._autograd._saved_tensors_hooks_disable(disabled)
        torch._C._set_torch_function_state(overriding)
        while torch._C._len_torch_function_stack() > functions:
            torch._C._pop_torch_function_stack()
        autocast.restore()
        torch.set_grad_enabled(grad)
        torch.set_anomaly_enabled(*anomaly)
        torch._C._set_fwd_grad_enabled(forward)
        settings.restore()
        if forward_ad._current_level > level:
            forward_ad.exit_dual_level(level=forward_ad._current_level)


def unsupported_ambient_mode(functions: bool) -> str | None:
    """Describes an ambient mode around a step that must observe its operations as they happen.

    Args:
        functions: the step can be captured under function modes.
    """
    modes = function_modes()
    classes = dict.fromkeys(map(type, modes))
    if classes and list(classes) != [DeviceContext]:
        mode = next(mode for mode in modes if type(mode) is not DeviceContext)
        if not functions or DeviceContext in classes or torch._C._is_torch_function_all_disabled():
            return f"runs inside {type(mode).__qualname__}, a TorchFunctionMode"
    if dispatch_mode_active():
        return "runs inside a TorchDispatchMode"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "runs inside hooks on saved tensors"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "runs inside a transform of torch.func"
    if torch._C._get_tracing_state() is not None:
        return "is traced by torch.jit"
    if forward_ad._current_level >= 0:
        return "runs inside a level of forward-mode differentiation: dual tensors carry tangents past a graph"
    return None


set_grad_enabled = torch._C._set_grad_enabled
