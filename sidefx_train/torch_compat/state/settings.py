"""Torch's global settings: what they are, what sets them, and which of them kernels read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from sidefx_train.torch_compat.state.modes import default_devices, enter_devices

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
class Settings:
    """Torch's global settings, with the devices of the ``torch.device`` contexts that the thread is in.

    Attributes:
        dtype: default dtype.
        deterministic: deterministic algorithms are used; an operator that has none only warns.
        precision: of matrix products in float32.
        threads: number of threads of an operator.
        switches: answers of the getters of :func:`switches`.
        devices: stack of function modes, as :func:`default_devices` describes it.
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
        answers = tuple(ask() for ask, _ in switches())
        dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
        current = torch.utils._device.CURRENT_DEVICE
        return cls(dtype, deterministic, _matmul_precision(), threads, answers, default_devices(), current)

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
        for (ask, give), value in zip(switches(), self.switches, strict=True):
            if ask() != value:
                give(value)
        enter_devices(now.devices, self.devices)
        torch.utils._device.CURRENT_DEVICE = self.current


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # the program has set it with another function, whose settings are switches
        return ""


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

    def changed(self, devices: Callable[[], set[str]], pointwise: bool = False) -> str | None:
        """Returns the name of a setting that kernels read and that has changed.

        Args:
            devices: returns the types of the devices whose kernels are meant.
            pointwise: each element is computed on its own: no kernel asks for determinism or the precision of products.
        """
        for kind, before in self._values[1:] if pointwise else self._values:
            if before != [ask() for ask in _read_by_kernels(kind)] and (not kind or kind in devices()):
                asked = zip(_read_by_kernels(kind), before, strict=True)
                return next(setting_name(ask) for ask, value in asked if ask() != value)
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
    asks = [ask for ask, _ in switches() if not decided.search(setting_name(ask))]
    asks = [ask for ask in asks if isinstance(ask, partial) or ask.__name__.startswith("_get_")]
    if kind == "cuda":
        return tuple(ask for ask in asks if of_cuda.search(setting_name(ask)))
    others = (ask for ask in asks if not of_cuda.search(setting_name(ask)))
    return (torch.get_num_threads, *(ask for ask in others if ask not in _read_by_kernels("")))


def setting_name(ask: Any) -> str:
    if isinstance(ask, partial):
        return f"fp32_precision of {ask.args[0]} {ask.args[1]}"
    return str(ask.__name__.removeprefix("_").removeprefix("get_"))


@cache
def switches() -> tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...]:
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
    if fn is torch.set_autocast_dtype:
        return tuple((torch.get_autocast_dtype, (kind,)) for kind in ("cpu", "cuda"))
    if fn in _setters() or str(getattr(fn, "__module__", "")).startswith("torch.backends"):
        return tuple((ask.func, ask.args) if isinstance(ask, partial) else (ask, ()) for ask, _ in switches())
    return ()


@cache
def _setters() -> frozenset[Any]:
    """Returns the functions of torch's C library that set one of :func:`switches`."""
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
"""Setters beyond those of :func:`switches` whose effects are followed, or that only name or mark something."""
