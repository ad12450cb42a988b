"""Derivatives that torch computes differently for fake tensors than for CPU tensors, recorded as in eager.

Transforms of ``torch.func`` wrap tensors, so inside them eager computes derivatives as for fake tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from sidefx_train import torch_compat as compat

aten = torch.ops.aten
_PICKS = ("MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0")
"""Nodes whose gradient goes to selected elements: eager fills it in, for fake tensors torch multiplies by a mask."""
_PRODUCTS = ("ProdBackward0", "ProdBackward1")


def multiplies_picked(func: Any, args: tuple[Any, ...]) -> bool:
    """Returns True for the product with the mask of selected elements, which makes NaN of non-finite gradients."""
    if func is not aten.mul.Tensor or args[0].dtype is not torch.bool or args[0].device.type != "cpu":
        return False
    return compat.running_node() in _PICKS


def fill_picked(picked: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Returns the gradient at selected elements, and zero elsewhere."""
    return aten.masked_fill.Tensor(aten.new_zeros.default(grad, picked.shape), picked, grad)  # type: ignore[no-any-return]


class ProdDerivative:
    """The gradient of ``prod``. Eager divides the product by each factor unless a factor is zero; for fake tensors
    torch always multiplies the other factors, which is rounded otherwise. The choice is recorded as an operation.
    """

    def __init__(self) -> None:
        self._factors: Any = None
        self._dim = 0

    def ends(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Returns True for the call that computes the gradient, from that of the product and the products of all other
        factors. It is asked for every call: the first of the derivative shows what the factors are.
        """
        if func is aten.slice.Tensor:
            if compat.running_node() in _PRODUCTS:
                self._factors, self._dim = args[:2]
            return False
        if func is not aten.mul.Tensor or self._factors is None or compat.running_node() not in _PRODUCTS:
            return False
        return args[0].shape != args[1].shape  # else of the factors before by those behind

    def gradient(self, grad: Any, others: Any) -> torch.Tensor:
        """Returns the gradient as eager computes it.

        Args:
            grad: gradient of the product: 0-dim for a product over all elements, else of size 1 in its dimension.
            others: the product of all other factors, for each factor.
        """
        factors, self._factors = self._factors, None
        whole = grad.dim() == 0
        zeros = aten.eq.Scalar(factors, 0)
        some = aten.any.default(zeros)
        product = aten.prod.default(factors) if whole else aten.prod.dim_int(factors, self._dim, True)
        quotient = aten.div.Tensor(product, aten.masked_fill.Scalar(factors, some, 1))  # finite where it is not taken
        if quotient.is_complex():
            quotient = aten.conj_physical.default(quotient)
        found = aten.where.self(some, aten.mul.Tensor(grad, others), aten.mul.Tensor(grad, quotient))
        if whole:  # with two zeros, the gradient is zero whatever the other factors are
            found = aten.masked_fill.Scalar(found, aten.gt.Scalar(aten.sum.default(zeros), 1), 0)
        return found  # type: ignore[no-any-return]
