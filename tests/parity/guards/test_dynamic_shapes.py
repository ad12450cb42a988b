"""Sizes: exact first, symbolic once they have changed; exact entries remain in use for their sizes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from tests.support.parity import Program, parity


def sized(sizes, width=4, batch=None):
    """Returns a factory of classification steps whose batch ``i`` has ``sizes[i]`` rows."""

    def make() -> Program:
        model = nn.Sequential(nn.Linear(width, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        log: list[object] = []

        def step(x, y):
            log.append(x.shape[0])
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach(), len(x)

        def arguments(i):
            g = torch.Generator().manual_seed(i)
            return torch.randn(sizes[i], width, generator=g), torch.randint(0, 3, (sizes[i],), generator=g)

        return Program(step, batch or arguments, (model, optimizer, log))

    return make


SIZES = [5, 5, 3, 7, 5, 11, 2, 4, 5, 64]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_size_that_changed_is_symbolic_from_then_on(backend):
    report = parity(sized(SIZES), backend=backend, captures=2)
    assert len(report.recaptures) == 1
    only = report.recaptures[0]
    assert "[5, 4]" in only.old and "[3, 4]" in only.new and only.seconds > 0


def test_under_inductor():
    report = parity(sized(SIZES), backend="inductor", captures=2)
    assert len(report.recaptures) == 1


def test_dynamic_false_captures_every_size():
    report = parity(sized(SIZES), captures=None, dynamic=False)
    assert len(report.captures) == len(set(SIZES))


def test_dynamic_true_captures_once():
    parity(sized(SIZES), captures=1, dynamic=True)


def test_a_marked_dimension_is_symbolic_at_once():
    def marked(i):
        g = torch.Generator().manual_seed(i)
        x, y = torch.randn(SIZES[i], 4, generator=g), torch.randint(0, 3, (SIZES[i],), generator=g)
        sidefx_train.mark_dynamic(x, 0)
        sidefx_train.mark_dynamic(y, -1)
        return x, y

    parity(sized(SIZES, batch=marked), captures=1)
    with pytest.raises(IndexError, match="dimension 2"):
        sidefx_train.mark_dynamic(torch.zeros(3, 3), 2)


def test_a_ragged_last_batch_leaves_the_main_entry_exact():
    calls: list[int] = []

    def counting(module, example_inputs):
        number = len(compiled)
        compiled.append(any(isinstance(s, torch.SymInt) for e in example_inputs if torch.is_tensor(e) for s in e.shape))

        def run(*args):
            calls.append(number)
            return module(*args)

        return run

    compiled: list[bool] = []
    parity(sized([6, 6, 6, 4] * 2 + [6, 5]), backend=counting, captures=2, verify=0)
    assert compiled == [False, True]
    assert calls == [0, 0, 0, 1] * 2 + [0, 1]


def test_sizes_that_were_equal_come_to_differ():
    def make():
        def step(x, y):
            return x.sum(0) + y.sum(0), x.shape[0] + y.shape[0]

        return Program(step, lambda i: (torch.ones(4 + i, 2) * i, torch.ones(4 + (i if i < 4 else 2 * i), 2)))

    parity(make, steps=8, captures=4)


def test_decisions_on_a_size_are_guarded():
    def make():
        seen = []

        def step(x):
            if x.shape[0] > 6:
                seen.append("long")
                x = x[:6]
            elif x.shape[0] % 2 == 0:
                seen.append("even")
            return x.sum() * x.shape[0]

        sizes = [3, 5, 4, 9, 8, 2, 7, 3, 6, 12]
        return Program(step, lambda i: (torch.arange(sizes[i] * 2.0).view(-1, 2),), seen)

    parity(make, captures=6)


def test_strides_are_guarded_with_sizes():
    def make():
        def layouts(i):
            x = torch.randn(4 + i, 3, generator=torch.Generator().manual_seed(i))
            return (x if i % 3 else x.t().contiguous().t(),)

        return Program(lambda x: (x.view(-1) if x.is_contiguous() else x.t().reshape(-1)) * 2, layouts)

    parity(make, captures=None)


def test_empty_and_single_rows():
    def make():
        sizes = [4, 3, 1, 5, 0, 1, 2]
        return Program(lambda x: (x * 2).sum(0), lambda i: (torch.ones(sizes[i], 3),))

    parity(make, steps=7, captures=4)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_sequence_lengths(backend):
    def make():
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            loss = layer(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        lengths = [5, 6, 9, 3, 5, 12]
        make_batch = lambda i: (torch.randn(2, lengths[i], 8, generator=torch.Generator().manual_seed(i)),)  # noqa: E731
        return Program(step, make_batch, (layer,))

    fixed = torch.__version__ < "2.13"  # its attention needs the length as a number: one graph per length
    parity(make, steps=6, backend=backend, captures=5 if fixed else 2)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_model_alone(backend):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    call = sidefx_train.compile(model, backend=backend, fullgraph=True)
    for rows in (5, 3, 7, 4):
        x = torch.randn(rows, 4)
        grads = []
        for fn in (model, call):
            model.zero_grad()
            out = fn(x)
            (out * torch.arange(rows * 3.0).view(rows, 3)).sum().backward()
            grads.append([out.detach(), *(p.grad.clone() for p in model.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert len(call.report().captures) == 2 and call.report().fallback_count == 0


def test_where_symbolic_sizes_do_not_compile_exact_ones_go_on():
    def picky(module, example_inputs):
        if any(isinstance(s, torch.SymInt) for e in example_inputs if torch.is_tensor(e) for s in e.shape):
            raise RuntimeError("no symbolic sizes here")
        return module.forward

    parity(sized(SIZES), backend=picky, captures=len(set(SIZES)))


def test_where_symbolic_sizes_do_not_go_through_an_operator_exact_ones_go_on():
    """``kron`` needs integers: after a ragged batch, any other change made every later step eager."""

    def make() -> Program:
        model = nn.Linear(6, 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scale = {"name": "a"}

        def batch(index):
            return (torch.randn(3 if index == 2 else 4, 5, 6),)

        def step(x):
            loss = torch.kron(model(x).flatten(1), torch.ones(1, 2)).square().mean() * (
                2 if scale["name"] == "b" else 1
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Program(step, batch, (model, optimizer, scale))

    def between(program, index):
        if index == 4:
            program.watch[2]["name"] = "b"

    parity(make, steps=6, captures=3, between=between)
