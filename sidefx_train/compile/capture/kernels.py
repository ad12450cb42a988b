"""Operations that a stand-in takes and the CPU's kernel refuses.

What nothing reads is left out of a graph, and would not raise there.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from sidefx_train import _torch_compat as compat
from sidefx_train.errors import Unsupported

_SCALARS = (bool, int, float, complex, str, type(None), torch.dtype)


def check_kernel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tries an operation on complex numbers or truth values, which many kernels do not know.

    Raises:
        Unsupported: the kernel raises, and so does eager.
    """
    if torch.Tag.pointwise not in func.tags or torch.Tag.nondeterministic_seeded in func.tags:
        return
    given = (*args, *kwargs.values())
    tensors = [arg for arg in given if isinstance(arg, torch.Tensor)]
    special = any(tensor.dtype == torch.bool or tensor.is_complex() for tensor in tensors)
    if not special and not any(type(arg) in (bool, complex) for arg in given):
        return
    if any(tensor.device.type != "cpu" for tensor in tensors) or len(set(map(id, tensors))) < len(tensors):
        return
    if not all(isinstance(arg, torch.Tensor) or type(arg) in _SCALARS for arg in given):
        return
    reason = _refusal(func, tuple(map(_kind, args)), tuple((name, _kind(arg)) for name, arg in kwargs.items()))
    if reason:
        raise Unsupported("SFX102", f"{func} raises: {reason}")


def _kind(arg: Any) -> tuple[str, Any, Any]:
    """What decides on a kernel: a tensor's type and whether it is a number, or a number itself."""
    return ("tensor", arg.dtype, arg.dim() == 0) if isinstance(arg, torch.Tensor) else ("number", type(arg), arg)


def _sample(kind: tuple[str, Any, Any]) -> Any:
    what, cls, value = kind
    return torch.ones(() if value else (1,), dtype=cls) if what == "tensor" else value


@lru_cache(maxsize=1024)
def _refusal(func: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> str:
    """What the kernel says to one element of each tensor; empty if it takes them."""
    with compat.real_world(), torch.no_grad():
        try:
            func(*map(_sample, args), **{name: _sample(kind) for name, kind in kwargs})
        except (RuntimeError, NotImplementedError) as error:
            return str(error).splitlines()[0]
    return ""
