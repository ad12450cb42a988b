"""Arguments that start requiring gradients in a step whose results are differentiated outside."""

from __future__ import annotations

import warnings

import pytest
import torch

import sidefx_train
from sidefx_train.errors import SideFXWarning
from tests.fuzz.alias_run import check


def in_the_middle(x):
    y = x * 2
    x.requires_grad_()
    return (x * y).sum()


def by_attribute(x):
    x.requires_grad = True
    return (x**2).sum()


def differentiated_twice(x):
    x.requires_grad_()
    loss = (x**3).sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return (grad**2).sum()


def hooked(x):
    x.requires_grad_()
    x.register_hook(lambda grad: grad * 2)
    return (x**3).sum()


def hooked_and_differentiated(x):
    x.requires_grad_()
    x.register_hook(lambda grad: grad * 2)
    loss = (x**3).sum()
    loss.backward()
    return (loss.detach() * x).sum()


def run(step, change=False):
    found = []
    for i in range(3):
        x = torch.arange(6.0).view(2, 3).sin() + i
        result = step(x)
        if change:
            with torch.no_grad():
                x.add_(1)
        try:
            result.backward()
        except RuntimeError as error:
            found.append(str(error))
        found += [result.detach(), x.detach(), x.grad, x.requires_grad, x.is_leaf, x._version]
    return found


def same(wanted, found):
    for want, have in zip(wanted, found, strict=True):
        equal = torch.equal(want, have) if isinstance(want, torch.Tensor) else want == have
        assert equal, f"{have}, eager has {want}"


@pytest.mark.parametrize("change", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("step", [in_the_middle, by_attribute, differentiated_twice, hooked, hooked_and_differentiated])
def test_captured(step, backend, change):
    captured = sidefx_train.compile(step, backend=backend, fullgraph=True, on_failure="raise")
    same(run(step, change), run(captured, change))
    assert captured.report().replays == 3


def test_what_is_a_leaf_already_is_another_entry():
    captured = sidefx_train.compile(by_attribute, backend="aot_eager", fullgraph=True, on_failure="raise")
    x = torch.ones(3)
    for _ in range(3):
        captured(x).backward()
    assert torch.equal(x.grad, torch.full((3,), 6.0)) and len(captured.report().captures) == 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("first", ["pass", "x.mul_(2)", "x.t_()"])
@pytest.mark.parametrize(
    "outs", ["x.view_as(x),", "x[0], x.view(-1)", "x.detach(), x", "(x * 2).sum(), x[0]", "d, x[0]"]
)
def test_views_of_what_begins(outs, first, backend):
    lines = ["import torch", "from tests.fuzz.alias_run import attempt", "def build():"]
    lines += ["    return torch.arange(12.0).reshape(3, 4).sin(),", "def step(x):", "    d = x.detach()"]
    lines += [f"    {first}", "    x.requires_grad_()", f"    return {outs}", "def after(outs, x):"]
    lines += ["    attempt('outs[0].add_(1)', 'eval', outs, {})", "    attempt('x.sin_()', 'eval', outs, {'x': x})"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        check("\n".join(lines) + "\n", backend)


def test_a_tensor_of_another_shape_than_its_history_is_left_to_eager():
    def step(x, w):
        return (x.sum() * w).sum()

    captured = sidefx_train.compile(step, backend="aot_eager")
    for called in (step, captured):
        w = torch.ones(3, 4, requires_grad=True)
        x = torch.ones(3, 4, requires_grad=True) * 2
        x.data = torch.ones(2, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SideFXWarning)
            (grad,) = torch.autograd.grad(called(x, w), w)
        assert torch.equal(grad, torch.full((3, 4), 8.0))
    assert {item.code for item in captured.report().fallbacks} == {"SFX107"}
