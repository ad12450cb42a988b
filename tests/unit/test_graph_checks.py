"""Graphs are checked after every pass: what a check finds, and what it says."""

from __future__ import annotations

import pytest
import torch

from sidefx_train.compile.functionalize import functionalize
from sidefx_train.compile.graph_checks import check_graph, enabled
from sidefx_train.errors import BackendError
from tests.graphs import trace_fn

aten = torch.ops.aten


def graph(functional=True):
    def fn(x, y):
        x.mul_(2)
        return (x @ y).relu().sum(0)

    traced = trace_fn(fn, [torch.ones(3, 4), torch.ones(4, 5)])
    return functionalize(traced, tensor_scalars=False).module if functional else traced.module, traced.fake_mode


def node(module, target):
    return next(n for n in module.graph.nodes if n.target is target)


def test_checks_are_on_in_tests():
    assert enabled()
    module, mode = graph()
    check_graph("a pass", module, mode, functional=True)


def test_they_can_be_turned_off(monkeypatch):
    monkeypatch.setenv("SIDEFX_CHECK_GRAPHS", "0")
    module, mode = graph(functional=False)
    check_graph("a pass", module, mode, functional=True)


@pytest.mark.parametrize(
    "change, said",
    [
        ("shape", r"relu has shape \(3, 6\) by its metadata, and makes \(3, 5\)"),
        ("stride", r"relu has stride \(1, 3\) by its metadata, and makes \(5, 1\)"),
        ("dtype", "relu has dtype torch.float64"),
        ("no metadata", "relu has no metadata"),
        ("other mode", "relu has metadata of another capture"),
    ],
)
def test_metadata(change, said):
    module, mode = graph()
    relu = node(module, aten.relu.default)
    value = relu.meta["val"]
    with torch._subclasses.FakeTensorMode() if change == "other mode" else mode:
        relu.meta["val"] = {
            "shape": lambda: torch.empty(3, 6),
            "stride": lambda: torch.empty(5, 3).t(),
            "dtype": lambda: torch.empty(3, 5, dtype=torch.float64),
            "no metadata": lambda: None,
            "other mode": lambda: torch.empty(value.shape),
        }[change]()
    with pytest.raises(BackendError, match=said) as error:
        check_graph("a pass", module, mode, functional=True)
    text = str(error.value)
    assert "after a pass" in text and "> %relu" in text and "%mm" in text, f"the nodes around it are not shown: {text}"


def test_a_stand_in_taken_for_a_constant():
    module, mode = graph()
    relu = node(module, aten.relu.default)
    module.left = relu.meta["val"]
    with module.graph.inserting_before(relu):
        module.graph.get_attr("left").meta["val"] = module.left
    with pytest.raises(BackendError, match="left is a stand-in of a tensor, taken for a constant"):
        check_graph("a pass", module, mode, functional=True)


def test_writes():
    module, mode = graph(functional=False)
    check_graph("the capture", module, mode)
    with pytest.raises(BackendError, match="mul_ writes, in a graph that must not"):
        check_graph("a pass", module, mode, functional=True)
    module, mode = graph()
    update = node(module, aten.copy_.default)
    with module.graph.inserting_after(update):
        again = module.graph.call_function(aten.copy_.default, update.args)
        again.meta = dict(update.meta)
    with pytest.raises(BackendError, match="updates a0 a second time"):
        check_graph("a pass", module, mode, functional=True)


def test_an_operation_behind_the_updates():
    module, mode = graph()
    update = node(module, aten.copy_.default)
    with module.graph.inserting_after(update):
        module.graph.call_function(aten.neg.default, (update.args[1],)).meta["val"] = update.meta["val"]
    with pytest.raises(BackendError, match="neg_default follows an update of an input"):
        check_graph("a pass", module, mode, functional=True)


def test_placeholders():
    module, mode = graph()
    with pytest.raises(BackendError, match="placeholders .* expected"):
        check_graph("a pass", module, mode, ["a0", "a2"], functional=True)
    first, second = (n for n in module.graph.nodes if n.op == "placeholder")
    target, second.target = second.target, first.target
    with pytest.raises(BackendError, match="second placeholder named a0"):
        check_graph("a pass", module, mode, functional=True)
    second.target = target
    with module.graph.inserting_after(node(module, aten.relu.default)):
        module.graph.placeholder("late")
    with pytest.raises(BackendError, match="behind an operation"):
        check_graph("a pass", module, mode, functional=True)


def test_order():
    module, mode = graph()
    node(module, aten.mm.default).prepend(node(module, aten.relu.default))
    with pytest.raises(BackendError, match=r"relu reads \[mm\] before it is made"):
        check_graph("a pass", module, mode, functional=True)
