"""Zeros without memory, which forward-mode differentiation makes of tangents that are missing.

Torch marks such a tensor by a dispatch key and computes with it by rules: a product is zero whatever the other factor
is, a sum is a copy of the other term. Views of a marked fake tensor are made by a kernel that leaves fake tensors
aside. So a capture keeps no mark on the tensor: the zeros are ordinary ones of the graph, and the rules are applied to
what shares memory with them.
"""

from __future__ import annotations

from typing import Any

import torch

from sidefx_train import torch_compat as compat

aten = torch.ops.aten
_MAKES = aten._efficientzerotensor.default
_PRODUCTS = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.linalg_cross.default})
_SUMS = {aten.add.Tensor: 1, aten.sub.Tensor: -1}


class ZeroTensors:
    """The zeros of one capture."""

    def __init__(self) -> None:
        self._known: dict[int, torch.Tensor] = {}  # by storage, kept alive: the storage is not another one's

    def concerns(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """Returns True for an operator that makes zeros, or that torch computes by a rule for them."""
        if func is _MAKES:
            return True
        if not self._known:
            return False
        if func._schema.is_mutable:  # what it writes to is zero no more
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Tensor):
                    self._known.pop(compat.storage_id(value), None)
            return False
        if func is aten.div.Tensor:
            return self._is_zero(args[0]) and not self._is_zero(args[1])
        return (func in _PRODUCTS or func in _SUMS) and any(map(self._is_zero, args[:2]))

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        """Returns the result of such an operator."""
        if func is _MAKES:
            return self._new(*args, **kwargs)
        layout = _layout(func, args, kwargs)
        zero = self._is_zero(args[0])
        if func not in _SUMS or (zero and self._is_zero(args[1])):
            return self._new(list(layout.shape), dtype=layout.dtype, device=layout.device)
        made = aten._to_copy.default((args[1] if zero else args[0]).expand(layout.shape), dtype=layout.dtype)
        factor = _SUMS[func] * kwargs.get("alpha", 1) if zero else 1
        return made if type(factor) is int and factor == 1 else made.mul(factor)

    def _is_zero(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and compat.storage_id(value) in self._known

    def _new(self, size: Any, **kwargs: Any) -> torch.Tensor:
        made = aten.zeros.default(size, **kwargs)
        self._known[compat.storage_id(made)] = made
        return made


def _layout(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """Returns a fake tensor like an operator's result."""
    with compat.no_recording():
        return func(*args, **kwargs)  # type: ignore[no-any-return]
