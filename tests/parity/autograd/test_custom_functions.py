"""``torch.autograd.Function`` inside a step."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.support.parity import Program, parity
from tests.support.training_steps import trained


def saved_and_attributes() -> Program:
    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, k):
            result = torch.exp(x * k)
            ctx.save_for_backward(result)
            ctx.k, ctx.notes = k, {"scale": 1}
            return result

        @staticmethod
        def backward(ctx, grad):
            (result,) = ctx.saved_tensors
            assert ctx.needs_input_grad == (True, False)
            return grad * result * ctx.k * ctx.notes["scale"], None

    return trained(lambda model, x, y: F.cross_entropy(Exp.apply(model(x), 0.3), y))


def setup_context() -> Program:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(x, k):
            return x * x * k, x.sign()

        @staticmethod
        def setup_context(ctx, inputs, output):
            x, k = inputs
            ctx.save_for_backward(x)
            ctx.k = k
            ctx.mark_non_differentiable(output[1])

        @staticmethod
        def backward(ctx, grad, _):
            (x,) = ctx.saved_tensors
            return 2 * grad * x * ctx.k, None

    def loss(model, x, y):
        square, sign = Square.apply(model(x), 0.3)
        assert not sign.requires_grad
        return F.cross_entropy(square + sign, y)

    return trained(loss)


def mark_dirty() -> Program:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            x.mul_(2)
            ctx.mark_dirty(x)
            return x

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    def loss(model, x, y):
        hidden = model(x) * 1.0
        out = Double.apply(hidden)
        assert out is hidden
        return F.cross_entropy(out, y)

    return trained(loss)


def needs_input_grad() -> Program:
    class Mul(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a * b

        @staticmethod
        def backward(ctx, grad):
            a, b = ctx.saved_tensors
            return grad * b if ctx.needs_input_grad[0] else None, grad * a if ctx.needs_input_grad[1] else None

    return trained(lambda model, x, y: F.cross_entropy(Mul.apply(model(x), torch.full((3,), 2.0)), y))


def side_effects() -> Program:
    log, counts = [], {"forward": 0, "backward": 0}

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            log.append("forward")
            counts["forward"] += 1
            ctx.set_materialize_grads(False)
            return x.view_as(x), x.clone()

        @staticmethod
        def backward(ctx, grad, unused):
            log.append(("backward", unused is None))
            counts["backward"] += 10
            return grad

    return trained(lambda model, x, y: F.cross_entropy(Noted.apply(model(x))[0], y), None, log, counts)


def once_differentiable() -> Program:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, grad):
            return grad * 2

    return trained(lambda model, x, y: F.cross_entropy(Twice.apply(model(x)), y))


def custom_autocast() -> Program:
    class Twice(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx, x):
            assert not torch.is_autocast_enabled("cpu")
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, grad):
            return grad * 2

    def loss(model, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(Twice.apply(model(x)), y)

    return trained(loss)


def default_arguments() -> Program:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(x, k=3.0):
            return x * k

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.k = inputs[1]

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.k, None

    return trained(lambda model, x, y: F.cross_entropy(Scaled.apply(model(x)), y))


FUNCTIONS = [
    saved_and_attributes,
    setup_context,
    mark_dirty,
    needs_input_grad,
    side_effects,
    once_differentiable,
    custom_autocast,
    default_arguments,
]


@pytest.mark.parametrize("make", FUNCTIONS, ids=lambda make: make.__name__)
def test_function(make):
    parity(make, steps=4, captures=2)


def test_function_is_guarded():
    """A method that is replaced between two calls is called from then on."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    def other(ctx, grad):
        return grad * 3

    first = Scale.backward

    def make() -> Program:
        Scale.backward = staticmethod(first)
        return trained(lambda model, x, y: F.cross_entropy(Scale.apply(model(x)), y))

    def between(program, index):
        if index == 2:
            Scale.backward = staticmethod(other)

    parity(make, steps=4, captures=2, between=between)
