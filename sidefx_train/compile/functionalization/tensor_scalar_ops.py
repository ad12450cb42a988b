"""Tensor operations whose number arguments became 0-dim tensors.

Inductor has no symbolic floats, but reads a 0-dim tensor at no cost. ``mul(x, s)`` therefore becomes a product of
tensors, ``add(x, y, alpha=s)`` becomes ``x + y * s``, and so on, with the result cast to the dtype that eager's number
would have given. Eager's kernels compute in float32 on half precision, with numbers in float32, and round the result
once; so do these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.ops.number_operators import call_with_tensors
from sidefx_train.errors import BackendError

aten = torch.ops.aten


@dataclass(frozen=True)
class TensorScalar:
    """A Python number held in a 0-dim tensor: a float in float64, an integer in int64."""

    value: torch.Tensor


def _bare(value: Any) -> Any:
    return value.value if isinstance(value, TensorScalar) else value


def _alike(value: TensorScalar) -> float | int:
    """Returns a Python number of the type of one in a tensor."""
    return 0.5 if value.value.dtype.is_floating_point else 1


def _as(value: Any, like: torch.Tensor) -> Any:
    """Returns a number in the dtype of ``like``, or as it is beside integers: 0.5 stays 0.5."""
    if not isinstance(value, TensorScalar):
        return value
    return value.value.to(like.dtype) if like.dtype.is_floating_point or like.dtype.is_complex else value.value


def _times(x: torch.Tensor, factor: Any) -> torch.Tensor:
    return x if not isinstance(factor, torch.Tensor) and factor == 1 else torch.mul(x, factor)


def _add(x: Any, y: Any, alpha: Any = 1) -> torch.Tensor:
    return torch.add(x, _times(y, alpha))


def _sub(x: Any, y: Any, alpha: Any = 1) -> torch.Tensor:
    return torch.sub(x, _times(y, alpha))


def _rsub(x: Any, y: Any, alpha: Any = 1) -> torch.Tensor:
    return torch.sub(y, _times(x, alpha))


def _addcmul(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, value: Any = 1) -> torch.Tensor:
    return torch.add(x, torch.mul(_times(a, value), b))


def _addcdiv(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, value: Any = 1) -> torch.Tensor:
    return torch.add(x, torch.div(_times(a, value), b))


def _clamp(x: torch.Tensor, min: Any = None, max: Any = None) -> torch.Tensor:
    if min is not None:
        low = _as(min, x)
        x = torch.maximum(x, low) if isinstance(low, torch.Tensor) else torch.clamp(x, min=low)
    if max is not None:
        high = _as(max, x)
        x = torch.minimum(x, high) if isinstance(high, torch.Tensor) else torch.clamp(x, max=high)
    return x


def _fill(x: torch.Tensor, value: Any) -> torch.Tensor:
    return value.value.to(x.dtype).expand(x.shape).clone()


def _full(size: Any, value: Any, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    dtype = dtype or torch.result_type(torch.empty(0, dtype=torch.bool), _alike(value))
    return value.value.to(device=device, dtype=dtype).expand(size).clone()


def _full_like(x: torch.Tensor, value: Any, dtype: Any = None, **_: Any) -> torch.Tensor:
    return value.value.to(dtype or x.dtype).expand(x.shape).clone()


def _new_full(x: torch.Tensor, size: Any, value: Any, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    return value.value.to(device=device or x.device, dtype=dtype or x.dtype).expand(size).clone()


def _scalar_tensor(value: Any, dtype: Any = None, **_: Any) -> torch.Tensor:
    return value.value.to(dtype or torch.get_default_dtype())


def _masked_fill(x: torch.Tensor, mask: torch.Tensor, value: Any) -> torch.Tensor:
    return torch.masked_fill(x, mask, value.value.to(x.dtype))


def _where(condition: torch.Tensor, x: Any, y: Any) -> torch.Tensor:
    like = x if isinstance(x, torch.Tensor) else y
    return torch.where(condition, _as(x, like), _as(y, like))


def _searchsorted(sequence: torch.Tensor, value: Any, **kwargs: Any) -> torch.Tensor:
    wanted = value.value.to(torch.result_type(sequence, _alike(value)))
    return torch.searchsorted(sequence, wanted, **kwargs)


def _bucketize(value: Any, boundaries: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return torch.bucketize(value.value.to(torch.result_type(boundaries, _alike(value))), boundaries, **kwargs)


def _normal(
    mean: Any, std: Any, size: Any, *, generator: Any = None, dtype: Any = None, device: Any = None, **_: Any
) -> torch.Tensor:
    made = torch.empty(size, dtype=dtype, device=device)
    return _of_kernel(aten.normal_functional.default, (made, mean, std), {"generator": generator})


def _spaced(op: Any) -> Callable[..., torch.Tensor]:
    """Returns the rule of ``linspace`` and ``logspace``, which have a form for tensors."""

    def apply(start: Any, end: Any, *rest: Any, **kwargs: Any) -> torch.Tensor:
        ends = (_bare(value) for value in (start, end))
        return op(
            *(v.double() if isinstance(v, torch.Tensor) else torch.full((), v, dtype=torch.float64) for v in ends),
            *rest,
            **kwargs,
        )

    return apply


def _logspace(start: Any, end: Any, steps: Any, base: Any = 10.0, *, dtype: Any = None, **kwargs: Any) -> torch.Tensor:
    if not isinstance(base, TensorScalar):
        return _spaced(aten.logspace.Tensor_Tensor)(start, end, steps, base, dtype=dtype, **kwargs)
    exponents = _spaced(aten.linspace.Tensor_Tensor)(start, end, steps, dtype=torch.float64, **kwargs)
    return torch.pow(base.value.to(exponents), exponents).to(dtype or torch.get_default_dtype())


def _float_range(start: Any, end: Any, step: Any, length: Any, dtype: Any, device: Any) -> torch.Tensor:
    places = torch.arange(length, dtype=torch.float64, device=device)
    return (places * _bare(step) + _bare(start)).to(dtype)


def _rrelu_with_noise(x: torch.Tensor, noise: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    made, drawn = _of_kernel(aten.rrelu_with_noise_functional.default, (x, noise, *args), kwargs)
    noise.copy_(drawn)
    return made


def _updating(op: Any) -> Callable[..., Any]:
    """Returns the rule of a batch norm that updates its statistics, by the operator that returns them last."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        *made, mean, var = _of_kernel(op, args, kwargs)
        args[3].copy_(mean)
        args[4].copy_(var)
        return tuple(made)

    return apply


