"""``cumprod`` along a dimension of symbolic length; torch's derivative asks for the length as a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Cumprod(torch.autograd.Function):
    """Product of the elements up to each: ``apply(check, input, dim)``."""

    @staticmethod
    def forward(ctx: Any, check: Callable[[], None], input: Any, dim: int) -> Any:
        """Returns the products."""
        made = torch.cumprod(input, dim)
        ctx.check, ctx.dim = check, dim
        ctx.save_for_backward(input, made)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Returns the gradient of the input, by the operations of torch's ``cumprod_backward``."""
        ctx.check()
        dim, (x, made) = ctx.dim, ctx.saved_tensors
        weighted = made * grad
        zeros_before = (x == 0).cumsum(dim)

        # Up to the first zero: no factor is zero.
        before = zeros_before == 0
        sums = weighted.masked_fill(before.logical_not(), 0.0).flip(dim).cumsum(dim).flip(dim)
        found = torch.where(before, sums / x, torch.zeros_like(x))

        # At the first zero: the other factors are those before it and those between it and the second.
        between = zeros_before == 1
        first = between.max(dim, keepdim=True).indices
        is_first = torch.zeros_like(between).scatter_(dim, first, 1).logical_and_(between)
        behind = x.masked_fill((between & is_first.logical_not()).logical_not(), 1.0).cumprod(dim)
        of_rest = (behind * grad.masked_fill(zeros_before != 1, 0.0)).sum(dim, keepdim=True)
        ahead = made.gather(dim, (first - 1).relu_()).masked_fill_(first == 0, 1.0)
        return None, torch.where(is_first, of_rest * ahead, found), None
