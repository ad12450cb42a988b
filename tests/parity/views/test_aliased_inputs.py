"""Arguments that share memory, one of them written: values, versions and guards as in eager."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sidefx_train

BACKENDS = ["eager", "aot_eager", "inductor"]


def fresh():
    return torch.arange(12.0).view(3, 4).sin()


def whole_and_part():
    x = fresh()
    return x, x[1]


def overlapping_parts():
    x = fresh()
    return x[:2], x[1:]


def disjoint_parts():
    x = fresh()
    return x[:1], x[1:]


def transposed():
    x = fresh()
    return x, x.t()


def interleaved():
    x = fresh()
    return x[:, ::2], x[:, 1:]


def another_type():
    x = fresh()
    return x, x.view(torch.int32)[1]


def as_complex():
    x = fresh()
    return x, torch.view_as_complex(x.view(3, 2, 2))[:, 0]


def same_twice():
    x = fresh()
    return x, x


def write_first(x, y):
    x.add_(1)
    z = y * 2
    return z, x + y.abs().sum()


def write_both(x, y):
    x.mul_(2)
    y.neg_()
    x.add_(3)
    return x.sum() + y.abs().sum()


def write_a_view(x, y):
    x[0].fill_(2)
    y.mul_(3)
    return x.clone()


INPUTS = [whole_and_part, overlapping_parts, disjoint_parts, transposed, interleaved, another_type, same_twice]


CASES = [(s, i, b) for s in (write_first, write_both, write_a_view) for i in INPUTS for b in ("eager", "aot_eager")]
CASES += [(write_first, i, "inductor") for i in (whole_and_part, overlapping_parts, another_type)]


@pytest.mark.parametrize("step, inputs, backend", CASES)
@pytest.mark.every(2)
def test_written_while_shared(step, inputs, backend):
    call = sidefx_train.compile(step, backend=backend, fullgraph=True, on_failure="raise")
    for _ in range(2):
        want, have = inputs(), inputs()
        out, captured = step(*want), call(*have)
        pairs = [*zip(want, have, strict=True)]
        pairs += [*zip(out, captured, strict=True)] if isinstance(out, tuple) else [(out, captured)]
        for a, b in pairs:
            close = torch.allclose(a, b) if a.dtype.is_floating_point or a.is_complex() else torch.equal(a, b)
            assert torch.equal(a, b) if backend != "inductor" else close, f"{a} and {b}"
            if backend != "eager":  # the kernels' own writes count there
                assert a._version == b._version
    assert call.report().replays == 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_complex_view_of_another_argument(backend):
    call = sidefx_train.compile(write_both, backend=backend, fullgraph=True, on_failure="raise")
    want, have = as_complex(), as_complex()
    torch.testing.assert_close(call(*have), write_both(*want))
    for a, b in zip(want, have, strict=True):
        torch.testing.assert_close(b, a)
    assert call.report().replays == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_another_aliasing_of_inputs_gets_its_own_graph(backend):
    call = sidefx_train.compile(write_first, backend=backend)
    arrangements = [
        whole_and_part,
        lambda: (fresh(), fresh()[1]),
        lambda: (lambda x: (x, x[2]))(fresh()),
        whole_and_part,
    ]
    for inputs in arrangements:
        want, have = inputs(), inputs()
        for a, b in zip(write_first(*want), call(*have), strict=True):
            assert torch.equal(a, b)
        assert all(torch.equal(a, b) for a, b in zip(want, have, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_in_one_memory(backend):
    """A flat buffer, its parts as parameters, and an update of the whole."""

    def run(compiled):
        flat = torch.linspace(-1, 1, 12)
        first, second = nn.Parameter(flat[:6].view(2, 3)), nn.Parameter(flat[6:].view(3, 2))

        def step(x):
            loss = (x @ first @ second).square().sum()
            loss.backward()
            with torch.no_grad():
                flat.mul_(0.9)
                first.sub_(0.1 * first.grad)
                second.sub_(0.1 * second.grad)
            first.grad = second.grad = None
            return loss.detach()

        call = sidefx_train.compile(step, backend=backend, fullgraph=True, on_failure="raise") if compiled else step
        return [call(torch.ones(4, 2) * i) for i in range(3)], flat

    (losses, flat), (found, other) = run(False), run(True)
    assert torch.allclose(flat, other) and all(torch.allclose(a, b) for a, b in zip(losses, found, strict=True))


def test_a_write_through_data_is_not_counted():
    def step(x, w):
        y = (x * w).sin()
        w.data.add_(1)
        (y * w).sum().backward()
        return y.detach()

    results = []
    for call in (step, sidefx_train.compile(step, backend="aot_eager", fullgraph=True, on_failure="raise")):
        w = torch.ones(3, requires_grad=True)
        results.append((call(torch.arange(3.0), w), w.detach().clone(), w.grad, w._version))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_metadata_of_an_input_mutated_and_data_written(backend):
    def step(x, y):
        x.unsqueeze_(0)
        x.mul_(2)
        y.as_strided_((2, 2), (1, 2), 3)
        return x.sum()

    worlds = []
    for call in (step, sidefx_train.compile(step, backend=backend, fullgraph=True, on_failure="raise")):
        x, y = fresh(), fresh()[1:]
        total = call(x, y)
        worlds.append((total, x, y, x.shape, y.shape, y.storage_offset(), x._version, y._version))
    for a, b in zip(*worlds, strict=True):
        assert torch.allclose(a, b) if isinstance(a, torch.Tensor) else a == b
