"""Decisions of functionalization: numbers, tail, hazards, aliases, layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sidefx_train.compile.functionalization.error_hazards import deferred_mutations, find_raising_ops
from sidefx_train.compile.functionalization.functionalize import functionalize
from sidefx_train.compile.functionalization.tensor_scalar_ops import TensorScalar, call_with_scalars
from sidefx_train.compile.graph.alias_analysis import Aliases
from sidefx_train.compile.graph.artifacts import IndexCheck
from sidefx_train.compile.graph.fx_utils import written_args
from sidefx_train.compile.graph.validation import check_functional
from sidefx_train.errors import BackendError
from tests.support.graphs import trace_fn, trace_step


def targets(graph: Any) -> list[str]:
    return [str(n.target) for n in graph.module.graph.nodes if n.op == "call_function"]


def step(optimizer: Any, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 3))
    opt = optimizer(model.parameters())
    batch = (torch.randn(8, 4), torch.randint(0, 3, (8,)))
    return trace_step(model, opt, lambda m, b: F.cross_entropy(m(b[0]), b[1]), batch, **kwargs).traced


def test_fused_update_and_its_counters_move_behind_the_graph() -> None:
    graph = functionalize(step(lambda p: torch.optim.AdamW(p, fused=True)), tensor_scalars=True)
    assert [str(c.op) for c in graph.tail] == ["aten._foreach_add_.Scalar", "aten._fused_adamw_.default"]
    assert graph.packed == ()
    lr = next(i for i, given in enumerate(graph.inputs) if given.kind == "scalar")
    assert str(graph.tail[1].kwargs["lr"]) == f"a{lr}"
    statistics = [i for i, given in enumerate(graph.inputs) if "1.running" in given.source or "tracked" in given.source]
    assert sorted(graph.mutated) == statistics


def test_fused_update_can_be_decomposed() -> None:
    graph = functionalize(step(lambda p: torch.optim.AdamW(p, fused=True)), tensor_scalars=True, keep_fused=False)
    assert graph.tail == () and not any("fused" in t for t in targets(graph))
    assert len(graph.packed) == 1


def test_step_counters_are_host_numbers() -> None:
    graph = functionalize(step(lambda p: torch.optim.AdamW(p, foreach=False)), tensor_scalars=True)
    assert "aten._local_scalar_dense.default" not in targets(graph)
    assert any(".item()" in line for line in graph.host)
    assert graph.feeds[-1] == "packed" and graph.packed


def test_nothing_is_written_but_inputs_at_the_end() -> None:
    for tensor_scalars in (False, True):
        graph = functionalize(
            step(lambda p: torch.optim.Adam(p, foreach=True), clip=1.0), tensor_scalars=tensor_scalars
        )
        check_functional(graph)
        kinds = [bool(written_args(n)) for n in graph.module.graph.nodes if n.op == "call_function"]
        assert kinds == sorted(kinds), "updates of inputs come last"


def test_broken_graph_is_reported_with_its_neighbours() -> None:
    graph = functionalize(trace_fn(lambda x: x * 2 + 1, [torch.randn(3)]), tensor_scalars=True)
    nodes = [n for n in graph.module.graph.nodes if n.op == "call_function"]
    with graph.module.graph.inserting_after(nodes[0]):
        graph.module.graph.call_function(torch.ops.aten.add_.Tensor, (nodes[0], 1))
    with pytest.raises(BackendError, match="> %add_"):
        check_functional(graph)


def test_labels_are_checked_before_the_graph() -> None:
    graph = functionalize(step(lambda p: torch.optim.SGD(p, 0.1, fused=True)), tensor_scalars=True)
    label = next(i for i, given in enumerate(graph.inputs) if given.source == "batch[1]")
    assert graph.checks == (IndexCheck(label, 0, 3, -100),)
    assert graph.covered and graph.deferred_copies == ()


def test_shifted_and_padded_labels_are_checked_at_their_source() -> None:
    def fn(scores: torch.Tensor, labels: torch.Tensor) -> Any:
        shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
        return F.cross_entropy(scores.float(), shifted)

    graph = functionalize(trace_fn(fn, [torch.randn(6, 5), torch.randint(0, 5, (2, 3))]), tensor_scalars=True)
    assert graph.checks == (IndexCheck(1, 0, 5, -100),) and graph.covered


def test_updates_wait_for_what_cannot_be_checked_first() -> None:
    def fn(seen: torch.Tensor, after: torch.Tensor, x: torch.Tensor, i: torch.Tensor) -> Any:
        seen.add_(1)
        row = x[i + 1]
        after.add_(row.sum())
        return row

    args = [torch.zeros(()), torch.zeros(()), torch.randn(4), torch.tensor([0, 2])]
    traced = trace_fn(fn, args)
    graph = functionalize(traced, tensor_scalars=False)
    assert not graph.covered and graph.report is None
    assert [target for target, _ in graph.deferred_copies] == ["a0"]
    assert graph.mutated == (1,)
    reporting = functionalize(traced, tensor_scalars=True)
    assert reporting.covered and reporting.report is not None
    assert not reporting.deferred_copies and reporting.mutated == (0, 1)
    copies = [node for node in reporting.module.graph.nodes if node.target is torch.ops.aten.copy_.default]
    kept = [node.args[1] for node in copies]
    assert [node.target for node in kept] == [torch.ops.aten.where.self] * 2, (
        "the old value if the index is out of range"
    )
    assert [node.args[1] for node in kept] == [node.args[0] for node in copies]
    aliases = Aliases(traced.module.graph)
    hazards = find_raising_ops(traced.module.graph, aliases)
    assert len(hazards.unchecked) == 1
    assert {n.name for n in deferred_mutations(traced.module.graph, aliases, hazards.unchecked)} == {"arg0"}


def test_aliases_follow_views_and_in_place_operations() -> None:
    def fn(x: torch.Tensor) -> Any:
        a, b = x.view(-1).split(2)
        a.mul_(2)
        c = b.clone().add_(1)
        return a, c

    graph = trace_fn(fn, [torch.randn(2, 2)]).module.graph
    aliases = Aliases(graph)
    by_name = {n.name: n for n in graph.nodes}
    x = by_name["arg0"]
    assert aliases.roots[by_name["mul_"]] == {x}
    assert aliases.roots[by_name["add_"]] == {by_name["clone"]}
    assert aliases.same[by_name["add_"]] is by_name["clone"]
    assert aliases.same[by_name["mul_"]] is not x
    assert aliases.writes(by_name["mul_"]) == {x}


def test_number_without_a_tensor_form_is_refused() -> None:
    with pytest.raises(BackendError, match="cumsum"):
        call_with_scalars(torch.ops.aten.cumsum.default, (torch.randn(3), TensorScalar(torch.tensor(0.0))), {}, None)


def test_convolutions_convert_images_to_channels_last_once() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
        return F.conv2d(F.relu(F.conv2d(x, w)), v).sum()

    args = [torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(4, 4, 3, 3)]
    graph = functionalize(trace_fn(fn, args), tensor_scalars=True, channels_last=True)
    assert targets(graph).count("aten.clone.default") == 1
