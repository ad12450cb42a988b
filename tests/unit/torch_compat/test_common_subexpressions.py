"""What the elimination of common subexpressions keeps apart."""

from __future__ import annotations

import math

import torch
from torch import fx

import sidefx_train
from sidefx_train.torch_compat.inductor.common_subexpressions import without_common_subexpressions

aten = torch.ops.aten


def zeros_of(graph: fx.Graph) -> list[float]:
    return [node.args[1] for node in graph.find_nodes(op="call_function", target=aten.add.Scalar)]


def test_zeros_of_either_sign_are_two():
    graph = fx.Graph()
    x = graph.placeholder("x")
    made = [graph.call_function(aten.add.Scalar, (x, number)) for number in (0.0, -0.0, 0.0, -0.0)]
    padded = [graph.call_function(aten.cat.default, ([x, *made],)) for _ in range(2)]
    graph.output((*made, *padded))
    module = fx.GraphModule({}, graph)
    merged = without_common_subexpressions(module)
    assert [math.copysign(1, zero) for zero in zeros_of(merged.graph)] == [1, -1]
    assert [math.copysign(1, zero) for zero in zeros_of(graph)] == [1, -1, 1, -1], "the graph is not changed"
    assert {type(zero) for each in (graph, merged.graph) for zero in zeros_of(each)} == {float}
    assert len(merged.graph.find_nodes(op="call_function", target=aten.cat.default)) == 1


def test_zeros_of_either_sign_in_one_kernel():
    def program(x):
        zero = -(x * 0).abs()
        filled = torch.full((3,), 0.0), torch.full((3,), -0.0)
        masked = x.masked_fill(x > 0, 0.0), x.masked_fill(x > 0, -0.0)
        return [
            1 / value for value in (zero + 0.0, zero + -0.0, *filled, *masked, torch.tensor(-0.0), torch.tensor(0.0))
        ]

    step = sidefx_train.compile(program, fullgraph=True, verify=0)
    x = torch.tensor([1.0, 2.0, 3.0])
    for _ in range(2):
        for found, expected in zip(step(x), program(x), strict=True):
            assert torch.equal(found, expected)
