"""What passes read from nodes, and erase."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from sidefx_train.compile.graph.fx_utils import erase_unused, static_cpu_shape


@pytest.fixture
def graph():
    graph = fx.Graph()
    x = graph.placeholder("x")
    shared = graph.call_function(torch.neg, (x,))
    only = graph.call_function(torch.exp, (shared,))
    last = graph.call_function(torch.add, (only, x))
    graph.output(shared)
    return graph, shared, last


def test_unused_calls_are_erased_with_inputs_that_only_they_used(graph):
    graph, shared, last = graph
    erase_unused(last)
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [torch.neg]
    assert [node.op for node in graph.nodes] == ["placeholder", "call_function", "output"]


def test_used_calls_and_placeholders_stay(graph):
    graph, shared, last = graph
    before = list(graph.nodes)
    erase_unused(shared)
    erase_unused(before[0])
    assert list(graph.nodes) == before


def test_shapes(graph):
    _, shared, last = graph
    shared.meta["val"] = torch.zeros(2, 3)
    last.meta["val"] = torch.zeros(2, device="meta")
    assert static_cpu_shape(shared) == [2, 3] == static_cpu_shape(shared, torch.float32)
    assert static_cpu_shape(shared, torch.float64) is None
    assert static_cpu_shape(last) is None
    assert static_cpu_shape(2) is None and static_cpu_shape(None) is None
