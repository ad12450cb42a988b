"""Memory formats: channels-last convolutions, the layout of values in the captured graph, the order of random draws.

Most of oneDNN's convolutions run fastest on channels-last images (``backend/autotune/conv_layout.py`` times those of a
graph). Each node of a captured graph has the user's layout, so converting at each convolution would copy back and
forth. Instead an image is converted once, before its first convolution, and the operations between convolutions keep
the format. Values that leave the graph are converted back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.graph.strided_layout import is_dense_in

aten = torch.ops.aten
_DRAWS_BY_MEMORY = frozenset(
    {aten.bernoulli_.float, aten.uniform_.default, aten.random_.default, aten.random_.to, getattr(aten.random_, "from")}
)
"""Draws in memory order (``normal_`` uses another order if a tensor is not contiguous)."""

_CHOOSES_LAYOUT = frozenset(
    {
        *(aten.addbmm_, aten.addmm_, aten.baddbmm_, aten.cumprod_, aten.cumsum_, aten.index_add_, aten.index_copy_),
        *(aten.index_reduce_, aten.masked_fill_, aten.masked_scatter_, aten.mvlgamma_, aten.renorm_, aten.scatter_),
        *(aten.scatter_add_, aten.scatter_reduce_, aten.tril_, aten.triu_),
    }
)


def keeps_layout(target: Any) -> bool:
    """Returns False for an operation whose out-of-place result is contiguous."""
    return getattr(target, "overloadpacket", None) not in _CHOOSES_LAYOUT


def is_convertible(image: torch.Tensor) -> bool:
    """Returns True for an image, sequence or volume that a CPU convolution accepts in channels-last format."""
    if image.device.type != "cpu" or image.dtype not in (torch.float32, torch.bfloat16):
        return False
    return image.dim() == 4 or (image.dim() in (3, 5) and all(isinstance(n, int) for n in image.shape))


def to_channels_last(image: torch.Tensor) -> torch.Tensor:
    """Returns ``image`` in channels-last format."""
    layout = _CHANNELS_LAST.get(image.dim())
    if layout is None or image.is_contiguous(memory_format=layout):
        return image
    return aten.clone.default(image, memory_format=layout)


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def convolution(image: Any, weight: Any, bias: Any, *rest: Any) -> Any:
    """Runs ``aten.convolution`` on a channels-last image."""
    if not is_convertible(image):
        return aten.convolution.default(image, weight, bias, *rest)
    if image.dim() == 3:
        return convolution(image.unsqueeze(2), weight.unsqueeze(2), bias, *_of_flat_images(*rest)).squeeze(2)
    return aten.convolution.default(to_channels_last(image), weight, bias, *rest)


def convolution_backward(grad: Any, image: Any, weight: Any, sizes: Any, *rest: Any) -> Any:
    """Runs ``aten.convolution_backward`` on channels-last tensors."""
    if not is_convertible(image):
        return aten.convolution_backward.default(grad, image, weight, sizes, *rest)
    if image.dim() == 3:
        flat = (given.unsqueeze(2) for given in (grad, image, weight))
        *grads, of_bias = convolution_backward(*flat, sizes, *_of_flat_images(*rest[:6]), rest[6])
        return *(made if made is None else made.squeeze(2) for made in grads), of_bias
    return aten.convolution_backward.default(to_channels_last(grad), to_channels_last(image), weight, sizes, *rest)


def _of_flat_images(stride: Any, padding: Any, dilation: Any, transposed: bool, more: Any, groups: int) -> Any:
    """Converts settings of a 1-d convolution to images of height 1: sequences have no channels-last format."""
    return [1, *stride], [0, *padding], [1, *dilation], transposed, [0, *more], groups


def _outermost_first(captured: torch.Tensor) -> list[int]:
    """Returns the dimensions in memory order."""
    if any(isinstance(n, torch.SymInt) for n in captured.stride()):
        return list(range(captured.dim()))
    return sorted(range(captured.dim()), key=lambda d: (captured.stride(d), captured.shape[d]), reverse=True)


def drawn(
    target: Any, value: torch.Tensor, captured: torch.Tensor, call: Callable[[torch.Tensor], Any]
) -> torch.Tensor:
    """Draws random numbers into ``value`` in the order of eager's memory, whatever its layout here.

    Args:
        target: the operation, in place.
        value: a functional tensor.
        captured: the tensor in the captured graph.
        call: calls the operation on a tensor.
    """
    order = _outermost_first(captured)
    in_order = value if target not in _DRAWS_BY_MEMORY or order == list(range(len(order))) else value.permute(order)
    if captured.device.type != "cpu":
        call(in_order)
        return value
    if not _draws_by_memory(target):
        return call(value)  # type: ignore[no-any-return]
    with compat.no_recording():  # of the comparison
        alike = tuple(compat.from_functional(value).stride()) == tuple(captured.stride())
        alike = alike or not is_dense_in(captured, order)
    if alike:
        call(in_order)
        return value
    dense = torch.empty([value.shape[d] for d in order], dtype=value.dtype, device=value.device)
    held = dense.permute([order.index(d) for d in range(len(order))])
    call(dense if target in _DRAWS_BY_MEMORY else held)
    return value.copy_(held)


def in_captured_layout(value: Any, captured: Any) -> Any:
    """Returns a functional tensor in the layout that it has in the captured graph."""
    return like_captured(value, tuple(compat.from_functional(value).stride()), captured)


@lru_cache
def _draws_by_memory(target: Any) -> bool:
    """Returns True if numbers are drawn in memory order: MKL, on Intel's processors, draws booleans by position."""
    if target is not aten.bernoulli_.float:
        return True
    with compat.outside_tracing():
        numbers = torch.Generator("cpu").manual_seed(0)
        to_channels_last = torch.empty(8, 8, device="cpu").t().bernoulli_(0.5, generator=numbers)
        plain = torch.empty(8, 8, device="cpu").bernoulli_(0.5, generator=numbers.manual_seed(0))
        return torch.equal(to_channels_last.t(), plain)


def like_captured(value: torch.Tensor, stride: tuple[Any, ...], captured: Any) -> torch.Tensor:
    """Returns ``value`` in the dense layout that it has in the captured graph.

    Args:
        value: a functional tensor; the strides it reports are not its actual ones.
        stride: its actual strides.
        captured: the value in the captured graph.
    """
    if not isinstance(captured, torch.Tensor) or compat.has_unbacked_sizes(captured):
        return value  # nothing is known of its sizes
    with compat.no_recording():  # of the comparisons
        if value.shape != captured.shape or stride == tuple(captured.stride()):
            return value
        order = _outermost_first(captured)
        if not is_dense_in(captured, order):
            return value
    dense = aten.clone.default(value.permute(order), memory_format=torch.contiguous_format)
    made = dense.permute([order.index(d) for d in range(len(order))])
    numbers = (*captured.shape, *captured.stride())
    if not all(isinstance(n, int) for n in numbers) or made.stride() == captured.stride():
        return made  # a comparison of symbols would be recorded
    return made.as_strided(captured.shape, captured.stride(), 0)  # dimensions of size 1 may have any stride
