"""Recurrent layers on sequences whose length changes from batch to batch: one graph for all lengths."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.parity import Program, parity

LENGTHS = [6, 9, 4, 7, 5, 1, 8]
LAYERS = {
    "lstm": (nn.LSTM, {}),
    "batch first": (nn.LSTM, {"batch_first": True}),
    "two lstm": (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "dropout": (nn.LSTM, {"num_layers": 2, "dropout": 0.3}),
    "projected": (nn.LSTM, {"proj_size": 4}),
    "without biases": (nn.LSTM, {"bias": False}),
    "gru": (nn.GRU, {}),
    "two gru": (nn.GRU, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    "rnn": (nn.RNN, {"num_layers": 2, "dropout": 0.3}),
    "relu": (nn.RNN, {"nonlinearity": "relu", "bidirectional": True}),
}


def program(kind, dtype=torch.float32, train=True, use=lambda net, x, y: y):
    """Returns a training step of a recurrent layer; ``use`` makes more of its output."""

    def make() -> Program:
        cls, options = LAYERS[kind]
        net = cls(3, 6, **options).to(dtype).train(train)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x):
            y, states = net(x)
            states = states if isinstance(states, tuple) else (states,)
            loss = use(net, x, y).square().mean() + sum(state.square().mean() for state in states)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach(), y.detach(), [state.detach() for state in states], y.stride()

        def batch(index):
            size = (5, LENGTHS[index], 3) if options.get("batch_first") else (LENGTHS[index], 5, 3)
            return (torch.randn(size, generator=torch.Generator().manual_seed(index), dtype=dtype),)

        return Program(step, batch, (net, optimizer))

    return make


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.covering(1)
def test_one_graph_for_all_lengths(kind, dtype, backend):
    report = parity(program(kind, dtype), steps=len(LENGTHS), captures=None, backend=backend, rng="eager")
    assert report.graph_count <= 3  # a length of 1 may be another


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_in_evaluation_mode(kind):
    report = parity(program(kind, train=False), steps=len(LENGTHS), captures=None)
    assert report.graph_count <= 3


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_memory_of_the_output_is_used_again(backend):
    """Regression: oneDNN's backward reads the output, whose memory a graph used again for its gradient."""
    report = parity(program("lstm"), steps=5, captures=None, backend=backend, verify=0, rng="eager")
    assert report.graph_count == 2


@pytest.mark.parametrize(("kind", "graphs"), [("lstm", 3), ("gru", len(LENGTHS))])
def test_a_layer_that_is_called_twice(kind, graphs):
    """Eager adds the gradients of each time of a GRU one by one to those of the other call: a capture for each
    length."""
    report = parity(program(kind, use=lambda net, x, y: y + net(x.flip(0))[0]), steps=len(LENGTHS), captures=None)
    assert report.graph_count <= graphs


def test_states_are_handed_on():
    def make() -> Program:
        net = nn.LSTM(3, 6, num_layers=2)
        optimizer = torch.optim.Adam(net.parameters())
        states = []

        def step(x):
            y, now = net(x, states[-1] if states else None)
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            states[:] = [tuple(state.detach() for state in now)]

        def batch(index):
            return (torch.randn(LENGTHS[index], 5, 3, generator=torch.Generator().manual_seed(index)),)

        return Program(step, batch, (net, optimizer, states))

    report = parity(make, steps=len(LENGTHS), captures=None)
    assert report.graph_count <= 4
