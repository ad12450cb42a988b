"""A capture that an operation's error ends is not tried again at every call."""

from __future__ import annotations

import warnings

import pytest
import torch

import sidefx_train

attempts: list[int] = []


@torch.library.custom_op("sidefx_tests::without_a_fake", mutates_args=())
def without_a_fake(x: torch.Tensor, wrong: bool) -> torch.Tensor:
    if wrong:
        raise RuntimeError("no such thing")
    return x + 1


@without_a_fake.register_fake
def _(x, wrong):
    attempts.append(len(x))
    raise RuntimeError("no such thing")


def test_an_operation_that_raises_only_in_captures():
    attempts.clear()
    step = sidefx_train.compile(lambda x: without_a_fake(x, False) * 2, backend="eager")
    counts = []
    for size in (3, 3, 3, 4, 4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert bool((step(torch.full((size,), 1.0)) == 4).all())
        counts.append(len(attempts))
    assert 0 < counts[0] == counts[1] == counts[2] < counts[3] == counts[4], counts
    assert step.report().fallback_count == 5, str(step.report())


def test_a_step_that_raises_is_captured_when_it_does_not():
    """The error of one call says nothing about the next, even with equal guards."""
    values = [torch.tensor(1.0), torch.tensor(0.0)]

    def step(x):
        if values[0] > 0:
            raise ValueError("too large")
        return x + 1

    compiled = sidefx_train.compile(step, backend="eager")
    with pytest.raises(ValueError, match="too large"):
        compiled(torch.ones(2))
    values[0].fill_(-1.0)
    for _ in range(3):
        assert bool((compiled(torch.ones(2)) == 2).all())
    assert compiled.report().replays >= 2, str(compiled.report())
