"""Wrapper subclasses: tensor classes with a ``__torch_dispatch__`` of their own, whose instances hold other tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint as _checkpoint
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

from sidefx_train.torch_compat.recording import no_recording

MAKE_WRAPPER = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
CORRECT_ALIASING = return_and_correct_aliasing
DISABLES_DISPATCH = torch._C._DisableTorchDispatch
CHECKPOINT_MODES: tuple[type, ...] = tuple(
    getattr(_checkpoint, name)
    for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    if hasattr(_checkpoint, name)
)
"""The modes of selective activation checkpointing, for a forward and for its repetition."""
_LAYOUT: tuple[Any, ...] = (
    torch.Tensor.size,
    torch.Tensor.stride,
    torch.Tensor.storage_offset,
    torch.Tensor.device.__get__,
    torch.Tensor.layout.__get__,
)
NO_OVERRIDE = torch._C._disabled_torch_function_impl
"""``__torch_function__`` of classes that override nothing: torch gives it to classes with a ``__torch_dispatch__``."""
WRAPPER_LAYOUT = (
    "size", "strides", "storage_offset", "memory_format", "dtype", "layout", "device", "pin_memory", "requires_grad",
    "dispatch_sizes_strides_policy", "dispatch_device", "dispatch_layout", "_extra_dispatch_keys", "storage_size",
)  # fmt: skip
"""Arguments of :data:`MAKE_WRAPPER` after the class, in order."""
_OWN_LAYOUT = ("dispatch_sizes_strides_policy", "dispatch_device", "dispatch_layout", "storage_size")


@functools.lru_cache(maxsize=256)
def is_wrapper_class(cls: Any) -> bool:
    """Returns True for classes of tensors whose operators are Python code, other than ``DTensor`` and torch's fakes."""
    if not issubclass(cls, torch.Tensor) or issubclass(cls, FakeTensor) or any(map(_is_dtensor_class, cls.__mro__)):
        return False
    return cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _is_dtensor_class(cls: type) -> bool:
    return cls.__name__ == "DTensor" and cls.__module__.startswith("torch.distributed.")


def is_wrapper(value: Any) -> bool:
    """Returns True for instances of those classes."""
    cls: Any = type(value)
    return issubclass(cls, torch.Tensor) and is_wrapper_class(cls)  # the cache would keep any other class alive


def has_plain_functions(cls: Any) -> bool:
    """Returns True if a tensor class handles functions as ``torch.Tensor`` does, or not at all."""
    found = cls.__torch_function__
    return found is NO_OVERRIDE or getattr(found, "__func__", None) is torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]


def has_own_layout(given: dict[str, Any]) -> bool:
    """Returns True if a wrapper created with these arguments answers for its sizes, device or layout in Python."""
    return any(given.get(name) for name in _OWN_LAYOUT)


class _AskedInPython(Exception):
    """Leaves an operator before the Python of a tensor subclass runs."""


class _Asked(TorchDispatchMode):
    """Raises at every operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _AskedInPython


def answers_in_python(wrapper: torch.Tensor) -> bool:
    """Returns True if a wrapper's sizes, strides, device or layout are computed by its ``__torch_dispatch__``."""
    try:
        with no_recording(), torch._C.DisableTorchFunctionSubclass(), _Asked():
            for read in _LAYOUT:
                read(wrapper)
    except _AskedInPython:
        return True
    return False


class ForwardingMode(TorchDispatchMode):
    """Calls a function with every operator.

    Args:
        run: called with the operator, the classes of its arguments, and the arguments.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, types, args, kwargs or {})


def make_wrapper(
    cls: type,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool = False,
) -> Any:
    """Returns a wrapper without attributes; none of its class's Python runs."""
    return MAKE_WRAPPER(
        cls,
        shape,
        strides=strides,
        storage_offset=offset,
        dtype=dtype,
        layout=torch.strided,
        device=device,
        requires_grad=requires_grad,
    )


class _Edge(torch.autograd.Function):
    """A function without operators, whose node leads to that of its argument."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None


def node_of_leaf(wrapper: torch.Tensor) -> Any:
    """Returns the ``AccumulateGrad`` node of a wrapper; torch's own way calls an operator of it."""
    with torch.enable_grad():
        return _Edge.apply(wrapper).grad_fn.next_functions[0][0]


def count_writes(tensor: torch.Tensor, writes: int) -> None:
    """Increments a tensor's version counter."""
    for _ in range(writes):
        torch.autograd.graph.increment_version(tensor)
