"""Decisions on numbers that torch draws on the CPU: the prologue foretells them from the generator's state."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import sidefx_train
from tests.support.parity import Program, parity
from tests.support.training_steps import ROWS, WIDTH, stacked


def between(program, index):
    """Keeps the random state after every call; :func:`parity` seeds before each."""
    program.watch[-1].append(torch.get_rng_state())


OWN = torch.Generator()
DECISIONS = {
    "scalar": lambda: torch.rand(()) < 0.5,
    "one element": lambda: torch.rand(1) < 0.5,
    "item": lambda: torch.rand(1).item() < 0.5,
    "float": lambda: float(torch.rand([])) > 0.5,
    "normal": lambda: torch.randn(1).item() > 0,
    "integer": lambda: torch.randint(0, 2, (1,)).item() == 0,
    "two numbers": lambda: torch.rand(()) < torch.rand(()),
    "double": lambda: torch.rand((), dtype=torch.float64) < 0.5,
}


@pytest.mark.parametrize("decide", DECISIONS.values(), ids=DECISIONS)
def test_each_side_of_a_random_decision_is_captured_once(decide):
    def body(model, x):
        y = F.dropout(model[0](x), 0.3)
        return (y * 2 if decide() else model[1](F.dropout(y, 0.2))).square().mean()

    report = parity(stacked(body), steps=12, captures=2, between=between)
    assert len(report.captures) == 2


def test_draws_of_every_kind_before_a_decision_keep_the_place_in_the_sequence():
    def body(model, x):
        y = model[0](x) + torch.randn_like(x) * torch.empty(3).exponential_().sum()
        y = y[torch.randperm(ROWS)] * torch.randint(1, 3, (ROWS, 1)) + torch.rand(1, generator=OWN)
        y = F.dropout1d(y.t(), 0.5).t() + torch.empty(2, ROWS).t().normal_().sum()
        return (y * 2 if torch.rand([]) < 0.5 else y).square().mean() + torch.rand(2).sum()

    OWN.manual_seed(0)
    states = []

    def between_with_own(program, index):
        if not index:
            states.append(OWN.get_state())
            OWN.set_state(states[0])
        between(program, index)

    parity(stacked(body), steps=8, captures=2, between=between_with_own)


def test_dropped_layers_whose_number_is_used_too():
    def body(model, x):
        for layer in model:
            chance = torch.rand([])
            if chance < 0.3:
                continue
            x = F.dropout(layer(x), 0.1) / chance
        return x.square().mean() if x.requires_grad else model[0](x).square().mean()

    report = parity(stacked(body, layers=4), steps=30, captures=None, whole=False, between=between)
    assert len(report.captures) <= 9 and not report.fallbacks


VECTORS = {
    "uniform": lambda n: torch.rand(n) < 0.4,
    "list": lambda n: (torch.rand(n) < 0.4).tolist(),
    "list of numbers": lambda n: [chance < 0.4 for chance in torch.rand(n).tolist()],
    "one by one": lambda n: (torch.rand(n, dtype=torch.float64)[i] < 0.4 for i in range(n)),
    "normal": lambda n: torch.randn(n) > 0.2,
    "integers": lambda n: torch.randint(0, 2, (n,)),
    "in place": lambda n: torch.zeros(n).uniform_(0.0, 2.0) < 0.8,
    "normal in place": lambda n: torch.empty(n).normal_(1.0, 2.0) > 1.2,
    "flags in place": lambda n: torch.empty(n).bernoulli_(0.4).bool(),
    "numbers in place": lambda n: [torch.empty(()).uniform_() < 0.4 for _ in range(n)],
}


@pytest.mark.parametrize("draw", VECTORS.values(), ids=VECTORS)
@pytest.mark.every(4)
def test_layers_dropped_by_a_vector_of_numbers(draw):
    def body(model, x):
        y = model[0](x)
        for layer, drop in zip(model[1:], draw(len(model) - 1), strict=True):
            if not drop:
                y = F.dropout(layer(y), 0.1)
        return y.square().mean()

    report = parity(stacked(body, layers=4), steps=24, captures=None, between=between)
    assert len(report.captures) <= 8 and not report.fallbacks, str(report)


def test_at_least_one_layer_is_kept():
    def body(model, x):
        dropped = torch.zeros(len(model)).uniform_(0.0, 1.0) < 0.6
        if all(dropped):
            dropped[-1] = False
        for layer, drop in zip(model, dropped, strict=True):
            if not drop:
                x = layer(x)
        return x.square().mean()

    report = parity(stacked(body), steps=24, captures=None, between=between)
    assert not report.breaks and not report.fallbacks, str(report)


def test_a_vector_on_which_a_step_decides_is_used_too():
    def body(model, x):
        chances = torch.empty(3).uniform_(0.5, 1.0)
        y = model[0](x) * chances.sum()
        if chances[1] > 0.75:
            y = model[1](y) / chances[1]
        return (y * (chances * 2).mean()).square().mean()

    parity(stacked(body), steps=12, captures=2, between=between)


def drawn_window(height, width, scale=(0.3, 1.0), ratio=(0.75, 1.34)):
    """Returns (top, left, height, width), as torchvision's ``RandomResizedCrop`` draws them."""
    bounds = torch.log(torch.tensor(ratio))
    for _ in range(10):
        area = height * width * torch.empty(1).uniform_(*scale).item()
        aspect = torch.exp(torch.empty(1).uniform_(bounds[0], bounds[1])).item()
        w, h = int(round(math.sqrt(area * aspect))), int(round(math.sqrt(area / aspect)))
        if 0 < w <= width and 0 < h <= height:
            top = torch.randint(0, height - h + 1, size=(1,)).item()
            return top, torch.randint(0, width - w + 1, size=(1,)).item(), h, w
    return 0, 0, height, width


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_random_windows_of_images(backend):
    def make():
        model = torch.nn.Conv2d(3, 4, 3)

        def step(x):
            top, left, height, width = drawn_window(*x.shape[-2:])
            window = x[..., top : top + height, left : left + width]
            model.zero_grad()
            loss = model(F.interpolate(window, size=(8, 8), mode="bilinear")).square().mean()
            loss.backward()
            return loss.detach()

        return Program(
            step, lambda i: (torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(i)),), [model, []]
        )

    report = parity(make, steps=20, captures=None, backend=backend, rng="eager", between=between)
    assert len(report.captures) <= 5 and not report.breaks and not report.fallbacks, str(report)


