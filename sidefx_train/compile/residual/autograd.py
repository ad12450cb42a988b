"""Tensors that left the step with a backward graph which the step has already used up."""

from __future__ import annotations

import functools
from typing import Any

import torch

FREED_MESSAGE = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). Specify "
    "retain_graph=True if you need to backward through the graph a second time or if you need to access saved tensors "
    "after calling backward."
)


@functools.cache
def freed_function(name: str) -> Any:
    """An autograd function whose node is called ``name`` and whose backward says that the graph is gone.

    The step's ``backward()`` freed the graph; eager raises this error text on a second backward.
    """

    class Freed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
            return value.view_as(value)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            raise RuntimeError(FREED_MESSAGE)

    node = getattr(Freed, "_backward_cls", None)
    if node is not None:
        node.__name__ = name
    return Freed


_ANCHOR = torch.zeros((), requires_grad=True)


def freed(value: torch.Tensor, name: str) -> torch.Tensor:
    """``value`` as eager would return it after ``backward()``: it requires grad, its graph is freed."""
    with torch.enable_grad():
        return freed_function(name).apply(value, _ANCHOR)


class _CustomView(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads


def view_of_custom_function(value: torch.Tensor) -> torch.Tensor:
    """``value`` as autograd takes what a custom function returns as a view: it may not be changed in place."""
    with torch.enable_grad():
        return _CustomView.apply(value)  # type: ignore[no-any-return]
