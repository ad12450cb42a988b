"""Masks are drawn before they are used, in the order of the step; and what Inductor schedules is looked at again."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sidefx_train
from tests.caches import new_cache
from tests.parity.harness import Program, parity

ROWS, LENGTH, WIDTH = 8, 16, 24


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Graphs are lowered, not found."""
    new_cache(tmp_path, monkeypatch)


def normed_then_dropped(x, norm):
    return F.dropout(norm(x), 0.1)


def dropped_then_normed(x, norm):
    return norm(F.dropout(x, 0.1))


def residual(x, norm):
    return norm(x + F.dropout(torch.relu(x), 0.3))


def centred(x, norm):
    mask = torch.empty(ROWS, LENGTH, WIDTH).bernoulli_(0.9) / 0.9
    return mask, (x - x.mean(-1, keepdim=True)) * mask, norm(x)


def attended(x, norm):
    weights = F.dropout(torch.softmax(x @ x.mT, -1), 0.2)
    return weights @ norm(x), weights


def twice(x, norm):
    return F.dropout(norm(F.dropout(norm(x), 0.2)), 0.2)


def noisy(x, norm):
    return norm(x) + torch.empty_like(x).normal_(), norm(x) * torch.empty_like(x).uniform_(0.5, 1.5)


BODIES = [normed_then_dropped, dropped_then_normed, residual, centred, attended, twice, noisy]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
@pytest.mark.parametrize("trains", [False, True])
def test_masks_are_drawn_before_they_are_used(body, trains, cache):
    """Regression: where loops were joined, a mask was read before it was drawn: the last call's, or none at all."""

    def make():
        norm = nn.LayerNorm(WIDTH)
        optimizer = torch.optim.SGD(norm.parameters(), lr=0.1)

        def step(x):
            results = body(x, norm)
            results = results if isinstance(results, tuple) else (results,)
            if trains:
                optimizer.zero_grad()
                sum((result * result).sum() for result in results).backward()
                optimizer.step()
                results = tuple(result.detach() for result in results)
            return results  # with what their backward needs where they are not trained here

        return Program(step, lambda i: (torch.randn(ROWS, LENGTH, WIDTH),), (*norm.parameters(),))

    parity(make, steps=3, backend="inductor", rng="eager")


def test_an_order_that_is_wrong_is_not_run(cache, monkeypatch):
    """Whatever moves a kernel in front of what it takes, the step is run eagerly, and says so."""
    from torch._inductor.scheduler import Scheduler

    joined = Scheduler.fuse_nodes
    monkeypatch.setattr(Scheduler, "fuse_nodes", lambda self, nodes: joined(self, nodes)[::-1])
    x = torch.randn(ROWS, LENGTH)
    step = sidefx_train.compile(lambda: (x @ x.T).softmax(-1) @ x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = step()
    assert torch.equal(result, (x @ x.T).softmax(-1) @ x)
    assert any("SFX201" in str(each.message) and "whose result it takes" in str(each.message) for each in caught)


def test_the_recursion_limit_stays_the_programs(cache):
    """Regression: Inductor raises it for good, and a step that asks for it ran eagerly after its capture."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1500)
    try:
        step = sidefx_train.compile(lambda x: (x * 2, sys.getrecursionlimit()), fullgraph=True, on_failure="raise")
        assert [step(torch.ones(3))[1] for _ in range(3)] == [1500] * 3
        assert sys.getrecursionlimit() == 1500
    finally:
        sys.setrecursionlimit(before)
    assert sidefx_train.explain(step).fallback_count == 0
