"""Code of graphs: what FX writes from their nodes has their values."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from sidefx_train import torch_compat as compat


@pytest.mark.parametrize("make", [compat.late_module, compat.graph_module])
@pytest.mark.parametrize("base", [-7, -2.5, 3])
def test_powers_of_negative_numbers(make, base):
    graph = fx.Graph()
    exponent = graph.placeholder("exponent")
    graph.output(graph.call_function(operator.pow, (base, exponent)))
    module = make(torch.nn.Module(), graph)
    assert [module(n) for n in (2, 3)] == [base**2, base**3]
    assert next(iter(graph.find_nodes(op="call_function", target=operator.pow))).args == (base, exponent)
