"""One kernel for many equal updates: what it computes, which updates of a graph it takes, and its recording."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend.autotune import multi_tensor as autotune
from sidefx_train.compile.backend.passes.multi_tensor_groups import Group, find_groups
from sidefx_train.compile.backend.passes.multi_tensor_rewrite import batch, results_with_own_memory, update_module
from sidefx_train.compile.functionalization.functionalize import functionalize
from sidefx_train.compile.gpu.multi_tensor import Expression, MultiTensorUpdate, Slot, Step, tables_of_recording
from sidefx_train.compile.gpu.section import Section
from sidefx_train.compile.gpu.simulation import compile_update, place
from sidefx_train.compile.gpu.simulation.kernels import SimulatedKernel
from sidefx_train.compile.gpu.simulation.recorder import HostRecorder, StaleAddress
from sidefx_train.compile.gpu.static_replay import StaticReplay
from sidefx_train.compile.graph.artifacts import FunctionalGraph
from sidefx_train.report import CudaGraphRecord, StepReport
from tests.gpu_sim.simulated import simulated, skipped_by_a_scaler
from tests.gpu_sim.test_placement import traced
from tests.support.parity import Program, batches, classifier, mlp

pytest.importorskip("triton")

SINGLE, HALF, DOUBLE = torch.float32, torch.bfloat16, torch.float64


class Lion(torch.optim.Optimizer):
    """An optimizer of the program's: the sign of an average."""

    def __init__(self, params, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            (first, second), lr = group["betas"], group["lr"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                average = state["average"]
                p.mul_(1 - lr * group["weight_decay"])
                p.add_((average * first + p.grad * (1 - first)).sign_(), alpha=-lr)
                average.mul_(second).add_(p.grad, alpha=1 - second)


OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=True),
    "Adam": partial(torch.optim.Adam, lr=0.01, weight_decay=0.01, foreach=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.01, amsgrad=True, foreach=False),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, eps=1e-3, momentum=0.9, foreach=True),  # see `trained_by`
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1, foreach=True),
    "Lion": Lion,
}


def trained(name: str, dtype: torch.dtype = SINGLE, keeps_gradients: bool = False) -> Program:
    """Returns a program that clips its gradients, so that no update can be fused with what computes a gradient."""
    model = mlp().to(dtype)
    optimizer, usual = OPTIMIZERS[name](model.parameters()), batches((5, 6), classes=3)

    def step(x, y):
        if keeps_gradients:
            optimizer.zero_grad()
        loss = F.cross_entropy(model(x).float(), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=True)
        optimizer.step()
        if not keeps_gradients:
            optimizer.zero_grad()
        return loss.detach()

    def batch_of(index):
        x, y = usual(index)
        return x.to(dtype), y

    return Program(step, batch_of, (model, optimizer))


def functional(program: Program) -> FunctionalGraph:
    program.step(*program.batch(0))  # the optimizer has state
    graph = place(traced(program.step, *program.batch(0)))
    with compat.simulated_cuda(90):
        return functionalize(graph, decompositions=compat.inductor_decompositions(), tensor_scalars=True)


