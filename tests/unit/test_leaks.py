"""Making, capturing and dropping models again and again leaves nothing behind but caches with a limit."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import sidefx_train


def one_round(backend):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters())

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    captured = sidefx_train.compile(step, backend=backend)
    for _ in range(3):
        captured(torch.randn(3, 4))
    assert captured.report().replays == 3


def tracked():
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.parametrize("rounds", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_rounds_leave_nothing(rounds):
    for _ in range(10 if rounds < 100 else 150):  # what is kept up to a limit is there
        one_round("eager")
    before = tracked()
    for _ in range(rounds):
        one_round("eager")
    left = (tracked() - before) / rounds
    assert left < (8 if rounds < 100 else 1), f"{left} objects of each round are left"
