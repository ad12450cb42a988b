"""Graphs compiled in the background are also compared there, in a copy of the process."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sidefx_train
from sidefx_train.compile.backend.verification.first_runs import Proving
from sidefx_train.compile.native import guards_module, native_module, products_module
from sidefx_train.compile.runtime import background_compile as background
from sidefx_train.errors import SideFXWarning, VerificationError
from tests.support.disk_cache import new_cache


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    products_module(), native_module(), guards_module()
    new_cache(tmp_path, monkeypatch)


@pytest.fixture
def compared_here(monkeypatch):
    """Records the comparisons made in this process."""
    found, compare = [], Proving.compare

    def noted(self, args):
        found.append(os.getpid())
        return compare(self, args)

    monkeypatch.setattr(Proving, "compare", noted)
    return found


def training(drop=0.0, **options):
    """Returns a step of a small model, and its parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(drop), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return (sidefx_train.compile(step, **options) if options else step), list(model.parameters())


def batch(i):
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(i))


def run(steps=6, wait=True, **options):
    step, parameters = training(**options)
    losses = []
    for i in range(steps):
        losses.append(step(batch(i)))
        if options.get("warmup") and wait:
            assert step.wait(300)
    return losses, parameters, step


def same(found, expected):
    for a, b in zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def verification(step):
    return step.report().captures[0].verification


def test_the_worker_compares_and_training_does_not(compared_here):
    expected = run()
    found = run(warmup="background")
    same(found, expected)
    (text,) = verification(found[2])
    assert text.startswith("equal") and "in the background" in text
    assert not compared_here
    (entry,) = found[2]._cache.entries
    assert not isinstance(entry.replay.__globals__["run"], Proving), "replays pay for the comparison"


def test_random_numbers_are_compared_and_none_is_drawn(compared_here, tmp_path, monkeypatch):
    states = []
    for verify in (0, "first"):
        new_cache(tmp_path / f"verify {verify}", monkeypatch)
        found = run(drop=0.5, warmup="background", verify=verify)
        states.append([*found[0], *found[1], torch.get_rng_state()])
    (text,) = verification(found[2])
    assert text.startswith("equal") and "in the background" in text and not compared_here
    for a, b in zip(*states, strict=True):
        assert torch.equal(a, b)


def _changed_graphs(monkeypatch, change):
    """Changes the results of cached graphs: runs ``change(run)`` in place of ``run``."""
    take = background.take

    def changed(*given):
        executable = take(*given)
        return None if executable is None else replace(executable, run=change(executable.run))

    monkeypatch.setattr(background, "take", changed)


def _wrong(run):
    return lambda args: [out * 1.5 for out in run(args)]


def test_a_wrong_graph_is_found_by_the_worker_and_never_used(monkeypatch, compared_here):
    expected = run()
    _changed_graphs(monkeypatch, _wrong)
    with pytest.warns(SideFXWarning, match="SFX205.*output 4, computed by aten.mean"):
        found = run(warmup="background")
    same(found, expected)
    assert [each.code for each in found[2].report().breaks] == ["SFX205"]
    assert found[2].report().replays > 0 and not compared_here


def test_a_wrong_graph_raises_on_request(monkeypatch):
    _changed_graphs(monkeypatch, _wrong)
    with pytest.raises(VerificationError, match="off by"):
        run(warmup="background", on_failure="raise")


def test_a_graph_that_ends_the_worker_does_not_end_the_training(monkeypatch):
    expected = run()
    _changed_graphs(monkeypatch, lambda run: lambda args: os.kill(os.getpid(), signal.SIGSEGV))
    with pytest.warns(SideFXWarning, match="SFX205.*SIGSEGV"):
        found = run(warmup="background")
    same(found, expected)


@pytest.mark.parametrize("how", ["killed", "inputs"])
def test_what_the_worker_could_not_compare_is_compared_here(how, monkeypatch, compared_here):
    here = os.getpid()
    if how == "killed":

        def killed(run):
            return lambda args: run(args) if os.getpid() == here else os.kill(os.getpid(), signal.SIGKILL)

        _changed_graphs(monkeypatch, killed)
    else:
        monkeypatch.setattr(background.compile_capture, "fetched", lambda *given: 1 / 0)
    expected = run()
    found = run(warmup="background")
    same(found, expected)
    (text,) = verification(found[2])
    assert text.startswith("equal") and "in the background" not in text and compared_here == [here]


def test_zeros_are_compared_again_by_the_training(compared_here):
    def trained(**options):
        torch.manual_seed(0)
        weight = torch.zeros(3, requires_grad=True)

        def step(x):
            return (weight.detach() * x).sum() * 2

        call = sidefx_train.compile(step, **options)
        for _ in range(8):
            call(torch.ones(3))
            call.wait(300)
        return call

    texts = verification(trained(warmup="background"))
    assert "in the background" in texts[0] and len(texts) == 2 and len(compared_here) == 1


def test_the_backward_of_a_model_compiled_alone_is_compared_when_it_runs(compared_here):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    call = sidefx_train.compile(model, warmup="background")
    for i in range(4):
        call(batch(i)).square().mean().backward()
        call.wait(300)
    forward, backward = verification(call)
    assert forward.startswith("forward: equal") and "in the background" in forward
    assert backward.startswith("backward: equal") and "in the background" not in backward and len(compared_here) == 1


def _until_replayed(step, seconds=120.0):
    end, i = time.monotonic() + seconds, 0
    while not step.report().replays and time.monotonic() < end:
        step(batch(i))
        i += 1
        time.sleep(0.005)
    assert step.report().replays, "never replayed"


def test_what_a_thread_compiled_is_compared_by_a_process(compared_here):
    step, _ = training(warmup="background", backend=lambda gm, inputs: gm.forward)
    _until_replayed(step)
    (text,) = verification(step)
    assert text.startswith("equal") and "in the background" in text and not compared_here


def test_what_a_thread_compiled_wrong_is_found_by_a_process(compared_here):
    def backend(gm, inputs):
        return lambda *args: [out * 1.5 if out.dim() == 0 else out for out in gm(*args)]

    step, parameters = training(warmup="background", backend=backend)
    with pytest.warns(SideFXWarning, match="SFX205"):
        _until_replayed(step)
    assert not compared_here
    assert [each.code for each in step.report().breaks] == ["SFX205"]


def test_who_waits_for_a_thread_has_the_captured_step_at_the_next_call(compared_here):
    _, _, step = run(warmup="background", backend=lambda gm, inputs: gm.forward)
    assert step.report().fallback_count == 2 and len(compared_here) == 1


def test_cross_entropy_of_a_graph_that_takes_its_time():
    """Training continues while the process compares: each step has its own values."""

    def slow(gm, inputs):
        def call(*args):
            time.sleep(0.3)
            return gm(*args)

        return call

    step, parameters = training(warmup="background", backend=slow)
    plain, wanted = training()
    for i in range(40):
        torch.testing.assert_close(step(batch(i)), plain(batch(i)))
        time.sleep(0.01)
    for a, b in zip(parameters, wanted, strict=True):
        torch.testing.assert_close(a, b)
    assert F.mse_loss(parameters[0], wanted[0]) < 1e-9
