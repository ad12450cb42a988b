"""The first call of a step shares its graph with all later ones."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sidefx_train

OPTIMIZERS = {
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw_fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adam": torch.optim.Adam,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_capture(name):
    model = nn.Linear(4, 3)
    optimizer = OPTIMIZERS[name](model.parameters())

    @sidefx_train.compile(backend="eager", fullgraph=True)
    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for _ in range(3):
        step(torch.randn(2, 4), torch.tensor([0, 1]))
    assert step.report().graph_count == 1, str(step.report())


def test_failed_first_step_leaves_the_optimizer_as_it_was():
    model = nn.Linear(4, 3)
    optimizer = OPTIMIZERS["sgd_fused"](model.parameters())

    @sidefx_train.compile(backend="eager")
    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    before = dict(vars(optimizer))
    with pytest.raises(IndexError, match="out of bounds"):
        step(torch.randn(2, 4), torch.tensor([0, 77]))
    assert not optimizer.state, "state was left behind"
    changed = {k for k, v in vars(optimizer).items() if type(v) is bool and before.get(k) is not v}
    assert not changed, f"{changed} changed"


METRIC = """
import torch, torchmetrics, sidefx_train
metric = torchmetrics.classification.MulticlassAccuracy(3)
step = sidefx_train.compile(lambda x, y: metric(x, y), backend="eager", fullgraph=True)
for _ in range(3):
    step(torch.randn(2, 3), torch.tensor([0, 1]))
report = step.report()
assert report.graph_count <= 2, report  # torchmetrics asks once whether there was a batch before
assert not any("after the graph" in effect for effect in report.effects), report.effects
"""


def test_accuracy_is_captured_in_a_fresh_process():
    subprocess.run([sys.executable, "-c", METRIC], check=True, timeout=300)