def values_of(group: Group) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns numbers for what a group writes and reads; a tensor that is both is one tensor."""
    made: dict[object, torch.Tensor] = {}
    torch.manual_seed(0)

    def value(node):
        if node not in made:
            known = node.meta["val"]
            made[node] = (torch.rand(known.shape) + 0.1).to(known.dtype)
        return made[node]

    return [value(node) for node in group.written()], [value(node) for node in group.read()]


def in_double(expression: Expression) -> Expression:
    """Returns the same expression with all numbers in float64."""

    def wide(dtype: torch.dtype) -> torch.dtype:
        return DOUBLE if dtype.is_floating_point else dtype

    return Expression(
        tuple(replace(slot, dtype=wide(slot.dtype)) for slot in expression.slots),
        tuple(replace(step, dtype=wide(step.dtype)) for step in expression.steps),
        expression.results,
        tuple(map(wide, expression.dtypes)),
    )


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, SINGLE) for name in OPTIMIZERS), ("AdamW", HALF), ("Lion", HALF)], ids=str
)
@pytest.mark.every(3)
def test_updates_of_an_optimizer_are_one_kernel_and_right_in_float64(name, dtype):
    graph = functional(trained(name, dtype))
    (group,) = find_groups(graph)
    assert len(group.members) == 4, "weights and biases of two layers"
    written, read = values_of(group)
    exact = [[each.double() if each.is_floating_point() else each for each in values] for values in (written, read)]
    for i in range(4):
        in_double(group.expression).run(exact[0][i::4], exact[1][i::4])
    MultiTensorUpdate(group.expression, group.sizes)(written, read)
    tolerance = 1e-5 if dtype == SINGLE else 0.05
    for have, want in zip(written, exact[0], strict=True):
        torch.testing.assert_close(have.double(), want, rtol=tolerance, atol=tolerance / 5)
    assert compile_update(group.expression, 80).size > 1000
    left = batch(graph, [group])
    assert not [node for node in left.module.graph.nodes if node.target is torch.ops.aten.copy_.default]
    assert len(left.tail) == 1 and left.mutated == graph.mutated


def test_gradients_that_are_kept_are_clipped_by_the_same_kernel_in_their_memory():
    graph = functional(trained("SGD", keeps_gradients=True))
    (group,) = find_groups(graph)
    assert len(group.members) == 4 and len(group.expression.results) == 3, "parameter, momentum, gradient"
    left = batch(graph, [group])
    written = [str(name) for name in left.tail[0].args[0]]
    assert written[8:] == [str(out.value) for out in left.outputs if str(out.value) in written[8:]]
    assert len(left.results) == len(graph.results) + 1, "the norm, from which the kernel computes the factor"
    assert results_with_own_memory(left) == frozenset(range(len(left.results)))


@pytest.mark.parametrize("keeps", [False, True])
def test_the_graph_of_a_measurement_computes_the_same(keeps):
    (group,) = find_groups(functional(trained("AdamW", keeps_gradients=keeps)))
    module, written, read = update_module(group)
    targets, sources = values_of(group)
    given = dict(zip([*written, *read], [*targets, *sources], strict=True))
    tensors = [given[i].clone() for i in range(len(given))]
    module(*tensors)
    MultiTensorUpdate(group.expression, group.sizes)(targets, sources)
    for i, target in zip(written, targets, strict=True):
        torch.testing.assert_close(target, tensors[i], rtol=1e-6, atol=1e-7)


def test_every_operation_and_dtype():
    steps = (
        Step("cast", (2,), SINGLE),
        Step("mul", (1, 4), HALF),
        Step("add", (0, 5), SINGLE),
        Step("sqrt", (6,), SINGLE),
        Step("div", (0, 7), SINGLE),
        Step("where", (3, 8, 0), SINGLE),
        Step("add_scaled", (9, 8, "0.5"), SINGLE),
        Step("maximum", (10, "0.25"), SINGLE),
        Step("sign", (11,), SINGLE),
        Step("gt", (0, "0.5"), torch.bool),
        Step("reciprocal", (0,), SINGLE),
        Step("addcdiv_scaled", (0, 8, 7, "-0.5"), SINGLE),
        Step("neg", (2,), DOUBLE),
    )
    slots = (Slot(SINGLE, False), Slot(HALF, False), Slot(DOUBLE, True), Slot(torch.bool, True))
    expression = Expression(
        slots, steps, (12, 5, "0.0", 13, 15, 14, 16), (SINGLE, HALF, SINGLE, torch.bool) + 3 * (SINGLE,)
    )
    shapes = [(3, 5), (1500,), (1,)]
    torch.manual_seed(0)
    read = [torch.rand(shape) for shape in shapes] + [torch.rand(shape).to(HALF) for shape in shapes]
    read += [torch.tensor(0.3, dtype=DOUBLE)] * 3 + [torch.tensor(True), torch.tensor(False), torch.tensor(True)]
    written = read[:6] + [torch.ones(shape) for shape in shapes]
    written += [torch.ones(shape, dtype=torch.bool) for shape in shapes] + [
        torch.ones(s) for _ in "123" for s in shapes
    ]
    copies = {id(each): each.clone() for each in [*written, *read]}
    others = [[copies[id(each)] for each in values] for values in (written, read)]
    MultiTensorUpdate(expression, [15, 1500, 1])(written, read)
    for i in range(3):
        expression.run(others[0][i::3], others[1][i::3])
    for have, want in zip(written, others[0], strict=True):
        torch.testing.assert_close(have, want, rtol=1e-6, atol=1e-7)  # fma rounds once
    assert all(compile_update(expression, capability).size > 1000 for capability in (80, 90))


def test_an_update_that_reads_what_another_writes_runs_first_and_one_that_the_graph_writes_for_stays():
    weights, averages, counts = ([torch.zeros(4) for _ in range(3)] for _ in range(3))
    last = torch.zeros(4)

    def step(x):
        for weight, average, count in zip(weights, averages, counts, strict=True):
            average.mul_(0.5).add_(weight)
            count.add_(last)
        for weight in weights:
            weight.add_(x.sum())
        last.add_(x.cumsum(0))

    graph = place(traced(step, torch.ones(4)))
    with compat.simulated_cuda(90):
        made = functionalize(graph, decompositions=compat.inductor_decompositions(), tensor_scalars=True)
    groups = find_groups(made)
    assert [len(group.expression.slots) for group in groups] == [2, 2]
    first, second = groups
    assert first.foreign() == set(second.written()) and not second.foreign()


def test_updates_that_a_kernel_of_a_gradient_can_contain_stay_in_the_graph():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    (group,) = find_groups(functional(classifier(model, optimizer, batches((5, 6), classes=3))))
    assert sorted(group.sizes) == sorted(p.numel() for p in model.parameters() if p.dim() == 2)


def of_one_slot() -> Expression:
    """Returns the update ``p = p - 0.5 * g``."""
    return Expression(2 * (Slot(SINGLE, False),), (Step("add_scaled", (0, 1, "-0.5"), SINGLE),), (2,), (SINGLE,))


def test_a_replay_reads_addresses_from_a_table_that_lives_as_long():
    update, weights, grads = MultiTensorUpdate(of_one_slot(), [3, 2]), [torch.ones(3), torch.ones(2)], []

    def run():
        grads[:] = [torch.full((3,), 2.0), torch.full((2,), 4.0)]
        update(weights, [*weights, *grads])
        return list(grads)

    run()
    with tables_of_recording() as tables:
        recorded, _ = HostRecorder().record(run, None)
    assert torch.equal(weights[0], torch.zeros(3)), "a recording executes nothing"
    recorded.replay()
    assert torch.equal(weights[0], torch.full((3,), -1.0)) and torch.equal(weights[1], torch.full((2,), -3.0))
    tables.clear()
    with pytest.raises(StaleAddress, match="freed"):
        recorded.replay()


def test_weights_that_move_are_seen_by_their_addresses():
    update = MultiTensorUpdate(of_one_slot(), [3, 2])
    section = Section(("a0", "a1", "a2"), ("static", "static", "input"), (0,), True)
    record = CudaGraphRecord()

    def run(args):
        first, second, x = args
        update([first, second], [first, second, x * 2, x[:2] * 4])
        return (x.sum(),)

    replay = StaticReplay(run, section, HostRecorder(), 4, 2**30, record)
    weights, expected = [torch.ones(3), torch.ones(2)], [torch.ones(3), torch.ones(2)]
    for call in range(9):
        x = torch.arange(3.0) + call
        if call in (4, 6):
            weights[0].data = weights[0].data * 0.5
            expected[0].mul_(0.5)
        replay([*weights, x])
        expected[0].sub_(x * 2 * 0.5)
        expected[1].sub_(x[:2] * 4 * 0.5)
        for have, want in zip(weights, expected, strict=True):
            torch.testing.assert_close(have, want)
    assert record.recordings == 2 and record.replays == 6, record


def test_without_a_measurement_updates_stay_with_inductor(monkeypatch):
    graph = functional(trained("SGD"))
    assert autotune.choose_updates(graph, lambda module: None) == ([], [])
    monkeypatch.setattr(autotune, "can_measure", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "simulated")
    for times, chosen in [
        ({}, 0),
        ({"Inductor": 1.0, "one kernel": 0.97}, 0),
        ({"Inductor": 1.0, "one kernel": 0.5}, 1),
    ]:
        monkeypatch.setattr(autotune, "timings", lambda tasks, times=times: dict.fromkeys(tasks, times))
        groups, (record,) = autotune.choose_updates(graph, lambda module: None)
        assert len(groups) == chosen and record.what.startswith("update of 4 tensors, "), record


@pytest.mark.parametrize(
    ("memory", "reason"),
    [
        (1, "its tensors have 0 MiB, and 0 MiB are free"),
        (2**40, "RuntimeError: no compiler"),
        (None, "TypeError: 'NoneType' object is not subscriptable"),
    ],
    ids=["memory", "compiler", "device"],
)
def test_the_report_says_why_updates_were_not_measured(monkeypatch, tmp_path, memory, reason):
    def fails(module):
        raise RuntimeError("no compiler")

    monkeypatch.setenv("SIDEFX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(autotune, "can_measure", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "simulated")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: memory and (memory, memory))
    graph = functional(trained("SGD"))
    for _ in range(2):  # the failure is not kept on disk as a measurement
        groups, (record,) = autotune.choose_updates(graph, fails)
        assert (groups, record.chosen, record.seconds, record.why_not) == ([], "Inductor", {}, reason)
    report = StepReport()
    report.record_capture(choices=[record])
    assert f"nothing: {reason}"[:30] in report.details()
    monkeypatch.setattr(autotune, "_times", lambda *args: {"Inductor": 2.0, "one kernel": 1.0})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**40, 2**40))
    groups, (record,) = autotune.choose_updates(graph, lambda module: None)
    assert len(groups) == 1 and not record.why_not


@pytest.fixture
def chosen(monkeypatch):
    """One kernel is chosen wherever it is possible."""
    monkeypatch.setattr(autotune, "can_measure", lambda: True)
    monkeypatch.setattr(autotune, "timings", lambda tasks: {key: {"Inductor": 2.0, "one kernel": 1.0} for key in tasks})


def test_a_whole_step(chosen, monkeypatch):
    launched, run = [], SimulatedKernel.run
    monkeypatch.setattr(SimulatedKernel, "run", lambda kernel, *a, **k: (launched.append(kernel), run(kernel, *a, **k)))
    step = simulated(partial(trained, "AdamW", keeps_gradients=True), rtol=1e-4, atol=1e-5)
    (graph,) = step.graphs
    kernels, library_calls = compat.launches_of(graph.executable.sources["inductor"])
    assert (3 * kernels, library_calls) == (len(launched), 5), "products of two layers and of their derivatives"
    assert graph.executable.sources["runner"].count("update0(") == 1
    assert len(graph.executable.choices) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_whole_steps(chosen, name):
    captures = 2 if name == "Lion" else 1  # it creates its state in the first step
    simulated(partial(trained, name), rtol=1e-4, atol=1e-5, captures=captures)


@pytest.mark.slow
def test_whole_steps_that_a_scaler_skips(chosen):
    make = partial(skipped_by_a_scaler, partial(torch.optim.RMSprop, lr=0.01, foreach=True))
    step = simulated(make, steps=6, rtol=1e-4, atol=1e-5, eager=1)
    assert "update0(" in step.graphs[-1].executable.sources["runner"]


@pytest.mark.slow
def test_averages_of_weights_counters_and_clipped_values_are_part_of_it(chosen):
    def make() -> Program:
        layers = [nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6, bias=False)]
        model = nn.Sequential(*layers, nn.BatchNorm1d(6), nn.Linear(6, 3))
        average, optimizer = copy.deepcopy(model), torch.optim.NAdam(model.parameters(), foreach=True)

        def step(x, y):
            optimizer.zero_grad(set_to_none=False)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.05)
            optimizer.step()
            with torch.no_grad():
                for kept, weight in zip(average.parameters(), model.parameters(), strict=True):
                    kept.lerp_(weight, 0.1)
            return loss.detach()

        return Program(step, batches((5, 6), classes=3), (model, optimizer, average))

    step = simulated(make, rtol=1e-3, atol=1e-4, captures=2)
    runner = step.graphs[-1].executable.sources["runner"]
    assert "update0(" in runner and "update1(" in runner, "counters of layers, and weights"
