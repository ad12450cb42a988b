"""Replaces operations that torch's functionalization does not support."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.functionalization import memory_format as layouts
from sidefx_train.compile.functionalization.tensor_scalar_ops import TensorScalar, has_tensor_scalar
from sidefx_train.compile.ops import ctc_loss, mkldnn_rnn
from sidefx_train.compile.ops.number_operators import call_with_tensors
from sidefx_train.compile.ops.symbolic_lengths import IS_INSIDE, SLICE, SLICE_BACKWARD
from sidefx_train.errors import BackendError

aten = torch.ops.aten


def _native_batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: Any
) -> Any:
    """``native_batch_norm`` updates its statistics although its schema does not say so."""
    if not training:
        no_training = aten._native_batch_norm_legit_no_training.default
        return _call(no_training, x, weight, bias, mean, var, momentum, eps)
    if mean is None:
        return _call(aten._native_batch_norm_legit.no_stats, x, weight, bias, True, momentum, eps)
    out, saved_mean, saved_rstd, new_mean, new_var = _call(
        aten._native_batch_norm_legit_functional.default, x, weight, bias, mean, var, True, momentum, eps
    )
    mean.copy_(new_mean)
    var.copy_(new_var)
    return out, saved_mean, saved_rstd


def _call(op: Any, *args: Any) -> Any:
    """Calls an operator, one of whose numbers may be a 0-dim tensor.

    Raises:
        BackendError: this torch has no such form of it.
    """
    if not has_tensor_scalar(args):
        return op(*args)
    made = call_with_tensors(op, tuple(arg.value if isinstance(arg, TensorScalar) else arg for arg in args), {})
    if made is NotImplemented:
        raise BackendError("SFX201", f"a number that changes from call to call is an argument of {op}")
    return made


def batch_norm_with_changing_numbers(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: Any, eps: Any
) -> Any:
    """``native_batch_norm`` whose momentum or ``eps`` is a 0-dim tensor: the statistics of the batch are mixed in
    outside of it."""
    if not isinstance(momentum, TensorScalar):
        return _native_batch_norm(x, weight, bias, mean, var, training, momentum, eps)
    if not training or mean is None:
        return _native_batch_norm(x, weight, bias, mean, var, training, 0.0, eps)
    of_batch, var_of_batch = mean.clone(), var.clone()
    made = _native_batch_norm(x, weight, bias, of_batch, var_of_batch, True, 1.0, eps)
    computing, _ = compat.elementwise_dtypes(mean)
    share = momentum.value.to(computing)
    for kept, new in ((mean, of_batch), (var, var_of_batch)):
        kept.copy_(share * new.to(computing) + (1 - share) * kept.to(computing))
    return made


def _cudnn_batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: Any, eps: Any
) -> Any:
    """``cudnn_batch_norm`` as a batch norm that a compiler can fuse; its backward needs no reserved memory then."""
    made = batch_norm_with_changing_numbers(x, weight, bias, mean, var, training, momentum, eps)
    return *made, aten.empty.memory_format([0], dtype=torch.uint8, device=x.device)


def _cudnn_batch_norm_backward(
    x: Any, grad: Any, weight: Any, mean: Any, var: Any, saved_mean: Any, saved_rstd: Any, eps: Any, reserved: Any
) -> Any:
    masks = [True, True, True]
    norm = aten.native_batch_norm_backward.default
    return _call(norm, grad, x, weight, mean, var, saved_mean, saved_rstd, True, eps, masks)


def _batch_norm_into(*args: Any, out: Any, save_mean: Any, save_invstd: Any) -> Any:
    """Batch norm with ``out=``."""
    made = _native_batch_norm(*args)
    for target, value in zip((out, save_mean, save_invstd), made, strict=True):
        target.copy_(value)
    return out, save_mean, save_invstd


def _resize_(target: Any, size: Any, memory_format: Any = None) -> Any:
    """Resize to the current size; other calls are refused."""
    return target


def _polygamma_(target: Any, n: int) -> Any:
    """Functionalization does not support the in-place operator."""
    return target.copy_(aten.polygamma.default(n, target))


def _zeros(size: Any, **kwargs: Any) -> Any:
    """Zeros without memory, which derivatives of functorch and forward mode make: generated code reads memory."""
    return aten.zeros.default(size, **kwargs)


def _sym_numel(tensor: Any) -> Any:
    """The number of elements as a product of sizes: torch's tracer does not find powers of a symbol."""
    return math.prod(aten.sym_size.int(tensor, dim) for dim in range(tensor.dim()))


def _add_rows(dense: Any, indices: Any, values: Any, coalesced: bool, alpha: Any) -> Any:
    """Adds the rows of a sparse tensor in place."""
    if isinstance(alpha, TensorScalar):
        values, alpha = torch.mul(values, alpha.value.to(values.dtype)), 1
    return dense.copy_(torch.ops.sidefx.sparse_added.default(dense, indices, values, coalesced, alpha))


def slice_of_unknown_length(node: fx.Node, args: tuple[Any, ...]) -> torch.Tensor | None:
    """Runs a slice of a length that only the graph knows, or its derivative; ``None`` for other operations, and for
    slices whose bounds are not known to be inside."""
    first = {aten.slice.Tensor: 1, aten.slice_backward.default: 2}.get(node.target)
    if first is None or len(args) < first + 3 or (len(args) > first + 3 and args[first + 3] != 1):
        return None
    dim, start, end = args[first : first + 3]
    bound = node.args[first + 2]
    if not isinstance(bound, fx.Node) or IS_INSIDE not in bound.meta:
        return None
    if first == 1:
        return SLICE(args[0], dim % args[0].dim(), start, end - start)  # type: ignore[no-any-return]
    return SLICE_BACKWARD(args[0], args[1], dim % len(args[1]), start)  # type: ignore[no-any-return]


CHANNELS_LAST: dict[Any, Callable[..., Any]] = {
    aten.convolution.default: layouts.convolution,
    aten.convolution_backward.default: layouts.convolution_backward,
}


REWRITES: dict[Any, Callable[..., Any]] = {
    aten.sym_numel.default: _sym_numel,
    aten.native_batch_norm.default: _native_batch_norm,
    aten.native_batch_norm.out: _batch_norm_into,
    aten.cudnn_batch_norm.default: _cudnn_batch_norm,
    aten.cudnn_batch_norm_backward.default: _cudnn_batch_norm_backward,
    aten._native_batch_norm_legit.out: _batch_norm_into,
    aten._efficientzerotensor.default: _zeros,
    aten.resize_.default: _resize_,
    aten.resize_as_.default: _resize_,
    aten.polygamma_.default: _polygamma_,
    aten.mkldnn_rnn_layer.default: mkldnn_rnn.forward,
    aten.mkldnn_rnn_layer_backward.default: mkldnn_rnn.backward,
    torch.ops.sidefx.sparse_add_.default: _add_rows,
    aten._ctc_loss.Tensor: ctc_loss.forward,
    aten._ctc_loss_backward.Tensor: ctc_loss.backward,
}
