"""Creating, capturing and dropping models repeatedly leaves nothing behind but caches with a limit."""

from __future__ import annotations

import subprocess
import sys

import pytest

# In a separate process, because pytest keeps torch's log records.
PROGRAM = """
import gc, sys
import torch
from torch import nn
import sidefx_train
from sidefx_train import torch_compat as compat

compat.recording._SOURCES_KEPT = 8

def one_round():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters())

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    captured = sidefx_train.compile(step, backend="eager")
    for _ in range(3):
        captured(torch.randn(3, 4))
    assert captured.report().replays == 3

def tracked():
    gc.collect()
    return len(gc.get_objects())

rounds = int(sys.argv[1])
for _ in range(20):
    one_round()
before = tracked()
for _ in range(rounds):
    one_round()
print((tracked() - before) / rounds)
"""


@pytest.mark.parametrize("rounds", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_rounds_leave_nothing(rounds):
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(rounds)], capture_output=True, text=True, check=True, timeout=900
    )
    left = float(found.stdout.split()[-1])
    assert left < (4 if rounds < 100 else 0.5), f"{left} objects of each round are left"
