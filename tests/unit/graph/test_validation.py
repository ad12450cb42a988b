"""Graphs are checked after every pass: the faults that a check finds, and its messages."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher

import sidefx_train
from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend import inductor, pass_list
from sidefx_train.compile.functionalization import functionalize as functionalization
from sidefx_train.compile.functionalization.functionalize import functionalize
from sidefx_train.compile.graph.validation import check_graph, enabled
from sidefx_train.compile.pipeline import capture_run, compile_capture
from sidefx_train.errors import BackendError
from tests.support.graphs import trace_fn

aten = torch.ops.aten


def graph(functional=True):
    def fn(x, y):
        x.mul_(2)
        return (x @ y).relu().sum(0)

    traced = trace_fn(fn, [torch.ones(3, 4), torch.ones(4, 5)])
    return functionalize(traced, tensor_scalars=False).module if functional else traced.module, traced.fake_mode


def node(module, target):
    return next(n for n in module.graph.nodes if n.target is target)


@pytest.fixture(autouse=True)
def checks(monkeypatch):
    monkeypatch.setenv("SIDEFX_CHECK_GRAPHS", "1")


def test_a_right_graph_passes():
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
    with pytest.raises(BackendError, match="left is a constant, but holds a fake tensor"):
        check_graph("a pass", module, mode, functional=True)


def test_strides_of_dimensions_of_size_1():
    """Regression: a pass of Inductor replaces ``full_like`` by ``full`` with other metadata there."""
    mode = compat.new_fake_mode(compat.new_shape_env())
    graph = fx.Graph()
    with mode:
        made = torch.empty(2, 1, 6, 2)
        other, wrong = (torch.empty_strided((2, 1, 6, 2), strides) for strides in ((12, 1, 2, 1), (12, 12, 1, 6)))
    full = graph.call_function(aten.full.default, ([2, 1, 6, 2], 0.3), {"device": torch.device("cpu")})
    graph.output((full,))
    module = fx.GraphModule({}, graph)
    for value in (made, other):
        full.meta["val"] = value
        check_graph("a pass", module, mode, functional=True)
    full.meta["val"] = wrong
    with pytest.raises(BackendError, match="has stride"):
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
    with pytest.raises(BackendError, match="after an operation"):
        check_graph("a pass", module, mode, functional=True)


def test_order():
    module, mode = graph()
    node(module, aten.mm.default).prepend(node(module, aten.relu.default))
    with pytest.raises(BackendError, match=r"relu reads \[mm\] before it is computed"):
        check_graph("a pass", module, mode, functional=True)


def test_numbers_of_results():
    def fn(x):
        first, second = x.split(2)
        return first + second

    traced = trace_fn(fn, [torch.ones(4)])
    split = next(n for n in traced.module.graph.nodes if "split" in n.name)
    split.meta["val"] = split.meta["val"][:1]
    with pytest.raises(BackendError, match="has 1 items by its metadata, and makes 2"):
        check_graph("a pass", traced.module, traced.fake_mode)


def made(module):
    """Returns the first operation that makes a tensor and writes nothing."""
    nodes = (n for n in module.graph.nodes if n.op == "call_function" and n.target is not aten.copy_.default)
    return next(n for n in nodes if isinstance(n.meta.get("val"), torch.Tensor))


def leaves_a_write(module):
    node = made(module)
    with module.graph.inserting_after(node):
        module.graph.call_function(aten.neg_.default, (node,)).meta = dict(node.meta)


def leaves_a_wrong_shape(module):
    node = made(module)
    node.meta["val"] = node.meta["val"].new_empty(7)


def leaves_two_of_a_name(module):
    first, second = [n for n in module.graph.nodes if n.op == "placeholder"][:2]
    second.target = first.target


def module_of(value):
    """Returns the graph in a pass's argument or result."""
    return value if isinstance(value, torch.fx.GraphModule) else value.module


PASSES = {
    "capture": (capture_run, "_made_generators", lambda args, out: args[1]),
    "partition": (compile_capture, "recompute", lambda args, out: out.forward),
    "functionalization": (functionalization, "check_functional", lambda args, out: args[0]),
    "attention": (inductor, "expand_attention", lambda args, out: args[0]),
    "Inductor's passes": (inductor.compat, "inductor_passes", lambda args, out: out),
    "matmul": (pass_list, "choose_products", lambda args, out: args[0]),
    "blocked_row_sums": (pass_list, "sum_by_blocks", lambda args, out: args[0]),
    "rematerialize": (pass_list, "recompute", lambda args, out: args[0]),
}
BROKEN = {
    leaves_a_write: "neg__default writes, in a graph that must not",
    leaves_a_wrong_shape: r"has shape \(7,\) by its metadata",
    leaves_two_of_a_name: "is a second placeholder named|placeholders .*, expected|placeholders .* are not the feeds",
}


@pytest.mark.parametrize(
    ("stage", "breaks"),
    [
        pytest.param(stage, breaks, id=f"{stage} {breaks.__name__}")
        for stage in PASSES
        for breaks in BROKEN
        if breaks is not leaves_a_write or stage not in ("capture", "partition")  # these may write
    ],
)
def test_every_pass_is_checked(stage, breaks, monkeypatch, tmp_path):
    """A pass that is broken on purpose is named, with the nodes around the fault."""
    owner, name, graph_of = PASSES[stage]
    pass_ = getattr(owner, name)

    def broken(*args, **kwargs):
        out = pass_(*args, **kwargs)
        breaks(module_of(graph_of(args, out)))
        return out

    monkeypatch.setattr(owner, name, broken)
    monkeypatch.setenv("SIDEFX_CACHE_DIR", str(tmp_path))  # a cached graph would not be lowered
    weight = torch.ones(4, 5, requires_grad=True)

    def fn(x):
        return (x @ weight).tanh().sum(0)

    step = sidefx_train.compile(fn, fullgraph=True, on_failure="raise")
    with pytest.raises(BackendError, match=BROKEN[breaks]) as error:
        step(torch.ones(3, 4))
    assert f"after {stage}: " in str(error.value)
    assert breaks is leaves_two_of_a_name or "\n> %" in str(error.value), "the nodes around it are not shown"


def test_strides_that_another_dispatcher_left_in_the_cache_of_fake_modes():
    """Regression: a step was not captured if the functionalization of another had expanded a scalar to one element."""

    def step(k):
        weight = torch.tensor([k * 0.5], requires_grad=True)
        (weight * weight).sum().backward()
        return weight.grad

    compat.FakeTensorMode.cache_clear()
    with compat.new_fake_mode(compat.new_shape_env()), enable_python_dispatcher():
        assert aten.expand.default(torch.empty(()), [1]).stride() == (1,), "another dispatcher's strides are the same"
    run = sidefx_train.compile(step, backend="aot_eager")
    assert torch.equal(run(3), torch.tensor([3.0]))
    assert run.report().graph_count == 1, run.report()
    compat.FakeTensorMode.cache_clear()
