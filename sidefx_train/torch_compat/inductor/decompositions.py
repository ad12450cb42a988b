"""Decompositions for Inductor: its own, but those that accept what kernels refuse, and rules with eager's values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from sidefx_train.torch_compat.inductor.late_imports import _import_lowering

aten = torch.ops.aten


def inductor_decompositions() -> dict[Any, Any]:
    """Returns Inductor's own table under the current options, with the rules of this module.

    Upstream, a quotient of floating point numbers is rounded before it is rounded down: ``1.0 // 0.1`` is 10, and
    ``1e10 % 0.7`` is 0 (torch 2.11 to 2.15). Eager begins with the exact remainder.
    """
    _import_lowering()  # some decompositions expect it to be imported
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table

    table = {op: rule for op, rule in select_decomp_table().items() if op not in _CHECKS_VALUES}
    table[aten.div.Tensor_mode] = _divided(table.get(aten.div.Tensor_mode))
    table[aten.div.Scalar_mode] = _divided(table.get(aten.div.Scalar_mode))
    for op in (aten.floor_divide.default, aten.floor_divide.Scalar):
        table[op] = _of_floats(floor_quotient, table.get(op))
    for op in (aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor):
        table[op] = _of_floats(remainder, table.get(op))
    table[aten.pow.Tensor_Scalar] = _power(table.get(aten.pow.Tensor_Scalar))
    for dims, op in ((2, aten.max_pool2d_with_indices.default), (3, aten.max_pool3d_with_indices.default)):
        if op in table:
            table[op] = _pooled(table[op], dims)
    for op in (aten.any.default, aten.any.dim, aten.any.dims):
        table[op] = _of_bytes(op, table.get(op))
    if not config.fallback_random:
        table.update(dict.fromkeys((aten.rand.default, aten.rand.generator), _uniform))
        table.update(dict.fromkeys((aten.randn.default, aten.randn.generator), _normal))
        table[aten.randint.low] = _of_wide_ranges
        table[aten.geometric.default] = _of_integers(table[aten.geometric.default])
    table[aten._conj.default] = _conjugate
    for op, parts in ((aten.split.Tensor, _split), (aten.split_with_sizes.default, _split), (aten.unbind.int, _unbind)):
        table[op] = _of_complex(parts, table.get(op))
    table[aten.soft_margin_loss_backward.default] = _soft_margin_gradient
    table[aten.as_strided_scatter.default] = _within_storage
    table[aten.adaptive_max_pool2d.default] = _of_plain_sizes(table.get(aten.adaptive_max_pool2d.default))
    return table


_CHECKS_VALUES = frozenset(
    {
        aten.binary_cross_entropy.default,
        aten.multi_margin_loss.default,
        aten.multilabel_margin_loss_forward.default,
        aten.repeat_interleave.Tensor,
    }
)
"""Their kernels raise for values that decompositions accept: a probability or a class out of range, repetitions that do
not add up to ``output_size``."""

_Rule = Callable[..., Any]


def _of_bytes(op: Any, rule: _Rule | None) -> _Rule:
    """Returns a decomposition of ``any``: of bytes, it is a byte. Upstream, it is a ``bool`` (torch 2.13)."""

    def decomposed(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dtype is torch.uint8:
            return op(x != 0, *args, **kwargs).to(torch.uint8)
        return NotImplemented if rule is None else rule(x, *args, **kwargs)

    return decomposed


def _divided(rule: _Rule | None) -> _Rule:
    """Returns a decomposition of ``div``, which truncates integers by operations that report a division by zero.

    The C++ that Inductor writes for it ends the process (torch 2.11 to 2.15).
    """

    def divided(a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
        floats = isinstance(b, (float, torch.SymFloat)) or any(
            value.is_floating_point() for value in (a, b) if isinstance(value, torch.Tensor)
        )
        if rounding_mode == "trunc" and not floats:
            return torch.floor_divide(a - torch.fmod(a, b), b)
        if rounding_mode == "floor" and _are_floats(a, b):
            return floor_quotient(a, b)
        return NotImplemented if rule is None else rule(a, b, rounding_mode=rounding_mode)

    return divided


def _of_floats(exact: _Rule, rule: _Rule | None) -> _Rule:
    def chosen(a: Any, b: Any) -> Any:
        if _are_floats(a, b):
            return exact(a, b)
        return NotImplemented if rule is None else rule(a, b)

    return chosen


def _are_floats(a: Any, b: Any) -> bool:
    plain = all(isinstance(value, torch.Tensor) or type(value) in (int, float, bool) for value in (a, b))
    return plain and torch.result_type(a, b).is_floating_point


def _operands(a: Any, b: Any, rounded: bool) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
    """Returns both operands in the dtype that kernels compute in, and the dtype of the result.

    Args:
        a: a tensor or number.
        b: a tensor or number.
        rounded: numbers and single elements are rounded to the dtype of the result before.
    """
    result = torch.result_type(a, b)
    dtype = torch.float32 if result.itemsize < 4 else result
    device = next(value.device for value in (a, b) if isinstance(value, torch.Tensor))

    def converted(value: Any) -> torch.Tensor:
        first = result if rounded else dtype
        if not isinstance(value, torch.Tensor):
            return torch.full((), value, dtype=first, device=device).to(dtype)
        return value.to(first).to(dtype)

    return converted(a), converted(b), result


def remainder(a: Any, b: Any) -> torch.Tensor:
    """Returns the remainder with the sign of the divisor, as eager computes it for floating point numbers."""
    x, y, dtype = _operands(a, b, rounded=True)
    exact = torch.fmod(x, y)
    return torch.where(_differ_in_sign(exact, y), exact + y, exact).to(dtype)


def floor_quotient(a: Any, b: Any) -> torch.Tensor:
    """Returns the quotient rounded down, as eager computes it for floating point numbers."""
    x, y, dtype = _operands(a, b, rounded=False)
    rest = torch.fmod(x, y)
    whole = (x - rest) / y
    whole = torch.where(_differ_in_sign(rest, y), whole - 1, whole)
    below, quotient = torch.floor(whole), x / y
    below = torch.where(whole - below > 0.5, below + 1, below)
    below = torch.where(whole != 0, below, torch.copysign(torch.zeros_like(quotient), quotient))
    return torch.where(y == 0, quotient, below).to(dtype)


def _differ_in_sign(rest: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    return (rest != 0) & ((rest < 0) != (divisor < 0))


def _uniform(size: Any, *, dtype: torch.dtype | None = None, generator: Any = None, **kwargs: Any) -> Any:
    """Draws uniform numbers in half and in double precision.

    Upstream, those drawn in float32 are cast (torch 2.13). In half precision one of 512 bfloat16 numbers is 1, so an
    index of ``rand() * n`` is out of range and ``log(1 - rand())`` infinite; eager takes 0 instead. In float64 there
    are 2**24 different numbers; here are 2**48.
    """
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if generator is not None or dtype not in (torch.float16, torch.bfloat16, torch.float64):
        return NotImplemented
    numbers = aten.rand.default(size, dtype=torch.float32, **kwargs)
    if dtype is torch.float64:
        finer = aten.rand.default(size, dtype=torch.float32, **kwargs)
        return (torch.floor(numbers.double() * 2**24) + finer) * 2.0**-24
    rounded_up = 1 - torch.finfo(dtype).eps / 4
    return torch.where(numbers >= rounded_up, 0.0, numbers).to(dtype)


def _normal(size: Any, *, dtype: torch.dtype | None = None, generator: Any = None, **kwargs: Any) -> Any:
    """Draws normal numbers in double precision (Box and Muller); upstream, those of float32 are cast (torch 2.13)."""
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if generator is not None or dtype is not torch.float64:
        return NotImplemented
    radius, angle = (aten.rand.default(size, dtype=dtype, **kwargs) for _ in range(2))
    return torch.sqrt(-2 * torch.log1p(-radius)) * torch.cos(2 * math.pi * angle)


def _of_wide_ranges(low: Any, high: Any, size: Any, *, dtype: Any = None, **kwargs: Any) -> Any:
    """Draws integers of a range that is wider than int64: upstream, they are all ``low`` (torch 2.13)."""
    if type(low) is not int or type(high) is not int or high - low < 2**63:
        return NotImplemented
    starts = (-(2**31), 0)
    upper, lower = (aten.randint.low(n, n + 2**32, size, dtype=torch.int64, **kwargs) for n in starts)
    bits, above = upper * 2**32 + lower, high - low - 2**63
    drawn = torch.where(bits >= above, bits - above + low, bits + (2**63 + low))
    return drawn.to(torch.int64 if dtype is None else dtype)


def _of_integers(rule: _Rule) -> _Rule:
    """Returns a decomposition that counts trials into integers: upstream, their numbers are all 1 (torch 2.13)."""

    def counted(x: torch.Tensor, p: Any, generator: Any = None) -> Any:
        if x.is_floating_point():
            return rule(x, p, generator)
        return rule(torch.empty_like(x, dtype=torch.float32), p, generator).to(x.dtype)

    return counted


def _pooled(rule: _Rule, dims: int) -> _Rule:
    """Returns a decomposition of pooling by the maximum whose indices are in the input.

    Upstream, a window of nothing but minus infinity has its maximum in the padding before the input: the index is
    negative, and the backward writes outside of the gradient's memory (torch 2.13). Eager takes the first element.
    """

    def pooled(
        x: torch.Tensor,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> Any:
        made = rule(x, kernel_size, stride, padding, dilation, ceil_mode)
        paddings = _of_each(padding, dims)
        if made is NotImplemented or not any(paddings):
            return made
        values, indices = made
        sizes, counts = x.shape[-dims:], values.shape[-dims:]
        steps = zip(
            sizes, counts, _of_each(stride or kernel_size, dims), paddings, _of_each(dilation, dims), strict=True
        )
        first: Any = 0
        for size, count, step, padded, distance in steps:
            place = torch.arange(count, device=x.device) * step - padded
            place = torch.where(place < 0, place % distance, place)
            first = place if isinstance(first, int) else first.unsqueeze(-1) * size + place
        lowest = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
        return values, torch.where(values == lowest, first, indices)

    return pooled


def _of_plain_sizes(rule: _Rule | None) -> _Rule:
    """Returns a decomposition for known sizes; it asks for symbolic ones as plain numbers."""

    def plain(x: torch.Tensor, output_size: Any) -> Any:
        if rule is None or any(isinstance(length, torch.SymInt) for length in x.shape):
            return NotImplemented
        return rule(x, output_size)

    return plain


def _conjugate(x: Any) -> Any:
    """Computes the conjugate: upstream, kernels that are called get a lazy one, which was not planned with. Those that
    solve triangular systems return other strides then (torch 2.13)."""
    return torch.conj_physical(x) if isinstance(x, torch.Tensor) else NotImplemented


def _soft_margin_gradient(grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, reduction: int) -> torch.Tensor:
    """Computes a gradient with all digits: upstream, 1 is subtracted from a number that is almost 1 (torch 2.13)."""
    made = -target * torch.sigmoid(-target * x) * grad
    return made / x.numel() if reduction == 1 else made  # 1: the mean


def _of_complex(parts: _Rule, rule: _Rule | None) -> _Rule:
    """Returns a decomposition of an operator that takes a complex tensor apart.

    Upstream, C++ that calls one for a list of one tensor takes the list for the tensor, and ends the process (torch
    2.13).
    """

    def apart(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.is_complex() and all(type(size) is int for size in x.shape):
            return parts(x, *args, **kwargs)
        return NotImplemented if rule is None else rule(x, *args, **kwargs)

    return apart


def _split(x: torch.Tensor, size: Any, dim: int = 0) -> list[torch.Tensor]:
    length, found, start = x.shape[dim], [], 0
    sizes = size if isinstance(size, (list, tuple)) else [size] * max(-(-length // size) if size else 1, 1)
    for each in sizes:
        found.append(aten.slice.Tensor(x, dim, start, min(start + each, length)))
        start += each
    return found


def _unbind(x: torch.Tensor, dim: int = 0) -> list[torch.Tensor]:
    return [aten.select.int(x, dim, i) for i in range(x.shape[dim])]


def _within_storage(x: torch.Tensor, src: torch.Tensor, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    """Refuses places that are not in the memory of a tensor, or do not count from its first element.

    Upstream, the places count from the first element of a copy, and may be in other memory (torch 2.13).
    """
    start = x.storage_offset()
    first = start if storage_offset is None else storage_offset
    if all(type(number) is int for number in (start, first, *x.shape, *x.stride(), *size, *stride)):
        last = first + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        outside = last >= x.untyped_storage().nbytes() // x.element_size()
        if (start and storage_offset is not None) or (outside and 0 not in size):
            raise RuntimeError("as_strided_scatter to places outside of a tensor")
    return NotImplemented


def _of_each(setting: Any, dims: int) -> list[int]:
    """Returns a setting of pooling for each dimension."""
    given = list(setting) if isinstance(setting, (list, tuple)) else [setting]
    return given * dims if len(given) == 1 else given


def _power(rule: _Rule | None) -> _Rule:
    """Returns a decomposition of powers: eager's kernel takes the reciprocal root for -0.5, also of infinity."""

    def power(x: torch.Tensor, exponent: Any) -> Any:
        if type(exponent) is float and exponent == -0.5 and x.is_floating_point():
            return torch.rsqrt(x)
        return NotImplemented if rule is None else rule(x, exponent)

    return power
