"""Torch's thread-wide settings: their guard, their restoration, and ambient modes that are not captured."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, partial
from threading import get_ident
from typing import Any

import torch
from torch.autograd import forward_ad
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

PRINT_OPTIONS = type(torch._tensor_str.PRINT_OPTS)
"""Class of the object that says how tensors are printed."""

PREFERRED_LIBRARIES = tuple(
    function
    for function in (
        getattr(torch.backends.cuda, f"preferred_{kind}_library", None) for kind in ("linalg", "blas", "rocm_fa")
    )
    if function is not None
)
"""Functions that set the library of an operation if they are given one; asking for it may load a library."""

MULTITHREADING = torch._C._is_multithreading_enabled
SET_MULTITHREADING = torch._C._set_multithreading_enabled
"""Whether the backward runs on threads of its own; a capture forbids that for itself."""


@dataclass(frozen=True)
class AutocastState:
    """The autocast regions that the thread is in.

    Attributes:
        casts: for each kind of device whether autocast is on, and the dtype that it casts to.
        cached: casts of weights are cached.
        depth: number of regions.
    """

    casts: tuple[tuple[str, bool, torch.dtype], ...]
    cached: bool
    depth: int

    @classmethod
    def now(cls) -> AutocastState:
        casts = tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
        )
        return cls(casts, torch.is_autocast_cache_enabled(), _autocast_nesting())

    def restore(self) -> None:
        """Makes this the state of the thread; drops the cached casts if no region is left."""
        left = self.depth == 0 and _autocast_nesting() > 0
        _nest_autocast(self.depth)
        for kind, enabled, dtype in self.casts:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.cached)
        if left:
            torch.clear_autocast_cache()


@dataclass(frozen=True)
class Settings:
    """Torch's global settings, with the devices of the ``torch.device`` contexts that the thread is in.

    Attributes:
        dtype: default dtype.
        deterministic: deterministic algorithms are used; an operator that has none only warns.
        precision: of matrix products in float32.
        threads: number of threads of an operator.
        switches: answers of the getters of :func:`_switches`.
        devices: stack of function modes, as :func:`_default_devices` describes it.
        current: the innermost of the devices, if there is one.
    """

    dtype: torch.dtype
    deterministic: tuple[bool, bool]
    precision: str
    threads: int
    switches: tuple[Any, ...]
    devices: tuple[Any, ...]
    current: torch.device | None

    @classmethod
    def now(cls) -> Settings:
        deterministic = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        switches = tuple(ask() for ask, _ in _switches())
        dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
        current = torch.utils._device.CURRENT_DEVICE
        return cls(dtype, deterministic, _matmul_precision(), threads, switches, _default_devices(), current)

    def restore(self) -> None:
        """Makes these the settings, except for function modes other than devices that were entered since."""
        now = Settings.now()
        if now == self:
            return
        if now.dtype != self.dtype:
            torch.set_default_dtype(self.dtype)
        if now.deterministic != self.deterministic:
            torch.use_deterministic_algorithms(self.deterministic[0], warn_only=self.deterministic[1])
        if now.precision != self.precision:
            torch.set_float32_matmul_precision(self.precision)
        if now.threads != self.threads:
            torch.set_num_threads(self.threads)
        for (ask, give), value in zip(_switches(), self.switches, strict=True):
            if ask() != value:
                give(value)
        _enter_devices(now.devices, self.devices)
        torch.utils._device.CURRENT_DEVICE = self.current


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # the program has set it with another function, whose settings are switches
        return ""


def _enter_devices(now: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
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
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Context with another default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class KernelSettings:
    """The settings that kernels read when they run, as they were when this was created."""

    def __init__(self) -> None:
        self._values = [(kind, [ask() for ask in _read_by_kernels(kind)]) for kind in ("", "cpu", "cuda")]
        self._dtype = torch.get_default_dtype()

    def changed(self, devices: Callable[[], set[str]]) -> str | None:
        """Returns the name of a setting that kernels read and that has changed.

        Args:
            devices: returns the types of the devices whose kernels are meant.
        """
        for kind, before in self._values:
            if before != [ask() for ask in _read_by_kernels(kind)] and (not kind or kind in devices()):
                asked = zip(_read_by_kernels(kind), before, strict=True)
                return next(_setting_name(ask) for ask, value in asked if ask() != value)
        return None

    def other_dtype(self) -> bool:
        """Returns True if the default dtype has changed."""
        return torch.get_default_dtype() != self._dtype


@cache
def _read_by_kernels(kind: str) -> tuple[Callable[[], Any], ...]:
    """Returns getters of settings that only kernels of this kind of device read, or those of all for ``""``."""
    if not kind:
        deterministic = torch.are_deterministic_algorithms_enabled, torch.is_deterministic_algorithms_warn_only_enabled
        fills = getattr(torch._C, "_get_deterministic_fill_uninitialized_memory", None)
        return (*deterministic, _matmul_precision, *([] if fills is None else [fills]))
    of_cuda = re.compile("cuda|cudnn|cublas|miopen|rocm|sm_carveout")
    decided = re.compile("sdp|autograd|backcompat|dtensor|executor|warn|view_replay|sparse")
    asks = [ask for ask, _ in _switches() if not decided.search(_setting_name(ask))]
    asks = [ask for ask in asks if isinstance(ask, partial) or ask.__name__.startswith("_get_")]
    if kind == "cuda":
        return tuple(ask for ask in asks if of_cuda.search(_setting_name(ask)))
    others = (ask for ask in asks if not of_cuda.search(_setting_name(ask)))
    return (torch.get_num_threads, *(ask for ask in others if ask not in _read_by_kernels("")))


def _setting_name(ask: Any) -> str:
    if isinstance(ask, partial):
        return f"fp32_precision of {ask.args[0]} {ask.args[1]}"
    return str(ask.__name__.removeprefix("_").removeprefix("get_"))


class GlobalState:
    """Torch's current thread-wide state: grad mode, autocast, determinism, default dtype and device, threads, modes."""

    def __init__(self) -> None:
        _no_replays_under_dynamo()
        self._settings = torch._C._dynamo.guards.GlobalStateGuard()
        self.overriding = torch._C._get_torch_function_state()
        self._devices = _default_devices()
        self._contexts = _entered_contexts()
        self._switches = [ask() for ask, _ in _switches()]

    @property
    def under_function_modes(self) -> bool:
        """True if there were function modes other than devices."""
        return any(not isinstance(mode, torch.device) for mode in self._devices)

    def changed_settings(self) -> list[str]:
        """Returns the settings that have changed, and the kinds of torch contexts that have not been left."""
        with _function_state(self.overriding):
            found = [] if self._settings.check() else [f"of {self._settings.reason()}"]
        found += [] if _default_devices() == self._devices else ["the default device, or a mode of functions"]
        asked = zip(_switches(), self._switches, strict=True)
        found += [_setting_name(ask) for (ask, _), before in asked if ask() != before]
        return found if _entered_contexts() == self._contexts else [*found, "an autograd context"]

    def check(self) -> bool:
        """Returns True if the state is unchanged, and no mode of the caller observes tensor operations."""
        return (
            self._settings.check()
            and not torch._C._len_torch_dispatch_stack()
            and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            and forward_ad._current_level < 0
            and (
                _default_devices() == self._devices
                if torch._C._len_torch_function_stack() or _TAKEN
                else not self._devices
            )
        )


