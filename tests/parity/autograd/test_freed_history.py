"""Values whose autograd graph the step's own backward has freed, or a part of it: a later backward is as in eager."""

from __future__ import annotations

import pytest
import torch
import torchmetrics
from torch import nn

import sidefx_train


def of_freed_values(w, b):
    h = (w * w).exp()
    h.sum().backward()
    return h / 2 + b


def of_nodes_without_saved_tensors(w, b):
    h = w + b
    h.square().mean().backward()
    return h


def of_both(w, b):
    h = w + b
    square = h.square()
    square.mean().backward()
    return h + square.mean()


def retained(w, b):
    h = (w * w).exp()
    h.sum().backward(retain_graph=True)
    return h / 2 + b


def of_inputs_only(w, b):
    """The graph behind ``w`` does not run, so it is not freed."""
    h = w.exp()
    z = h * b
    z.sum().backward(inputs=[b])
    return h


def of_a_function(w, b):
    h = Squared.apply(w)
    h.sum().backward()
    return h * 2


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


STEPS = [of_freed_values, of_nodes_without_saved_tensors, of_both, retained, of_inputs_only, of_a_function]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_later_backward(step):
    outcomes = []
    for run in (step, sidefx_train.compile(step, backend="eager")):
        w, b = (torch.linspace(1, 2, 3, requires_grad=True) for _ in range(2))
        for _ in range(3):
            value, raised = run(w, b), None
            before = [None if each.grad is None else each.grad.clone() for each in (w, b)]
            try:
                value.sum().backward()
            except RuntimeError as error:
                raised = str(error)
                w.grad, b.grad = before  # eager may have accumulated into other leaves before it raises
            outcomes.append((value.tolist(), value.requires_grad, value.grad_fn is None, raised, w.grad, b.grad))
    for eager, captured in zip(outcomes[:3], outcomes[3:], strict=True):
        assert str(eager) == str(captured)
    assert run.report().replays == 3 and not run.report().breaks
    assert (outcomes[0][3] is None) == (step in (of_nodes_without_saved_tensors, retained, of_inputs_only))


@pytest.mark.parametrize("grad", [True, False])
def test_a_metric_called_with_the_loss_after_its_backward(grad):
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, mean = nn.Linear(3, 2), torchmetrics.MeanMetric()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x, model=model, mean=mean, optimizer=optimizer):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss, mean(loss if grad else loss.detach())

        run = sidefx_train.compile(step, backend="eager") if compiled else step
        for seed in range(4):
            loss, value = run(torch.full((2, 3), float(seed)))
            results.append([loss, value, value.requires_grad, mean.compute(), *model.parameters()])
    assert str(results[:4]) == str(results[4:])
    assert run.report().replays == 4 and not run.report().breaks
    if grad:
        with pytest.raises(RuntimeError, match="a second time"):
            value.backward()
