"""Masks are drawn before they are used, in the order of the step; also checks Inductor's generated code."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sidefx_train
from tests.support.disk_cache import new_cache
from tests.support.parity import Program, parity

ROWS, LENGTH, WIDTH = 8, 16, 24


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, so that graphs are lowered."""
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
OFTEN = (normed_then_dropped, twice, noisy)


@pytest.mark.parametrize(
    "body",
    [pytest.param(body, marks=() if body in OFTEN else pytest.mark.slow, id=body.__name__) for body in BODIES],
)
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.every(2)
def test_masks_are_drawn_before_they_are_used(body, trains, cache):
    """Regression: where loops were fused, a mask was read before it was drawn: the last call's, or none at all."""

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
            return results  # includes the tensors saved for a backward outside

        return Program(step, lambda i: (torch.randn(ROWS, LENGTH, WIDTH),), (*norm.parameters(),))

    parity(make, steps=3, backend="inductor", rng="eager")


@pytest.mark.parametrize("rng", ["eager", "fast"])
def test_what_is_drawn_for_nobody(rng, cache):
    """Regression: an unused mask was not drawn, and every later draw of the step differed."""

    def drawn(x):
        F.dropout(x, 0.5)
        torch.empty_like(x).uniform_()
        first = x * torch.rand_like(x)
        torch.randn(3)
        return first, F.dropout(x, 0.1), torch.randn(5), torch.empty(4).bernoulli_(0.3)

    x = torch.randn(ROWS, LENGTH, WIDTH)
    step = sidefx_train.compile(drawn, rng=rng, fullgraph=True, on_failure="raise")
    torch.manual_seed(1)
    wanted = [*drawn(x), torch.rand(2)]
    torch.manual_seed(1)
    found = [*step(x), torch.rand(2)]
    assert [tensor.shape for tensor in found] == [tensor.shape for tensor in wanted]
    if rng == "eager":
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other)


def test_an_order_that_is_wrong_is_not_run(cache, monkeypatch):
    """If a schedule runs a kernel before its inputs are written, the step runs eagerly, with a warning."""
    from torch._inductor.scheduler import Scheduler

    joined = Scheduler.fuse_nodes
    monkeypatch.setattr(Scheduler, "fuse_nodes", lambda self, nodes: joined(self, nodes)[::-1])
    x = torch.randn(ROWS, LENGTH)
    step = sidefx_train.compile(lambda: (x @ x.T).softmax(-1) @ x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = step()
    assert torch.equal(result, (x @ x.T).softmax(-1) @ x)
    assert any("SFX201" in str(each.message) and "before it is written" in str(each.message) for each in caught)


def test_the_recursion_limit_stays_the_programs(cache):
    """Regression: Inductor raises it permanently, and a step that reads it ran eagerly after its capture."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1500)
    try:
        step = sidefx_train.compile(lambda x: (x * 2, sys.getrecursionlimit()), fullgraph=True, on_failure="raise")
        assert [step(torch.ones(3))[1] for _ in range(3)] == [1500] * 3
        assert sys.getrecursionlimit() == 1500
    finally:
        sys.setrecursionlimit(before)
    assert sidefx_train.explain(step).fallback_count == 0


def added_to_itself(x, ids):
    scaled = x * 1.5
    return scaled.index_add(1, ids, scaled)


def a_part_added_to_the_whole(x, ids):
    scaled = x * 1.5
    return scaled.index_put((ids[:3],), scaled[2:5], accumulate=True)


def put_into_itself(x, ids):
    scaled = x @ torch.ones(WIDTH, WIDTH)
    return scaled.index_put((torch.arange(LENGTH // 2),), scaled.flip(0)[: LENGTH // 2]), scaled.scatter(
        0, ids[:1, None, None].expand(1, LENGTH, WIDTH), scaled[1:2]
    )


@pytest.mark.parametrize(
    "body", [added_to_itself, a_part_added_to_the_whole, put_into_itself], ids=lambda b: b.__name__
)
def test_what_is_read_is_not_written_meanwhile(body, cache):
    """Regression, also in ``torch.compile``: rows were added to the buffer from which they were read."""
    ids = torch.tensor([3, 1, 1, 0, 7, 3, 5, 2] * 2)

    def make():
        return Program(lambda x: body(x, ids), lambda i: (torch.randn(LENGTH, LENGTH, WIDTH),))

    parity(make, steps=2, backend="inductor")


def test_inductors_cache_is_known_by_what_fills_it(monkeypatch):
    """Regression: graphs that are not in our cache were reused as lowered by an earlier version."""
    from torch._inductor.codecache import FxGraphHashDetails

    from sidefx_train import torch_compat as compat

    seen = []
    for maker in ("one", "another"):
        with compat.inductor_cache_of(maker):
            seen.append(FxGraphHashDetails(torch.fx.GraphModule({}, torch.fx.Graph()), [], {}, []).cache_key_tag)
    assert len(set(seen)) == 2
    assert torch.compiler.config.cache_key_tag == ""
