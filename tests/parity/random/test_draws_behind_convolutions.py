"""Random numbers in the memory order of eager, where the default backend runs a convolution on channels-last images."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train

DRAWS = {
    "dropout": lambda y: F.dropout(F.max_pool2d(torch.relu(y), 2), 0.25),
    "like": lambda y: y * torch.rand_like(y) + torch.randn_like(y),
    "in place": lambda y: y.detach().clone().uniform_() * y.detach().clone().normal_() * y,
    "places": lambda y: F.dropout(y.transpose(1, 3), 0.2),
    "probabilities": lambda y: torch.bernoulli(torch.sigmoid(y)) * y,
    "counts": lambda y: torch.poisson(y.detach().abs()) + y,
    "other distributions": lambda y: (
        y.detach().clone().exponential_() + y.detach().clone().geometric_(0.3) + y.detach().clone().cauchy_() * y
    ),
    "integers": lambda y: y.detach().clone().random_(0, 9) * torch.randint_like(y, 3) * y,
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.every(2)
def test_each_element_gets_its_number(name):
    """Regression: numbers were drawn in the order of channels-last memory."""
    torch.manual_seed(0)
    convolution = nn.Conv2d(6, 6, 3, padding=1)

    def step(x):
        y = DRAWS[name](convolution(x))
        y.square().sum().backward()
        grad = convolution.weight.grad.clone()
        convolution.zero_grad()
        return y.detach(), grad

    compiled = sidefx_train.compile(step, rng="eager", keep_slower=True, autotune="off")
    for seed in range(2):
        x = torch.randn(3, 6, 6, 6)
        torch.manual_seed(seed)
        wanted, state = step(x), torch.get_rng_state()
        torch.manual_seed(seed)
        for expected, made in zip(wanted, compiled(x), strict=True):
            torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-3 * expected.abs().max().item())
        assert torch.equal(torch.get_rng_state(), state)
    report = compiled.report()
    assert report.replays == 2 and not report.breaks and not report.fallbacks
