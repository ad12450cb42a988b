"""Gradients that come from outside of a graph, in another layout than results have, and kernels that depend on it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train


class Called(nn.Module):
    """A module with a parameter around a function."""

    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.function(x * self.weight)


MODULES = {
    "group norm": (lambda: nn.GroupNorm(2, 4), (3, 4, 5, 6), torch.float32),
    "group norm of images": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4)),
        (3, 4, 5, 6),
        torch.float32,
    ),
    "parts of complex numbers": (lambda: Called(torch.view_as_real), (3, 4), torch.complex64),
    "written by strides": (
        lambda: Called(lambda x: torch.as_strided_scatter(torch.zeros(x.shape[0] + 3, 5), x, x.shape, (2, 1))),
        (3, 2),
        torch.float32,
    ),
}


def transposed(grad):
    return grad.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODULES)
def test_gradient_of_another_layout(name, backend):
    """Also if the number of rows changes: sizes are symbolic then."""
    make, shape, dtype = MODULES[name]
    torch.manual_seed(0)
    module = make()
    captured = sidefx_train.compile(module, backend=backend)
    for rows, lay_out in ((3, torch.clone), (3, transposed), (4, torch.clone), (5, transposed), (6, transposed)):
        x = torch.randn(rows, *shape[1:], dtype=dtype)
        if name == "of images":
            x = x.to(memory_format=torch.channels_last)
        found = []
        for run in (module, captured):
            given = x.clone().requires_grad_()
            module.zero_grad()
            y = run(given)
            y.backward(lay_out(torch.arange(y.numel(), dtype=y.dtype).view(y.shape).sin()))
            found.append([given.grad, *(p.grad for p in module.parameters())])
        exact = {} if backend == "inductor" else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(found[1], found[0], **exact)
        if backend != "inductor":
            assert [t.stride() for t in found[1]] == [t.stride() for t in found[0]]
    assert captured.report().replays == 5


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_gradient_that_is_transposed_in_the_step(backend):
    """The fake result of ``hardtanh_backward`` was laid out like its operand, so that a copy was not recorded."""

    def step(x, weight, bias):
        y = F.hardtanh(F.group_norm(x, 1, weight, bias))
        y = F.conv2d(y.transpose(3, 1), torch.ones(2, y.shape[3], 3, 3).cumsum(0))
        return torch.autograd.grad(y.sin().sum(), (x, weight, bias))

    given = [t.requires_grad_() for t in (torch.randn(3, 8, 7, 9), torch.ones(8), torch.zeros(8))]
    captured = sidefx_train.compile(step, backend=backend)
    for have, want in zip(captured(*given), step(*given), strict=True):
        assert torch.equal(have, want) and have.stride() == want.stride()
