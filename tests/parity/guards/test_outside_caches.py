"""Functions under ``functools.cache`` whose value depends on more than their arguments: the cache is asked."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

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


@functools.cache
def zeros(n, dtype=torch.float32):
    return torch.zeros(n, dtype=dtype)


@functools.cache
def angles(n):
    steps = torch.arange(n) / n
    return torch.cos(steps), {"sin": torch.sin(steps)}


@functools.cache
def window(n):
    return torch.from_numpy(np.hanning(n))


class Held:
    scale = 2.0

    @functools.lru_cache
    def identity(self, n):
        return torch.eye(n) * self.scale


HELD = Held()
KEPT = []


def written(x):
    total = zeros(2, x.dtype)
    total.add_(x)
    return x * total


def returned(x):
    return zeros(2), angles(3)


def kept(x):
    KEPT.append(zeros(2))
    return x + KEPT[-1]


def differentiated(x):
    weight = zeros(3).requires_grad_()
    (x.sum() * weight).sum().backward()
    return weight.grad


def read(x):
    cosines, more = angles(2)
    return x * cosines + more["sin"] + window(2) + x @ HELD.identity(2)


CACHES = (zeros, angles, window, Held.identity)
STEPS = (written, returned, kept, differentiated, read)


def run_with_caches(step, calls=5):
    """Returns results, which objects they are, what was kept and how often the functions ran, of each call."""
    for cache in CACHES:
        cache.cache_clear()
    KEPT.clear()
    outcomes, first = [], None
    for i in range(calls):
        if i == 3:
            zeros.cache_clear()
        HELD.scale = 2.0 + i  # the cache keeps its value
        found = step(torch.tensor([1.0, i]))
        first = found if first is None else first
        leaves = [x.clone() for x in pytree.tree_leaves(found)]
        same = pytree.tree_leaves(found)[0] is pytree.tree_leaves(first)[0]
        outcomes.append((leaves, same, len({id(x) for x in KEPT}), [cache.cache_info().misses for cache in CACHES]))
    return outcomes


@pytest.mark.parametrize("step", STEPS)
def test_the_object_is_that_of_the_cache(step):
    captured = sidefx_train.compile(step, backend="eager")
    eager, found = run_with_caches(step), run_with_caches(captured)
    for (leaves, *others), (wanted, *rest) in zip(found, eager, strict=True):
        assert all(map(torch.equal, leaves, wanted)) and others == rest
    report = captured.report()
    assert not report.breaks and not report.fallbacks and len(report.captures) <= 2, str(report)


def test_writes_at_arguments_that_change():
    def step(x):
        total = zeros(x.shape[0])
        total.add_(1)
        return x * total

    outcomes = []
    for run in (step, sidefx_train.compile(step, backend="eager")):
        zeros.cache_clear()
        outcomes.append([run(torch.ones(3 + i % 3)).tolist() for i in range(8)])
    assert outcomes[0] == outcomes[1]


def test_a_function_that_reads_what_the_step_has_changed():
    """The cache cannot be asked before the step: at its first call it would compute with the old value."""

    @functools.cache
    def scaled(n):
        return torch.ones(n) * HELD.scale

    def step(x):
        HELD.scale = HELD.scale + 1
        return x * scaled(2)

    outcomes = []
    for run in (step, sidefx_train.compile(step, backend="eager")):
        scaled.cache_clear()
        HELD.scale = 1.0
        outcomes.append([run(torch.ones(2)).tolist() for _ in range(3)])
    assert outcomes[0] == outcomes[1]


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


@pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")
@pytest.mark.parametrize("on_class", [False, True], ids=["method", "static"])
def test_a_cached_method_with_effects_runs_between_two_parts(on_class):
    """Regression: the step ran eagerly as a whole."""

    def make():
        calls = []

        def scale(owner, times):
            calls.append(times)
            return owner.factor * times

        class Scaled:
            factor = 2.0
            scale_by = functools.lru_cache(maxsize=None)(scale)
            of_any = staticmethod(functools.cache(lambda times: calls.append(times) or times))

        owner = Scaled()

        def step(x):
            y = x * 3
            return y * (owner.of_any(4) if on_class else owner.scale_by(4)), x + 1

        return step, calls

    worlds = [make() for _ in range(2)]
    captured = sidefx_train.compile(worlds[1][0], backend="eager")
    for i in range(4):
        found = [[t.tolist() for t in run(torch.full((2,), float(i)))] for run in (worlds[0][0], captured)]
        assert found[0] == found[1] and worlds[0][1] == worlds[1][1] == [4]
    report = captured.report()
    assert not report.fallbacks and report.replays == 4, str(report)
