"""Hooks and retained gradients around a captured function with a live autograd graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sidefx_train
from tests.support.joint_graph import compare, data, function

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")


def test_hooks_on_intermediates_run_when_backward_runs():
    seen = []

    def fn(x, w):
        y = x @ w
        y.register_hook(lambda g: (seen.append(g.sum().item()), g * 2)[1])
        return y.sum()

    compare(function(fn), data(5, 6), whole=False)
    assert len(seen) == 6 and seen[:3] == seen[3:]


@pytest.mark.parametrize("when", ["before", "between", "after_a_call"])
@pytest.mark.parametrize("late", [False, True])
def test_hooks_on_leaves_run_once(when, late):
    """The engine calls the captured backward and runs the hooks once, whenever they were registered."""

    def make(backend):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        seen = []

        def register():
            if late:
                model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum().item()))
            else:
                model.weight.register_hook(lambda g: (seen.append(g.sum().item()), g * 0.5)[1])

        def loss(x):
            return model(x).pow(2).mean()

        step = loss if backend is None else sidefx_train.compile(loss, backend=backend)
        if when == "before":
            register()
        for index in range(4):
            value = step(torch.ones(4, 3))
            if index == 1 and when != "before":
                register()
                if when == "after_a_call":
                    value = step(torch.ones(4, 3))
            value.backward()
        return seen, model.weight.grad

    eager, captured = make(None), make("eager")
    assert captured[0] == eager[0], f"hooks saw {captured[0]}, eager's {eager[0]}"
    assert torch.equal(captured[1], eager[1])


def _watched(hidden, loss, how):
    seen = []
    if how == "hook":
        hidden.register_hook(lambda grad: seen.append(grad) or grad * 2)
    elif how == "retain_grad":
        hidden.retain_grad()
        seen.append(hidden)
    elif how == "grad":
        seen.append(torch.autograd.grad(loss, hidden, retain_graph=True)[0])
    return seen


def _hidden_and_loss(model, x):
    hidden = model(x)
    return hidden, hidden.pow(2).mean()


def _tied(model, x):
    hidden = model(x)
    return hidden, hidden.pow(2).mean() + model.weight.norm()


def _three_levels(model, x):
    first, second = model(x).chunk(2, 1)
    third = first * 2 + second.exp()
    return first, (third + model.bias[0]).sum(), third, second


def _views_of_views(model, x):
    hidden = model(x)
    transposed = hidden.t()
    row = transposed[0].exp_() if hidden.shape[0] > 10 else transposed[0]
    return row, row.sigmoid().sum() + hidden.mean() + transposed.pow(2).sum(), transposed, hidden


def _view_and_loss(model, x):
    logits = model(x)[:, 0]
    return logits, logits.pow(2).mean()


@pytest.mark.parametrize("how", ["hook", "retain_grad", "grad", "nobody"])
@pytest.mark.parametrize("forward", [_hidden_and_loss, _tied, _three_levels, _views_of_views, _view_and_loss])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.covering(1)
def test_gradients_between_two_outputs(how, forward, backend):
    """A gradient from one output to another passes through the tensor in between, where a hook may observe it."""

    def results(compiled):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        run = sidefx_train.compile(forward, backend=backend, fullgraph=True) if compiled else forward
        hidden, loss, *others = run(model, torch.ones(4, 3))
        seen = [*_watched(hidden, loss, how), *(tensor for other in others for tensor in _watched(other, loss, how))]
        (loss + hidden.sum()).backward()
        seen = [tensor.grad if tensor.requires_grad else tensor for tensor in seen]
        return [model.weight.grad, model.bias.grad, *seen]

    assert all(torch.equal(a, b) for a, b in zip(results(True), results(False), strict=True))


def test_gradients_between_two_outputs_under_inductor():
    def results(compiled):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        run = sidefx_train.compile(_three_levels, fullgraph=True) if compiled else _three_levels
        first, loss, third, second = run(model, torch.ones(4, 3))
        for tensor in (first, third, second):
            tensor.retain_grad()
        third.register_hook(lambda grad: grad * 3)
        loss.backward()
        return [model.weight.grad, model.bias.grad, first.grad, second.grad, third.grad]

    torch.testing.assert_close(results(True), results(False))


def _retained(x, w, kept):
    hidden = x * w
    hidden.retain_grad()
    hidden.sum().backward()
    kept.append(hidden)


def _retained_and_alive(x, w, kept):
    hidden = x * w
    hidden.retain_grad()
    (hidden * 2).sum().backward(retain_graph=True)
    kept.append(hidden)


def _to_be_retained(x, w, kept):
    hidden = x * w
    hidden.retain_grad()
    kept += [hidden, hidden.exp()]


def _new_leaf(x, w, kept):
    leaf = torch.ones(3, requires_grad=True)
    (leaf * x * w).sum().backward()
    kept += [leaf, leaf.grad]


@pytest.mark.parametrize("step", [_retained, _retained_and_alive, _to_be_retained, _new_leaf])
def test_tensors_leave_with_their_gradients(step):
    def states(compiled):
        w = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        run = sidefx_train.compile(step, backend="eager", fullgraph=True, on_failure="raise") if compiled else step
        found = []
        for _ in range(3):
            kept: list[torch.Tensor] = []
            run(torch.full((3,), 0.5), w, kept)
            if step is _to_be_retained:
                kept[1].sum().backward()
            found.append([(t.retains_grad, t.grad, len(kept) > 1 and kept[0].grad is kept[1]) for t in kept])
        return found

    assert str(states(True)) == str(states(False))
