"""A plain training step around a loss, and the proof that one is refused."""

from __future__ import annotations

import torch
from torch import nn

from tests.support.parity import Program, batches, mlp, parity

ROWS, WIDTH = 5, 4
"""Sizes of the batches and layers of :func:`stacked`."""


def trained(loss_of, model: nn.Module | None = None, *watch) -> Program:
    """Returns a plain training step over ``loss_of(model, x, y)``."""
    model = model if model is not None else mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(x, y):
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Program(step, batches((5, 6), classes=3), (model, optimizer, *watch))


def refused(loss_of, code: str, words: str, model: nn.Module | None = None) -> None:
    """Checks that the step is not captured whole, for this reason, and that its result equals eager's."""
    report = parity(lambda: trained(loss_of, model), steps=4, captures=None, whole=False)
    assert (code, words) in {(found.code, found.reason) for found in report.breaks}, report.breaks


def stacked(body, batch=lambda i: (torch.randn(ROWS, WIDTH),), layers=2):
    """Returns a factory of a step that trains a stack of linear layers with the loss ``body(layers, *batch)``."""

    def make():
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(*args):
            loss = body(model, *args)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Program(step, batch, [model, optimizer, []])

    return make
