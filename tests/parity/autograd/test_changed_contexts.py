"""Custom functions whose backward changes attributes of its context, in a backward that runs outside of the step."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import sidefx_train


class Grows(torch.autograd.Function):
    """Each backward multiplies by a larger number than the one before."""

    @staticmethod
    def forward(ctx, x):
        ctx.factor = 3.0
        return x * 3

    @staticmethod
    def backward(ctx, grad):
        ctx.factor = ctx.factor * 2
        return grad * ctx.factor


class Counts(torch.autograd.Function):
    """The first backward makes the attribute that the next one reads."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        if not hasattr(ctx, "calls"):
            ctx.calls = 0
        ctx.calls += 1
        (x,) = ctx.saved_tensors
        return grad * x.cos() * ctx.calls


class Checkpoint(torch.autograd.Function):
    """Computes its function again in the backward, and frees what it held."""

    @staticmethod
    def forward(ctx, function, count, *args):
        ctx.function, ctx.inputs, ctx.params = function, list(args[:count]), list(args[count:])
        with torch.no_grad():
            return ctx.function(*ctx.inputs)

    @staticmethod
    def backward(ctx, *grads):
        ctx.inputs = [x.detach().requires_grad_(True) for x in ctx.inputs]
        with torch.enable_grad():
            made = ctx.function(*[x.view_as(x) for x in ctx.inputs])
        found = torch.autograd.grad(made, ctx.inputs + ctx.params, grads, allow_unused=True)
        del ctx.inputs, ctx.params, made
        return (None, None, *found)


class Shaped(torch.autograd.Function):
    """Leaves an attribute in its context that it never reads."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.shape = grad.shape
        return grad * 2


@pytest.mark.parametrize("function", [Grows, Counts])
def test_a_second_backward_continues_from_what_the_first_left_in_the_context(function):
    def gradients(wrap):
        torch.manual_seed(0)
        model, found = nn.Linear(4, 4), []
        step = wrap(lambda x: function.apply(model(x)).sum())
        for _ in range(3):
            loss = step(torch.ones(2, 4))
            loss.backward(retain_graph=True)
            loss.backward()
            found.append(model.weight.grad.clone())
            model.weight.grad = None
        return found

    want = gradients(lambda step: step)
    have = gradients(lambda step: sidefx_train.compile(step, backend="eager", on_failure="raise"))
    assert all(map(torch.equal, have, want))
    once = want[0] / 3  # the second factor is twice the first one
    torch.testing.assert_close(want[0] - once, 2 * once)


@pytest.mark.parametrize("function", ["checkpoint", "shaped"])
def test_each_recording_of_a_backward_begins_with_the_context_of_the_forward(function):
    def train(wrap):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []

        def loss_of(x):
            if function == "checkpoint":
                h = Checkpoint.apply(model[0], 1, x, *model[0].parameters())
            else:
                h = Shaped.apply(model[0](x))
            values = model[1](h).square().mean(1)
            return values.mean(), values * 2  # two results that share the custom function

        step = wrap(loss_of)
        for i in range(3):
            loss, values = step(torch.linspace(-1, 1 + i, 12).view(3, 4))
            sys.setprofile(lambda frame, event, arg: run.add(frame.f_code))
            try:
                loss.backward()
            finally:
                sys.setprofile(None)
            optimizer.step()
            optimizer.zero_grad()
            losses.append((loss.item(), values.sum().item()))
        return [*model.parameters()], losses, step

    cls, run = {"checkpoint": Checkpoint, "shaped": Shaped}[function], set()
    want, want_losses, _ = train(lambda step: step)
    assert cls.backward.__code__ in run
    run.clear()
    have, have_losses, step = train(lambda step: sidefx_train.compile(step, backend="eager", fullgraph=True))
    assert all(map(torch.equal, have, want)) and have_losses == want_losses
    assert step.report().replays == 3
    assert function == "checkpoint" or cls.backward.__code__ not in run  # what that one reads may change