@pytest.mark.parametrize("before", [lambda y: torch.bernoulli(y.sigmoid()), lambda y: torch.poisson(y.square())])
def test_a_draw_that_depends_on_values_before_a_decision(before):
    def body(model, x):
        y = model[0](x)
        y = y + before(y.detach())
        return (y * 2 if torch.rand([]) < 0.5 else y).square().mean()

    report = parity(stacked(body), steps=5, captures=None, whole=False, between=between)
    assert {found.code for found in report.breaks} == {"SFX101"} and not report.fallbacks


def test_changing_batch_sizes():
    def body(model, x):
        y = F.dropout(model[0](x), 0.3)
        return (y * 2 if torch.rand([]) < 0.5 else y).square().mean()

    report = parity(
        stacked(body, lambda i: (torch.ones(3 + i % 3, WIDTH),)),
        steps=15,
        captures=None,
        whole=False,
        between=between,
    )
    assert not report.fallbacks


def test_a_recomputed_region_and_saved_states():
    def region(layer, x):
        y = F.dropout(layer(x), 0.2)
        return y * 2 if torch.rand(1) < 0.5 else y.tanh()

    def body(model, x):
        y = checkpoint(region, model[0], x, use_reentrant=False)
        with torch.random.fork_rng(devices=[]):
            y = y + torch.rand(1)
        return (model[1](y) if torch.rand([]) < 0.5 else y).square().mean()

    parity(stacked(body), steps=8, captures=None, whole=False, between=between)


def test_an_index_into_a_list_of_layers():
    def body(model, x):
        return model[int(torch.randint(0, 3, (1,)))](x).square().mean()

    parity(stacked(body, layers=3), steps=9, captures=None, whole=False, between=between)


