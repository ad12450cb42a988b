"""Views that are transposed in place before their memory is written: each gradient element has the right position.

A fake tensor loses the transpose when autograd regenerates its history, so a square view's gradient was transposed.
"""

from __future__ import annotations

import pytest
import torch

import sidefx_train

W = torch.arange(9.0).reshape(3, 3)


def transposed_next_to_a_write(x):
    view = x.view(3, 3)
    view.t_()
    x.detach().add_(1)
    return (view * W).sum()


def transposed_and_written(x):
    view = x.view(3, 3)
    view.t_()
    view.mul_(2)
    return (view * W).sum()


def base_written(x):
    base = x * 1
    view = base.view(3, 3)
    view.transpose_(0, 1)
    base.mul_(2)
    return (view * W).sum()


def base_read(x):
    base = x * 1
    view = base.view(3, 3)
    view.t_()
    view.mul_(2)
    return (base * W).sum()


def unsqueezed(x):
    view = x.transpose(0, 1)
    view.unsqueeze_(0)
    x.detach().add_(1)
    return (view * W).sum()


def squeezed(x):
    view = x.narrow(0, 0, 1)
    view.squeeze_()
    view.exp_()
    return (view * W[1]).sum()


def only_transposed(x):
    view = x.view(3, 3)
    view.t_()
    return (view * W).sum()


def transposed_without_grad(x):
    view = x.view(3, 3)
    with torch.no_grad():
        view.t_()
    return (view * W).sum()


def transposed_without_grad_twice(x):
    view = (x * 1)[..., :2]
    with torch.no_grad():
        view.t_()
    return (view.reshape(-1) * torch.arange(6.0)).sum()


def transposed_in_inference_mode(x):
    view = x.view(3, 3)
    with torch.inference_mode():
        view.transpose_(0, 1)
    return (view[0] * W[1]).sum()


def squeezed_unseen(x):
    view = x.narrow(0, 0, 1)
    with torch.no_grad():
        view.squeeze_(0)
    return (view * W[1]).sum()


def no_view(x):
    made = x * 1
    made.t_()
    made.mul_(2)
    return (made * W).sum()


STEPS = [
    transposed_next_to_a_write,
    transposed_and_written,
    base_written,
    base_read,
    unsqueezed,
    squeezed,
    only_transposed,
    transposed_without_grad,
    transposed_without_grad_twice,
    transposed_in_inference_mode,
    squeezed_unseen,
    no_view,
]


def argument():
    made = torch.arange(9.0).reshape(3, 3).cos().requires_grad_() * 1.5
    made.retain_grad()
    return made


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_the_gradient_behind_the_step(step):
    def gradient(run):
        x = argument()
        run(x).backward()
        return x.grad

    compiled = sidefx_train.compile(step, backend="aot_eager")
    for _ in range(2):
        assert torch.equal(gradient(compiled), gradient(step))


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_the_gradient_within_the_step(step):
    def whole(x):
        step(x).backward()
        return x.grad.clone()

    compiled = sidefx_train.compile(whole, backend="aot_eager")
    for _ in range(2):
        assert torch.equal(compiled(argument()), whole(argument()))


@pytest.mark.parametrize("step", [only_transposed, no_view], ids=lambda step: step.__name__)
def test_metadata_mutations_that_hide_nothing_are_captured(step):
    compiled = sidefx_train.compile(step, backend="aot_eager")
    compiled(argument())
    assert compiled.report().graph_count == 1


def test_storage_of_a_view_replaced_behind_a_break():
    """Autograd regenerates the history of a view in the layout that the view has when it is read."""

    def step(x):
        made = x.detach() * 2
        view = made.expand(2, 3, 3)
        torch.sin(view, out=made)
        torch._foreach_add_([made], [x])
        view.data = x
        return x.sin(), view

    gradients = []
    for run in (step, sidefx_train.compile(step, backend="aot_eager")):
        x = torch.arange(9.0).reshape(3, 3).cos().requires_grad_()
        sum(out.sum() for out in run(x)).backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
