"""Operations that write lists of tensors, ``_foreach_add_`` and its kin, as the CPU's kernels do them."""

from __future__ import annotations

from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.errors import Unsupported

_ALIASED_WRITES = frozenset(
    {"add_", "sub_", "mul_", "div_", "copy_", "zero_", "neg_", "abs_", "exp_", "log_", "sqrt_", "rsqrt_", "reciprocal_"}
)
"""Those that take the arguments of the operation on one tensor, in the same order."""


def count_lists(func: Any, args: tuple[Any, ...]) -> None:
    """Moves version counters: kernels count their writes themselves, one for each tensor, and stand-ins have none.

    The fused updates of optimizers (``_fused_adamw_``) are not counted in eager either.
    """
    if writes_lists(func):
        compat.increment_version([written for written in args[0] if not written.is_inference()])


def one_after_another(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """Calls, one for each tensor, where tensors share memory: the order of the writes is to be seen then.

    Each is an operation and its arguments. ``None`` if nothing is shared, or where that is not what eager does.

    Raises:
        Unsupported: autograd gives them histories that do not know of one another.
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
        if len(set(written)) < len(written):  # each gets a new history after all have been written, of what it was then
            stop = Unsupported("SFX107", f"{func} writes, with gradients, to several tensors in one memory")
            stop.whole = True  # what is captured behind it asks for their histories under other versions
            raise stop
        return None
    calls = []
    for i in range(len(args[0])):
        item = [arg[i] if safe_isinstance(arg, (list, tuple)) else arg for arg in args]
        named = {key: arg[i] if safe_isinstance(arg, (list, tuple)) else arg for key, arg in kwargs.items()}
        calls.append((getattr(torch.ops.aten, name), item, named))
    return calls


def writes_lists(func: Any) -> bool:
    """True for ``_foreach_add_`` and its kin."""
    return bool(func._schema.is_mutable) and func._schema.name.startswith("aten::_foreach_")