@contextmanager
def _function_state(state: Any) -> Iterator[None]:
    """Context in which torch calls ``__torch_function__`` as it did: captures change that for their own code."""
    before = torch._C._get_torch_function_state()
    torch._C._set_torch_function_state(state)
    try:
        yield
    finally:
        torch._C._set_torch_function_state(before)


@cache
def _no_replays_under_dynamo() -> None:
    """Makes no entry fit while torch's own compiler traces a compiled step (as ``torch.cond`` does).

    It is registered once, so that replays need not check.
    """
    substitute = torch.compiler.substitute_in_graph(GlobalState.check, skip_signature_check=True)
    substitute(lambda self: False)


@cache
def _switches() -> tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...]:
    """Returns getters and setters of torch's global settings beyond those that :class:`GlobalState` compares."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    known = _all_switches()
    before = [ask() for ask, _ in known]
    with FakeTensorMode():  # a mode of torch changes some for itself
        return tuple(pair for pair, answer in zip(known, before, strict=True) if pair[0]() == answer)


@cache
def _all_switches() -> tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...]:
    """Returns them with those that torch changes while it records; no module of torch is imported for it."""
    names = [name[5:] for name in dir(torch._C) if name.startswith("_set_")]
    pairs = [(f"{prefix}{name}", f"_set_{name}") for name in names for prefix in ("_get_", "_is_", "_")]
    kernels = ("cudnn", "flash", "math", "mem_efficient", "overrideable", "fa3")
    pairs += [(f"_get_{name}_sdp_enabled", f"_set_sdp_use_{name}") for name in kernels]
    pairs.append(("_debug_only_are_vmap_fallback_warnings_enabled", "_debug_only_display_vmap_fallback_warnings"))
    found = [
        (getattr(torch._C, ask), getattr(torch._C, give))
        for ask, give in pairs
        if not _KEPT.search(ask) and hasattr(torch._C, ask) and hasattr(torch._C, give)
    ]
    return (*((ask, give) for ask, give in [*found, *_precisions()] if _answers(ask)), *_reductions())


def _spread(give: Callable[..., Any], values: tuple[Any, ...]) -> None:
    give(*values)


def _precisions() -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Yields getters and setters of the precisions in float32; one that is not set answers as the more general one."""
    ask, give = (
        getattr(torch._C, "_get_fp32_precision_getter", None),
        getattr(torch._C, "_set_fp32_precision_setter", None),
    )
    if ask is None or give is None:
        return
    for backend in ("generic", "mkldnn", "cuda"):
        for operation in ("all", "conv", "rnn", "matmul") if backend != "generic" else ("all",):
            yield partial(ask, backend, operation), partial(give, backend, operation)


