"""Operators of torch whose integers may be symbolic: ``sidefx::avg_pool2d_of_integers(Tensor, SymInt[], ...)``.

Torch declares windows, strides and the like as plain integers. The kernel is torch's own, called with their values when
the graph runs; sizes of results are computed with the symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sidefx_train.compile.ops.registration import define_operator

aten = torch.ops.aten

_TYPES = {
    "Tensor": "Tensor", "bool": "bool", "int": "SymInt", "Optional[int]": "SymInt?", "List[int]": "SymInt[]",
    "number": "Scalar",
}  # fmt: skip


def _define(op: Any, fake: Callable[..., Any], elementwise: bool = False) -> Any:
    """Defines the form of one of torch's operators that takes symbolic integers, and returns it.

    The operands of one that is not elementwise are made contiguous, so that results are, as ``fake`` says.
    """
    schema = op._schema
    name = f"{schema.name.removeprefix('aten::')}_of_integers"
    given = ", ".join(f"{_TYPES[str(each.type)]} {each.name}" for each in schema.arguments)
    named = [each.name for each in schema.arguments if each.kwarg_only]
    results = ", ".join("Tensor" for _ in schema.returns)
    results = f"({results})" if len(schema.returns) > 1 else results

    def run(*args: Any) -> Any:
        if not elementwise:
            args = tuple(arg.contiguous() if isinstance(arg, torch.Tensor) else arg for arg in args)
        positional = len(args) - len(named)
        return op(*args[:positional], **dict(zip(named, args[positional:], strict=True)))

    define_operator(f"{name}({given}) -> {results}", run, fake, key="CompositeExplicitAutograd")
    return getattr(torch.ops.sidefx, name).default


def window_count(size: Any, kernel: Any, stride: Any, padding: Any, dilation: Any = 1, rounds_up: bool = False) -> Any:
    """Returns the number of windows along a dimension, as torch's pooling computes it."""
    reach = size + 2 * padding - dilation * (kernel - 1) - 1
    if not rounds_up:
        return reach // stride + 1
    count = (reach + stride - 1) // stride + 1
    return count - 1 if (count - 1) * stride >= size + padding else count  # the last one starts inside


def _each(given: Sequence[Any], dims: int) -> list[Any]:
    return list(given) * dims if len(given) == 1 else list(given)


def _pooled(dims: int, x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, rounds_up: bool) -> list[Any]:
    kernel, stride, padding, dilation = (_each(each, dims) for each in (kernel, stride, padding, dilation))
    windows = zip(x.shape[-dims:], kernel, stride, padding, dilation, strict=True)
    counts = [window_count(size, k, s, p, d, rounds_up) for size, k, s, p, d in windows]
    return [*x.shape[:-dims], *counts]


def _mean_fake(dims: int) -> Any:
    def fake(x: Any, kernel: Any, stride: Any, padding: Any, rounds_up: bool, *_: Any) -> torch.Tensor:
        return torch.empty(_pooled(dims, x, kernel, stride, padding, [1], rounds_up), dtype=x.dtype, device=x.device)

    return fake


def _maximum_fake(dims: int) -> Any:
    def fake(x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, rounds_up: bool) -> Any:
        sizes = _pooled(dims, x, kernel, stride, padding, dilation, rounds_up)
        return tuple(torch.empty(sizes, dtype=dtype, device=x.device) for dtype in (x.dtype, torch.int64))

    return fake


def _adaptive_fake(dims: int) -> Any:
    def fake(x: Any, size: Any) -> Any:
        sizes = [*x.shape[:-dims], *_each(size, dims)]
        return tuple(torch.empty(sizes, dtype=dtype, device=x.device) for dtype in (x.dtype, torch.int64))

    return fake


def _gradient_fake(grad: Any, x: Any, *_: Any) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


MEANS = {
    dims: _define(op, _mean_fake(dims)) for dims, op in ((2, aten.avg_pool2d.default), (3, aten.avg_pool3d.default))
}
MEAN_GRADIENTS = {
    dims: _define(op, _gradient_fake)
    for dims, op in ((2, aten.avg_pool2d_backward.default), (3, aten.avg_pool3d_backward.default))
}
MAXIMA = {
    dims: _define(op, _maximum_fake(dims))
    for dims, op in ((2, aten.max_pool2d_with_indices.default), (3, aten.max_pool3d_with_indices.default))
}
MAXIMUM_GRADIENTS = {
    dims: _define(op, _gradient_fake)
    for dims, op in (
        (2, aten.max_pool2d_with_indices_backward.default),
        (3, aten.max_pool3d_with_indices_backward.default),
    )
}
ADAPTIVE_MAXIMA = {
    dims: _define(op, _adaptive_fake(dims))
    for dims, op in ((2, aten.adaptive_max_pool2d.default), (3, aten.adaptive_max_pool3d.default))
}
_ADAPTIVE_GRADIENTS = {2: aten.adaptive_max_pool2d_backward.default, 3: aten.adaptive_max_pool3d_backward.default}


def _columns_fake(x: Any, kernel: Any, dilation: Any, padding: Any, stride: Any) -> torch.Tensor:
    kernel, dilation, padding, stride = (_each(each, 2) for each in (kernel, dilation, padding, stride))
    rows, columns = map(window_count, x.shape[-2:], kernel, stride, padding, dilation)
    sizes = [*x.shape[:-3], x.shape[-3] * kernel[0] * kernel[1], rows * columns]
    return torch.empty(sizes, dtype=x.dtype, device=x.device)