def _unsafe_masked_index(x: torch.Tensor, mask: torch.Tensor, indices: Any, fill: Any) -> torch.Tensor:
    made = aten._unsafe_masked_index.default(x, mask, indices, 0)
    return torch.where(mask, made, fill.value.to(made.dtype))


def _real(value: Any, x: torch.Tensor) -> Any:
    """Returns a number in the precision in which kernels compute with ``x``."""
    if not isinstance(value, TensorScalar):
        return value
    return value.value.to(torch.float64 if x.dtype == torch.float64 else torch.float32)


def _computed(function: Callable[..., torch.Tensor], numbers: int) -> Callable[..., torch.Tensor]:
    """Returns a rule that computes in float32 at least; its numbers follow the first ``numbers`` arguments."""

    def apply(*args: Any, **kwargs: Any) -> torch.Tensor:
        x = args[0]
        wide = x.dtype if x.dtype == torch.float64 else torch.float32
        tensors = [t.to(wide) if isinstance(t, torch.Tensor) else t for t in args[:numbers]]
        rest = [t.to(wide) if isinstance(t, torch.Tensor) else _real(t, x) for t in args[numbers:]]
        return function(*tensors, *rest, **{name: _real(value, x) for name, value in kwargs.items()}).to(x.dtype)

    return apply


