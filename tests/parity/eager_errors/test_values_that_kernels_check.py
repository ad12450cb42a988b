"""Values and numbers that eager's kernels refuse, and Inductor's decompositions do not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train

NUMBERS = {
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x * 2, beta=-1.0),
    "huber_loss": lambda x: F.huber_loss(x, x * 2, delta=-1.0),
    "celu": lambda x: F.celu(x, 0.0),
}


@pytest.mark.parametrize("operation", list(NUMBERS))
def test_a_number_that_the_kernel_refuses(operation):
    """Regression: the compiled step returned a result."""
    compiled = sidefx_train.compile(NUMBERS[operation], warmup="now")
    with pytest.raises(Exception) as wanted:
        NUMBERS[operation](torch.ones(2, 2))
    for _ in range(2):
        with pytest.raises(type(wanted.value)) as raised:
            compiled(torch.ones(2, 2))
        assert str(raised.value) == str(wanted.value)


def test_classes_and_divisors_that_kernels_refuse():
    """Regression: losses of classes out of range were numbers; a division of integers by zero ended the process."""

    def step(x: torch.Tensor, classes: torch.Tensor, divisors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        quotients = torch.div(torch.tensor([7, -7, 5]), divisors, rounding_mode="trunc")
        return F.multi_margin_loss(x, classes), F.multilabel_margin_loss(x, classes[:, None].expand(3, 4)), quotients

    compiled = sidefx_train.compile(step, warmup="now")
    x, classes, divisors = torch.randn(3, 4), torch.tensor([0, 3, 1]), torch.tensor([2, 2, -3])
    for _ in range(3):
        torch.testing.assert_close(compiled(x, classes, divisors), step(x, classes, divisors))
    for bad in ((x, classes + 2, divisors), (x, classes, divisors * 0)):
        with pytest.raises(RuntimeError) as wanted:
            step(*bad)
        with pytest.raises(RuntimeError) as raised:
            compiled(*bad)
        assert str(raised.value) == str(wanted.value)
    torch.testing.assert_close(compiled(x, classes, divisors), step(x, classes, divisors))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_probabilities_out_of_range(backend):
    """Regression: without its sigmoid a model trained on NaN, where eager raises before any update."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    other = copy.deepcopy(net)

    def program(net: nn.Module):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            loss = F.binary_cross_entropy(net(x).sigmoid() * scale, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    eager, compiled = program(net), sidefx_train.compile(program(other), backend=backend, warmup="now")
    x, y = torch.randn(8, 4), torch.rand(8, 1)
    for scale, target in ((1.0, y), (1.0, y), (5.0, y), (1.0, y + 2), (0.5, y)):
        if scale > 1 or target is not y:
            for step in (eager, compiled):
                with pytest.raises(RuntimeError, match="should be between 0 and 1"):
                    step(x, target, torch.tensor(scale))
        else:
            torch.testing.assert_close(compiled(x, target, torch.tensor(scale)), eager(x, target, torch.tensor(scale)))
        for own, theirs in zip(
            (*other.parameters(), *other.buffers()), (*net.parameters(), *net.buffers()), strict=True
        ):
            torch.testing.assert_close(own, theirs)
    assert compiled.report().replays >= 3
