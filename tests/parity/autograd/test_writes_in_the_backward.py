"""A backward that writes tensors increments their versions when it runs, not in the forward."""

from __future__ import annotations

import pytest
import torch

import sidefx_train

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")


class Counting(torch.autograd.Function):
    """Accumulates a statistic of its gradient."""

    @staticmethod
    def forward(ctx, x, stat):
        ctx.stat = stat
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        with torch.no_grad():
            ctx.stat.add_(grad.sum())
        return grad, None


class CountingTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, stat):
        ctx.stat = stat
        with torch.no_grad():
            stat.add_(1)
        return x.exp()

    @staticmethod
    def backward(ctx, grad):
        with torch.no_grad():
            ctx.stat.mul_(2)
            ctx.stat[0].add_(grad.sum())
        return grad, None


@pytest.mark.parametrize("function", [Counting, CountingTwice])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_versions(function, backend):
    def fn(x, stat):
        return function.apply(x, stat).sin()

    call = sidefx_train.compile(fn, backend=backend, fullgraph=True)
    for _ in range(2):
        seen = []
        for each in (fn, call):
            w, x, stat = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True), torch.zeros(1)
            other = (stat.exp() * w).sum() + (stat * w).sum()
            versions = [stat._version]
            out = each(x, stat)
            versions.append(stat._version)
            try:
                other.backward()
                said = ""
            except RuntimeError as error:
                said = str(error)[:80]
            out.sum().backward()
            versions.append(stat._version)
            seen.append((versions, said, x.grad))
        assert seen[0][:2] == seen[1][:2], f"{seen[1][:2]}, eager {seen[0][:2]}"
        assert torch.allclose(seen[0][2], seen[1][2])


def test_whole_step():
    def step(x, stat):
        Counting.apply(x, stat).sin().sum().backward()
        return x.grad

    call = sidefx_train.compile(step, backend="eager", fullgraph=True)
    seen = []
    for each in (step, call):
        x, stat = torch.ones(3, requires_grad=True), torch.zeros(1)
        each(x, stat)
        seen.append((stat._version, float(stat)))
    assert seen[0] == seen[1]