def _leaky_relu(x: Any, negative_slope: Any = 0.01) -> torch.Tensor:
    return torch.where(x > 0, x, x * negative_slope)


def _leaky_relu_backward(grad: Any, x: Any, negative_slope: Any, self_is_result: bool) -> torch.Tensor:
    return torch.where(x > 0, grad, grad * negative_slope)


def _elu(x: Any, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> torch.Tensor:
    return torch.where(x > 0, x * scale, torch.expm1(x * input_scale) * alpha * scale)


def _elu_backward(grad: Any, alpha: Any, scale: Any, input_scale: Any, is_result: bool, x: Any) -> torch.Tensor:
    if is_result:
        return torch.where(x > 0, grad * scale, grad * input_scale * (x + scale * alpha))
    return torch.where(x > 0, grad * scale, grad * input_scale * alpha * scale * torch.exp(x * input_scale))


def _softplus(x: Any, beta: Any = 1, threshold: Any = 20) -> torch.Tensor:
    scaled = x * beta
    return torch.where(scaled > threshold, x, torch.log1p(torch.exp(scaled)) / beta)


def _softplus_backward(grad: Any, x: Any, beta: Any, threshold: Any) -> torch.Tensor:
    scaled = x * beta
    z = torch.exp(scaled)
    return torch.where(scaled > threshold, grad, grad * z / (z + 1.0))


def _limits(low: Any, high: Any, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(v if isinstance(v, torch.Tensor) else torch.full((), v, dtype=like.dtype) for v in (low, high))  # type: ignore[return-value]


def _hardtanh(x: Any, min_val: Any = -1, max_val: Any = 1) -> torch.Tensor:
    low, high = _limits(min_val, max_val, x)
    return torch.minimum(torch.maximum(x, low), high)


def _hardtanh_backward(grad: Any, x: Any, min_val: Any, max_val: Any) -> torch.Tensor:
    return torch.where((x <= min_val) | (x >= max_val), 0.0, grad)


def _huber(x: Any, target: Any, reduction: int = 1, delta: Any = 1.0) -> torch.Tensor:
    z = (x - target).abs()
    return _reduced(torch.where(z <= delta, 0.5 * z * z, delta * (z - 0.5 * delta)), reduction)


def _huber_backward(grad: Any, x: Any, target: Any, reduction: int, delta: Any) -> torch.Tensor:
    norm = 1.0 / x.numel() if reduction == 1 else 1.0
    z = x - target
    inner = torch.where(z >= delta, norm * grad * delta, norm * z * grad)
    return torch.where(z <= -delta, -norm * grad * delta, inner)


def _smooth_l1(x: Any, target: Any, reduction: int = 1, beta: Any = 1.0) -> torch.Tensor:
    z = (x - target).abs()
    return _reduced(torch.where(z < beta, 0.5 * z * z / beta, z - 0.5 * beta), reduction)


def _smooth_l1_backward(grad: Any, x: Any, target: Any, reduction: int, beta: Any) -> torch.Tensor:
    norm = 1.0 / x.numel() if reduction == 1 else 1.0
    z = x - target
    return torch.where(z.abs() < beta, norm * z * grad / beta, norm * torch.sign(z) * grad)


def _reduced(loss: torch.Tensor, reduction: int) -> torch.Tensor:
    return loss if reduction == 0 else loss.mean() if reduction == 1 else loss.sum()


def _product(multiply: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Returns the rule of ``beta * x + alpha * multiply(a, b)``."""

    def apply(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
        product = multiply(a, b)
        product = _times(product, _as(alpha, product))
        if not isinstance(beta, TensorScalar) and beta == 0:  # what is in ``x`` does not matter then
            return product.expand(torch.broadcast_shapes(x.shape, product.shape))
        return torch.add(_times(x, _as(beta, x)), product)

    return apply


def _elementwise(
    function: Callable[..., torch.Tensor], operands: int = 2, *, wide: bool = False, to_floats: bool = False
) -> Callable[..., torch.Tensor]:
    """Returns the rule of an operation whose first ``operands`` arguments decide the dtype in which it computes.

    Args:
        wide: whether eager's kernel computes half precision in float32, its numbers, too, and rounds the result once.
        to_floats: whether the result is of floats if all operands are integers.
    """

    def apply(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = [_alike(each) if isinstance(each, TensorScalar) else each for each in args[:operands]]
        given += [0.5] if to_floats else []
        computing, result = compat.elementwise_dtypes(*given)

        def cast(value: Any) -> Any:
            value = _bare(value)
            return value.to(computing if wide else result) if isinstance(value, torch.Tensor) else value

        made = function(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})
        return made.to(result) if wide else made

    return apply


_QUOTIENT = _elementwise(torch.div, wide=True, to_floats=True)


def _divide(x: Any, y: Any, rounding_mode: str | None = None) -> torch.Tensor:
    if rounding_mode is None:
        return _QUOTIENT(x, y)
    return _elementwise(functools.partial(torch.div, rounding_mode=rounding_mode), wide=True)(x, y)


def _power(x: Any, y: Any) -> torch.Tensor:
    whole = isinstance(x, torch.Tensor) and not (x.is_floating_point() or x.is_complex())
    if whole and isinstance(y, TensorScalar) and not y.value.is_floating_point():
        raise BackendError("SFX201", "a power of integers, whose exponent changes from call to call, may raise")
    return _elementwise(torch.pow)(x, y)


_PRODUCTS = {"addmm": _product(torch.mm), "addmv": _product(torch.mv), "baddbmm": _product(torch.bmm)}
_RULES: dict[str, Callable[..., torch.Tensor]] = {
    "add": _elementwise(_add, wide=True),
    "sub": _elementwise(_sub, wide=True),
    "rsub": _elementwise(_rsub, wide=True),
    "mul": _elementwise(torch.mul, wide=True),
    "div": _divide,
    "true_divide": _divide,
    "remainder": _elementwise(torch.remainder),
    "fmod": _elementwise(torch.fmod),
    "pow": _power,
    "lerp": _elementwise(torch.lerp, wide=True),
    "addcmul": _elementwise(_addcmul, 3, wide=True),
    "addcdiv": _elementwise(_addcdiv, 3, wide=True),
    "clamp": _clamp,
    "clamp_min": lambda x, v: _clamp(x, min=v),
    "clamp_max": lambda x, v: _clamp(x, max=v),
    "fill": _fill,
    "full": _full,
    "full_like": _full_like,
    "new_full": _new_full,
    "normal.float_float": _normal,
    "rrelu_with_noise": _rrelu_with_noise,
    "_native_batch_norm_legit.default": _updating(aten._native_batch_norm_legit_functional.default),
    "_batch_norm_with_update": _updating(aten._batch_norm_with_update_functional.default),
    "_unsafe_masked_index": _unsafe_masked_index,
    "linspace": _spaced(aten.linspace.Tensor_Tensor),
    "logspace": _logspace,
    "float_range": _float_range,
    "searchsorted.Scalar": _searchsorted,
    "bucketize.Scalar": _bucketize,
    "scalar_tensor": _scalar_tensor,
    "masked_fill": _masked_fill,
    "where": _where,
    "leaky_relu": _computed(_leaky_relu, 1),
    "leaky_relu_backward": _computed(_leaky_relu_backward, 2),
    "elu": _computed(_elu, 1),
    "elu_backward": _computed(_elu_backward, 1),
    "softplus": _computed(_softplus, 1),
    "softplus_backward": _computed(_softplus_backward, 2),
    "hardtanh": _computed(_hardtanh, 1),
    "hardtanh_backward": _computed(_hardtanh_backward, 2),
    "huber_loss": _computed(_huber, 2),
    "huber_loss_backward": _computed(_huber_backward, 3),
    "smooth_l1_loss": _computed(_smooth_l1, 2),
    "smooth_l1_loss_backward": _computed(_smooth_l1_backward, 3),
    **_PRODUCTS,
    **{name: _elementwise(getattr(torch, name)) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
}


def has_tensor_scalar(args: Any) -> bool:
    """Returns True if nested arguments contain a :class:`TensorScalar`."""
    if isinstance(args, TensorScalar):
        return True
    if isinstance(args, (list, tuple)):
        return any(has_tensor_scalar(a) for a in args)
    if isinstance(args, dict):
        return any(has_tensor_scalar(a) for a in args.values())
    return False


def call_with_scalars(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result_dtype: Any) -> Any:
    """Runs an aten operation with 0-dim tensors in place of some numbers.

    Args:
        result_dtype: dtype of eager's result.

    Raises:
        BackendError: the operation has no form that accepts a tensor there.
    """
    name = op._schema.name.split("::")[1]
    in_place = name.endswith("_") and not name.endswith("__")
    base = name.rstrip("_") if in_place else name
    rule = _RULES.get(f"{base}.{op._overloadname}") or _RULES.get(base)
    if rule is None or (base in _PRODUCTS and result_dtype in (torch.bfloat16, torch.float16)):  # rounded once
        return _of_kernel(op, args, kwargs)
    try:
        out = rule(*args, **kwargs)
    except TypeError as error:
        raise BackendError("SFX201", f"{op} with a changing number: {error}") from error
    if in_place:
        return args[0].copy_(out)
    return out if result_dtype is None or out.dtype == result_dtype else out.to(result_dtype)


def _of_kernel(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls torch's own kernel, which reads the numbers when the graph runs."""
    bare = tuple(map(_bare, args)), {name: _bare(value) for name, value in kwargs.items()}
    made = NotImplemented if has_tensor_scalar(bare) else call_with_tensors(op, *bare)
    if made is NotImplemented:
        raise BackendError("SFX201", f"a number that changes from call to call is an argument of {op}")
    return made


def foreach_calls(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, list[tuple[Any, ...]]] | None:
    """Splits ``_foreach_name[_](lists...)`` into one call per tensor: (name, argument tuples), or ``None``."""
    name = op._schema.name.split("::")[1]
    if not name.startswith("_foreach_"):
        return None
    count = next(len(a) for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple)))
    calls = []
    for i in range(count):
        item = tuple(a[i] if isinstance(a, (list, tuple)) else a for a in args)
        named = {k: v[i] if isinstance(v, (list, tuple)) else v for k, v in kwargs.items()}
        calls.append((item, named))
    return name.removeprefix("_foreach_"), calls


def call_foreach(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a ``_foreach_`` operation one tensor at a time; returns :data:`NotImplemented` if there is no such form."""
    split = foreach_calls(op, args, kwargs)
    if split is None:
        return NotImplemented
    name, calls = split
    in_place = name.endswith("_")
    base = name.rstrip("_")
    results = []
    for item, named in calls:
        if base in _RULES:
            value = named.pop("value", named.pop("scalars", named.pop("scalar", None)))
            if value is not None:
                item = (*item, value)
            out = _RULES[base](*item, **named)
        elif base == "copy":
            out = item[1].to(item[0].dtype).expand(item[0].shape)
        elif base == "zero":
            out = torch.zeros_like(item[0])
        elif base == "norm":
            out = torch.linalg.vector_norm(item[0], *item[1:2], dtype=named.get("dtype"))
        elif base in ("maximum", "minimum"):
            function = torch.maximum if base == "maximum" else torch.minimum
            out = (
                function(item[0], item[1])
                if isinstance(item[1], torch.Tensor)
                else _clamp(item[0], **{"min" if base == "maximum" else "max": item[1]})
            )
        elif hasattr(torch, base) and len(item) == 1 and not named:
            out = getattr(torch, base)(item[0])
        else:
            return NotImplemented
        results.append(out)
    if not in_place:
        return results
    for item, out in zip((c[0] for c in calls), results, strict=True):
        item[0].copy_(out)
    return None
