"""Outside autograd nodes that compute nothing: they raise that a graph is freed, or pass gradients on."""

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
def _freed(name: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Returns a function whose result has a node called ``name``, whose backward raises that the graph is freed.

    The step's ``backward()`` freed the graph; eager raises this message on a second backward.
    """

    class Freed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
            return compat.plain_alias(value)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            raise RuntimeError(FREED_MESSAGE)

    _name_node(Freed, name)
    return compat.apply_of(Freed)  # type: ignore[no-any-return]


_ANCHOR = torch.zeros((), requires_grad=True)


def freed_result(name: str, make: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """Returns ``make(*args)`` as the result of a node called ``name`` whose graph is freed."""
    with torch.enable_grad():
        return _freed_result(name)(make, args, _ANCHOR)


@functools.cache
def _freed_result(name: str) -> Callable[..., torch.Tensor]:
    """Returns a function that calls another one; the backward of its result raises that the graph is freed."""

    class Freed(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, make: Callable[..., torch.Tensor], args: tuple[Any, ...], anchor: torch.Tensor
        ) -> torch.Tensor:
            return make(*args)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            raise RuntimeError(FREED_MESSAGE)

    _name_node(Freed, name)
    return compat.apply_of(Freed)  # type: ignore[no-any-return]


def freed(value: torch.Tensor, name: str) -> torch.Tensor:
    """Returns ``value`` as eager would after ``backward()``: it requires grad, its graph is freed."""
    if torch.is_grad_enabled():
        made = _freed(name)(value, _ANCHOR)
    else:
        with torch.enable_grad():
            made = _freed(name)(value, _ANCHOR)
    if value._version:
        compat.set_version(made, value._version)
    return made


@functools.cache
def pass_through(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that applies ``make`` to a tensor and passes its gradient on unchanged.

    Args:
        name: name of its autograd node.
        make: returns the same values in the same storage; a view must not be changed in place afterwards.
    """

    class PassThrough(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            ctx.set_materialize_grads(False)  # without a gradient, none is passed on
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
def own_node(name: str) -> Callable[[torch.Tensor], None]:
    """Returns a function that gives a tensor a node of its own, which passes the gradient on to its present node.

    The tensor stays the same object with the same version counter.

    Args:
        name: name of the node.
    """

    class OwnNode(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            ctx.set_materialize_grads(False)
            ctx.mark_dirty(value)
            return value

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return grads

    _name_node(OwnNode, name)

    def run(value: torch.Tensor) -> None:
        version = value._version
        OwnNode.apply(value)
        compat.set_version(value, version)  # nothing was written

    return run


@functools.cache
def custom_view(name: str) -> Callable[[torch.Tensor, Callable[[], torch.Tensor]], torch.Tensor]:
    """Returns a function whose result autograd treats as a view made by a custom function.

    Its arguments are a tensor, which gets the view's gradient, and a function that makes the view of something else.

    Args:
        name: name of its autograd node.
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
    """Returns a view of a whole tensor."""
    return value.view_as(value)


def _name_node(function: Any, name: str) -> None:
    node = getattr(function, "_backward_cls", None)
    if node is not None:
        node.__name__ = name
