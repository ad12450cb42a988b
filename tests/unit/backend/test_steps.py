"""Compares whole training steps through every backend with eager, over several steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sidefx_train.compile.backend.compile_graph import build
from sidefx_train.config import CompileConfig
from tests.support.graphs import eager_step, init_state, trace_step

BACKENDS = ("eager", "aot_eager", "inductor")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw_fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, foreach=False),
    "adam_foreach": lambda p: torch.optim.Adam(p, 1e-2, foreach=True, weight_decay=0.1),
    "adam_fused_amsgrad": lambda p: torch.optim.Adam(p, 1e-2, fused=True, amsgrad=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, fused=True, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, nesterov=True),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8, bias=False)
        self.n = nn.BatchNorm1d(8)
        self.b = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(F.gelu(self.n(self.a(x))))


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def make(optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    opt = OPTIMIZERS[optimizer](model.parameters())
    init_state(opt)
    return model, opt


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(10, 6, generator=g), torch.randint(0, 3, (10,), generator=g)) for _ in range(count)]


def tensors(model: nn.Module, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = [v for s in opt.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return [t.detach() for t in (*model.state_dict().values(), *state)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.every(2)
def test_steps_equal_eager_while_numbers_change(optimizer: str, backend: str) -> None:
    model, opt = make(optimizer)
    reference, reference_opt = make(optimizer)
    data = batches(5)
    step = trace_step(model, opt, loss_of, data[0], clip=1.0, symbolic=("lr", "weight_decay", "momentum"))
    executable = build(step.traced, CompileConfig(backend=backend))
    for i, batch in enumerate(data):
        for group in (*opt.param_groups, *reference_opt.param_groups):
            group["lr"] = 1e-2 / (i + 1)
            group["weight_decay"] = group["weight_decay"] * 0.9
        loss = executable.run(step.args(batch))[0]
        expected = eager_step(reference, reference_opt, loss_of, batch, 1.0)
        if backend == "inductor":
            torch.testing.assert_close(loss, expected)
            for mine, theirs in zip(tensors(model, opt), tensors(reference, reference_opt), strict=True):
                torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
        else:
            assert torch.equal(loss, expected)
            for mine, theirs in zip(tensors(model, opt), tensors(reference, reference_opt), strict=True):
                assert torch.equal(mine, theirs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_label_changes_nothing(backend: str) -> None:
    model, opt = make("adamw_fused")
    data = batches(2)
    step = trace_step(model, opt, loss_of, data[0])
    executable = build(step.traced, CompileConfig(backend=backend))
    assert executable.atomic
    executable.run(step.args(data[0]))
    before = copy.deepcopy(tensors(model, opt))
    bad = (data[1][0], data[1][1].clone())
    bad[1][4] = 3
    with pytest.raises(IndexError):
        executable.run(step.args(bad))
    for mine, old in zip(tensors(model, opt), before, strict=True):
        assert torch.equal(mine, old)
    executable.run(step.args(data[1]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_updates_in_one_step(backend: str) -> None:
    """The second forward reads the result of the first update, so the first update must stay in the graph."""

    def body(model: Any, opt: Any, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        total = torch.zeros(())
        for _ in range(2):
            loss = loss_of(model, batch)
            loss.backward()
            opt.step()
            opt.zero_grad()
            total = total + loss.detach()
        return total

    model, opt = make("adamw_fused")
    reference, reference_opt = make("adamw_fused")
    data = batches(3)
    step = trace_step(model, opt, loss_of, data[0], body=body)
    executable = build(step.traced, CompileConfig(backend=backend))
    assert backend == "eager" or any("decomposed" in note for note in executable.notes)
    for batch in data:
        loss = executable.run(step.args(batch))[0]
        torch.testing.assert_close(loss, body(reference, reference_opt, batch))
        for mine, theirs in zip(tensors(model, opt), tensors(reference, reference_opt), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0][:, -1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_lstm_stays_whole(backend: str) -> None:
    def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Recurrent()
        opt = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
        init_state(opt)
        return model, opt

    model, opt = pair()
    reference, reference_opt = pair()
    data = [(torch.randn(4, 5, 8), torch.randint(0, 3, (4,))) for _ in range(3)]
    step = trace_step(model, opt, loss_of, data[0])
    executable = build(step.traced, CompileConfig(backend=backend))
    for batch in data:
        loss = executable.run(step.args(batch))[0]
        torch.testing.assert_close(loss, eager_step(reference, reference_opt, loss_of, batch))
        for mine, theirs in zip(tensors(model, opt), tensors(reference, reference_opt), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 32), nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(F.dropout(F.relu(self.a(x)), 0.4))


@pytest.mark.parametrize("backend", BACKENDS)
def test_eager_random_stream(backend: str) -> None:
    def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Dropping()
        opt = torch.optim.SGD(model.parameters(), 1e-1, momentum=0.9, fused=True)
        init_state(opt)
        return model, opt

    model, opt = pair()
    reference, reference_opt = pair()
    data = batches(3)
    step = trace_step(model, opt, loss_of, data[0], rng=True)
    executable = build(step.traced, CompileConfig(backend=backend, rng="eager"))
    for i, batch in enumerate(data):
        torch.manual_seed(i)
        loss = executable.run(step.args(batch))[0]
        drawn = torch.rand(1)
        torch.manual_seed(i)
        expected = eager_step(reference, reference_opt, loss_of, batch)
        assert torch.equal(drawn, torch.rand(1))
        torch.testing.assert_close(loss, expected)


def test_sources_can_be_read() -> None:
    model, opt = make("adamw_fused")
    data = batches(1)
    executable = build(trace_step(model, opt, loss_of, data[0]).traced, CompileConfig(backend="inductor"))
    assert "def run(args):" in executable.sources["runner"]
    assert "native.adam(" in executable.sources["runner"]
    assert "torch.ops.aten.addmm" in executable.sources["graph"]
    assert executable.sources["inductor"]
    assert set(executable.seconds) >= {"find", "runner"}


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1)
        self.n = nn.BatchNorm2d(8)
        self.b = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.head = nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(2, 8, 6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.n(self.a(x)))
        self.seen.copy_(y.detach()[:2])
        return self.head(F.relu(self.b(y)).mean((2, 3)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_convolutions_keep_the_layouts_that_leave(backend: str) -> None:
    def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Convolutional()
        opt = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9, fused=True)
        init_state(opt)
        return model, opt

    def body(model: Any, opt: Any, batch: tuple[torch.Tensor, ...]) -> Any:
        activation = model.a(batch[0])
        loss = loss_of(model, batch) + activation.square().mean()
        loss.backward()
        gradient = model.b.weight.grad.clone()
        opt.step()
        opt.zero_grad()
        return loss.detach(), activation.detach(), gradient

    model, opt = pair()
    reference, reference_opt = pair()
    data = [(torch.randn(4, 3, 6, 6), torch.randint(0, 3, (4,))) for _ in range(3)]
    step = trace_step(model, opt, loss_of, data[0], body=body)
    executable = build(step.traced, CompileConfig(backend=backend))
    for batch in data:
        got = executable.run(step.args(batch))
        expected = body(reference, reference_opt, batch)
        for g, e in zip(got, expected, strict=True):
            assert g.stride() == e.stride()
            torch.testing.assert_close(g, e, atol=1e-5, rtol=1e-4)
        for mine, theirs in zip(tensors(model, opt), tensors(reference, reference_opt), strict=True):
            assert mine.stride() == theirs.stride()
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_a_graph_kept_from_before_the_step_raises(backend: str) -> None:
    model, opt = make("adamw_fused")
    data = batches(2)
    executable = build(trace_step(model, opt, loss_of, data[0]).traced, CompileConfig(backend=backend))
    kept = loss_of(model, data[1])
    executable.run(trace_step(model, opt, loss_of, data[0]).args(data[0]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()
