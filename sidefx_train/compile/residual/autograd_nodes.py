"""Nodes of the autograd graph outside that compute nothing: they say that a graph is gone, or hand gradients on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from sidefx_train import torch_compat as compat

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
            return compat.alias_hidden_from_autograd(value)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            raise RuntimeError(FREED_MESSAGE)

    _name_node(Freed, name)
    return Freed


_ANCHOR = torch.zeros((), requires_grad=True)


def freed(value: torch.Tensor, name: str) -> torch.Tensor:
    """``value`` as eager would return it after ``backward()``: it requires grad, its graph is freed."""
    with torch.enable_grad():
        made = freed_function(name).apply(value, _ANCHOR)
    compat.set_version(made, value._version)
    return made  # type: ignore[no-any-return]


@functools.cache
def pass_through(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that gives what ``make`` makes of a tensor, and hands its gradient on as it is.

    Args:
        name: of its node in the autograd graph.
        make: gives the same values in the same memory; a view is one that may not be changed in place.
    """

    class PassThrough(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            ctx.set_materialize_grads(False)  # where no gradient comes, none goes on
            return make(value)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return grads

    _name_node(PassThrough, name)

    def run(value: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return PassThrough.apply(value)  # type: ignore[no-any-return]

    return run


@functools.cache
def custom_view(name: str) -> Callable[[torch.Tensor, Callable[[], torch.Tensor]], torch.Tensor]:
    """A function whose result autograd takes for a view that a custom function made.

    It is called with a tensor, which gets the view's gradient, and with what makes the view of something else.

    Args:
        name: of its node in the autograd graph.
    """

    class View(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
            ctx.set_materialize_grads(False)
            return make()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return *grads, None

    _name_node(View, name)
    return View.apply


def whole_view(value: torch.Tensor) -> torch.Tensor:
    """A view of all of a tensor."""
    return value.view_as(value)


def _name_node(function: Any, name: str) -> None:
    node = getattr(function, "_backward_cls", None)
    if node is not None:
        node.__name__ = name
