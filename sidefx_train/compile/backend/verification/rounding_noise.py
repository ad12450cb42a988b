"""Measures the effect of rounding on a captured graph's results: runs it op by op with noise on every operation.

Two correct programs differ in how they round. The effect on a result depends on the result: if a sum cancels, or a
value lies at the edge of a clamp, it can be all of it. A run with random noise of the size of a rounding error on each
operation's result shows the size of such differences. Source: Parker, Pierce and Eggert,
*Monte Carlo arithmetic: how to gamble with floating point and win*, Computing in Science & Engineering 2 (4), 2000.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend.verification.replaced_operators import Calling

_ROUNDINGS = {torch.float16: 1.0, torch.bfloat16: 1.0}
"""Size of the noise in rounding errors, by dtype."""

_OTHERS = 16.0
"""Size for any other dtype: sums of some length accumulate as many rounding errors."""

_SUMS = frozenset(
    f"aten::{name}"
    for name in (
        "sum", "convolution_backward", "native_batch_norm_backward", "native_layer_norm_backward",
        "native_group_norm_backward", "cudnn_batch_norm_backward", "embedding_dense_backward", "cumsum", "trace",
    )
)  # fmt: skip
"""Operators whose results, if smaller than an argument, are sums of it, not means."""

_KEEPING_SIGN = frozenset(
    f"aten::{name}"
    for name in ("mul", "div", "pow", "square", "sqrt", "exp", "sigmoid", "_softmax", "linalg_vector_norm")
)
"""Operators whose result, if no element is negative, has none in any order of operations, and the same zeros."""

_MEANS = frozenset(
    f"aten::{name}"
    for name in (
        "sum", "mean", "cumsum", "avg_pool1d", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d",
        "_adaptive_avg_pool3d",
    )
)  # fmt: skip
"""Operators of which the same is true if no element of their argument is negative."""

_ADDING = frozenset(f"aten::{name}" for name in ("add", "addcmul", "addcdiv", "lerp"))
"""Operators of which the same is true if they add what is not negative: moving averages of squares."""

_STATISTICS = ("running_mean", "running_var")
"""Arguments that operators write to although their schema does not say so."""

_SHARE = 0.25
"""Fraction of the terms' rounding errors that remains in sums with vector registers."""

_BIASED = 1 / 16
"""Error of a sum of equal terms, in roundings of the sum for each term: additions in a vector's lane round alike."""

_MOST_BIASED = 4096
"""Number of terms from which sums are no longer made one after the other."""

_EXACT = frozenset(
    f"aten::{name}"
    for name in (
        "clone", "copy_", "cat", "stack", "where", "constant_pad_nd", "index_select", "gather", "take", "index",
        "embedding", "neg", "abs", "relu", "flip", "roll", "repeat", "fill_", "zero_", "masked_fill", "tril", "triu",
        "amax", "amin", "aminmax", "max", "min", "maximum", "minimum", "fmax", "fmin", "cummax", "cummin", "sort",
        "topk", "kthvalue", "median", "nanmedian", "mode", "max_pool2d_with_indices", "max_pool3d_with_indices",
        "adaptive_max_pool2d", "adaptive_max_pool3d", "fractional_max_pool2d", "fractional_max_pool3d",
        "select_scatter", "slice_scatter", "sign", "floor", "ceil", "round", "trunc",
    )
)  # fmt: skip
"""Operators that round nothing. The derivative of a maximum looks for the element that equals it."""


class Noisy(Calling):
    """Runs a graph with noise on every operation that rounds.

    Args:
        module: the graph.
        seed: seed of the noise.
        functions: replacements of some of its operators.
    """

    def __init__(
        self, module: fx.GraphModule, seed: int, functions: Mapping[Any, Callable[..., Any]] | None = None
    ) -> None:
        super().__init__(module, functions)
        self._noise = _Noise(seed)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        floats = list(filter(_is_float, _tensors((args, kwargs))))
        moves = _rounds(target) and bool(floats)
        terms = _Terms(target, floats, _adds_no_negative(target, args, kwargs)) if moves else None
        result = super().call_function(target, args, kwargs)
        if terms is not None:
            returned = _tensors(result)
            written = [each for each in _written(target, args, kwargs) if not any(each is other for other in returned)]
            for tensor in (*returned, *written):
                self._move(tensor, terms)
            if target is torch.ops.aten.native_batch_norm_backward.default and args[7]:
                self._shift(result[0], args)
        return result

    def _shift(self, gradient: torch.Tensor | None, args: Any) -> None:
        """Moves all elements of a channel alike: the backward of batch norm subtracts a mean, which is rounded. What a
        bias before the norm gets, a sum of zero but for rounding, is ``n`` times that."""
        given, weight, inverse = args[0], args[2], args[6]
        if gradient is None or given.dtype in _ROUNDINGS or not _is_float(given) or given.numel() == 0:
            return
        eps, count = torch.finfo(given.dtype).eps, given.numel() // given.shape[1]
        error = eps * _BIASED * min(count, _MOST_BIASED) * _rms(given) * inverse
        if weight is not None:
            error = error * weight
        shape = [1, -1] + [1] * (given.dim() - 2)
        gradient.add_((error * self._noise.like(error)).reshape(shape).to(gradient.dtype))

    def _move(self, tensor: torch.Tensor, terms: _Terms) -> None:
        overlaps = any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if not _is_float(tensor) or tensor.numel() == 0 or overlaps:
            return
        plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        eps, roundings = torch.finfo(tensor.dtype).eps, _ROUNDINGS.get(tensor.dtype, _OTHERS)
        sizes = torch.nan_to_num(plain.detach().abs(), 0.0, 0.0)
        wide = sizes if sizes.dtype not in _ROUNDINGS else sizes.float()
        wide = wide.mul_(eps * roundings).add_(eps * roundings * _rms(plain) + eps * terms.of(tensor))
        noise = wide.mul_(self._noise.like(wide)).to(plain.dtype)
        if terms.keep_sign and (side := _side(plain)):
            half = plain.detach() / 2
            noise = torch.maximum(noise, -half) if side > 0 else torch.minimum(noise, -half)
            noise.masked_fill_(plain == 0, 0)
        plain.add_(noise)


