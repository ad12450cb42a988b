"""Errors of a backward about a tensor that was changed after it was saved: eager's text, with the operation's name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import sidefx_train
from tests.fuzz.alias_run import Same

STEPS = {
    "the result of an operation": lambda x: (x.exp(),),
    "the argument of one": lambda x: (lambda a: (a.sin(), a))(x * 1),
    "a view of the argument of one": lambda x: (lambda a: (a.sin(), a.view(-1)))(x * 1),
    "softmax": lambda x: (F.softmax(x, -1),),
    "one of two results": lambda x: (lambda a: (a.sin() * 2, a))((x * 1).max(1)[0]),
    "a result of what does not leave": lambda x: ((x * 2).tanh(),),
    "an argument of the function": lambda x: (x.sin(),),
    "a view of one": lambda x: (lambda a: (a.sigmoid(), a))(F.linear(x, x)),
    "one of several views": lambda x: (x.split(2)[0].max(),),
    "a view by a custom function": lambda x: (Same.apply(x).sin(),),
}


def _change_unseen(outs, x):
    with torch.no_grad():
        outs[-1].add_(1)


def _change(outs, x):
    outs[-1].add_(1)


def _change_argument(outs, x):
    with torch.no_grad():
        x.add_(1)


def _said(called, change, first):
    x = first.detach().clone().requires_grad_()
    outs = called(x)
    try:
        change(outs, x)
        outs[0].sum().backward()
    except RuntimeError as error:
        return str(error)
    return x.grad


UNDER_INDUCTOR = ("softmax", "one of two results", "an argument of the function")
"""Saved as a result, saved beside one, and as it was given: who compiles the graphs does not affect the text."""
KINDS_AND_BACKENDS = [
    pytest.param(name, how, backend, marks=pytest.mark.slow if late else (), id=f"{name}-{how.__name__}-{backend}")
    for name in STEPS
    for how in (_change_unseen, _change, _change_argument)
    for backend in ("eager", "aot_eager", "inductor")
    for late in [backend == "inductor" and name not in UNDER_INDUCTOR]
]


@pytest.mark.parametrize(("name", "change", "backend"), KINDS_AND_BACKENDS)
@pytest.mark.every(3)
def test_text(name, change, backend):
    first = torch.arange(12.0).reshape(3, 4).sin()
    want = _said(STEPS[name], change, first)
    have = _said(sidefx_train.compile(STEPS[name], backend=backend, fullgraph=True, on_failure="raise"), change, first)
    if isinstance(want, str):
        assert have == want
    else:
        torch.testing.assert_close(have, want)


def _branches(x, y):
    largest = x.max()
    return torch.where(y > 0, y, largest) + (x * y).tanh(), largest


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("asked", [(0,), (1,), (0, 1)], ids=["x", "y", "both"])
@pytest.mark.parametrize("changed", ["largest", "x", "y"])
@pytest.mark.covering(1)
def test_what_eager_does_not_come_by_may_be_changed(changed, asked, backend):
    """``autograd.grad`` runs only the nodes between a result and its inputs, and checks only their saved tensors."""

    def said(called):
        first = torch.arange(12.0).reshape(3, 4).sin()
        inputs = [(first.clone().requires_grad_() * 1.0), (first.flip(0).clone().requires_grad_() * 1.0)]
        out, largest = called(*inputs)
        with torch.no_grad():
            {"largest": largest, "x": inputs[0], "y": inputs[1]}[changed].mul_(2)
        try:
            return torch.autograd.grad(out.sum(), [inputs[i] for i in asked])
        except RuntimeError as error:
            return str(error)

    want, have = said(_branches), said(sidefx_train.compile(_branches, backend=backend, fullgraph=True))
    if isinstance(want, str):
        assert have == want
    else:
        torch.testing.assert_close(have, want)


def one_node(x, w, z):
    h = x.sin().cos().exp().tanh()
    return (h * w).sum(), (h * z).sum(), (h.sin() * w.sin() * z).sum()


def one_node_in_another_order(w, z, x):
    h = x.sin().cos().exp().tanh()
    return (w * h).sum(), (z * h * h).sum(), w.sum()


@pytest.mark.parametrize("partition", ["default", "min_cut"])
@pytest.mark.parametrize("result", range(3))
@pytest.mark.parametrize("changed", range(3))
@pytest.mark.parametrize("step", [one_node, one_node_in_another_order])
@pytest.mark.covering(1)
def test_results_of_one_node(step, changed, result, partition):
    """Eager checks only the saved tensors on its way; a recomputed value may read other tensors."""

    def said(called, leaf):
        given = [torch.arange(12.0).reshape(3, 4).sin().add(i).requires_grad_() for i in range(3)]
        outs = called(*given)
        with torch.no_grad():
            given[changed].add_(1)
        try:
            return torch.autograd.grad(outs[result], given[leaf], allow_unused=True)[0]
        except RuntimeError as error:
            return str(error)

    captured = sidefx_train.compile(step, backend="aot_eager", fullgraph=True, on_failure="raise", partition=partition)
    for leaf in range(3):
        want, have = said(step, leaf), said(captured, leaf)
        if partition == "min_cut" and isinstance(have, str):
            assert "has been modified by an inplace operation" in have
        else:
            assert type(want) is type(have) and (torch.equal(want, have) if torch.is_tensor(want) else want == have)


UNREAD = {
    "gather": lambda x: x.gather(0, torch.zeros(1, 3, dtype=torch.long)),
    "cummax": lambda x: x.cummax(0).values,
    "real transform": lambda x: torch.fft.rfft(x).abs(),
}


@pytest.mark.parametrize("name", UNREAD)
def test_what_no_derivative_reads_may_be_changed(name):
    """Eager saves the argument only for its sizes, but checks its version; a captured backward saves what it reads."""
    step, found = UNREAD[name], []
    for changes in (False, True):
        x = torch.arange(6.0).view(2, 3).requires_grad_()
        between = x * 1
        out = (sidefx_train.compile(step, backend="aot_eager", fullgraph=True) if changes else step)(between)
        if changes:
            _change_argument((), between)
        out.sum().backward()
        found.append(x.grad)
    assert torch.equal(*found), "not the gradient at what was given"


def _written_first(x0, x1):
    x0.mul_(2)
    return x0 * x0


def _a_view_written_first(x0, x1):
    x1.mul_(2)
    return x1 * x1


def _saved_as_it_came_out(x0, x1):
    return x0.exp_()


@pytest.mark.parametrize("step", [_written_first, _a_view_written_first, _saved_as_it_came_out])
def test_the_size_is_that_of_the_tensor_by_then(step):
    """A saved argument is the caller's tensor: after an in-place unsqueeze, the error shows its current size."""
    said = []
    for called in (step, sidefx_train.compile(step, backend="aot_eager", fullgraph=True, on_failure="raise")):
        x0 = torch.arange(12.0).reshape(3, 4).cos().requires_grad_() * 1.5
        x1 = x0.reshape(-1)[1:6]
        out = called(x0, x1)
        x0.unsqueeze_(0)
        x1.unsqueeze_(0)
        x0.mul_(3)
        with pytest.raises(RuntimeError, match="is at version") as raised:
            (out * 1).sum().backward()
        said.append(str(raised.value))
    assert said[0] == said[1]
