"""Functions under ``functools.cache`` whose value depends on more than their arguments: the cache is asked."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch

import sidefx_train


def make(change_in_step=False, effect=False):
    settings = SimpleNamespace(fast=True, factor=2.0)
    calls = []

    @functools.cache
    def scale(times=1):
        if effect:
            calls.append(times)
        return settings.factor * times if settings.fast else 1.0

    def step(x):
        if change_in_step:
            settings.factor = 4.0
        return x * scale(2) + scale()

    return step, settings, scale, calls


def changes(i, settings, scale):
    if i == 2:
        settings.factor = 8.0  # the cache keeps its value
    if i == 4:
        scale.cache_clear()
    if i == 6:
        settings.fast = False
        scale.cache_clear()


@pytest.mark.parametrize("effect", [False, True], ids=["pure", "effect"])
@pytest.mark.parametrize("change_in_step", [False, True], ids=["outside", "in step"])
def test_the_value_is_that_of_the_cache(change_in_step, effect):
    worlds = [make(change_in_step, effect) for _ in range(2)]
    captured = sidefx_train.compile(worlds[1][0], backend="eager")
    for i in range(8):
        outcomes = []
        for run, (_, settings, scale, calls) in zip((worlds[0][0], captured), worlds, strict=True):
            changes(i, settings, scale)
            outcomes.append((run(torch.ones(2)).tolist(), settings, list(calls), scale.cache_info().misses))
        assert outcomes[0] == outcomes[1], i
    if not change_in_step and not effect:
        report = captured.report()
        assert not report.breaks and not report.fallbacks, str(report)
        assert len(report.captures) <= 4, str(report)


def test_a_function_without_arguments_in_one_graph():
    """As libraries ask whether training is distributed."""

    @functools.cache
    def is_distributed():
        return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1

    def step(x):
        return x + 1 if is_distributed() else x * 2

    captured = sidefx_train.compile(step, backend="eager")
    for i in range(4):
        assert torch.equal(captured(torch.full((2,), float(i))), torch.full((2,), i * 2.0))
    assert len(captured.report().captures) == 1 and not captured.report().breaks, str(captured.report())
