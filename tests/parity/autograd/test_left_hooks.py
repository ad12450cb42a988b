"""Hooks that a step leaves registered on its arguments and parameters, or removes in a later call."""

from __future__ import annotations

import pytest
import torch

import sidefx_train


class State:
    """What the steps keep between calls."""

    def __init__(self):
        self.log, self.handle = [], None


def outside(state, x, w):
    x.register_hook(lambda g: (state.log.append(g.sum().item()), g * 3)[1])
    return (x * w).exp()


def inside_and_outside(state, x, w):
    x.register_hook(lambda g: (state.log.append(g.sum().item()), g * 3)[1])
    (x * w).exp().sum().backward()
    return (x * w).sin()


def of_an_intermediate_value(state, x, w):
    y = x.sin()
    x.register_hook(lambda g: g + y.detach())
    return y * w


def after_accumulation(state, x, w):
    def hook(leaf):
        state.log.append(leaf.grad.sum().item())
        leaf.mul_(2)
        leaf.grad.mul_(5)

    with torch.no_grad():
        x.register_post_accumulate_grad_hook(hook)
    return (x.clone() * w).exp()


def kept_handle(state, x, w):
    state.handle = x.register_hook(lambda g: g * 2)
    return (x * w).exp()


def removed_again(state, x, w):
    handle = w.register_hook(lambda g: (state.log.append("w"), g * 2)[1])
    (x * w).exp().sum().backward()
    handle.remove()
    return (x * w).sin()


def once(state, x, w):
    if state.handle is None:
        state.handle = w.register_hook(lambda g: (state.log.append("w"), g * 2)[1])
    return (x * w).exp()


def toggled(state, x, w):
    if state.handle is None:
        state.handle = w.register_hook(lambda g: (state.log.append("w"), g * 2)[1])
    else:
        state.handle.remove()
        state.handle = None
    (x * w).exp().sum().backward()
    return (x * w).sin()


def growing(state, x, w):
    w.register_hook(lambda g: (state.log.append("w"), g * 2)[1])
    return (x * w).exp()


def history(run, same_w):
    state, found, w = State(), [], torch.tensor([0.5, -0.25, 0.1], requires_grad=True)
    for i in range(4):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(i)).requires_grad_()
        w = w if same_w else w.detach().requires_grad_()
        result = run(state, x, w)
        if not same_w and i == 2 and state.handle is not None:
            state.handle.remove()
        result.sum().backward()
        found.append((result.tolist(), x.tolist(), x.grad.tolist(), w.grad.tolist(), len(w._backward_hooks or ())))
    return found, state.log


@pytest.mark.parametrize(
    ("step", "same_w", "captures"),
    [
        (outside, False, 1),
        (inside_and_outside, False, 1),
        (of_an_intermediate_value, False, 1),
        (after_accumulation, False, 1),
        (kept_handle, False, 1),
        (removed_again, False, 1),
        (once, True, 2),
        (toggled, True, 4),
        (growing, True, 4),
    ],
)
def test_hooks_are_left_registered(step, same_w, captures):
    captured = sidefx_train.compile(step, backend="eager", fullgraph=True, on_failure="raise")
    assert history(captured, same_w) == history(step, same_w)
    report = captured.report()
    assert report.replays == 4 and len(report.captures) <= captures, str(report)


def test_under_inductor():
    captured = sidefx_train.compile(inside_and_outside, fullgraph=True, on_failure="raise")
    wanted, found = history(inside_and_outside, False), history(captured, False)
    torch.testing.assert_close(found[1], wanted[1])
    for want, have in zip(wanted[0], found[0], strict=True):
        torch.testing.assert_close([torch.tensor(each) for each in have], [torch.tensor(each) for each in want])
