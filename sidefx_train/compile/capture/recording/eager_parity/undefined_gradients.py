"""Derivatives of attention for an undefined gradient: undefined, too, in eager's kernels.

The fake kernels return tensors. An autograd node gets an undefined gradient where a later one gives none.
"""

from __future__ import annotations

from typing import Any

import torch

from sidefx_train.compile.common.sentinels import ABSENT

aten = torch.ops.aten

_DERIVATIVES = frozenset(
    getattr(aten, name)
    for name in (
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_efficient_attention_backward",
    )
)


def undefined(func: Any, args: Any) -> Any:
    """Returns the undefined results of a call with an undefined gradient; :data:`ABSENT` for other calls."""
    if func.overloadpacket in _DERIVATIVES and args[0] is None:
        return (None,) * len(func._schema.returns)
    return ABSENT
