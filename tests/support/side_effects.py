"""Training steps with an object whose changes are compared after every call."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tests.support.parity import Program, batches, mlp, parity


class Plain:
    """An instance of a user class."""


def program(body, *, data=None, state=None, **fields) -> Program:
    """A trainer object with ``fields``, whose step is ``body(self, loss, x)`` between backward and update."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Plain()
    vars(trainer).update(fields)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        result = body(trainer, loss, x)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach() if result is None else result

    return Program(step, data or batches((5, 6), classes=3), (model, optimizer, trainer, state))


def check(body, *, fields=dict, steps=10, captures=1, backend="eager", state=None):
    return parity(
        lambda: program(body, state=state() if state else None, **fields()),
        steps=steps,
        captures=captures,
        backend=backend,
    )
