"""The replay of recorded steps, with a recorder of CPU tensors in place of a device.

The recorder keeps to what a CUDA graph knows: it raises where a replay uses memory that was freed or has moved, and
overwrites everything in its pool at each replay.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from sidefx_train.compile.gpu.replaying import recording_on_host
from sidefx_train.compile.gpu.simulation.recorder import HostRecorder
from tests.gpu import programs
from tests.gpu.compare import check

_NOT_RECORDED = {programs.mlp_scaler, programs.mlp_adam_capturable}


@pytest.fixture(autouse=True)
def device():
    recorder = HostRecorder()
    with recording_on_host(recorder):
        yield recorder


@pytest.mark.parametrize("make", [each for each in programs.PROGRAMS if each not in _NOT_RECORDED])
def test_programs(make):
    step = check(make, "cpu", 1e-5, backend="aot_eager")
    report = step.report()
    for capture in report.captures[-1:]:
        graph = capture.cuda_graph
        assert graph.recordings == 1 and not graph.refused, report
        assert graph.plain == {"first call with its sizes and numbers": 1}, report


BATCHES = [(torch.randn(4, 6, generator=torch.Generator().manual_seed(i)), torch.arange(4) % 3) for i in range(12)]


class Training:
    """A small training, eager or replayed; the world changes between its calls."""

    def __init__(self, compiled: bool, accumulates: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.05, fused=True)

        def step(x: Any, y: Any) -> Any:
            if not accumulates:
                self.optimizer.zero_grad()
            loss = F.cross_entropy(self.net(x), y)
            loss.backward()
            if not accumulates:
                self.optimizer.step()
            return loss

        self.step: Any = sidefx_train.compile(step, backend="aot_eager", **options) if compiled else step

    @property
    def graph(self) -> Any:
        return self.step.report().captures[-1].cuda_graph

    def values(self) -> list[torch.Tensor]:
        state = [t for each in self.optimizer.state.values() for t in each.values() if isinstance(t, torch.Tensor)]
        grads = [p.grad for p in self.net.parameters() if p.grad is not None]
        return [t.detach().clone() for t in (*self.net.parameters(), *grads, *state)]


def both(between: Any, **options: Any) -> tuple[Training, Any, Any]:
    """Runs a training eagerly and replayed, with ``between(training, call)`` before every call; compares all values."""
    seen: list[Any] = []
    for compiled in (False, True):
        training = Training(compiled, **options)
        kept = []
        for call, batch in enumerate(BATCHES):
            kept.append(between(training, call))
            kept.append(training.step(*batch))
        seen.append((kept, training.values()))
    flat = [[*_tensors(kept), *values] for kept, values in seen]
    assert len(flat[0]) == len(flat[1])
    for expected, found in zip(*flat, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    return training, seen[1][0], seen[0][0]


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value.detach()]
    return [t for each in value for t in _tensors(each)] if isinstance(value, (list, tuple)) else []


def test_losses_that_are_kept_stay_right():
    training, kept, _ = both(lambda training, call: None)
    assert training.graph.replays == len(BATCHES) - 1
    assert len({loss.data_ptr() for loss in kept[1::2]}) == len(BATCHES)


def test_gradients_are_written_again_where_nothing_else_uses_them():
    pointers = []

    def note(training: Training, call: int) -> None:
        if call > 2 and hasattr(training.step, "report"):
            pointers.append([p.grad.data_ptr() for p in training.net.parameters()])

    both(note)
    assert len(pointers) > 5 and all(each == pointers[0] for each in pointers)


@pytest.mark.parametrize(
    "keep",
    [
        lambda p: p.grad,
        lambda p: p.grad[0],
        lambda p: p.grad.detach(),
        lambda p: p.grad.view(-1)[:1],
        lambda p: p.grad * p.grad.new_ones(1).requires_grad_(),  # autograd saves it
        lambda p: weakref.ref(p.grad),
        lambda p: p.grad.untyped_storage(),
    ],
    ids=["itself", "a_part", "an_alias", "a_view", "saved_by_autograd", "weakly", "its_storage"],
)
@pytest.mark.parametrize("when", [3, 6])
def test_a_gradient_that_is_used_elsewhere_is_copied(keep, when):
    held: list[Any] = []

    def between(training: Training, call: int) -> Any:
        if call != when:
            return None
        held.append(keep(next(iter(training.net.parameters()))))
        return held[-1] if isinstance(held[-1], torch.Tensor) else None

    training, _, _ = both(between)
    graph = training.graph
    assert graph.recordings == 2, graph
    assert [reason for reason in graph.plain if "in use" in reason], graph
    assert graph.replays >= len(BATCHES) - 4
    if isinstance(held[-1], weakref.ref):
        assert held[0]() is None and held[1]() is None


def test_a_gradient_that_another_tensor_has_is_not_written_again():
    others = []

    def between(training: Training, call: int) -> Any:
        if call == 4:
            first = next(iter(training.net.parameters()))
            others.append(torch.zeros_like(first).requires_grad_())
            others[-1].grad = first.grad
            first.grad = None
        return others[-1].grad if call == 11 else None

    training, _, _ = both(between)
    assert training.graph.recordings == 2


def test_the_memory_of_a_gradient_is_replaced():
    def between(training: Training, call: int) -> None:
        if call in (4, 7):
            for p in training.net.parameters():
                p.grad.data = torch.full_like(p, 7.0)

    both(between)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: [p.data.mul_(0.5) for p in t.net.parameters()],
        lambda t: [setattr(p, "data", p.data * 0.5) for p in t.net.parameters()],
        lambda t: t.net.load_state_dict({k: v * 0.5 for k, v in t.net.state_dict().items()}),
        lambda t: t.optimizer.load_state_dict(t.optimizer.state_dict()),
        lambda t: t.optimizer.param_groups[0].update(lr=0.01),
        lambda t: t.optimizer.param_groups[0].update(betas=(0.5, 0.9)),
        lambda t: [each["exp_avg"].zero_() for each in t.optimizer.state.values()],
        lambda t: [each.update(exp_avg=each["exp_avg"] * 0.1) for each in t.optimizer.state.values()],
        lambda t: torch.nn.utils.vector_to_parameters(
            torch.nn.utils.parameters_to_vector(t.net.parameters()).detach() * 0.9, t.net.parameters()
        ),
        lambda t: t.optimizer.zero_grad(set_to_none=False),
        lambda t: t.net[0].weight.requires_grad_(False),
    ],
    ids=[
        "in_place", "data", "load_model", "load_optimizer", "lr", "betas", "state_in_place", "state", "vector",
        "zeroed_gradients", "frozen",
    ],
)  # fmt: skip
def test_the_world_changes(change):
    def between(training: Training, call: int) -> None:
        if call in (4, 8):
            change(training)

    both(between, keep_slower=True)


def test_learning_rates_are_no_part_of_a_recording():
    def between(training: Training, call: int) -> None:
        training.optimizer.param_groups[0]["lr"] = 0.1 / (call + 1)

    training, _, _ = both(between)
    assert training.graph.recordings == 1 and training.graph.replays == len(BATCHES) - 1


def test_accumulation_shares_gradients():
    def between(training: Training, call: int) -> None:
        if call % 3 == 0:
            training.optimizer.step()
            training.optimizer.zero_grad()

    training, _, _ = both(between, accumulates=True)
    graphs = [capture.cuda_graph for capture in training.step.report().captures]
    assert all(graph.recordings <= 2 and graph.replays >= 3 for graph in graphs), graphs


@pytest.mark.parametrize("limit", [1, 2])
def test_recordings_are_dropped_beyond_the_limit(limit):
    torch.manual_seed(0)
    net = nn.Linear(3, 1)

    def step(x: Any) -> Any:
        return net(x).square().mean()

    compiled = sidefx_train.compile(step, backend="aot_eager", dynamic=True, cuda_graph_limit=limit)
    with torch.no_grad():
        for rows in (4, 5, 4, 5, 4, 5, 6, 6, 4, 5):
            x = torch.randn(rows, 3)
            torch.testing.assert_close(compiled(x), step(x))
    assert compiled.report().captures[0].cuda_graph.recordings > 3 - (limit == 2)


def test_what_cannot_be_recorded_runs_plainly_and_the_report_says_so():
    def step(x: Any) -> Any:
        return x.nonzero().sum() + x.sum()

    compiled = sidefx_train.compile(step, backend="aot_eager")
    for _ in range(3):
        x = torch.randn(5).relu()
        assert torch.equal(compiled(x), step(x))
    graph = compiled.report().captures[0].cuda_graph
    assert "nonzero" in graph.refused or "depends on data" in graph.refused


def test_a_recording_that_fails_leaves_everything_usable(device, monkeypatch):
    def fails(run: Any, pool: Any) -> Any:
        run()
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(device, "record", fails)
    training = Training(True)
    for batch in BATCHES[:3]:
        training.step(*batch)
    assert training.graph.refused.startswith("cannot be recorded: RuntimeError: operation not permitted")
    assert training.graph.plain[training.graph.refused] == 2
    assert training.step.report().replays == 3


def test_version_counters_are_those_of_eager():
    counts = []
    for compiled in (False, True):
        training = Training(compiled)
        for batch in BATCHES[:5]:
            loss = training.step(*batch)
        state = [t for each in training.optimizer.state.values() for t in each.values()]
        tensors = [loss, *training.net.parameters(), *(p.grad for p in training.net.parameters()), *state]
        counts.append([tensor._version for tensor in tensors])
    assert counts[0] == counts[1]


def test_random_numbers_are_drawn_anew_and_repeat_with_the_seed():
    def step(x: Any) -> Any:
        return F.dropout(x, 0.5)

    compiled = sidefx_train.compile(step, backend="aot_eager")
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append([compiled(torch.ones(64)) for _ in range(4)])
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)
    assert len({tuple(each.tolist()) for each in runs[0]}) == 4
    torch.manual_seed(3)
    assert all(torch.equal(step(torch.ones(64)), each) for each in runs[0])
