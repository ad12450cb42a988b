"""Collectives stay apart and in order while Inductor has their graph."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._functorch.compile_utils import fx_graph_cse

from sidefx_train import torch_compat as compat
from sidefx_train.torch_compat.inductor.checks import WrongSchedule
from sidefx_train.torch_compat.inductor.collective_order import (
    collectives_in_order,
    distinct_collectives,
    restore_groups,
)


def _graph() -> fx.Graph:
    """Returns a graph that reduces the same tensor twice."""
    ops, graph = compat.functional_collectives(), fx.Graph()
    x = graph.placeholder("x")
    started = [graph.call_function(ops.all_reduce.default, (x, "sum", "7")) for _ in range(2)]
    graph.output(tuple(graph.call_function(ops.wait_tensor.default, (node,)) for node in started))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(4)
    return graph


def _started(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if compat.is_collective(node.target) and compat.collective_name(node.target)]


def test_equal_collectives_are_not_merged():
    graph = _graph()
    assert len(_started(fx_graph_cse(graph))) == 1, "torch keeps equal collectives apart itself"
    with distinct_collectives(graph):
        copy = fx_graph_cse(graph)
    restore_groups(copy)
    assert [node.args[1:] for node in _started(copy)] == [("sum", "7")] * 2
    assert [node.args[1:] for node in _started(graph)] == [("sum", "7")] * 2


def test_another_order_is_refused():
    graph = _graph()
    with distinct_collectives(graph):
        pass
    with collectives_in_order(graph):
        pass
    first, second = _started(graph)
    first.prepend(second)
    with pytest.raises(WrongSchedule, match=r"\[2, 0\]|\[1, 0\]"), collectives_in_order(graph):
        pass


def test_a_process_alone_stands_in_for_the_others():
    ops, x = compat.functional_collectives(), torch.arange(4.0)
    with compat.OneProcess():
        assert torch.equal(ops.wait_tensor(ops.all_reduce(x, "sum", "no group")), x)
        assert ops.all_gather_into_tensor(x, 3, "no group").shape == (12,)
        assert ops.reduce_scatter_tensor(x, "sum", 2, "no group").shape == (2,)
        assert torch.equal(ops.broadcast(x, 1, "no group"), x)
        assert ops.all_to_all_single(x, [1, 2], [2, 2], "no group").shape == (3,)