class _Noise:
    """Numbers from -1 to 1, drawn once and read from another position for each tensor: drawing costs more than most
    operations."""

    _COUNT = 2**17

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._pool = torch.rand(2 * self._COUNT, generator=generator, dtype=torch.float32) * 2 - 1
        self._position = random.Random(seed)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns noise for a tensor."""
        noise = torch.empty(tensor.numel(), dtype=torch.float32)
        for first in range(0, len(noise), self._COUNT):
            piece, start = noise[first : first + self._COUNT], self._position.randrange(self._COUNT)
            piece.copy_(self._pool[start : start + len(piece)])
        return noise.to(tensor.device, tensor.dtype).reshape(tensor.shape)


class _Terms:
    """The terms that an operation adds: if they cancel, their rounding is large relative to the sum.

    Adding ``n`` terms one after the other has an error of up to about ``n`` roundings of their size. A derivative may
    cancel internally too: that of GELU far from zero is the rounding error of the gradient.

    Attributes:
        keep_sign: a result of one sign keeps it, and its zeros, in any order of operations.
    """

    def __init__(self, target: Any, floats: list[torch.Tensor], keep_sign: bool) -> None:
        self._most = max(tensor.numel() for tensor in floats)
        self._size = max(map(_rms, (tensor for tensor in floats if tensor.numel() == self._most)))
        name = target._schema.name
        self._adds = name in _SUMS
        keeping = _out_of_place(target) in _KEEPING_SIGN
        self.keep_sign = keep_sign or keeping or (name in _MEANS and _side(floats[0]) != 0)
        first = floats[0]
        backward = target._schema.name.endswith("_backward")
        self._gradient = _OTHERS * _rms(first) if backward and first.dtype not in _ROUNDINGS else 0.0

    def of(self, tensor: torch.Tensor) -> float:
        """Returns the size of the terms' rounding errors in a result, in roundings."""
        if tensor.numel() >= self._most:
            return self._gradient
        return _SHARE * self._size * (self._most / tensor.numel() if self._adds else 1.0)


def _adds_no_negative(target: Any, args: Any, kwargs: Any) -> bool:
    """Returns True for an addition of numbers, products and quotients of which none is negative."""
    name = _out_of_place(target)
    if name not in _ADDING:
        return False
    values = [*args, *kwargs.values()]
    if name == "aten::addcmul" and all(map(operator.is_, _tensors(args[1]), _tensors(args[2]))):  # squares
        values = [args[0], *values[3:]]
    if name == "aten::lerp" and not _is_share(args[2] if len(args) > 2 else kwargs["weight"]):
        return False
    tensors, numbers = _tensors(values), [value for value in values if isinstance(value, (int, float))]
    return all(number >= 0 for number in numbers) and all(_is_float(each) and _side(each) == 1 for each in tensors)


def _is_share(weight: Any) -> bool:
    """Returns True for a number, or for tensors, of at most 1: the other term's weight is not negative."""
    return all(float(torch.as_tensor(each).max()) <= 1 for each in _tensors(weight) or [weight])


def _out_of_place(target: Any) -> str:
    """Returns the name of the operator that makes a new tensor where this one writes, or makes several."""
    name: str = target._schema.name
    return name.removesuffix("_").replace("::_foreach_", "::")


def _written(target: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Returns the tensor arguments that an operator writes to, including running statistics of norms."""
    schema = target._schema.arguments
    pairs = [*zip(schema, args, strict=False), *((each, kwargs[each.name]) for each in schema if each.name in kwargs)]
    return [tensor for each, value in pairs if each.is_write or each.name in _STATISTICS for tensor in _tensors(value)]


def _side(tensor: torch.Tensor) -> int:
    """Returns 1 if no element is negative, -1 if none is positive; 0 for other tensors."""
    if tensor.is_complex() or tensor.numel() == 0:
        return 0
    least, most = (float(bound) for bound in torch.aminmax(tensor.detach()))
    return 1 if least >= 0 else -1 if most <= 0 else 0


def _rms(tensor: torch.Tensor) -> float:
    plain = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    if plain.numel() == 0:
        return 0.0
    norm = float(torch.linalg.vector_norm(plain, dtype=torch.float64))
    if not math.isfinite(norm):
        norm = float(torch.nan_to_num(plain.double(), 0.0, 0.0, 0.0).norm())
    return norm / math.sqrt(plain.numel())


def _rounds(target: Any) -> bool:
    if not isinstance(target, compat.OpOverload) or target._schema.name in _EXACT:
        return False
    if torch.Tag.inplace_view in target.tags:
        return False
    returns = target._schema.returns
    return not any(each.alias_info is not None and not each.alias_info.is_write for each in returns)  # not a view


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _tensors(each)]
    return []
