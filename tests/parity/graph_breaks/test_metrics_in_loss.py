"""Metrics whose results a step uses in computations: their branches on values are ordinary breaks."""

from __future__ import annotations

import warnings

import pytest
import torch
import torchmetrics
from torch import nn

import sidefx_train
from sidefx_train.errors import SideFXWarning


class Checked(torchmetrics.Metric):
    """The mean absolute error; checks its arguments' values."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(()), dist_reduce_fx="sum")
        self.negative = 0

    def update(self, output, target):
        if output.min() < 0:
            self.negative += 1
        self.total = self.total + (output - target).abs().sum()
        self.count += output.numel()

    def compute(self):
        return self.total / self.count


def as_the_loss(model, metric, x, y, kept):
    loss = metric(model(x), y)
    loss.backward()
    return loss.detach()


def looked_at(model, metric, x, y, kept):
    loss = (model(x) - y).abs().mean()
    loss.backward()
    metric.update(model(x).detach(), y)
    return metric.compute() * 2


def method_kept(model, metric, x, y, kept):
    kept.append(metric.update)
    metric.update(model(x).detach(), y)
    kept.append(metric.compute())
    return x


STEPS = (as_the_loss, looked_at, method_kept)


def _history(step, run, seed=0):
    torch.manual_seed(seed)
    model, metric, history, kept = nn.Linear(3, 2), Checked(), [], []
    for _ in range(4):
        result = run(model, metric, torch.randn(4, 3), torch.randn(4, 2), kept)
        grads = [None if p.grad is None else p.grad.tolist() for p in model.parameters()]
        history.append((result.tolist(), grads, metric.total.tolist(), metric.count.item(), metric.negative))
    methods = [each is metric.update if callable(each) else each.tolist() for each in kept]
    return history, methods, metric.update_count


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_metrics_are_left_as_in_eager(step):
    compiled = sidefx_train.compile(step, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        found = _history(step, compiled)
    assert found == _history(step, step)
    assert compiled.report().replays == 4 and not compiled.report().fallbacks, str(compiled.report())
