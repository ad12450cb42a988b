"""Operations of einx on tensors whose sizes change from call to call: one graph for all sizes."""

from __future__ import annotations

import pytest
import torch

import sidefx_train

einx = pytest.importorskip("einx", reason="einx is among the test extras, which a user may not have")

OPERATIONS = {
    "split": lambda x, w: einx.id("b (h s) c -> b c h s", x, h=2),
    "merge": lambda x, w: einx.id("b s c -> (b s) c", x),
    "merge and split": lambda x, w: einx.id("b (h s) c -> (b h) (s c)", x, h=2),
    "sum": lambda x, w: einx.sum("b [s] c", x),
    "mean": lambda x, w: einx.mean("[b] s c", x),
    "dot": lambda x, w: einx.dot("b s c, c d -> b s d", x, w),
    "softmax": lambda x, w: einx.softmax("b s [c]", x),
    "add": lambda x, w: einx.add("b s c, c", x, w[0]),
    "repeat": lambda x, w: einx.id("b s c -> b r s c", x, r=3),
    "attention": lambda x, w: einx.dot("b s c, b t c -> b s t", x, x),
    "flip": lambda x, w: einx.flip("b [s] c", x),
    "get at": lambda x, w: einx.get_at("b [s] c, b -> b c", x, torch.zeros(len(x), dtype=torch.int64)),
    "where": lambda x, w: einx.where("b s c, c, b s c", x > 0.5, w[0], x),
}


def compare(operation, shapes, backend="eager"):
    weight = torch.nn.Parameter(torch.rand(3, 3))

    def step(x):
        y = operation(x * weight[0], weight)
        y.square().sum().backward()
        gradient, weight.grad = weight.grad, None
        return y.detach(), gradient

    compiled = sidefx_train.compile(step, backend=backend, keep_slower=True)
    for i, shape in enumerate(shapes):
        x = torch.rand(shape, generator=torch.Generator().manual_seed(i))
        found = []
        for run in (step, compiled):
            try:
                found.append(run(x))
            except Exception as error:
                found.append(type(error).__name__)
        if isinstance(found[0], str):
            assert found[0] == found[1]
        elif backend == "eager":
            assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(*found, strict=True))
        else:
            torch.testing.assert_close(*found)
    return compiled.report()


@pytest.mark.parametrize("name", OPERATIONS)
def test_batches_of_changing_sizes(name):
    report = compare(OPERATIONS[name], [(size, 4, 3) for size in (4, 5, 6, 7, 4, 9)])
    assert len(report.captures) == 2 and not report.breaks, str(report)


@pytest.mark.parametrize("name", ["merge and split", "attention", "mean"])
def test_two_changing_sizes(name):
    report = compare(OPERATIONS[name], [(4, 4, 3), (5, 6, 3), (6, 8, 3), (8, 10, 3), (9, 12, 3), (11, 2, 3)])
    assert len(report.captures) <= 3 and not report.breaks, str(report)


def test_sizes_that_the_operation_rejects_or_treats_otherwise():
    report = compare(OPERATIONS["split"], [(4, size, 3) for size in (4, 6, 8, 7, 10, 1, 2)])
    assert report.replays >= 4, str(report)
    compare(OPERATIONS["repeat"], [(size, 4, 3) for size in (4, 5, 1, 6, 0, 7)])


def test_changing_sizes_under_inductor():
    report = compare(OPERATIONS["dot"], [(size, 4, 3) for size in (4, 5, 6, 7)], "inductor")
    assert len(report.captures) == 2 and not report.breaks, str(report)