def _reductions() -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Yields getters and setters of settings of two flags each."""
    for dtype in ("fp16", "bf16"):
        name = f"cublas_allow_{dtype}_reduced_precision_reduction"
        ask, give = getattr(torch._C, f"_get_{name}", None), getattr(torch._C, f"_set_{name}", None)
        if ask is not None and give is not None and type(ask()) is tuple:
            yield ask, partial(_spread, give)


_KEPT = re.compile(
    "default|function_state|trac|dispatch|metaclass|preferred|thread|float32_matmul|metadata|deterministic_algorithms"
    "|grad_enabled|only_lift"
)
"""Settings that are kept otherwise, or whose getters may load a library."""


def _answers(ask: Callable[[], Any]) -> bool:
    try:
        return isinstance(ask(), (bool, int, str, list))
    except (RuntimeError, TypeError):  # it requires arguments, or a library that this build lacks
        return False


def answers_changed_by_captures() -> dict[Any, Any]:
    """Returns getters whose result a capture changes, with their results before it."""
    return {MULTITHREADING: MULTITHREADING()}


GRAD_LAYOUT = getattr(torch._C, "_is_grad_layout_enforcement_enabled", None)
"""Whether gradients get the memory layout of their leaves, in recent torch."""


def settings_of(fn: Any) -> tuple[tuple[Callable[..., Any], tuple[str, ...]], ...]:
    """Returns what a function of torch reads or sets beside its arguments, as getters with their arguments.

    That is the allowed attention kernels, on which it branches while it is recorded, or any setting: one that is set to
    the value that it has is an effect where it has another.
    """
    if getattr(fn, "__name__", "") in ("scaled_dot_product_attention", "multi_head_attention_forward"):
        names = ("flash", "math", "mem_efficient", "cudnn")
        return tuple((getattr(torch._C, f"_get_{name}_sdp_enabled"), ()) for name in names)
    if fn in _setters() or str(getattr(fn, "__module__", "")).startswith("torch.backends"):
        return tuple((ask.func, ask.args) if isinstance(ask, partial) else (ask, ()) for ask, _ in _switches())
    return ()


@cache
def _setters() -> frozenset[Any]:
    """Returns the functions of torch's C library that set one of :func:`_switches`."""
    setters = (give for _, give in _all_switches())
    return frozenset(
        give if not isinstance(give, partial) else give.args[0] if give.func is _spread else give.func
        for give in setters
    )


