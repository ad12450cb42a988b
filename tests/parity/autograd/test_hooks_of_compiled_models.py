"""Hooks around a model that is compiled alone: called as in eager, in its order, as often, with the same gradients."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
from torch import nn

import sidefx_train


class Model(nn.Module):
    """Two outputs over shared layers; logs the hooks of intermediate tensors in ``calls``."""

    def __init__(self, calls, inside=(), breaks=False):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 2)
        self.shared = nn.Parameter(torch.full((5,), 0.5))
        self.calls, self.inside, self.breaks = calls, inside, breaks

    def forward(self, x):
        h = torch.tanh(self.first(x)) * self.shared
        if "hidden" in self.inside:
            h.register_hook(lambda grad: self.calls.append(("hidden", grad.clone())))
        if self.breaks:
            os.times()
        a = self.second(h)
        b = self.third(h * self.shared)
        if "replaced" in self.inside:
            b.register_hook(lambda grad: self.calls.append(("replaced", grad.clone())) or grad * 2)
        if "two" in self.inside:
            for name in ("a1", "a2"):
                a.register_hook(lambda grad, name=name: self.calls.append((name, grad.clone())))
        return a.relu(), b


def noting(calls, name, factor=None):
    def hook(grad):
        calls.append((name, None if grad is None else grad.clone()))
        return None if factor is None else grad * factor

    return hook


def outputs_hooked(model, calls, a, b):
    a.register_hook(noting(calls, "out a"))
    b.register_hook(noting(calls, "out b"))


def outputs_replaced(model, calls, a, b):
    a.register_hook(noting(calls, "out a", 3.0))
    a.register_hook(noting(calls, "out a again", -1.0))
    b.register_hook(noting(calls, "out b"))


def retained(model, calls, a, b):
    a.retain_grad()
    a.register_hook(noting(calls, "out a", 2.0))


def nothing(model, calls, a, b):
    pass


def node_hooks(model, calls, a, b):
    for name, out in (("a", a), ("b", b)):
        out.grad_fn.register_hook(lambda gi, go, name=name: calls.append((f"node {name}", go[0].clone())))
        out.grad_fn.register_prehook(lambda go, name=name: calls.append((f"pre {name}", go[0].clone())))


def parameter_hooks(model, calls):
    for name, parameter in model.named_parameters():
        parameter.register_hook(noting(calls, name))


def parameters_replaced(model, calls):
    model.shared.register_hook(noting(calls, "shared", 0.5))
    model.first.weight.register_hook(noting(calls, "weight", 2.0))


def post_accumulate(model, calls):
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: calls.append((name, p.grad.clone())))


def post_accumulate_clears(model, calls):
    def update(p):
        calls.append(("update", p.grad.clone()))
        with torch.no_grad():
            p.sub_(p.grad, alpha=0.1)
        p.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)


def no_hooks(model, calls):
    pass


def both_used(a, b):
    (a.sum() + b.square().sum()).backward()


def first_only(a, b):
    a.sum().backward()


def second_only(a, b):
    b.sum().backward()


def one_after_the_other(a, b):
    a.sum().backward(retain_graph=True)
    b.square().sum().backward()


def twice(a, b):
    loss = a.sum() + b.square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def wanted_only(a, b):
    torch.autograd.backward([a, b], [torch.ones_like(a), torch.full_like(b, 0.25)])


def zeros(a, b):
    (a * 0).sum().backward()


BACKWARDS = [both_used, first_only, second_only, one_after_the_other, twice, wanted_only, zeros]
OUTSIDE = [nothing, outputs_hooked, outputs_replaced, retained, node_hooks]
PARAMETERS = [no_hooks, parameter_hooks, parameters_replaced, post_accumulate, post_accumulate_clears]
INSIDE = [(), ("hidden",), ("replaced", "two"), ("hidden", "replaced", "two")]


def run(compiled, backward, outside, parameters, inside, breaks, input_grad, late=False):
    calls: list = []
    torch.manual_seed(0)
    model = Model(calls, inside, breaks)
    if not late:
        parameters(model, calls)
    called = sidefx_train.compile(model, backend="eager") if compiled else model
    states = []
    for i in range(3):
        if late and i == 1:
            parameters(model, calls)
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(i)).requires_grad_(input_grad)
        if input_grad:
            x.register_hook(noting(calls, "input"))
        a, b = called(x)
        outside(model, calls, a, b)
        calls.append(("forward done", None))
        try:
            backward(a, b)
            calls.append(("backward done", None))
        except RuntimeError as error:  # a hook has changed what a second backward needs
            calls.append((str(error), None))
        states.append([x.grad, a.grad if a.retains_grad else None, *(p.grad for p in model.parameters())])
        states.append([p.detach().clone() for p in model.parameters()])
    return calls, states


def same(backward, outside, parameters, inside, breaks, input_grad, late=False):
    if (backward, parameters) == (one_after_the_other, post_accumulate_clears):
        pytest.skip("a backward that raises does so before any hook of its stage, in eager after some of them")
    given = (backward, outside, parameters, inside, breaks, input_grad, late)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, found = run(False, *given), run(True, *given)
    assert [name for name, _ in found[0]] == [name for name, _ in expected[0]]
    pairs = [(a, b) for (_, a), (_, b) in zip(found[0], expected[0], strict=True)]
    for x, y in zip(found[1], expected[1], strict=True):
        pairs += zip(x, y, strict=True)
    for a, b in pairs:
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "break"])
@pytest.mark.parametrize("backward", BACKWARDS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("outside", OUTSIDE, ids=lambda fn: fn.__name__)
@pytest.mark.covering(1)
def test_hooks_on_outputs(backward, outside, breaks):
    same(backward, outside, no_hooks, (), breaks, True)


@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "break"])
@pytest.mark.parametrize("backward", BACKWARDS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("parameters", PARAMETERS[1:], ids=lambda fn: fn.__name__)
@pytest.mark.covering(1)
def test_hooks_on_parameters(backward, parameters, breaks):
    same(backward, outputs_hooked, parameters, (), breaks, False)


@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "break"])
@pytest.mark.parametrize("backward", BACKWARDS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("inside", INSIDE[1:], ids="+".join)
@pytest.mark.covering(1)
def test_hooks_on_intermediate_tensors(backward, inside, breaks):
    same(backward, outputs_hooked, parameter_hooks, inside, breaks, True)


@pytest.mark.parametrize("parameters", PARAMETERS[1:], ids=lambda fn: fn.__name__)
def test_hooks_registered_after_the_capture(parameters):
    same(both_used, outputs_hooked, parameters, ("hidden",), False, True, late=True)


@pytest.mark.slow
@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "break"])
@pytest.mark.parametrize("inside", INSIDE, ids="+".join)
@pytest.mark.parametrize("parameters", PARAMETERS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("outside", OUTSIDE, ids=lambda fn: fn.__name__)
def test_all_together(outside, parameters, inside, breaks):
    for backward in BACKWARDS:
        if (backward, parameters) == (one_after_the_other, post_accumulate_clears):
            continue
        for input_grad in (False, True):
            same(backward, outside, parameters, inside, breaks, input_grad)
