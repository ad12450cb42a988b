"""Fake kernels whose results have the strides of eager's kernel, where torch's own have others.

What a step does with a view of such a result depends on its strides: ``reshape`` is a view or a copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as PROMOTION
from torch._prims_common import elementwise_dtypes, suggest_memory_format

aten = torch.ops.aten

_TO_FLOAT, _KEEPING, _TO_BOOL = PROMOTION.INT_TO_FLOAT, PROMOTION.DEFAULT, PROMOTION.ALWAYS_BOOL
_ELEMENTWISE: dict[Any, PROMOTION] = {
    **dict.fromkeys((aten.copysign.Tensor, aten.xlogy.Tensor, aten.special_xlog1py.default), _TO_FLOAT),
    **dict.fromkeys((aten.floor_divide.default, aten.heaviside.default, aten.logaddexp.default), _KEEPING),
    **dict.fromkeys((aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default), _TO_BOOL),
}
"""Operations whose results are laid out like sums, with the rule for their dtype."""

_NORMALIZATIONS = (
    *(aten.native_batch_norm.default, aten._batch_norm_with_update.default),
    *(aten._native_batch_norm_legit.default, aten._native_batch_norm_legit.no_stats),
)
_NORMALIZATIONS_BACKWARD = (aten.native_batch_norm_backward.default, aten.batch_norm_backward.default)
_CONTIGUOUS = (
    *(aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default),
    *(aten.rrelu_with_noise.default, aten._log_softmax_backward_data.default, aten.glu_backward.default),
)
"""Operations whose results are contiguous on the CPU, whatever the layout of their operand."""

_ALL_CONTIGUOUS = (aten.native_layer_norm_backward.default, aten.nll_loss2d_forward.default)
"""Operations with several results, each contiguous on the CPU."""

_ACTIVATIONS_BACKWARD = (
    *(aten.hardswish_backward.default, aten.hardtanh_backward.default, aten.logit_backward.default),
)
"""Gradients by elementwise kernels of the incoming gradient and the operand, in this order."""

_PADDINGS_BACKWARD = (
    *(aten.reflection_pad2d_backward.default, aten.replication_pad2d_backward.default),
    *(aten.reflection_pad3d_backward.default, aten.replication_pad3d_backward.default),
)


def know_layouts() -> None:
    """Registers the fake kernels of :data:`LAYOUTS`."""
    from torch._decomp import meta_table
    from torch._subclasses import fake_impls

    missing = [op for op in LAYOUTS if op not in fake_impls.op_implementations_dict]
    for op in missing:
        fake_impls.register_op_impl(op)(LAYOUTS[op])
        meta_table.setdefault(op, LAYOUTS[op])  # else a decomposition takes precedence
    if missing:
        torch._subclasses.FakeTensorMode.cache_clear()


def _elementwise(mode: Any, func: Any, a: Any, b: Any) -> Any:
    _, dtype = elementwise_dtypes(a, b, type_promotion_kind=_ELEMENTWISE[func])
    return _like_sum(mode, dtype, a, b)


def _divided(mode: Any, func: Any, a: Any, b: Any, *, rounding_mode: str | None) -> Any:
    kind = PROMOTION.INT_TO_FLOAT if rounding_mode is None else PROMOTION.DEFAULT
    return _like_sum(mode, elementwise_dtypes(a, b, type_promotion_kind=kind)[1], a, b)


def _undropped(mode: Any, func: Any, grad: Any, mask: Any, scale: Any) -> Any:
    return _like_sum(mode, grad.dtype, grad, mask)


def _like_sum(mode: Any, dtype: torch.dtype, a: Any, b: Any) -> Any:
    with mode:
        return torch.empty_like(_wider(a) + _wider(b), dtype=dtype)


def _wider(t: Any) -> Any:
    """Returns a tensor of float32 with the same layout: sums in half precision make expanded operands contiguous."""
    if not isinstance(t, torch.Tensor) or any(type(n) is not int for n in (*t.shape, *t.stride())):
        return t
    return torch.empty_strided(t.shape, t.stride(), device=t.device)


def _outer(mode: Any, func: Any, x: Any, a: Any, b: Any, **factors: Any) -> Any:
    with mode:
        return torch.empty_like(x + a.unsqueeze(1) * b)


def _products_and_sum(mode: Any, func: Any, x: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """``baddbmm`` and ``addbmm`` with symbolic sizes, which torch's own expands as plain numbers."""
    if not x.dtype == a.dtype == b.dtype or a.dim() != 3 or b.dim() != 3:
        return NotImplemented
    size = (*a.shape[:2], b.shape[2]) if func is aten.baddbmm.default else (a.shape[1], b.shape[2])
    if all(type(each) is int for each in size):
        return NotImplemented
    with mode:
        x.expand(size)  # raises for others
        return torch.bmm(a, b).new_empty(size)


def _power_of_number(mode: Any, func: Any, base: Any, exponent: Any) -> Any:
    _, dtype = elementwise_dtypes(base, exponent, type_promotion_kind=PROMOTION.BOOL_TO_LONG)
    with mode:
        return torch.empty_like(exponent, dtype=dtype, memory_format=torch.contiguous_format)


def _cross_entropy(mode: Any, func: Any, x: Any, target: Any, weight: Any = None, reduction: int = 1) -> Any:
    with mode:
        return torch.empty_like(x) if reduction == 0 else torch.empty((), dtype=x.dtype, device=x.device)


