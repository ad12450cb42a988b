"""Recurrent layers of a GPU: cuDNN's two calls are nodes of the graph. Here torch's own cells stand for cuDNN."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from sidefx_train.compile.capture.interceptors.nn import recurrent_layers
from sidefx_train.compile.gpu.replaying import recording_on_host
from sidefx_train.compile.gpu.simulation.recorder import HostRecorder
from sidefx_train.compile.ops import cudnn_rnn
from tests.gpu_sim.simulated import leaves, simulated
from tests.support.parity import Program, batches, parity, run

_FUNCTIONS = {
    cudnn_rnn.RELU: torch.rnn_relu, cudnn_rnn.TANH: torch.rnn_tanh, cudnn_rnn.LSTM: torch.lstm, cudnn_rnn.GRU: torch.gru
}  # fmt: skip


class Cudnn:
    """torch's two operators, as far as this library calls them, on the CPU."""

    calls: list[str] = []

    class _cudnn_rnn:  # noqa: N801
        @staticmethod
        def default(input, weights, stride, buffer, hx, cx, mode, hidden, projected, layers, batch_first, *rest):
            Cudnn.calls.append("forward")
            assert buffer is None and projected == 0 and hidden == hx.shape[2] and stride == (4 if len(weights) else 0)
            _, train, bidirectional, sizes, _ = rest
            assert not sizes
            states = (hx, cx) if mode == cudnn_rnn.LSTM else hx
            with torch.backends.mkldnn.flags(enabled=False):
                given = (weights, True, layers, 0.0, train, bidirectional, batch_first)
                output, hy, *cy = _FUNCTIONS[mode](input, states, *given)
            time_first = output.transpose(0, 1).contiguous().transpose(0, 1) if batch_first else output
            flat = torch.cat([weight.detach().flatten() for weight in weights])
            return time_first, hy, cy[0] if cy else input.new_empty(0), torch.zeros(5, dtype=torch.uint8), flat

    class _cudnn_rnn_backward:  # noqa: N801
        @staticmethod
        def default(input, weights, stride, buffer, hx, cx, output, *rest):
            grads, numbers, (reserve, mask) = rest[:3], rest[3:-2], rest[-2:]
            assert reserve.shape == (5,) and mask == [True, True, cx is not None, True]
            given = [t.detach().requires_grad_() for t in (input, hx, *(() if cx is None else (cx,)), *weights)]

            def derived():
                first = 2 + (cx is not None)
                cell = given[2] if cx is not None else None
                made = Cudnn._cudnn_rnn.default(given[0], given[first:], stride, None, given[1], cell, *numbers)[:3]
                pairs = [(value, grad) for value, grad in zip(made, grads, strict=True) if grad is not None]
                values, weighted = zip(*pairs, strict=True)
                return torch.autograd.grad(values, given, weighted, allow_unused=True)

            with ThreadPoolExecutor(1) as elsewhere:  # a simulation is below autograd
                found = elsewhere.submit(derived).result()
            found = [torch.zeros_like(t) if grad is None else grad for t, grad in zip(given, found, strict=True)]
            dx = found[0].transpose(0, 1).contiguous().transpose(0, 1) if numbers[4] else found[0]
            return dx, found[1], found[2] if cx is not None else None, found[-len(weights) :]


@pytest.fixture(autouse=True)
def cudnn(monkeypatch):
    monkeypatch.setattr(recurrent_layers, "runs_on_cudnn", lambda input: True)
    monkeypatch.setattr(cudnn_rnn, "aten", Cudnn)
    cudnn_rnn._sizes.cache_clear()
    Cudnn.calls.clear()
    yield
    cudnn_rnn._sizes.cache_clear()


def model(kind: Any, **options: Any):
    def make():
        torch.manual_seed(0)
        layer = kind(3, 4, **options)
        net = nn.ModuleList([layer, nn.Linear(4 * (2 if options.get("bidirectional") else 1), 3)])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x, y):
            optimizer.zero_grad()
            output, states = net[0](x)
            last = output[:, -1] if options.get("batch_first") else output.transpose(0, 1)[:, -1]
            hidden = states[0] if isinstance(states, tuple) else states
            loss = F.cross_entropy(net[1](last), y) + hidden.pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.detach(), output.detach(), output.stride()

        usual = batches((2, 5, 3), classes=3)
        flip = not options.get("batch_first")
        return Program(
            step, lambda i: (usual(i)[0].transpose(0, 1) if flip else usual(i)[0], usual(i)[1]), (net, optimizer)
        )

    return make


CASES: dict[str, Any] = {
    "lstm": model(nn.LSTM, batch_first=True), "time_first": model(nn.LSTM, num_layers=2),
    "gru": model(nn.GRU, batch_first=True, bidirectional=True), "tanh": model(nn.RNN, batch_first=True),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(4)
def test_one_graph(name):
    with torch.backends.mkldnn.flags(enabled=False):
        report = parity(CASES[name], steps=3, backend="inductor" if name == "lstm" else "aot_eager")
    assert report.replays == 3 and len(Cudnn.calls) >= 3


def test_replayed():
    """The two calls are recorded; their results are in the recording's memory."""
    steps = []

    def compiled(fn):
        steps.append(sidefx_train.compile(fn, backend="aot_eager", keep_slower=True))
        return steps[-1]

    with torch.backends.mkldnn.flags(enabled=False), recording_on_host(HostRecorder()):
        seen = [run(CASES["lstm"], 4, wrap) for wrap in (lambda fn: fn, compiled)]
    for moments in zip(*seen, strict=True):
        expected, found = (list(leaves((moment.outcome, moment.state), "")) for moment in moments)
        for (where, one), (_, other) in zip(expected, found, strict=True):
            if isinstance(one, torch.Tensor):  # a recording rounds the learning rate to float32
                torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-7, msg=where)
    (capture,) = steps[0].report().captures
    assert capture.cuda_graph.replays == 3 and not capture.cuda_graph.refused, f"{steps[0].report()}"


def test_lowered_for_a_gpu():
    pytest.importorskip("triton")
    with torch.backends.mkldnn.flags(enabled=False):
        step = simulated(CASES["lstm"])
        with recording_on_host(HostRecorder()):  # says whether it could
            report = simulated(CASES["lstm"], steps=1).report()
    assert not report.captures[0].cuda_graph.refused, f"{report}"
    assert any("cudnn_rnn_backward" in text for text in step.graphs[0].executable.sources.values())


def test_left_to_torch():
    """Dropout between layers needs cuDNN's own random state; a backward in evaluation raises."""
    with torch.backends.mkldnn.flags(enabled=False):
        report = parity(model(nn.LSTM, num_layers=2, dropout=0.5), steps=2, rng="eager")
    assert not Cudnn.calls and report.replays == 2
