"""Code of the program that a backward outside of its graph runs: its exception handlers work after a graph break."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.parity import Program, parity


def doubled(x):
    return x * 2 if os.environ.get("SIDEFX_NO_SUCH_NAME", "0") == "1" else x


def scaled(x, found):
    try:
        return x * found["factor"]
    except KeyError as error:
        return x * len(error.args)
    finally:
        x = None


@pytest.mark.parametrize("reads", [lambda x, found: doubled(x), scaled], ids=["environment", "dict"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_handles_an_exception(reads, reentrant):
    def make():
        model = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = {"times": 0}

        def block(layer, x):
            return layer(reads(x, found)).tanh()

        def step(x):
            optimizer.zero_grad()
            for layer in model:
                x = checkpoint(block, layer, x, use_reentrant=reentrant)
            found["times"] += len(os.times()) > 0
            loss = x.square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Program(step, lambda index: (torch.randn(2, 3, requires_grad=True),), (model, optimizer, found))

    report = parity(make, captures=None, whole=False)
    if not reentrant:
        assert not report.fallbacks and report.captures, str(report)