def without_getters() -> tuple[Any, ...]:
    """Returns the functions that set what cannot be asked for."""
    names = (name for name in dir(torch._C) if re.match("_set_|_jit_(set|override|texpr_set)_", name))
    setters = {getattr(torch._C, name) for name in names} - _setters()
    return (
        torch.set_flush_denormal,
        torch.set_num_interop_threads,
        *(setter for setter in setters if not _FOLLOWED.fullmatch(setter.__name__)),
    )


_FOLLOWED = re.compile(
    r"_set_(default_(dtype|tensor_type)|deterministic_algorithms|dispatch_mode|float32_matmul_precision|multithreading.*"
    r"|(fwd_)?grad_enabled|.*torch_function.*|tracing_state|meta_in_tls_dispatch_include|conj|neg|tensor_metadata"
    r"|thread_name|generator_metaclass|onednn_allow_tf32)"
)
"""Setters beyond those of :func:`_switches` whose effects are followed, or that only name or mark something."""


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


def _default_devices() -> tuple[Any, ...]:
    """Returns the stack of function modes: devices of ``torch.device`` contexts, and the classes of other modes."""
    return tuple(mode.device if type(mode) is DeviceContext else type(mode) for mode in function_modes())


def function_modes() -> tuple[Any, ...]:
    """Returns the function modes of the thread, the innermost last, also while a capture has taken them away."""
    taken = _TAKEN.get(get_ident()) if _TAKEN else None
    if taken is not None:
        return taken
    return tuple(map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack())))


_TAKEN: dict[int, tuple[Any, ...]] = {}
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
    if get_ident() in _TAKEN or all(type(mode) is DeviceContext for mode in modes):
        yield
        return
    _TAKEN[get_ident()] = modes
    for _ in modes:
        torch._C._pop_torch_function_stack()
    try:
        yield
    finally:
        for mode in modes:
            torch._C._push_on_torch_function_stack(mode)
        del _TAKEN[get_ident()]


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
        with _function_state(state.overriding):
            return function(*args)

    return called


def default_device_cpu() -> Any:
    """Returns a context in which new tensors are on the CPU; a no-op, which is faster, if they are anyway."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


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


def _autocast_nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _nest_autocast(depth: int) -> None:
    """Makes the thread ``depth`` autocast regions deep: torch drops its casts of weights when it leaves the last."""
    while _autocast_nesting() > depth:
        torch.autocast_decrement_nesting()
    while _autocast_nesting() < depth:
        torch.autocast_increment_nesting()


@contextmanager
def autocast_depth_kept() -> Iterator[None]:
    """Context that leaves the autocast regions which other code has entered in it, and not left."""
    depth = _autocast_nesting()
    try:
        yield
    finally:
        _nest_autocast(depth)


def dispatch_mode_active() -> bool:
    """Returns True inside a dispatch mode of the program."""
    return bool(torch._C._len_torch_dispatch_stack())


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

autocast_enabled = torch._C._is_any_autocast_enabled


def autocast_off() -> AbstractContextManager[Any]:
    """Returns a context with autocast off for all devices."""
    return torch._C._DisableAutocast()  # type: ignore[no-any-return]


@contextmanager
def no_autocast_cache() -> Iterator[None]:
    """Context whose autocast copies of weights are not cached beyond it."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def without_autocast(function: Any, *args: Any) -> Any:
    """Calls ``function`` with autocast off: the captured graph contains the casts already."""
    with torch._C._DisableAutocast():
        return function(*args)
