"""Operations that write lists of tensors, ``_foreach_add_`` and similar, recorded as CPU kernels execute them."""

from __future__ import annotations

from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.errors import Unsupported

_ALIASED_WRITES = frozenset(
    {"add_", "sub_", "mul_", "div_", "copy_", "zero_", "neg_", "abs_", "exp_", "log_", "sqrt_", "rsqrt_", "reciprocal_"}
)
"""Operations with the same arguments, in the same order, as the operation on one tensor."""


def count_lists(func: Any, args: tuple[Any, ...]) -> None:
    """Increments version counters as eager's kernels do, once for each tensor; fake tensors run no kernels.

    Eager does not increment them for fused optimizer updates (``_fused_adamw_``) either.
    """
    if writes_lists(func):
        compat.increment_version([written for written in args[0] if not written.is_inference()])


def one_after_another(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """Splits the operation into one call per tensor if tensors share storage, where the order of writes matters.

    Returns a list of (operation, arguments, keyword arguments), or ``None`` if nothing is shared or eager does not do
    this.

    Raises:
        Unsupported: autograd would give the tensors independent histories.
    """
    if not writes_lists(func):
        return None
    name = func._schema.name.removeprefix("aten::_foreach_")
    lists = [arg for arg in (*args, *kwargs.values()) if safe_isinstance(arg, (list, tuple))]
    tensors = [t for each in lists for t in each if safe_isinstance(t, torch.Tensor)]
    memory = [compat.storage_id(t) for t in tensors if t.layout is torch.strided and t.device.type == "cpu"]
    if name not in _ALIASED_WRITES or len(memory) < len(tensors) or len(set(memory)) == len(memory):
        return None
    if torch.is_grad_enabled() and any(t.requires_grad for t in args[0]):
        written = [compat.storage_id(t) for t in args[0]]
        if len(set(written)) < len(written):  # autograd builds each new history after all writes, from the final state
            stop = Unsupported("SFX107", f"{func} writes, with autograd on, to several tensors that share storage")
            stop.whole = True  # code after a break would read their histories with other versions
            raise stop
        return None
    calls = []
    for i in range(len(args[0])):
        item = [arg[i] if safe_isinstance(arg, (list, tuple)) else arg for arg in args]
        named = {key: arg[i] if safe_isinstance(arg, (list, tuple)) else arg for key, arg in kwargs.items()}
        calls.append((getattr(torch.ops.aten, name), item, named))
    return calls


def writes_lists(func: Any) -> bool:
    """Returns True for ``_foreach_add_`` and similar operations."""
    return bool(func._schema.is_mutable) and func._schema.name.startswith("aten::_foreach_")