def _log_sigmoid(mode: Any, func: Any, x: Any) -> Any:
    if x.device.type != "cpu":
        return NotImplemented
    with mode:
        made = torch.empty_like(x, memory_format=torch.contiguous_format)
        return made, torch.empty_like(made)


def _contiguous(mode: Any, func: Any, first: Any, second: Any, *rest: Any, **named: Any) -> Any:
    x = second if func._schema.name.endswith("_backward") else first
    if x.device.type != "cpu":
        return NotImplemented
    with mode:
        return torch.empty_like(x, memory_format=torch.contiguous_format)


def _shuffled(mode: Any, func: Any, x: Any, groups: int) -> Any:
    with mode:
        return torch.empty_like(x, memory_format=suggest_memory_format(x))


def _scaled_by_power(mode: Any, func: Any, x: Any, exponent: Any) -> Any:
    with mode:
        power = torch.pow(2.0, exponent)
        if x.dtype.itemsize == 2:  # one kernel, not two
            power = torch.empty_strided(exponent.shape, exponent.stride(), dtype=power.dtype, device=power.device)
    return _like_sum(mode, torch.result_type(x, power), x, power)


def _normalized(mode: Any, func: Any, x: Any, *args: Any, **named: Any) -> Any:
    if x.device.type != "cpu":
        return NotImplemented
    with mode:
        _, *statistics = torch._decomp.decomposition_table[func](x, *args, **named)
        return torch.empty_like(x, memory_format=suggest_memory_format(x)), *statistics


def _by_torch(func: Any, *args: Any, **named: Any) -> Any:
    kernel = func.py_kernels.get(torch._C.DispatchKey.Meta) or torch._decomp.decomposition_table[func]
    return kernel(*args, **named)


def _all_contiguous(mode: Any, func: Any, x: Any, *args: Any, **named: Any) -> Any:
    if x.device.type != "cpu":
        return NotImplemented
    with mode:
        made = _by_torch(func, x, *args, **named)
        return tuple(t if t is None else torch.empty_like(t, memory_format=torch.contiguous_format) for t in made)


def _normalized_backward(mode: Any, func: Any, grad: Any, x: Any, *args: Any) -> Any:
    if x.device.type != "cpu":
        return NotImplemented
    with mode:
        of_operand, *others = _by_torch(func, grad, x, *args)
        if of_operand is not None:
            of_operand = torch.empty_like(of_operand, memory_format=suggest_memory_format(x))
        return of_operand, *others


def _padded(mode: Any, func: Any, x: Any, padding: Any) -> Any:
    if x.device.type != "cpu":
        return NotImplemented
    with mode:
        return torch.empty_like(_by_torch(func, x, padding), memory_format=suggest_memory_format(x))


def _padded_backward(mode: Any, func: Any, grad: Any, x: Any, padding: Any) -> Any:
    if x.device.type != "cpu":
        return NotImplemented
    with mode:
        return torch.empty_like(x, memory_format=suggest_memory_format(x))


def _activated_backward(mode: Any, func: Any, grad: Any, x: Any, *numbers: Any) -> Any:
    return _like_sum(mode, torch.promote_types(grad.dtype, x.dtype), grad, x)


def _cross_entropy_backward(mode: Any, func: Any, grad: Any, x: Any, *args: Any) -> Any:
    with mode:
        return torch.empty_like(x)


def _drawn(mode: Any, func: Any, mean: Any, deviation: Any, **named: Any) -> Any:
    with mode:
        size = torch.broadcast_shapes(mean.shape, deviation.shape)
        return torch.empty(size, dtype=mean.dtype, device=mean.device)


def _unpooled(mode: Any, func: Any, x: Any, indices: Any, output_size: Any) -> Any:
    layout = suggest_memory_format(x)
    with mode:
        size = (*x.shape[:-2], *output_size)
        return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=layout)


LAYOUTS: dict[Any, Any] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys((aten.div.Tensor_mode, aten.div.Scalar_mode), _divided),
    **dict.fromkeys(_NORMALIZATIONS, _normalized),
    **dict.fromkeys(_NORMALIZATIONS_BACKWARD, _normalized_backward),
    **dict.fromkeys(_CONTIGUOUS, _contiguous),
    **dict.fromkeys(_ALL_CONTIGUOUS, _all_contiguous),
    **dict.fromkeys(_ACTIVATIONS_BACKWARD, _activated_backward),
    **dict.fromkeys(_PADDINGS_BACKWARD, _padded_backward),
    **dict.fromkeys((aten.reflection_pad3d.default, aten.replication_pad3d.default), _padded),
    aten.binary_cross_entropy_backward.default: _cross_entropy_backward,
    aten.normal.Tensor_Tensor: _drawn,
    aten.native_dropout_backward.default: _undropped,
    aten.addr.default: _outer,
    **dict.fromkeys((aten.baddbmm.default, aten.addbmm.default), _products_and_sum),
    aten.log_sigmoid_forward.default: _log_sigmoid,
    **dict.fromkeys((aten.channel_shuffle.default, aten.native_channel_shuffle.default), _shuffled),
    aten.ldexp.Tensor: _scaled_by_power,
    aten.pow.Scalar: _power_of_number,
    aten.binary_cross_entropy.default: _cross_entropy,
    aten.max_unpool2d.default: _unpooled,
}
"""Fake kernels by operator; :func:`know_layouts` registers them."""
