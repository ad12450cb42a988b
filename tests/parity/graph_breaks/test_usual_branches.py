"""Branches on tensors that go one way call after call: assumed from then on, in one graph, until they often do not."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from tests.support.graph_breaks import mixture
from tests.support.parity import Program, mlp, parity


def check(make, steps, backend="eager", fallbacks=0, captures=2, **options):
    """Compares with eager; returns the report."""
    if backend == "inductor":
        options["rng"] = "eager"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sidefx_train.errors.SideFXWarning)
        report = parity(make, steps=steps, backend=backend, whole=False, captures=None, **options)
    assert len(report.captures) == captures, f"{report}"
    assert report.fallback_count == fallbacks, f"{report}"
    assert [record.code for record in report.fallbacks] == ["SFX208"] * bool(fallbacks), f"{report}"
    return report


def training(unwanted, seldom=()):
    """Returns a step that skips the update for an unwanted loss, which the batches of some calls have."""

    def make() -> Program:
        model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        log = {"skipped": 0, "losses": [], "mean": 0.0}

        def step(x, y, scale):
            loss = F.cross_entropy(model(x), y) * scale
            if unwanted(loss, log):
                log["skipped"] += 1
                return loss.detach() * 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log["losses"] = [loss.detach()]
            log["mean"] = 0.9 * log["mean"] + 0.1 * loss.item() if log["mean"] else loss.item()
            return loss.detach()

        def batch(i):
            generator = torch.Generator().manual_seed(i)
            x, y = torch.randn(6, 6, generator=generator), torch.randint(0, 3, (6,), generator=generator)
            return x, y, torch.tensor(100.0 if i in seldom else 1.0)

        return Program(step, batch, (model, optimizer, log))

    return make


def by_tensor(loss, log):
    return loss > 40


def by_number(loss, log):
    return loss.item() > 40


def by_history(loss, log):
    return log["mean"] and loss.item() > 10 * log["mean"]


FORMS = [by_tensor, by_number, by_history]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_one_graph_after_a_while(form):
    report = check(training(form, (20, 45)), 50, fallbacks=2, captures=3 if form is by_history else 2)
    assert any("assumes conditions" in note for note in report.captures[-1].caveats)
    assert report.recaptures[-1].source == "the way of a branch"


@pytest.mark.parametrize("form", [by_number, by_history], ids=lambda form: form.__name__)
@pytest.mark.every(2)
def test_inductor(form):
    check(training(form, (14,)), 16, "inductor", fallbacks=1, captures=3 if form is by_history else 2)


def test_not_if_it_often_goes_the_other_way():
    report = check(training(by_number, range(3, 100, 5)), 60, captures=1)
    assert not report.recaptures


def test_given_up():
    """Three of the calls 30 to 40 go the other way: the step is captured in parts again, and needs more calls."""
    report = check(training(by_number, (30, 34, 38, 40, 50)), 70, fallbacks=3, captures=3)
    assert report.replays == 67


def test_assumed_again():
    check(training(by_number, (12, 13, 14)), 100, fallbacks=3, captures=4)


def test_nothing_depends_on_earlier_calls():
    check(training(by_number), 30, captures=1, deterministic=True)


def test_a_loop_that_may_end_early():
    """Proximal policy optimization ends its epochs when the policy has moved too far."""

    def make() -> Program:
        policy = mlp()
        optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
        epochs = []

        def step(x, y, moved):
            with torch.no_grad():
                old = F.log_softmax(policy(x), -1).gather(1, y[:, None])[:, 0] - moved
            for epoch in range(3):
                new = F.log_softmax(policy(x), -1).gather(1, y[:, None])[:, 0]
                ratio = (new - old).exp()
                divergence = ((ratio - 1) - (new - old)).mean()
                if divergence.item() > 0.05:
                    break
                optimizer.zero_grad()
                (-ratio.mean()).backward()
                nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
                optimizer.step()
            epochs.append(epoch)
            return divergence.detach()

        def batch(i):
            generator = torch.Generator().manual_seed(i)
            x, y = torch.randn(6, 6, generator=generator), torch.randint(0, 3, (6,), generator=generator)
            return x, y, torch.tensor(1.0 if i == 20 else 0.0)

        return Program(step, batch, (policy, optimizer, epochs))

    check(make, 30, fallbacks=1)


def test_in_a_part():
    """A branch behind a break of another kind is assumed in the part that it lies in."""

    def make() -> Program:
        weight, kept = nn.Parameter(torch.ones(3)), []

        def step(x):
            with torch.no_grad():
                kept[:] = (weight * x).numpy().tolist()
                scaled = weight * 2 + len(kept)
                if scaled.dot(scaled) > 300000:
                    scaled = scaled * 0
                weight.mul_(0.5).add_(scaled)
                weight.clamp_(-100, 100)
                return weight.sum()

        return Program(step, lambda i: (torch.full((3,), float(i)),), (weight, kept))

    report = check(make, 40)
    assert any("assumes conditions" in note for part in report.parts for each in part.captures for note in each.caveats)


def by_positions(x, weights, chosen, experts):
    out = torch.zeros_like(x)
    for number in range(len(experts)):
        rows = torch.where(chosen == number)
        if rows[0].numel() == 0:
            continue
        out.index_add_(0, rows[0], weights[rows].unsqueeze(-1) * experts[number](x[rows[0]]))
    return out


def by_length(x, weights, chosen, experts):
    out = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        rows = torch.nonzero(chosen == number)
        if len(rows):
            out.index_add_(0, rows[:, 0], weights[rows[:, 0], rows[:, 1]].unsqueeze(-1) * expert(x[rows[:, 0]]))
    return out


def by_flat_positions(x, weights, chosen, experts):
    out = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        places = (chosen.view(-1) == number).nonzero().view(-1)
        if places.numel() > 0:
            rows = places // chosen.shape[1]
            out = out.index_add(0, rows, weights.view(-1)[places].unsqueeze(-1) * expert(x[rows]))
    return out


def by_one_hot(x, weights, chosen, experts):
    out, masks = torch.zeros_like(x), F.one_hot(chosen, len(experts)).permute(2, 1, 0)
    for number, expert in enumerate(experts):
        place, rows = torch.where(masks[number])
        if rows.shape[0] == 0:
            continue
        out.index_add_(0, rows, expert(x[None, rows].reshape(-1, x.shape[1])) * weights[rows, place, None])
    return out


def by_mask(x, weights, chosen, experts):
    out = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        mine = chosen == number
        if mine.any():
            rows = mine.any(-1)
            out[rows] = out[rows] + expert(x[rows]) * (weights * mine).sum(-1)[rows].unsqueeze(-1)
    return out


SPARSE = [by_positions, by_length, by_flat_positions, by_one_hot, by_mask]


@pytest.mark.parametrize("form", SPARSE, ids=lambda form: form.__name__)
@pytest.mark.every(2)
def test_experts_that_are_always_chosen_are_one_graph(form):
    """An expert that no row has chosen gets no gradient, and the optimizer leaves it out: that call runs eagerly."""
    check(mixture(form, unused=(30,)), 40, fallbacks=1)


def test_inductor_of_selected_rows():
    """The number of selected rows exists only when the graph runs."""

    def make() -> Program:
        weight, seen = nn.Parameter(torch.ones(6)), []

        def step(x):
            with torch.no_grad():
                rows = torch.where(x[:, 0] > 0)[0]
                if rows.numel() == 0:
                    seen.append("none")
                    return x.sum()
                weight.mul_(0.5).add_(x[rows].sum(0))
                return weight.sum()

        def batch(i):
            generator = torch.Generator().manual_seed(i)
            return (torch.randn(20, 6, generator=generator) - (100.0 if i == 14 else 0.0),)

        return Program(step, batch, (weight, seen))

    check(make, 18, "inductor", fallbacks=1)


def test_experts_that_are_often_not_chosen():
    check(mixture(by_positions, unused=range(0, 60, 3)), 30, captures=1)


def without_bounds(log):
    z = torch.randn(50)
    for _ in iter(int, 1):
        if not (z.abs() > 1).any():
            return z
        z = torch.where(z.abs() > 1, torch.randn(50), z)
        log["again"] += 1


def test_a_loop_that_only_its_branch_ends():
    """Numbers are drawn until all are small: the first ones never are. The capture has an end nevertheless."""

    def make() -> Program:
        weight, log = nn.Parameter(torch.ones(50)), {"again": 0}

        def step(x):
            loss = (weight * without_bounds(log) * x).sum()
            loss.backward()
            with torch.no_grad():
                weight.sub_(weight.grad * 0.1)
            weight.grad = None
            return loss.detach()

        return Program(step, lambda i: (torch.ones(50),), (weight, log))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sidefx_train.errors.SideFXWarning)
        report = parity(make, steps=25, whole=False, captures=None)
    assert len(report.captures) == 2 and not report.fallbacks
    program = make()
    step = sidefx_train.compile(program.step, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sidefx_train.errors.SideFXWarning)
        for index in range(12):
            step(*program.batch(index))
    assert len(step._specialization.current.endless_branches) == 1  # later captures know it
