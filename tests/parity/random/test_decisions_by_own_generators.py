"""Decisions on numbers that torch draws from a generator which the step makes, or which it gets from outside."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import sidefx_train


class State:
    calls = 0
    generator = torch.Generator()
    other = torch.Generator()


def made_with_a_seed(x):
    return torch.rand(1, generator=torch.Generator().manual_seed(3)).item()


def made_with_a_changing_seed(x):
    return torch.rand((), generator=torch.Generator().manual_seed(State.calls)).item()


def made_without_a_seed(x):
    generator = torch.Generator()
    F.dropout(x)
    return torch.randn(4, generator=generator).sum() + torch.rand(1, generator=generator).item()


def from_outside(x):
    return torch.rand(1, generator=State.generator).item()


def from_outside_after_other_draws(x):
    noise = (
        torch.randn(3, 5, generator=State.generator).sum() * torch.empty(2).uniform_(generator=State.generator).sum()
    )
    return torch.rand(1, generator=State.generator).item() + 0.0 * noise.item()


def of_several(x):
    first = torch.rand(1, generator=State.generator).item()
    place = torch.randint(0, 10, (1,), generator=State.other).item()
    mine = torch.Generator().manual_seed(State.calls % 4)
    second = torch.rand(1).item() + torch.rand(1, generator=State.generator).item()
    return (first + second + place / 10 + torch.rand(1, generator=mine).item()) / 4


def with_drawn_bounds(x):
    high = torch.randint(1, 10, (1,), generator=State.generator).item()
    return torch.randint(0, high + 1, (1,), generator=State.generator).item() / high


def seeded_from_outside(x):
    State.generator.manual_seed(State.calls)
    return torch.rand(1, generator=State.generator).item()


def named_default(x):
    return torch.rand(1, generator=torch.default_generator).item() * torch.rand(1).item() * 2


def read_out_of_order(x):
    first, second = (torch.rand(1, generator=State.generator) for _ in range(2))
    return 0.5 if second.item() > 0.3 and first.item() > 0.3 else 0.6


STEPS = (
    made_with_a_seed, made_with_a_changing_seed, made_without_a_seed, from_outside, from_outside_after_other_draws,
    of_several, with_drawn_bounds, seeded_from_outside, named_default, read_out_of_order,
)  # fmt: skip
WHOLE = frozenset(STEPS) - {seeded_from_outside, read_out_of_order, made_without_a_seed, from_outside_after_other_draws}


def history(draw, calls=12, **options):
    State.calls = 0
    torch.manual_seed(0)
    State.generator.manual_seed(1)
    State.other.manual_seed(2)
    weight = torch.nn.Parameter(torch.ones(3))

    def step(x):
        State.calls += 1
        number = draw(x)
        y = weight * x * (2 if number > 0.5 else 1)
        (y * number).sum().backward()
        gradient, weight.grad = weight.grad, None
        return y.detach(), gradient

    run = sidefx_train.compile(step, rng="eager", **options) if options else step
    found = []
    for _ in range(calls):
        generators = torch.default_generator, State.generator, State.other
        found.append((*run(torch.ones(3)), *(each.get_state() for each in generators)))
    return found, run


@pytest.mark.parametrize("draw", STEPS, ids=lambda draw: draw.__name__)
def test_numbers_and_states_are_eagers(draw):
    want, _ = history(draw)
    have, run = history(draw, backend="eager")
    for wanted, had in zip(want, have, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(wanted, had, strict=True))
    report = run.report()
    if draw in WHOLE:
        assert len(report.captures) <= 2 and not report.breaks and not report.fallbacks, str(report)


@pytest.mark.parametrize("draw", [made_with_a_changing_seed, of_several], ids=lambda draw: draw.__name__)
def test_numbers_under_inductor(draw):
    want, _ = history(draw)
    have, run = history(draw, backend="inductor", keep_slower=True)
    for wanted, had in zip(want, have, strict=True):
        torch.testing.assert_close(had, wanted, rtol=1e-5, atol=1e-6)
    assert not run.report().breaks and not run.report().fallbacks, str(run.report())
