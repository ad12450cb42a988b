"""Loops over the experts that a token has chosen: that all are is assumed, and one graph has them all."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from tests.support.graph_breaks import mixture
from tests.support.parity import Program, parity


def mixtral(x, weights, chosen, experts):
    out = torch.zeros_like(x)
    with torch.no_grad():
        masks = F.one_hot(chosen, num_classes=len(experts) + 1).permute(2, 1, 0)
        hit = torch.greater(masks.sum(dim=(-1, -2)), 0).nonzero()
    for expert in hit:
        expert = expert[0]
        if expert == len(experts):
            continue
        place, rows = torch.where(masks[expert])
        out.index_add_(0, rows, experts[expert](x[rows]) * weights[rows, place, None])
    return out


def mixtral_of_before(x, weights, chosen, experts):
    out = torch.zeros_like(x)
    masks = F.one_hot(chosen, num_classes=len(experts)).permute(2, 1, 0)
    for expert in torch.greater(masks.sum(dim=(-1, -2)), 0).nonzero():
        place, rows = torch.where(masks[expert].squeeze(0))
        out.index_add_(0, rows, experts[expert](x[None, rows].reshape(-1, x.shape[1])) * weights[rows, place, None])
    return out


def by_a_slice(x, weights, chosen, experts):
    masks = F.one_hot(chosen, num_classes=len(experts)).permute(2, 1, 0)
    out = torch.zeros_like(x)
    for turn, expert in enumerate((masks.sum(dim=(-1, -2)) > 0).nonzero()[:]):
        place, rows = torch.where(masks[expert[0]])
        out = out.index_add(0, rows, experts[int(expert)](x[rows]) * weights[rows, place, None] * (turn + 1))
    return out


def by_numbers(x, weights, chosen, experts):
    out = torch.zeros_like(x)
    for expert in F.one_hot(chosen, len(experts)).sum((0, 1)).ne(0).nonzero().squeeze(1):
        rows, place = torch.where(chosen == expert)
        out = out.index_add(0, rows, experts[expert](x[rows]) * weights[rows, place, None])
    return out


def by_any(x, weights, chosen, experts):
    masks = torch.stack([(chosen == number).any(-1) for number in range(len(experts))])
    out = torch.zeros_like(x)
    for expert in masks.any(-1).nonzero().flatten():
        rows = masks[expert]
        out[rows] = out[rows] + experts[expert](x[rows]) * weights[rows].sum(-1, keepdim=True)
    return out


FORMS = [mixtral, mixtral_of_before, by_a_slice, by_numbers, by_any]


def quietly(make, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sidefx_train.errors.SideFXWarning)
        return parity(make, whole=False, captures=None, **options)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_all_are_chosen(form):
    parity(mixture(form), steps=6)


@pytest.mark.parametrize("form", [mixtral, by_numbers], ids=lambda form: form.__name__)
def test_one_is_not_chosen_once(form):
    """An expert that no row has chosen gets no gradient, and the optimizer leaves it out: that call runs eagerly."""
    report = quietly(mixture(form, unused=(5,)), steps=10)
    assert len(report.captures) == 1 and report.replays == 9, f"{report}"
    assert [(each.code, each.count) for each in report.fallbacks] == [("SFX208", 1)], f"{report}"


def test_one_is_often_not_chosen():
    report = quietly(mixture(mixtral, unused=range(0, 40, 2)), steps=20)
    assert report.fallback_count == 3 and report.breaks, f"{report}"


def test_inductor():
    report = quietly(mixture(mixtral, unused=(4,)), steps=8, backend="inductor", rng="eager")
    assert len(report.captures) == 1 and report.replays == 7, f"{report}"


def plain(body):
    def make() -> Program:
        weight, kept = nn.Parameter(torch.ones(3)), []

        def step(x):
            with torch.no_grad():
                found = (x.sum(-1) > 0).nonzero()
                body(found, weight, x, kept)
            return (weight * 2).detach()

        return Program(step, lambda i: (torch.full((3, 2), 1.0 + i),), (weight, kept))

    return make


def keeps(found, weight, x, kept):
    kept[:] = [row for row in found]
    kept[0] += 1
    kept.append(found)


def writes_rows(found, weight, x, kept):
    for row in found:
        row += 1
    weight.add_(found.sum())


def writes_positions(found, weight, x, kept):
    for row in found:
        weight.add_(row.sum())
        found.add_(1)


def writes_before(found, weight, x, kept):
    found.mul_(2)
    for row in found:
        weight.add_(row.sum())


@pytest.mark.parametrize("body", [keeps, writes_rows, writes_positions, writes_before], ids=lambda body: body.__name__)
def test_rows_share_memory_with_the_positions(body):
    quietly(plain(body), steps=4)


def test_other_positions_are_not_assumed():
    """Of a mask of tokens, some are usually false."""

    def make() -> Program:
        weight = nn.Parameter(torch.ones(3))

        def step(x):
            total = (weight * x).sum()
            for row in (x > 0).nonzero():
                total = total + row.sum() * weight.sum()
            total.backward()
            weight.grad = None
            return total.detach()

        return Program(step, lambda i: (torch.tensor([1.0, -1.0, 1.0 if i % 2 else -1.0]),), (weight,))

    report = quietly(make, steps=6)
    assert not report.fallbacks, f"{report}"