PLACES = {
    "tensor": lambda: int(torch.rand(()) * ROWS),
    "one element": lambda: int(torch.rand(1) * ROWS),
    "item of a vector": lambda: int(torch.rand(1)[0] * ROWS),
    "floor": lambda: int(torch.floor(torch.rand(()) * ROWS)),
    "sum": lambda: int(torch.rand(()) * (ROWS - 1) + torch.rand(())),
    "array": lambda: int(torch.rand(()).numpy() * ROWS),
    "item of an array": lambda: int(0.5 + torch.rand(1).numpy()[0] * (ROWS - 1)),
    "double": lambda: int(torch.rand((), dtype=torch.float64).numpy() * ROWS),
    "integers of an array": lambda: torch.randperm(ROWS).numpy()[2],
    "permutation in an array": lambda: torch.randperm(ROWS).numpy()[: ROWS // 2],
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_rows_at_drawn_places(place):
    def body(model, x):
        y = F.dropout(model[0](x), 0.3)
        return y[place()].square().mean() + model[1](y)[place()].mean()

    parity(stacked(body), steps=12, captures=1, between=between)


@pytest.mark.parametrize("name", ["tensor", "array", "permutation in an array"])
def test_rows_at_drawn_places_under_inductor(name):
    def body(model, x):
        return model[1](model[0](x)[PLACES[name]()]).square().mean()

    parity(stacked(body), steps=8, captures=1, between=between, backend="inductor", rng="eager")


def test_loop_over_a_permutation_in_an_array():
    def body(model, x):
        total = x.sum() * 0
        for place in torch.randperm(4).numpy():
            total = total * 0.5 + model[0](x[place]).square().mean()
        return total

    parity(stacked(body), steps=8, captures=1, between=between)


def decided(x):
    """Returns a number and the decision on it."""
    y = F.dropout(x, 0.5)
    chance = torch.rand(1)
    return (y.sum() * 0 + 1 if chance < 0.5 else y.sum() * 0 - 1), chance * 1


def test_random_numbers_of_the_backend_agree_with_the_decision():
    """Under Inductor the graph has random numbers of its own: the number in it is the one that was decided on."""
    torch.manual_seed(0)
    step, found = sidefx_train.compile(decided), []
    for _ in range(12):
        side, chance = step(torch.ones(ROWS, WIDTH))
        assert (chance.item() < 0.5) == (side.item() == 1)
        found.append(chance.item())
    report = step.report()
    assert len(set(found)) == 12 and 1 <= len(report.captures) <= 2 and not report.breaks


def test_vectors_of_the_backend_agree_with_the_decisions():
    def step(x):
        drawn = torch.empty(3).uniform_()
        return drawn, x * 2 if drawn[0] < 0.5 else x, x * 2 if drawn[2] < 0.5 else x

    captured = sidefx_train.compile(step)
    for _ in range(12):
        drawn, first, last = captured(torch.ones(2))
        assert [first[0].item(), last[0].item()] == [2.0 if chance < 0.5 else 1.0 for chance in drawn[::2].tolist()]
    assert not captured.report().breaks and not captured.report().fallbacks, str(captured.report())


def test_eagers_numbers_under_inductor():
    parity(
        lambda: Program(decided, lambda i: (torch.ones(ROWS, WIDTH),)),
        steps=6,
        captures=2,
        backend="inductor",
        rng="eager",
    )


@pytest.mark.parametrize("draw", [lambda g: torch.rand(3, generator=g), lambda g: torch.ones(3).uniform_(generator=g)])
def test_draws_that_name_the_default_generator_count(draw):
    """Regression: the number behind them was foretold as if they had drawn nothing."""

    def make():
        def step(x):
            draw(torch.default_generator)
            return x * 2 if torch.rand(()) < 0.5 else x

        return Program(step, lambda index: (torch.ones(()),), [])

    parity(make, steps=8, captures=None, whole=False)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.int8])
def test_draws_between_two_bounds(dtype):
    """Regression: torch names the operator ``from``, which generated code cannot spell."""

    def make():
        def step(x, low, high):
            into = torch.zeros(4, 3, dtype=dtype).t()
            return into.random_(low, high), torch.empty(3, dtype=dtype).random_(low, high), torch.rand(2)

        return Program(step, lambda index: (torch.ones(()), -index, 5 + 20 * index), [])

    parity(make, steps=4, captures=None, between=lambda program, _: program.watch.append(torch.get_rng_state()))


def test_bounds_that_a_tensor_does_not_hold():
    def make():
        def step(x, high):
            return x + torch.empty(3, dtype=torch.int8).random_(1, high)

        return Program(step, lambda index: (torch.ones(()), (9, 200)[index % 2]))

    report = parity(make, steps=4, captures=None, whole=False)
    assert {found.code for found in (*report.breaks, *report.fallbacks)} == {"SFX202"}


def test_rows_in_random_order_under_inductor():
    """Mixup, whose batch gets another size."""
    model = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x):
        optimizer.zero_grad()
        y = model(x)
        loss = (0.3 * y + 0.7 * y[torch.randperm(len(x))]).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = []
    for run in (step, sidefx_train.compile(step, rng="eager", fullgraph=True, on_failure="raise", warmup="now")):
        model.load_state_dict(before)
        torch.manual_seed(3)
        found.append([run(torch.randn(rows, WIDTH)) for rows in (6, 6, 7, 8, 6)] + [model.weight.detach().clone()])
    for want, have in zip(*found, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)
    assert run.report().replays == 5 and len(run.report().captures) == 2
