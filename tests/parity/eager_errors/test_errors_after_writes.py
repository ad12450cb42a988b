"""Operations that raise because of values: what the step wrote before is written once, what comes after it is not."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn import functional as F

import sidefx_train

GOOD, BAD = torch.tensor([0, 1, 1]), torch.tensor([9, 2, 2])

LIVE = {
    "index_fill": lambda x, i: x.index_fill(0, i * 3, 1.0),
    "integer division": lambda x, i: 10 // (i - 9),
    "index_reduce": lambda x, i: x.index_reduce(0, i * 3, x[:3], "prod"),
    "poisson": lambda x, i: torch.poisson(x * 0 + 5 - i[0]) * 0 + 1,
    "svd": lambda x, i: torch.linalg.svdvals(torch.eye(2) / (9 - i[0]).float() * 0),
    "normal": lambda x, i: torch.normal(x, 5.0 - i[0].float() + x * 0) * 0 + 1,
    "take": lambda x, i: torch.take(x, i * 3),
    "remainder": lambda x, i: torch.fmod(torch.tensor(10), i - 9),
    "histc": lambda x, i: torch.histc(x / (9 - i[0]), 4),
    "segment_reduce": lambda x, i: torch.segment_reduce(x[:3], "sum", lengths=i + torch.tensor([1, 0, 0])),
    "cholesky_inverse": lambda x, i: torch.cholesky_inverse(torch.eye(2) * (9 - i[0])),
    "pinv": lambda x, i: torch.linalg.pinv(torch.eye(2) / (9 - i[0]).float() * 0),
    "max_unpool2d": lambda x, i: F.max_unpool2d(x[:3].view(1, 1, 1, 3), (i * 3).view(1, 1, 1, 3), (1, 2)),
}
DEAD = {
    "embedding of an input": lambda x, i: F.embedding(i, x.view(6, 1)),
    "embedding of a result": lambda x, i: F.embedding(i + 1, x.view(6, 1)).sum(),
    "index": lambda x, i: torch.ones(3)[i % 5],
    "cross_entropy": lambda x, i: F.cross_entropy(x.view(2, 3), i[:2] * 2),
    "take": lambda x, i: torch.take(x, i * 3),
    "scatter_": lambda x, i: x.clone().scatter_(0, i * 2, 1.0),
}


def outcomes(operation, result_used, backend):
    found = []
    for captured in (False, True):
        before, after, outcome = torch.zeros(2), torch.zeros(2), []

        def step(x, i, before=before, after=after):
            before.add_(1)
            made = operation(x, i)
            after.add_(1)
            return made if result_used else x * 2

        call = sidefx_train.compile(step, backend=backend, warmup="now", keep_slower=True) if captured else step
        for i in (GOOD, GOOD, BAD, GOOD, BAD + 0, BAD + 1):
            x = torch.arange(1.0, 7.0) / 7
            try:
                outcome.append([f"{value:.4f}" for value in call(x, i).flatten().tolist()])
            except (RuntimeError, IndexError) as error:
                outcome.append((type(error), str(error)))
            outcome.append(f"{before.tolist()} {after.tolist()}")
        if captured:
            assert call.report().replays > 2 and not call.report().breaks
        found.append(outcome)
    return found


@pytest.mark.parametrize("operation", LIVE)
@pytest.mark.every(3)
def test_writes_around_an_operation_that_raises(operation):
    """Regression: under Inductor, what was written before was written twice, and ``index_fill`` wrote anywhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # index_reduce is new
        eager, captured = outcomes(LIVE[operation], True, "inductor")
    assert captured == eager


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("operation", DEAD)
@pytest.mark.every(3)
def test_an_index_out_of_range_whose_result_is_not_used(operation, backend):
    """Regression: such an operation was dropped, and did not raise."""
    eager, captured = outcomes(DEAD[operation], False, backend)
    assert captured == eager
