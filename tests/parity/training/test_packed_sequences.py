"""Packed sequences and recurrent layers on them: one graph for all lengths, with eager's numbers bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence, pad_sequence

import sidefx_train
from sidefx_train.errors import SideFXError
from tests.support.parity import Program, parity

LENGTHS = [[6, 3, 2], [5, 4, 3], [6, 6, 2], [4, 2, 2], [5, 6, 3], [2, 2, 2], [3, 2, 6]]
DESCENDING = [sorted(each, reverse=True) for each in LENGTHS]


def inputs(lengths, as_list=False):
    def batch(i):
        x = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(i))
        found = lengths[i % len(lengths)]
        return x.requires_grad_(), list(found) if as_list else torch.tensor(found)

    return batch


def program(kind: Any, lengths=LENGTHS, as_list=False, sort=True, given=False, loss="both", **options: Any):
    """A layer with its first states among the parameters (``given``), whose loss uses outputs, last states, or both."""

    def make() -> Program:
        layer = kind(4, 5, batch_first=True, **options)
        rows = layer.num_layers * (2 if layer.bidirectional else 1)
        states = nn.ParameterList([torch.randn(rows, 3, layer.proj_size or 5), torch.randn(rows, 3, 5)])
        optimizer = torch.optim.SGD([*layer.parameters(), *states], lr=0.1, momentum=0.9)

        def step(x, lengths):
            optimizer.zero_grad()
            first = (tuple(states) if kind is nn.LSTM else states[0],) if given else ()
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=not sort)
            output, last = layer(packed, *first)
            y, found = pad_packed_sequence(output, batch_first=True)
            value = y.square().mean() if loss != "states" else 0
            if loss != "outputs":
                value = value + (last[0] if kind is nn.LSTM else last).sin().sum()
            value.backward()
            optimizer.step()
            return value.detach(), y.detach(), found, x.grad, y.stride()

        return Program(step, inputs(lengths, as_list), (layer, states, optimizer))

    return make


STACKED: dict[str, Any] = {"num_layers": 2, "bidirectional": True, "dropout": 0.5, "given": True}
CASES: dict[str, Any] = {
    "LSTM": program(nn.LSTM),
    "LSTM, stacked": program(nn.LSTM, **STACKED),
    "LSTM, projected": program(nn.LSTM, proj_size=3, bidirectional=True),
    "LSTM, outputs": program(nn.LSTM, loss="outputs", bidirectional=True),
    "LSTM, states": program(nn.LSTM, loss="states", num_layers=2),
    "LSTM, sorted": program(nn.LSTM, DESCENDING, sort=False),
    "GRU": program(nn.GRU, given=True),
    "GRU, stacked": program(nn.GRU, **STACKED),
    "GRU, no bias": program(nn.GRU, bias=False),
    "tanh, stacked": program(nn.RNN, **STACKED),
    "relu": program(nn.RNN, nonlinearity="relu", bidirectional=True),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(2)
def test_one_graph_for_all_lengths(name):
    report = parity(CASES[name], steps=len(LENGTHS) + 1, rng="eager")
    assert report.replays == len(LENGTHS) + 1


def test_lengths_in_a_list():
    """The second capture takes every number of the list as an input."""
    parity(program(nn.LSTM, as_list=True), steps=len(LENGTHS), captures=2)


def test_list_of_sequences():
    """Regression: with lengths that are sizes of tensors, the packed data had the size of the padded batch's first
    dimension, in Python as well."""

    def make() -> Program:
        layer = nn.GRU(4, 5)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        def step(sequences):
            packed = pack_sequence(sequences, enforce_sorted=False)
            output, last = layer(packed)
            padded = pad_sequence(pad_packed_sequence(output)[0].unbind(1), batch_first=True)
            loss = output.data.square().sum() / output.data.shape[0] + last.sin().sum() + padded.mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach(), packed.data.shape

        def batch(i):
            return ([torch.randn(length, 4, generator=torch.Generator().manual_seed(i)) for length in LENGTHS[i]],)

        return Program(step, batch, (layer, optimizer))

    parity(make, steps=len(LENGTHS), captures=2)


@pytest.mark.slow
def test_inductor():
    """Includes equal lengths of 1: Inductor computes the zeros of their first states once more for the backward."""
    parity(program(nn.LSTM, [*LENGTHS[:3], [1, 1, 1]]), steps=4, backend="inductor", captures=2)


def test_other_numbers_of_sequences():
    def make() -> Program:
        layer = nn.LSTM(4, 5)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        def step(x, lengths):
            optimizer.zero_grad()
            packed = pack_padded_sequence(x.transpose(0, 1), lengths, enforce_sorted=False)
            y, found = pad_packed_sequence(layer(packed)[0], padding_value=-2.5, total_length=8)
            mask = (torch.arange(8)[:, None] < found).unsqueeze(-1)
            loss = (y * mask).square().sum() / mask.sum()
            loss.backward()
            optimizer.step()
            return loss.detach(), y.detach(), found

        def batch(i):
            x, lengths = inputs(LENGTHS)(i)
            return x.detach()[: 3 - i % 2], lengths[: 3 - i % 2]

        return Program(step, batch, (layer, optimizer))

    parity(make, steps=6, captures=2)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_packed_outside(backend):
    """Batch sizes are an input of the step."""

    def make() -> Program:
        layer = nn.GRU(4, 5)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        def step(data, batch_sizes):
            optimizer.zero_grad()
            output, last = layer(nn.utils.rnn.PackedSequence(data, batch_sizes))
            y, found = pad_packed_sequence(output)
            loss = y.square().mean() + last.sum()
            loss.backward()
            optimizer.step()
            return loss.detach(), y.detach(), found

        def batch(i):
            x, lengths = inputs(DESCENDING)(i)
            packed = pack_padded_sequence(x.detach(), lengths, batch_first=True)
            return packed.data, packed.batch_sizes

        return Program(step, batch, (layer, optimizer))

    parity(make, steps=4, captures=2, backend=backend)


def gradients(make, wrap, create_graph=False):
    """Returns losses, and gradients of a backward outside of the step."""
    torch.manual_seed(0)
    program, results = make(), []
    step, (model,) = wrap(program.step), program.watch
    for i in range(4):
        model.zero_grad()
        args = program.batch(i)
        loss = step(*args)
        if create_graph:
            loss = loss + torch.autograd.grad(loss, args[0], create_graph=True)[0].square().sum()
        loss.backward()
        results += [loss.detach(), *(p.grad for p in model.parameters())]
    return results


def without_update():
    model = nn.ModuleList([nn.Linear(4, 4), nn.LSTM(4, 5, batch_first=True)])

    def step(x, lengths):
        packed = pack_padded_sequence(model[0](x), lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(model[1](packed)[0], batch_first=True)[0].square().sum()

    return Program(step, inputs(LENGTHS), (model,))


def test_backward_outside():
    captured = gradients(without_update, lambda fn: sidefx_train.compile(fn, backend="eager", fullgraph=True))
    assert all(map(torch.equal, gradients(without_update, lambda fn: fn), captured))


def test_second_derivatives_outside_raise():
    with pytest.raises(SideFXError, match="backward.default cannot be differentiated"):
        gradients(without_update, lambda fn: sidefx_train.compile(fn, backend="eager"), create_graph=True)


def penalty(model, x, run):
    """Its gradients of the weights come before those of the layer."""
    return run(x)[1][0].square().sum() + sum(p.square().sum() for p in model.parameters())


def norms_before(model, x, run):
    """Their gradients of the weights come after those of the layer."""
    norms = [p.norm() for p in model.parameters()]
    return run(x)[1][0].square().sum() * torch.stack(norms).sum()


def siamese(model, x, run):
    return (run(x)[0] - run(x * 2 + 1)[0]).square().sum()


def encoder_and_decoder(model, x, run):
    _, states = run(x)
    output, last = run(x.flip(0), states)
    return output.square().sum() + last[0].sum()


def residual(model, x, run):
    """With two directions, the gradients of the data are summed over time, too."""
    x = x.sin()
    y, last = run(x)
    return (x.sum(2) * y.sum(2)[:, :1]).square().sum() + last[0].sum() + x.cos().sum()


def only_the_first_is_used(model, x, run):
    y, _ = run(x)
    run(x + 1)
    return y.square().sum() + model.weight_hh_l0.sum()


USES = [penalty, norms_before, siamese, encoder_and_decoder, residual, only_the_first_is_used]


def with_other_uses(use, kind=nn.LSTM, packed=True, backwards=1, **options):
    """A step whose layer, and its data, have gradients from elsewhere, too."""

    def make() -> Program:
        model = kind(4, 5, batch_first=True, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        calls = []
        model.weight_hh_l0.register_hook(lambda grad: calls.append(float(grad.sum())))

        def step(x, lengths):
            def run(x, *states):
                if not packed:
                    return model(x, *states)
                given = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
                output, last = model(given, *states)
                return pad_packed_sequence(output, batch_first=True)[0], last

            for k in range(backwards):
                value = use(model, x * (k + 1), run)
                value.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=backwards == 1)
            return value.detach(), x.grad

        def batch(i):
            x, lengths = inputs(LENGTHS)(i)
            return (x, lengths) if packed else (x.detach()[:, : 2 + i % 4].requires_grad_(), lengths)

        return Program(step, batch, (model, optimizer, calls))

    return make


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.every(2)
def test_gradients_from_elsewhere(use, kind):
    """The operator of the backward adds the gradient of each time to what the engine has before."""
    options = {"bidirectional": use is residual, "num_layers": 2}
    parity(with_other_uses(use, getattr(nn, kind), **options), steps=5)


@pytest.mark.parametrize("use", [siamese, residual])
def test_two_backwards(use):
    """Gradients of an earlier backward are no part of a sum."""
    parity(with_other_uses(use, backwards=2, bidirectional=True), steps=4, captures=2)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("use", [penalty, siamese, residual])
def test_gradients_from_elsewhere_for_changing_lengths(kind, use):
    parity(with_other_uses(use, kind, packed=False, bidirectional=use is residual), steps=6, captures=2)


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
def test_gradients_from_elsewhere_on_inductor(use):
    parity(with_other_uses(use, bidirectional=use is residual), steps=4, backend="inductor")


def second_derivative(model, x, run):
    last = run(x)[1]
    (grad,) = torch.autograd.grad(last.sum(), x, create_graph=True)
    return last.square().sum() + grad.square().sum()


def test_second_derivatives_are_left_to_eager():
    """They need the operations of the layer."""
    report = parity(with_other_uses(second_derivative, nn.GRU), steps=3, whole=False, captures=None)
    assert {each.code for each in report.fallbacks} == {"SFX102"} and report.fallback_count == 3


@pytest.mark.parametrize("lengths", [[3, 6, 2], [7, 3, 2], [3, 2, 0], [0, 0, 0], [6, 5]])
@pytest.mark.every(2)
def test_lengths_that_are_refused_raise_before_anything_is_written(lengths):
    counter = torch.zeros(())

    def make() -> Program:
        model = nn.LSTM(4, 5, batch_first=True)
        counter.zero_()

        def step(x, lengths):
            counter.add_(1)
            loss = model(pack_padded_sequence(x, lengths, batch_first=True))[0].data.sum()
            loss.backward()
            return loss.detach()

        return Program(step, inputs([DESCENDING[0], lengths]), (model, counter))

    parity(make, steps=3, whole=False, captures=None)
