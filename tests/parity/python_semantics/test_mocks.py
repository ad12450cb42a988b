"""Mocks as callbacks and hooks: they create classes and children as they are used, and claim to be of another class."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

from tests.support.parity import Program, batches, parity

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")

USES = {
    "called": lambda seen, loss: seen(1),
    "with a tensor": lambda seen, loss: seen(loss.detach()),
    "a method": lambda seen, loss: seen.on_step(loss=loss.detach()),
    "a result": lambda seen, loss: seen.scale() is seen.scale(),
}


@pytest.mark.parametrize("cls", [mock.Mock, mock.MagicMock])
@pytest.mark.parametrize("name", USES)
def test_called_by_the_step(name, cls):
    def make() -> Program:
        model, seen = nn.Linear(3, 2), cls()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x):
            loss = model(x).square().mean()
            USES[name](seen, loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach(), seen.call_count, [(str(each[0]), each[2]) for each in seen.mock_calls]

        return Program(step, batches((2, 3)), (model, optimizer))

    parity(make, steps=4, captures=None, whole=False)