def _image_fake(x: Any, size: Any, kernel: Any, *_: Any) -> torch.Tensor:
    kernel = _each(kernel, 2)
    sizes = [*x.shape[:-2], x.shape[-2] // (kernel[0] * kernel[1]), *size]
    return torch.empty(sizes, dtype=x.dtype, device=x.device)


COLUMNS = _define(aten.im2col.default, _columns_fake)
IMAGE = _define(aten.col2im.default, _image_fake)


def _like(*given: Any) -> torch.Tensor:
    return torch.empty_like(next(each for each in given if isinstance(each, torch.Tensor)))


ROUNDED = _define(aten.round.decimals, _like, elementwise=True)
POLYGAMMA = _define(aten.polygamma.default, _like, elementwise=True)
HISTOGRAM = _define(aten.histc.default, lambda x, bins, low, high: torch.empty(bins, dtype=x.dtype, device=x.device))


class Rounded(torch.autograd.Function):
    """Decimal rounding: ``apply(input, decimals)``."""

    @staticmethod
    def forward(ctx: Any, x: Any, decimals: Any) -> Any:
        """Returns the rounded numbers."""
        return ROUNDED(x, decimals)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Returns zeros."""
        return torch.zeros_like(grad), None


class Polygamma(torch.autograd.Function):
    """Derivatives of the logarithm of the gamma function: ``apply(order, input)``."""

    @staticmethod
    def forward(ctx: Any, order: Any, x: Any) -> Any:
        """Returns the derivatives of an order, one more than ``order``."""
        ctx.order = order
        ctx.save_for_backward(x)
        return POLYGAMMA(order, x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Returns the gradient, of the next order."""
        (x,) = ctx.saved_tensors
        return None, grad * Polygamma.apply(ctx.order + 1, x)


class Mean(torch.autograd.Function):
    """Average pooling: ``apply(dims, input, kernel, stride, padding, ceil_mode, includes_padding, divisor)``."""

    @staticmethod
    def forward(ctx: Any, dims: int, x: Any, *options: Any) -> Any:
        """Returns the means of the windows."""
        ctx.dims, ctx.options = dims, options
        ctx.save_for_backward(x)
        return MEANS[dims](x, *options)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Returns the gradient of the input, from torch's kernel."""
        made = _MeanGradient.apply(ctx.dims, grad, *ctx.saved_tensors, *ctx.options)
        return None, made, *(None for _ in ctx.options)


class _MeanGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dims: int, grad: Any, x: Any, *options: Any) -> Any:
        ctx.dims, ctx.options = dims, options
        ctx.save_for_backward(x)
        return MEAN_GRADIENTS[dims](grad, x, *options)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        made = Mean.apply(ctx.dims, grad, *ctx.options)
        return None, made, *map(torch.zeros_like, ctx.saved_tensors), *(None for _ in ctx.options)


class Maximum(torch.autograd.Function):
    """Maximum pooling: ``apply(dims, input, kernel, stride, padding, dilation, ceil_mode)``."""

    @staticmethod
    def forward(ctx: Any, dims: int, x: Any, *options: Any) -> Any:
        """Returns the maxima of the windows and where they are."""
        ctx.dims, ctx.options = dims, options
        made, indices = MAXIMA[dims](x, *options)
        ctx.save_for_backward(x, indices)
        ctx.mark_non_differentiable(indices)
        return made, indices

    @staticmethod
    def backward(ctx: Any, grad: Any, _: Any) -> Any:
        """Returns the gradient of the input, from torch's kernel."""
        made = _MaximumGradient.apply(ctx.dims, grad, *ctx.saved_tensors, *ctx.options)
        return None, made, *(None for _ in ctx.options)


class _MaximumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dims: int, grad: Any, x: Any, indices: Any, *options: Any) -> Any:
        ctx.dims, ctx.options = dims, options
        ctx.save_for_backward(x, indices)
        return MAXIMUM_GRADIENTS[dims](grad, x, *options, indices)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, indices = ctx.saved_tensors
        made = grad.flatten(-ctx.dims).gather(-1, indices.flatten(-ctx.dims)).view_as(indices)
        return None, made, torch.zeros_like(x), None, *(None for _ in ctx.options)


class AdaptiveMaximum(torch.autograd.Function):
    """Maximum pooling to a size: ``apply(dims, input, size)``."""

    @staticmethod
    def forward(ctx: Any, dims: int, x: Any, size: Any) -> Any:
        """Returns the maxima of the windows and where they are."""
        ctx.dims = dims
        made, indices = ADAPTIVE_MAXIMA[dims](x, size)
        ctx.save_for_backward(x, indices)
        ctx.mark_non_differentiable(indices)
        return made, indices

    @staticmethod
    def backward(ctx: Any, grad: Any, _: Any) -> Any:
        """Returns the gradient of the input, from torch's operator, which has a derivative."""
        return None, _ADAPTIVE_GRADIENTS[ctx.dims](grad, *ctx.saved_tensors), None


class Columns(torch.autograd.Function):
    """The windows of an image as columns: ``apply(input, kernel, dilation, padding, stride)``."""

    @staticmethod
    def forward(ctx: Any, x: Any, *options: Any) -> Any:
        """Returns the columns."""
        ctx.size, ctx.options = list(x.shape[-2:]), options
        return COLUMNS(x, *options)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Returns the sums of the gradients of each pixel, from torch's kernel."""
        return Image.apply(grad, ctx.size, *ctx.options), None, None, None, None


class Image(torch.autograd.Function):
    """The image of which columns are windows: ``apply(input, size, kernel, dilation, padding, stride)``."""

    @staticmethod
    def forward(ctx: Any, x: Any, size: Any, *options: Any) -> Any:
        """Returns the sums of the windows at each pixel."""
        ctx.options = options
        return IMAGE(x, size, *options)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Returns the gradients of the windows, from torch's kernel."""
        return Columns.apply(grad, *ctx.options), None, None, None, None, None
