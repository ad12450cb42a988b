"""``out[m:n]`` with integers that the graph computes, in generated code: the length is clamped, and is a size."""

from __future__ import annotations

import pytest
import torch

import sidefx_train

TAKES = {
    "first": lambda out, n: out[:n].sum() + n,
    "all but the last": lambda out, n: (out[:-n] * 2).sum(),
    "a later dimension": lambda out, n: out.view(4, 2)[1:, :n].sum(),
    "functions": lambda out, n: torch.softmax(out[:n], 0).square().sum(),
    "last": lambda out, n: out[n:].square().sum() * 2,
    "last but some": lambda out, n: out[n - 9 :].square().sum(),
    "between": lambda out, n: out[1:n].square().sum(),
    "between two": lambda out, n: torch.exp(-out[n - 2 : n + 2]).sum() * n,
    "last of a later dimension": lambda out, n: out.view(4, 2)[1:, n:].square().sum(),
    "rotated": lambda out, n: (torch.cat([out[n:], out[:n]]) * torch.arange(8.0)).sum(),
    "of a slice": lambda out, n: out[n:][1:].square().sum() + out[:n][: n - 1].square().sum(),
    "another": lambda out, n: out.sum() * out[:n].detach().sum(),
}
OTHERS = {
    "written at the end": lambda out, n: out.clone()[n:].mul_(2).sum(),
    "written": lambda out, n: out.clone()[:n].mul_(2).sum(),
}


def compare(take, numbers=(3, 5, 20, -2, 0, 8)):
    weight = torch.ones(8, requires_grad=True)

    def step(x):
        weight.grad = None
        out = weight * x
        n = int(out.detach().dot(torch.ones(8)).round().long() - 36)  # more than the prologue computes
        loss = take(out * 2, n)
        loss.backward()
        return loss.detach()

    compiled = sidefx_train.compile(step, backend="inductor", keep_slower=True)
    for number in numbers:
        x = torch.arange(1.0, 9.0)
        x[0] += number
        found = []
        for function in (step, compiled):
            found += [function(x), weight.grad.clone()]
        torch.testing.assert_close(found[2:], found[:2])
    return compiled.report()


@pytest.mark.parametrize("name", TAKES)
@pytest.mark.every(3)
def test_the_slice_is_part_of_the_graph(name):
    report = compare(TAKES[name])
    assert not report.breaks, str(report)
    assert not report.fallbacks, str(report)


def test_every_other_item():
    report = compare(lambda out, n: out[:n:2].sum())
    assert not report.fallbacks, str(report)
    known = torch.__version__ >= (2, 15)  # Inductor's code of such a view; in 2.13 the step breaks there
    assert [each.code for each in report.breaks] == ([] if known else ["SFX106"]), str(report)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.every(2)
def test_another_slice_is_a_break(name):
    assert {each.code for each in compare(OTHERS[name], numbers=(3, 5)).breaks} == {"SFX106"}
