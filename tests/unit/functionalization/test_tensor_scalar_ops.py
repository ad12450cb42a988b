"""Numbers that became 0-dim tensors: results in half precision are rounded once, as those of eager's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sidefx_train.compile.functionalization.fused_optimizers import fused_update
from sidefx_train.compile.functionalization.op_rewrites import batch_norm_with_changing_numbers
from sidefx_train.compile.functionalization.tensor_scalar_ops import TensorScalar, call_foreach, call_with_scalars

aten = torch.ops.aten
HALF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Half precision, and the largest relative error of one rounding."""

# An operation, its tensors, where a number goes, and the value in exact arithmetic.
OPERATIONS: dict[str, tuple[Any, int, Callable[..., tuple[Any, ...]], dict[str, bool], Callable[..., Any]]] = {
    "add": (aten.add.Tensor, 1, lambda x, s: (x, s), {}, lambda x, s: x + s),
    "add alpha": (aten.add.Tensor, 2, lambda x, y, s: (x, y), {"alpha": True}, lambda x, y, s: x + s * y),
    "sub alpha": (aten.sub.Tensor, 2, lambda x, y, s: (x, y), {"alpha": True}, lambda x, y, s: x - s * y),
    "rsub alpha": (aten.rsub.Tensor, 2, lambda x, y, s: (x, y), {"alpha": True}, lambda x, y, s: y - s * x),
    "rsub": (aten.rsub.Scalar, 1, lambda x, s: (x, s), {}, lambda x, s: s - x),
    "mul": (aten.mul.Tensor, 1, lambda x, s: (x, s), {}, lambda x, s: x * s),
    "div": (aten.div.Scalar, 1, lambda x, s: (x, s), {}, lambda x, s: x / s),
    "lerp": (aten.lerp.Scalar, 2, lambda x, y, s: (x, y, s), {}, lambda x, y, s: x + s * (y - x)),
    "addcmul": (aten.addcmul.default, 3, lambda *a: a[:3], {"value": True}, lambda x, y, z, s: x + s * y * z),
    "addcdiv": (aten.addcdiv.default, 3, lambda *a: a[:3], {"value": True}, lambda x, y, z, s: x + s * y / z),
}


def scalar(value: float) -> TensorScalar:
    return TensorScalar(torch.tensor(value, dtype=torch.float64))


def tensors(count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [(torch.rand(256) + 0.5).to(dtype) for _ in range(count)]


def assert_rounded_once(value: torch.Tensor, exact: torch.Tensor, operands: list[torch.Tensor], error: float) -> None:
    """One rounding, and those of float32 on the way, which cancellation magnifies."""
    size = max(1.0, *(float(each.abs().max()) for each in operands))
    bound = exact.abs() * error * 1.001 + size * 2.0**-20
    assert bool(((value.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_number_is_not_rounded_to_half_precision(name: str, dtype: torch.dtype) -> None:
    op, count, arguments, named, exact = OPERATIONS[name]
    given = tensors(count, dtype)
    for number in (0.1, 0.3, 1e-3, 3.7):
        value = call_with_scalars(
            op, arguments(*given, scalar(number)), {key: scalar(number) for key in named}, result_dtype=dtype
        )
        assert value.dtype == dtype
        assert_rounded_once(value, exact(*(each.double() for each in given), number), given, HALF[dtype])


@pytest.mark.parametrize("dtype", HALF)
def test_lists_of_tensors_keep_their_dtype(dtype: torch.dtype) -> None:
    given = tensors(3, dtype)
    made = call_foreach(aten._foreach_mul.Scalar, (given, scalar(0.1)), {})
    for x, value in zip(given, made, strict=True):
        assert torch.equal(value, x * 0.1)
    call_foreach(aten._foreach_mul_.Scalar, (given, scalar(0.1)), {})
    assert all(map(torch.equal, given, made))


@pytest.mark.parametrize("number", [0.1, 2.5, 16777216.5])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "remainder", "fmod", "pow", "eq", "lt", "ge"])
def test_integers_and_a_number_are_float32(name: str, number: float) -> None:
    x = torch.tensor([1, 3, 7, 2**24 + 1, 5])
    op = aten.pow.Tensor_Scalar if name == "pow" else getattr(aten, name).Scalar
    want = op(x, number)
    torch.testing.assert_close(call_with_scalars(op, (x, scalar(number)), {}, want.dtype), want, rtol=3e-7, atol=0)


@pytest.mark.parametrize("dtype", HALF)
def test_statistics_of_half_precision_take_the_momentum_as_it_is(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 16).to(dtype)
    kept = [(torch.randn(16) + 3).to(dtype), (torch.rand(16) + 3).to(dtype)]
    before = [each.double() for each in kept]
    batch_norm_with_changing_numbers(x, None, None, *kept, True, scalar(0.3), 1e-5)
    of_batch = (x.double().mean(0), x.double().var(0))
    for value, old, new in zip(kept, before, of_batch, strict=True):
        exact = 0.3 * new + 0.7 * old
        # The kernel gives the statistics of the batch in half precision.
        bound = (exact.abs() + 0.3 * new.abs()) * HALF[dtype] * 1.01
        assert bool(((value.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", ["_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"])
def test_fused_updates_of_half_precision_are_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    """Numbers that half precision cannot hold: a small ``eps`` is 0 there, a decay of 0.9999 is 1."""
    param, grad, first, second = tensors(4, dtype)
    step = torch.tensor(3.0)
    adam = dict(lr=0.1, beta1=0.3, beta2=0.9999, weight_decay=0.03, eps=1e-9, amsgrad=False, maximize=False)
    sgd = dict(weight_decay=0.03, momentum=0.3, lr=0.1, dampening=0.1, nesterov=False, maximize=False)
    adagrad = dict(lr=0.1, lr_decay=0.03, weight_decay=0.03, eps=1e-9, maximize=False)
    state: list[list[torch.Tensor]]
    numbers, rest, state = {
        "sgd": (sgd, {"is_first_step": False}, [[first]]),
        "adagrad": (adagrad, {}, [[second], [step]]),
    }.get(name.split("_")[2], (adam, {}, [[first], [second], [], [step]]))
    op = getattr(aten, name).default

    def update(cast: Callable[[torch.Tensor], torch.Tensor], number: Callable[[float], Any]) -> list[torch.Tensor]:
        given = [[cast(each) for each in group] for group in ([param], [grad], *state)]
        named = {key: number(v) if type(v) is float else v for key, v in numbers.items()} | rest
        (op if number is float else lambda *args, **kwargs: fused_update(op, args, kwargs))(*given, **named)
        return [each for group in given for each in group]

    exact = update(lambda each: each.double() if each.dim() else each.clone(), float)
    for value, want in zip(update(torch.clone, scalar), exact, strict=True):
        if value.dim():
            assert value.dtype == dtype
            assert_rounded_once(value, want, [param, grad, first, second], HALF[dtype])
