"""The graph of a step on another device: what moves, and what stays."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.specialization import Specialization
from sidefx_train.compile.functionalization.functionalize import functionalize
from sidefx_train.compile.gpu.section import why_not
from sidefx_train.compile.gpu.simulation import SimulatedStep, place, stay_on_cpu
from sidefx_train.compile.graph.artifacts import TracedGraph
from sidefx_train.compile.pipeline.capture_step import capture
from sidefx_train.config import CompileConfig
from tests.support.parity import batches, classifier, mlp


def traced(step, *args) -> TracedGraph:
    return capture(step, args, {}, "step", Specialization()).traced


def of_optimizer(make) -> TracedGraph:
    model = mlp()
    program = classifier(model, make(model.parameters()), batches((5, 6), classes=3))
    return traced(program.step, *program.batch(0))


def devices(graph: TracedGraph) -> dict[str, str]:
    """Returns the device of every tensor, by the name of its node."""
    values = {node.name: node.meta.get("val") for node in graph.module.graph.nodes}
    return {name: str(value.device) for name, value in values.items() if isinstance(value, torch.Tensor)}


def test_all_but_the_counters_of_an_optimizer_moves():
    graph = of_optimizer(torch.optim.AdamW)
    counters = stay_on_cpu(graph)
    assert len(counters) == 4 and all("step" in name for name in counters)
    placed = place(graph)
    found = devices(placed)
    assert set(found.values()) == {"cuda:0", "cpu"}
    used = {str(node.target) for node in placed.module.graph.nodes if found.get(node.name) == "cpu"}
    assert used == counters | {"aten.add_.Tensor"}, used
    examples = {given.name: str(given.example.device) for given in placed.inputs if given.kind != "scalar"}
    assert {name for name, device in examples.items() if device == "cpu"} == counters
    assert set(devices(graph).values()) == {"cpu"}, "the captured graph is as it was"


def test_counters_of_fused_optimizers_and_of_averaged_sgd_move():
    for make in (lambda params: torch.optim.Adam(params, fused=True), torch.optim.ASGD):
        graph = of_optimizer(make)
        assert not stay_on_cpu(graph)
        placed = place(graph)
        assert {given.example.device.type for given in placed.inputs if given.kind != "scalar"} == {"cuda"}


def test_inputs_that_share_memory_share_it_there_and_keep_their_layout():
    whole = torch.zeros(4, 6)
    part = whole.t()[1:3]

    def step(whole, part):
        made = torch.zeros(3, device=whole.device)
        part.add_(1)
        return whole.sum() + made.sum()

    placed = place(traced(step, whole, part))
    found = {given.name: given.example for given in placed.inputs}
    assert found["part"].untyped_storage()._cdata == found["whole"].untyped_storage()._cdata
    assert (found["part"].stride(), found["part"].storage_offset()) == (part.stride(), part.storage_offset())
    assert set(devices(placed).values()) == {"cuda:0"}, "factories make what they make there"


def test_a_graph_keeps_what_its_nodes_say_and_a_constant_is_copied():
    table = torch.arange(4.0)

    def step(x):
        return x.mul(2).t_() + torch.tensor([1.0, 2.0, 3.0, 4.0])

    graph = traced(step, table)
    placed = place(graph)
    known = {node.name: node for node in placed.module.graph.nodes}
    for node in graph.module.graph.nodes:
        kept = {key: value for key, value in node.meta.items() if key.startswith("sidefx")}
        assert kept.items() <= known[node.name].meta.items()
    assert set(devices(placed).values()) == {"cuda:0", "cpu"}
    assert any(node.target is torch.ops.aten._to_copy.default for node in known.values())


def test_numbers_that_the_host_puts_into_tensors_are_put_there_on_the_device():
    """A counter times a number is rounded as its kernel does; a tensor that is only copied is no kernel of the host."""
    average, counter, scale = torch.zeros(()), torch.ones(()), torch.ones(3)

    def step(x, number):
        counter.mul_(number)
        average.copy_(torch.as_tensor(1 / number))
        return x * scale * torch.tensor(number + 1) * counter.item()

    graph = capture(
        step, (torch.ones(3), 0.3), {}, "step", Specialization(symbolic_numbers=frozenset({"number"}))
    ).traced
    names = [given.name for given in graph.inputs if given.kind != "scalar" and "counter" in given.source]
    with compat.simulated_cuda(90):
        functional = functionalize(place(graph, on_cpu=names), tensor_scalars=True)
    assert not why_not(functional, functional.module.graph), functional.module
    assert [name for _, name, _ in functional.counters], "the runner sets the counter"


def test_a_result_keeps_the_strides_that_its_backward_expects():
    """A batch norm of a view has other strides on a GPU; its result is read by a backward of its own."""
    w = torch.randn(6, requires_grad=True)

    def step(x):
        normed = F.batch_norm(x.transpose(1, 2), None, None, w, None, True).transpose(1, 2)
        return F.relu(normed)

    x = torch.randn(4, 5, 6, requires_grad=True)
    want = step(x)
    compiled = SimulatedStep(step, CompileConfig(verify=0, on_failure="raise"))
    have = compiled(x)
    assert have.stride() == want.stride()
    gradients = [torch.autograd.grad(made.square().sum(), (x, w)) for made in (have, want)]
    for mine, eager in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-5, atol=1e-5)
