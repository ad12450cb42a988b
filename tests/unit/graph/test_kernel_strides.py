"""Strides of fake results of elementwise kernels, for operands that are laid out differently, or expanded."""

from __future__ import annotations

import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from sidefx_train import torch_compat as compat
from sidefx_train.compile.graph.kernel_strides import lay_out

aten = torch.ops.aten

CALLS = {
    "mul": torch.mul,
    "maximum": torch.maximum,
    "comparison": torch.gt,
    "threshold_backward": lambda grad, x: aten.threshold_backward(grad, x, 0),
    "hardtanh_backward": lambda grad, x: aten.hardtanh_backward(grad, x, -1, 1),
    "elu_backward": lambda grad, x: aten.elu_backward(grad, 1.0, 1.0, 1.0, False, x),
    "softplus_backward": lambda grad, x: aten.softplus_backward(grad, x, 1.0, 20.0),
    "hardsigmoid_backward": aten.hardsigmoid_backward,
    "tanh_backward": aten.tanh_backward,
    "gelu_backward": aten.gelu_backward,
    "leaky_relu_backward": lambda grad, x: aten.leaky_relu_backward(grad, x, 0.1, False),
    "prelu": aten._prelu_kernel,
    "prelu_backward": lambda grad, x: aten._prelu_kernel_backward(grad, x, x),
    "log_sigmoid_backward": lambda grad, x: aten.log_sigmoid_backward(grad, x, x),
    "huber_loss": lambda x, y: aten.huber_loss(x, y, 0),
    "smooth_l1_loss": lambda x, y: aten.smooth_l1_loss(x, y, 0),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "addcmul": lambda x, y: torch.addcmul(x, y, x),
    "no elementwise kernel": lambda x, y: x.gather(0, torch.zeros_like(y, dtype=torch.long)),
}


class Lays(TorchDispatchMode):
    """Lays out results as the recording of a capture does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        lay_out(func, args, kwargs or {}, made)
        return made


def drawn(draw: random.Random, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns zeros whose dimensions are in memory in a random order; some are expanded."""
    sizes = [1 if draw.random() < 0.25 else size for size in shape]
    order = draw.sample(range(len(shape)), len(shape))
    made = torch.zeros([sizes[i] for i in order], dtype=dtype)
    return made.permute([order.index(i) for i in range(len(shape))]).expand(shape)


def strides(made: object) -> list[list[int]]:
    """Returns the strides of each result, without those of dimensions of size 1."""
    parts = made if isinstance(made, tuple) else (made,)
    return [[stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1] for t in parts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_strides_of_the_kernel(name, dtype):
    compat.know_layouts()
    draw = random.Random(name)
    for _ in range(40):
        shape = [draw.choice((1, 2, 3, 4)) for _ in range(draw.choice((2, 3, 4)))]
        a, b = drawn(draw, shape, dtype), drawn(draw, shape, dtype)
        with FakeTensorMode() as mode:
            fakes = mode.from_tensor(a), mode.from_tensor(b)
            with Lays():
                made = CALLS[name](*fakes)
        assert strides(made) == strides(CALLS[name](a, b)), (a.shape, a.stride(), b.stride())


def test_random_operators_are_not_tried():
    """The kernels run to see what they do: one that draws would move eager's stream."""
    state = torch.get_rng_state()
    with FakeTensorMode() as mode:
        mean, deviation = mode.from_tensor(torch.zeros(3, 2).t()), mode.from_tensor(torch.ones(2, 3))
        with Lays():
            torch.normal(mean, deviation)
            torch.rrelu(mean, training=True)
    assert torch.equal(torch.get_rng_state(), state)
