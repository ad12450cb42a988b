"""Tensors indexed by an integer that the graph computes (``x[scores.argmax().item()]``): part of the graph."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import sidefx_train
from tests.support.parity import Program, parity


def best(scores):
    return scores.argmax().item()


def a_row(model, kept, x):
    return model(x)[best(x.sum(1))].square().sum()


def a_row_of_a_tensor(model, kept, x):
    return model(x)[x.sum(1).argmax()].square().sum()


def an_element(model, kept, x):
    out = model(x)
    place = best(out.detach().reshape(-1))
    return out[place // 3, place % 3] * 2 + out[..., place % 3].sum() + out[None, place // 3, 1:].sum()


def a_parameter(model, kept, x):
    return (model.weight[best(x.sum(0)) % 3] * x).sum()


def in_a_loop(model, kept, x):
    """Greedy matching."""
    costs, out = torch.cdist(model(x), kept["boxes"]), model(x)
    left, total = costs.detach().clone(), 0.0
    for _ in range(3):
        place = left.argmin().item()
        row, column = place // 3, place % 3
        total = total + costs[row, column] + out[row].sum()
        left[row, :] = float("inf")
        left[:, column] = float("inf")
    return total


def masked(model, kept, x):
    out, used = model(x), torch.zeros(4, dtype=torch.bool)
    chosen = []
    for column in range(3):
        place = int(out.detach()[:, column].masked_fill(used, -float("inf")).argmax())
        used[place] = True
        chosen.append(place)
    return out[torch.tensor(chosen), torch.arange(3)].sum() + used.sum()


def written_through_the_view(model, kept, x):
    values = x.clone()
    row = values[best(x.sum(1))]
    row.mul_(2)
    values[0] = 5.0
    values[best(x.sum(1)), 1:] = row[:3] + 1
    values[x.sum(1).argmin()] += 1
    return (model(x)[:, 0] * values.sum(1)).sum() + row.sum()


def written_outside(model, kept, x):
    with torch.no_grad():
        place = best(x.sum(1))
        kept["table"][place] = x[place]
        kept["table"][:, place % 2].add_(1)
        kept["counts"][place] += 1
    return model(kept["table"]).sum()


def chosen_by_draws(model, kept, x):
    place = torch.multinomial(x.abs().sum(1), 1).item()
    return model(x)[place].sum() + x[torch.randint(0, 4, (1,)).item()].sum()


def from_the_end(model, kept, x):
    return model(x)[-1 - best(x.sum(1)), 0]


STEPS = (
    (a_row, a_row_of_a_tensor, an_element, a_parameter, in_a_loop, masked, written_through_the_view)
    + (written_outside, chosen_by_draws, from_the_end)
)  # fmt: skip


def program(loss_of, size=4):
    def make() -> Program:
        model = nn.Linear(4, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        kept = {"boxes": torch.rand(3, 3), "table": torch.zeros(4, 4), "counts": torch.zeros(4)}

        def step(x):
            loss = loss_of(model, kept, x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        def batch(i):
            return (torch.randn(size + (i % 3 if i > 2 else 0) * (size > 4), 4, generator=torch.manual_seed(i)),)

        return Program(step, batch, (model, optimizer, kept))

    return make


@pytest.mark.parametrize("loss_of", STEPS, ids=lambda step: step.__name__)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.every(2)
def test_one_graph(loss_of, backend):
    options = {"rng": "eager"} if backend == "inductor" else {}
    parity(program(loss_of), steps=6, backend=backend, **options)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_of_changing_sizes(backend):
    parity(program(a_row, size=6), steps=7, backend=backend, captures=2)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_an_index_out_of_range(backend):
    """Nothing is read or written there, and the error is eager's; so is an index from the end."""

    def make() -> Program:
        table = torch.zeros(3, 4)

        def step(x):
            place = x.argmax().item() - 2
            table[place] = x.sum()
            return table[place] + 1

        places = (2, 3, 4, 1, 4, 7, 3, 5000)

        def batch(i):
            return (torch.arange(6000) == places[i],)

        return Program(lambda x: step(x.float()), batch, table)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sidefx_train.errors.SideFXWarning)
        parity(make, steps=8, backend=backend, whole=False, captures=None)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_views_that_leave(backend):
    """The view is made again of the outside tensor; what is written to it later is in both."""

    def make() -> Program:
        table, kept = torch.zeros(4, 3), {}

        def step(x):
            kept["view"] = table[best(x.sum(1))]
            kept["view"].add_(x[0, :3])
            return table[best(x.sum(0)) % 4, 1:]

        def twice(x):
            found = step(x)
            found.add_(1)
            kept["view"].mul_(2)
            return found

        return Program(twice, lambda i: (torch.randn(4, 4, generator=torch.manual_seed(i)),), (table, kept))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sidefx_train.errors.SideFXWarning)
        parity(make, steps=5, backend=backend, whole=False, captures=None)


def test_with_a_backward_outside():
    """A graph with a separate backward checks no conditions."""

    def make() -> Program:
        model = nn.Linear(4, 3)
        step = lambda x: model(x)[best(x @ torch.ones(4))].sum() * 2  # noqa: E731
        return Program(step, lambda i: (torch.randn(4, 4, generator=torch.manual_seed(i)),), model)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sidefx_train.errors.SideFXWarning)
        report = parity(make, steps=3, whole=False, captures=None)
    (found,) = report.breaks
    assert (found.code, found.reason) == (
        "SFX106",
        "indexes a tensor by a number that exists only when the graph runs",
    )


def a_slice(model, kept, x):
    place = best((torch.ones(len(x)) @ x)[:3])
    return model(x)[:, place : place + 2].square().sum()


def a_drawn_slice(model, kept, x):
    place = torch.randint(0, 3, (1,)).item()
    return model(x[place : place + 2]).square().sum()


def test_a_drawn_slice_is_foretold_where_the_backend_needs_it():
    parity(program(a_drawn_slice), steps=6, backend="inductor", rng="eager")


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.slow
def test_a_slice_between_numbers_of_the_graph(backend):
    parity(program(a_slice), steps=6, backend=backend)
