"""Inputs on the host that a step only moves to an accelerator, on fake tensors of one."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.functionalization.moved_inputs import move_inputs
from sidefx_train.compile.graph.artifacts import GraphInput, TracedGraph

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)


def traced(step: Any, *shapes: tuple[tuple[int, ...], torch.device | str]) -> TracedGraph:
    mode = compat.FakeTensorMode()
    with mode, torch.no_grad():
        values = [torch.empty(shape, device=device) for shape, device in shapes]
        module = make_fx(step)(*values)
    inputs = tuple(GraphInput(f"a{i}", "tensor", value, f"input {i}") for i, value in enumerate(values))
    return TracedGraph(module, inputs, mode)


def operators(graph: TracedGraph) -> list[Any]:
    return [(n.target, dict(n.kwargs)) for n in graph.module.graph.nodes if n.op == "call_function"]


def test_a_batch_is_moved_by_the_runner():
    def step(x: Any, w: Any) -> Any:
        there = aten._to_copy.default(x, device=CUDA, non_blocking=True)
        half = aten._to_copy.default(x, device=CUDA, dtype=torch.float16, non_blocking=True)
        return aten.mm.default(there, w), half

    before = traced(step, ((4, 3), "cpu"), ((3, 2), CUDA))
    text = str(before.module.graph)
    after, moved = move_inputs(before)
    assert moved == ((0, True),) and after.inputs[0].example.device == CUDA
    targets = operators(after)
    assert (aten.clone.default, {}) in targets and (aten._to_copy.default, {"dtype": torch.float16}) in targets
    assert str(before.module.graph) == text and before.inputs[0].example.device.type == "cpu"


def test_the_host_waits_where_one_move_does():
    def step(x: Any, w: Any) -> Any:
        one = aten._to_copy.default(x, device=CUDA, non_blocking=True)
        return aten.add.Tensor(one, aten._to_copy.default(x, device=CUDA)), w

    assert move_inputs(traced(step, ((2,), "cpu"), ((2,), CUDA)))[1] == ((0, False),)


def test_what_the_host_uses_too_stays():
    def step(x: Any, w: Any) -> Any:
        return aten._to_copy.default(x, device=CUDA), aten.neg.default(x), w

    before = traced(step, ((2,), "cpu"), ((2,), CUDA))
    assert move_inputs(before) == (before, ())


def test_a_number_in_a_tensor_and_a_step_on_the_host_stay():
    before = traced(lambda x, w: (aten._to_copy.default(x, device=CUDA), w), ((), "cpu"), ((2,), CUDA))
    assert move_inputs(before) == (before, ())
    host = traced(lambda x: aten.neg.default(x), ((2,), "cpu"))
    assert move_inputs(host) == (host, ())
