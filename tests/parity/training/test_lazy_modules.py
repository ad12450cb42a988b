"""Lazy modules: the step that gives their parameters a shape runs eagerly, as a whole; later ones are replayed."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter

import sidefx_train


class KeepsItsClass(LazyModuleMixin, nn.Module):
    """A lazy module that stays one."""

    def __init__(self):
        super().__init__()
        self.weight = UninitializedParameter()

    def initialize_parameters(self, x):
        if self.has_uninitialized_params():
            self.weight.materialize((x.shape[1], 3))
            nn.init.ones_(self.weight)

    def forward(self, x):
        return x @ self.weight


def layers():
    return nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))


def trained(make, wrap, calls=5, unused=None):
    torch.manual_seed(0)
    net, optimizers = make(), []
    shape = (4, 2, 6, 6) if isinstance(net[0], nn.LazyConv2d) else (4, 5)

    def step(x):
        loss = net(x).square().mean()
        if not optimizers:
            optimizers.append(torch.optim.SGD(net.parameters(), lr=0.1))
        loss.backward()
        for parameter in unused.parameters() if unused is not None else ():
            assert parameter.grad is None
        optimizers[0].step()
        optimizers[0].zero_grad()
        return loss.detach()

    wrapped = wrap(step)
    losses = [wrapped(torch.randn(shape)) for _ in range(calls)]
    return losses, [*net.parameters(), *net.buffers()], wrapped


@pytest.mark.parametrize("make", [layers, lambda: nn.Sequential(KeepsItsClass(), nn.Tanh())], ids=["torch's", "own"])
def test_the_first_step_runs_eagerly(make):
    losses, values, _ = trained(make, lambda step: step)
    with warnings.catch_warnings():
        warnings.simplefilter("error", sidefx_train.SideFXWarning)
        found, parameters, step = trained(make, lambda step: sidefx_train.compile(step, backend="eager"))
    assert torch.equal(torch.stack(found), torch.stack(losses)) and all(map(torch.equal, parameters, values))
    report = step.report()
    assert (len(report.captures), report.breaks, report.replays) == (1, [], 4), str(report)
    assert [(each.code, each.count) for each in report.fallbacks] == [("SFX213", 1)], str(report)


def test_a_module_that_is_never_called_is_reported():
    with pytest.warns(sidefx_train.SideFXWarning, match=r"SFX213.*unused.weight gets its shape"):
        _, _, step = trained(
            layers, lambda step: sidefx_train.compile(step, backend="eager"), calls=20, unused=nn.LazyLinear(2)
        )
    assert step.report().fallback_count == 20, str(step.report())


@pytest.mark.parametrize("make", [lambda: nn.LazyBatchNorm1d(affine=False, track_running_stats=False), layers])
def test_with_fullgraph_the_first_step_may_initialize(make):
    """It is no graph break: the next steps are one graph."""
    shape = (4, 2, 6, 6) if make is layers else (4, 5)
    batches = [torch.randn(shape) for _ in range(3)]

    def run(wrap):
        torch.manual_seed(0)
        net = make()
        step = wrap(lambda x: net(x).sum())
        return [step(batch).item() for batch in batches], type(net), step

    expected = run(lambda step: step)
    found = run(lambda step: sidefx_train.compile(step, backend="eager", fullgraph=True))
    assert found[:2] == expected[:2]
    report = found[2].report()
    assert len(report.captures) == 1 and not report.breaks and report.replays == 2
