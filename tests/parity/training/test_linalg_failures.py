"""Matrix factorizations that raise if there is none: the graph reports it, and the step runs eagerly."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.parity import Program, parity

EYE = torch.eye(4)
FUNCTIONS = {
    "cholesky": lambda m: torch.linalg.cholesky(m @ m.t()),
    "solve": lambda m: torch.linalg.solve(m, EYE),
    "inv": lambda m: torch.linalg.inv(m),
    "both": lambda m: torch.linalg.inv(m) @ torch.cholesky_solve(EYE, torch.linalg.cholesky(m @ m.t() + EYE)),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.every(4)
def test_factorization(name, backend):
    """The third matrix is zero: effects of the step before it raises remain, as in eager."""

    def make() -> Program:
        norm, weight = nn.BatchNorm1d(4, momentum=0.5), nn.Parameter(torch.ones(4))
        optimizer, seen = torch.optim.SGD([weight, *norm.parameters()], lr=1e-5), []

        def batch(index):
            generator = torch.Generator().manual_seed(index)
            matrix = torch.zeros(4, 4) if index == 2 else torch.randn(4, 4, generator=generator) + 4 * EYE
            return torch.randn(6, 4, generator=generator), matrix

        def step(x, matrix):
            seen.append("begun")
            y = (norm(x) + 1).exp().mean(0) * weight
            optimizer.zero_grad()
            loss = (FUNCTIONS[name](matrix * weight) @ y).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Program(step, batch, (norm, weight, optimizer, seen))

    report = parity(make, steps=5, backend=backend, whole=False, captures=1)
    assert not report.breaks, str(report)
    assert {record.code for record in report.fallbacks} <= {"SFX202"}, str(report)
