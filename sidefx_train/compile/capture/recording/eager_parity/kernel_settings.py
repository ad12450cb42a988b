"""Settings of torch that kernels read when they run: a graph runs with those of the moment when it is called.

So an operation is recorded only while they are those of the step's start. Changed ones are kept as effects of the part
before a graph break, and the part behind it starts with them. Only the default dtype may change: an operation that
makes a tensor of it is recorded with the dtype.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from sidefx_train import torch_compat as compat
from sidefx_train.errors import Unsupported

_KNOWN = ("aten", "prims")
"""Libraries whose operators say in their schemas and tags what their dtype is."""
_NEVER_READ = ("sidefx", "c10d", "_c10d_functional", "c10d_functional")
"""Libraries none of whose operators reads the default dtype."""


def check_settings(settings: compat.KernelSettings, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses an operation that the step computes with other settings than those that it started with.

    Raises:
        Unsupported: the kernel may compute something else when the graph runs.
    """

    def devices() -> set[str]:
        chosen = kwargs.get("device")
        found = [tensor.device for tensor in _tensors(args, kwargs)] or [torch.device("cpu")]
        return {device.type for device in (found if chosen is None else [*found, torch.device(chosen)])}

    if func.is_view or func in compat.READS:
        return
    changed = settings.changed(devices, torch.Tag.pointwise in func.tags)
    if changed is not None:
        _refuse(func, changed)


def reads_dtype(settings: compat.KernelSettings, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns True if an operation makes a tensor of the default dtype, and that is not the one of the step's start.

    Raises:
        Unsupported: another library's operator may read the default dtype.
    """
    if not settings.other_dtype() or kwargs.get("dtype") is not None or func.is_view or func in compat.READS:
        return False
    if any(_of_floats(tensor) for tensor in _tensors(args, kwargs)) or func.namespace in _NEVER_READ:
        return False
    if func.namespace not in _KNOWN:
        _refuse(func, "the default dtype")
    with compat.no_recording():
        made = func(*args, **kwargs)
    return any(_of_floats(tensor) for tensor in _tensors(made))


def with_dtype(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls an operation that makes a tensor of the default dtype such that it no longer reads it.

    Raises:
        Unsupported: it takes no dtype and does not convert its arguments to the one of its result.
    """
    dtype = torch.get_default_dtype()
    if any(argument.name == "dtype" for argument in func._schema.arguments):
        return func(*args, **{**kwargs, "dtype": dtype})
    if torch.Tag.pointwise not in func.tags:
        _refuse(func, "the default dtype")

    def converted(value: Any) -> Any:
        return torch.ops.aten._to_copy.default(value, dtype=dtype) if isinstance(value, torch.Tensor) else value

    return func(*pytree.tree_map(converted, args), **pytree.tree_map(converted, kwargs))


def _refuse(func: Any, changed: str) -> NoReturn:
    raise Unsupported("SFX111", f"computes {func} while the step has a setting of torch changed: {changed}")


def _tensors(*values: Any) -> list[torch.Tensor]:
    return [value for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]


def _of_floats(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
