"""Dual tensors of forward-mode differentiation, as arguments, in closures, and created inside the step."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import sidefx_train

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")

_HELD = {"tensor": None}
_LAYER = nn.Linear(3, 3)


def of_arguments(x):
    return (x * 2).sin()


def of_a_module(x):
    return _LAYER(x).tanh()


def of_what_it_holds(x):
    return x * _HELD["tensor"]


@pytest.mark.parametrize("captured_before", [False, True])
@pytest.mark.parametrize("fn", [of_arguments, of_a_module, of_what_it_holds, _LAYER])
def test_tangents_are_kept(fn, captured_before):
    call, x = sidefx_train.compile(fn, backend="eager"), torch.ones(2, 3)
    _HELD["tensor"] = x
    if captured_before:
        call(x)
        call(x)
    with forward_ad.dual_level():
        dual = _HELD["tensor"] = forward_ad.make_dual(x, torch.full_like(x, 0.5))
        want, have = forward_ad.unpack_dual(fn(dual)).tangent, forward_ad.unpack_dual(call(dual)).tangent
    assert have is not None and torch.equal(want, have)
    _HELD["tensor"] = x
    assert torch.equal(call(x), fn(x))
    report = sidefx_train.explain(call)
    assert report.replays == 1 + 2 * captured_before
    assert [f.code for f in report.fallbacks] == ["SFX111"] and "forward-mode" in report.fallbacks[0].reason


def test_parameters_with_tangents():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    call, x, seen = sidefx_train.compile(model, backend="eager"), torch.randn(2, 3), []
    for net in (model, call):
        call(x)
        with forward_ad.dual_level():
            weight = model[0].weight.detach()
            del model[0]._parameters["weight"]
            model[0].weight = forward_ad.make_dual(weight, weight.cos())
            seen.append(forward_ad.unpack_dual(net(x)).tangent)
            del model[0].weight
            model[0].weight = nn.Parameter(weight)
    assert torch.equal(*seen)


def test_a_level_that_the_step_enters_is_captured():
    def step(x):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(forward_ad.make_dual(x, torch.ones_like(x)).sin()).tangent

    call = sidefx_train.compile(step, backend="eager", fullgraph=True)
    for _ in range(2):
        x = torch.randn(3)
        assert torch.equal(call(x), step(x))
    assert call.report().replays == 2


def test_a_break_inside_a_level():
    def step(x):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, x * 2)
            print(end="") if float(x.sum()) > -1e9 else None
            return forward_ad.unpack_dual(_LAYER(dual).tanh()).tangent

    call = sidefx_train.compile(step, backend="eager")
    for _ in range(3):
        x = torch.randn(2, 3)
        assert torch.equal(call(x), step(x))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_derivatives_that_begin_with_zeros(backend):
    """Regression: such zeros have no memory, and generated code read it: the process ended."""
    torch.manual_seed(0)
    model, reference = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)), None
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def step(x):
        with forward_ad.dual_level():
            value, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))
            loss = value.mean() + tangent.square().mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad
        return tangent.detach()

    captured = sidefx_train.compile(step, backend=backend, fullgraph=True)
    batches = torch.randn(4, 6, 3)
    for run in (step, captured):
        model.load_state_dict(state)
        results = [run(batch) for batch in batches]
        found = [*results, *(parameter.detach().clone() for parameter in model.parameters())]
        if reference is None:
            reference = found
    for want, have in zip(reference, found, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-6)
    assert "_efficientzerotensor" not in captured.report().sources()["graph"]  # they are ordinary zeros there


def test_the_first_dual_tensor_of_a_process():
    """It imports scripted derivatives, whose import warns."""
    program = """
import torch, sidefx_train
from torch.autograd import forward_ad

@sidefx_train.compile(backend="eager", fullgraph=True)
def step(x, tangent):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(forward_ad.make_dual(x, tangent).square()).tangent

assert torch.equal(step(torch.ones(3), torch.full((3,), 2.0)), torch.full((3,), 4.0))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert not ran.returncode, ran.stderr
