"""Training steps that break, and the proof that they are captured in parts."""

from __future__ import annotations

import os
import time

import torch
from torch import nn
from torch.nn import functional as F

from tests.support.parity import Program, batches, mlp, parity


def outside(value: object) -> float:
    """A call that cannot be captured: it reads the clock between two operations, and a number."""
    assert time.perf_counter_ns() > 0
    return round(float(value * 1), 6)  # type: ignore[operator]


def failing(value: object) -> float:
    if outside(value) > 0:
        raise ValueError("outside failed")
    return 0.0


def trained(after, extra=None):
    """Returns a factory of steps that train and then do ``after(loss, log)`` with the detached loss."""

    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        log: list[object] = []
        state = {"calls": 0} if extra is None else extra()

        def step(x, y):
            state["calls"] += 1
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return after(loss.detach(), log, state)

        return Program(step, batches((5, 6), classes=3), (model, optimizer, log, state))

    return make


def in_parts(make, **options):
    report = parity(make, whole=False, captures=None, **options)
    assert report.breaks, f"no break:\n{report}"
    assert not report.fallbacks, f"ran eagerly:\n{report}"
    assert report.parts, f"no parts:\n{report}"
    for part in report.parts:
        assert not part.fallbacks, f"a part ran eagerly:\n{part}"
    return report


def natively(value):
    os.times()
    return value


def mixture(form, unused=()):
    """Returns the training of a mixture of experts; in some calls no row chooses the last expert."""

    def make() -> Program:
        experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)) for _ in range(3))
        gate = nn.Linear(6, 3, bias=False)
        optimizer = torch.optim.AdamW([*experts.parameters(), *gate.parameters()], lr=0.01)

        def step(x, y, bias):
            weights, chosen = torch.topk(F.softmax(gate(x) + bias, -1), 2, -1)
            loss = F.mse_loss(form(x, weights, chosen, experts), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        def batch(i):
            generator = torch.Generator().manual_seed(i)
            bias = torch.tensor([0.0, 0.0, -100.0 if i in unused else 0.0])
            return torch.randn(40, 6, generator=generator), torch.randn(40, 6, generator=generator), bias

        return Program(step, batch, (experts, gate, optimizer))

    return make
