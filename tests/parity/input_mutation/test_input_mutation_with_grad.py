"""Outside tensors to which a captured function writes values with an autograd history."""

from __future__ import annotations

import pytest
import torch

import sidefx_train

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")


def multiply(x, w):
    x.mul_(w)


def several_times(x, w):
    x.mul_(w)
    x.add_(1).mul_(w)
    return x.sum()


def the_value_before_too(x, w):
    before = x * 3
    x.mul_(w)
    return before * x, before.sum()


def used_on_both_sides(x, w):
    kept = x.clone()
    x.mul_(w)
    y = x.cos()
    return y, (y * kept).sum(), kept


def what_it_saves_is_the_result(x, w):
    x.exp_()
    return x.view(-1)[1:] * w.view(-1)[1:]


def overwritten(x, w):
    x.copy_(w)
    return x[0], x


def unseen_by_autograd(x, w):
    with torch.no_grad():
        x.mul_(2)
    return x * w


def passed_on(x, w):
    y = x.mul_(w)
    return y, y.sin()


STEPS = [
    multiply,
    several_times,
    the_value_before_too,
    used_on_both_sides,
    what_it_saves_is_the_result,
    overwritten,
    unseen_by_autograd,
    passed_on,
]


def outcome(call, kind, prepare=None):
    """Returns the state after a call, including gradients of all tensors that contribute."""
    found = []
    for i in range(3):
        leaf = (torch.arange(6.0).view(2, 3) + i).sin().requires_grad_()
        w = torch.arange(6.0).view(2, 3).cos().requires_grad_()
        x = leaf * 1.5 if kind == "non-leaf" else torch.linspace(1, 2, 6).view(2, 3).clone()
        seen = [] if prepare is None else prepare(x)
        out = call(x, w)
        outs = [x, *(out if isinstance(out, tuple) else () if out is None else (out,))]
        total = sum((t * t.cos()).sum() for t in outs if t.requires_grad)
        total.backward()
        x.detach().add_(1)
        facts = [(t._version, t.requires_grad, t.is_leaf, t._is_view(), t is x) for t in outs]
        found.append((facts, [t.detach().clone() for t in outs], leaf.grad, w.grad, *seen))
        if prepare is not None and x.retains_grad:
            found[-1] += (x.grad,)
    return found


def same(want, have, exact):
    """Compares; not ``exact`` if two autograd nodes outside use a value that stays in the step.

    Its gradient is then computed for each of the two, and the two are added: eager adds first.
    """
    assert type(want) is type(have)
    if isinstance(want, torch.Tensor):
        assert torch.equal(want, have) if exact else torch.allclose(want, have, atol=1e-5)
    elif isinstance(want, (list, tuple)):
        assert len(want) == len(have)
        for a, b in zip(want, have, strict=True):
            same(a, b, exact)
    else:
        assert want == have


def compiled(step, backend):
    return sidefx_train.compile(step, backend=backend, fullgraph=True, on_failure="raise")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", ["non-leaf", "buffer"])
@pytest.mark.parametrize("step", STEPS)
def test_steps(step, kind, backend):
    if kind == "buffer" and step in (unseen_by_autograd, what_it_saves_is_the_result):
        pytest.skip("nothing that autograd knows is written to it")
    # A value that stays in the step, and that several nodes of the captured part use, gets a gradient in each of them.
    exact = step is not the_value_before_too
    same(outcome(step, kind), outcome(compiled(step, backend), kind), exact)


def test_under_inductor():
    call = compiled(the_value_before_too, "inductor")
    same(outcome(the_value_before_too, "non-leaf"), outcome(call, "non-leaf"), exact=False)


@pytest.mark.parametrize("how", ["retain_grad", "hook"])
def test_what_watches_the_gradient(how):
    def prepare(x):
        seen = []
        if how == "hook":
            x.register_hook(seen.append)  # of its old value: the hook stays there
        else:
            x.retain_grad()  # of its current value
        return [seen]

    eager = outcome(several_times, "non-leaf", prepare)
    call = sidefx_train.compile(several_times, backend="aot_eager")
    same(eager, outcome(call, "non-leaf", prepare), exact=True)


def test_a_later_change_of_a_saved_tensor_raises():
    call = compiled(what_it_saves_is_the_result, "aot_eager")
    x = torch.randn(2, 3, requires_grad=True) * 1.5
    out = call(x, torch.ones(2, 3))
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("share", ["view", "detached alias"])
def test_memory_that_others_see_is_left_to_eager(share):
    def step(x, other):
        x.mul_(2)
        return other.sum()

    def run(call):
        leaf = torch.arange(6.0).view(2, 3).requires_grad_()
        x = leaf * 1.5
        other = x.view(-1) if share == "view" else x.detach()
        out = call(x, other)
        (x.sum() + out).backward()
        return [leaf.grad, out.detach(), x.detach()]

    call = sidefx_train.compile(step, backend="aot_eager")
    same(run(step), run(call), exact=True)
