"""What the elimination of common subexpressions keeps apart."""

from __future__ import annotations

import math

import pytest
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
        zeros = torch.zeros(3), torch.tensor(0.0), torch.full((3,), -0.0)
        sums = [each for made in zeros for each in (zero + made, made + zero, zero - made)] + [zero + 0, zero - -0.0]
        return [
            1 / value
            for value in (zero + 0.0, zero + -0.0, *filled, *masked, torch.tensor(-0.0), torch.tensor(0.0), *sums)
        ]

    step = sidefx_train.compile(program, fullgraph=True, verify=0)
    x = torch.tensor([1.0, 2.0, 3.0])
    for _ in range(2):
        for found, expected in zip(step(x), program(x), strict=True):
            assert torch.equal(found, expected)


COMPLEX = [complex(real, imag) for real in (0.0, -0.0, 1.0) for imag in (0.0, -0.0, 1.0)] + [complex("inf-0j")]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_complex_numbers_keep_the_signs_of_their_zeros(backend):
    """Regression: FX wrote ``(-0+1j)`` into the code of a graph, which is ``0+1j``, and one number stood for both."""

    def program(x):
        return [torch.full((2,), number) for number in COMPLEX] + [x * number for number in COMPLEX]

    step = sidefx_train.compile(program, backend=backend, fullgraph=True, verify=0)
    x = torch.tensor([1.0, 2.0])
    for _ in range(2):
        for found, expected in zip(step(x), program(x), strict=True):
            same = [torch.view_as_real(each).nan_to_num(7.0) for each in (found, expected)]
            assert torch.equal(*same) and torch.equal(*map(torch.signbit, same))


def test_complex_numbers_that_differ_in_a_zero_are_two():
    graph = fx.Graph()
    x = graph.placeholder("x")
    given = (complex(0.0, 1), complex(-0.0, 1), complex(0.0, 1), complex(1, -0.0), complex(1, 0.0), complex(1, -0.0))
    graph.output(tuple(graph.call_function(aten.add.Scalar, (x, number)) for number in given))
    merged = without_common_subexpressions(fx.GraphModule({}, graph))
    assert [str(number) for number in zeros_of(merged.graph)] == ["1j", "(-0+1j)", "(1-0j)", "(1+0j)"]
    assert {type(number) for each in (graph, merged.graph) for number in zeros_of(each)} == {complex}
