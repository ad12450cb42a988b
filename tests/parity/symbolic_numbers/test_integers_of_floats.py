"""Integers of floats that change, used as sizes: the prologue computes them. A graph takes no size from a float."""

from __future__ import annotations

import math
import random

import pytest
import torch

import sidefx_train


class Share:
    value = 1.0


def keeps_columns(x):
    kept = int(x.shape[1] * Share.value)
    return x[:, :kept].sum() * kept


def fills(x):
    made = torch.zeros(math.floor(8 * Share.value))
    made[: round(4 * Share.value)] = x.sum()
    return made


def pastes_a_box(x):
    """As CutMix does."""
    size = int(x.shape[1] * math.sqrt(1 - random.betavariate(1.0, 1.0)))
    center = random.randrange(x.shape[1])
    first, last = max(center - size // 2, 0), min(center + size // 2, x.shape[1])
    x = x.clone()
    x[:, first:last] = x.flip(0)[:, first:last]
    return x * (1 - (last - first) / x.shape[1])


@pytest.mark.parametrize("program", [keeps_columns, fills, pastes_a_box], ids=lambda program: program.__name__)
def test_the_step_is_one_graph(program):
    step = sidefx_train.compile(program, keep_slower=True)
    for number in range(12):
        Share.value = 1 - number / 16
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        outcomes = []
        for function in (program, step):
            random.seed(number)
            outcomes.append((function(x), random.random()))
        (expected, drawn), (found, drawn_too) = outcomes
        torch.testing.assert_close(found, expected)
        assert drawn == drawn_too
    report = step.report()
    assert report.replays == 12 and not report.fallbacks, str(report)
    assert not report.breaks, str(report)
    assert len(report.captures) <= 4
