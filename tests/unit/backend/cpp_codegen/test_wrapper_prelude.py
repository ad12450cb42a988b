"""Wrappers with sizes of the graph, lists of results and calls through the dispatcher do without torch's headers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import sidefx_train
from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend.cpp_codegen import build_library


@pytest.fixture
def wrappers(tmp_path, monkeypatch):
    """Records the wrappers that are compiled, also those that the compiler refuses."""
    monkeypatch.setenv("SIDEFX_CACHE_DIR", str(tmp_path))
    found = []
    build = build_library._build

    def noted(units, *rest):
        found.append(units[0].text)
        return build(units, *rest)

    monkeypatch.setattr(build_library, "_build", noted)
    return found


def between(x, weight):
    """A slice whose bounds the graph computes: sums, ``max`` and ``min`` of integers are arguments."""
    out = weight * x
    n = int(out.detach().dot(torch.ones(8)).round().long() - 36)
    return (out[n - 2 : n + 2].exp().sum() * n + out[1:n].square().sum()).reshape(1)


def combinations(x, weight):
    """A function of integers of the graph, an operator with a dtype as an argument."""
    n = int((weight.detach() * x).dot(torch.ones(8)).round().long() - 30)
    return (weight * math.comb(abs(n) + 3, 2)).sum().reshape(1)


@pytest.mark.parametrize("loss", [between, combinations])
def test_sizes_and_integers_of_the_graph(loss, wrappers):
    weight = torch.ones(8, requires_grad=True)

    def step(x):
        weight.grad = None
        loss(x, weight).sum().backward()
        return weight.grad.clone()

    compiled = sidefx_train.compile(step, keep_slower=True)
    for first in (3.0, 5.0, 1.0, -2.0):
        x = torch.arange(1.0, 9.0)
        x[0] += first
        torch.testing.assert_close(compiled(x), step(x))
    assert not compiled.report().fallbacks and wrappers
    assert not any(compat.WRAPPER_HEADER in text for text in wrappers)


def test_the_size_of_a_result(wrappers):
    """The number of selected rows exists only when the graph runs."""

    def step(x, total):
        with torch.no_grad():
            rows = torch.where(x[:, 0] > 0)[0]
            if rows.numel() == 0:
                return total
            return total.mul_(0.5).add_(x[rows].sum(0))

    compiled = sidefx_train.compile(step, keep_slower=True)
    for i in range(4):
        x = torch.randn(20, 6, generator=torch.Generator().manual_seed(i))
        torch.testing.assert_close(compiled(x, torch.ones(6)), step(x, torch.ones(6)))
    assert compiled.report().replays and wrappers
    assert any(".size(0)" in text for text in wrappers)
    assert not any(compat.WRAPPER_HEADER in text for text in wrappers)


def test_an_operator_that_returns_a_list(wrappers):
    """The backward of a recurrent layer on sequences of changing lengths."""
    torch.manual_seed(0)
    net = nn.GRU(3, 4)

    def step(x):
        net.zero_grad()
        net(x)[0].square().mean().backward()
        return [parameter.grad.clone() for parameter in net.parameters()]

    compiled = sidefx_train.compile(step, keep_slower=True)
    for length in (4, 6, 5, 7):
        x = torch.randn(length, 2, 3)
        torch.testing.assert_close(compiled(x), step(x))
    assert not compiled.report().fallbacks and wrappers
    assert any("sidefx_delete_list(stack" in text for text in wrappers)
    assert not any(compat.WRAPPER_HEADER in text for text in wrappers)
