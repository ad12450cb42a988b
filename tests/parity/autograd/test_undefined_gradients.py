"""Arguments without a gradient path whose contents were replaced have gradient None, not zeros."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from tests.support.parity import Program, parity

MADE = {
    "a product": lambda x: x * 1,
    "a part by unsafe_split": lambda x: x.unsafe_split(2)[0],
    "a part by unsafe_chunk": lambda x: x.unsafe_chunk(2)[0],
    "a part by unsafe_split_with_sizes": lambda x: torch.unsafe_split_with_sizes(x, [2, 2])[1],
    "one of two results": lambda x: x.sort()[0][:2].clone(),
    "values of the largest": lambda x: x.topk(2, 0).values,
    "a view": lambda x: (x * 1)[1:3],
    "a view of a leaf's clone, by split": lambda x: x.clone().narrow(0, 0, 2),
}


def copied(x, a):
    part = x.narrow(0, 0, 2)
    a.copy_(part)
    return part.max(), a


def filled(x, a):
    part = x.narrow(0, 0, 2)
    a.zero_().add_(part)
    return part.max(), a


def filled_in_part(x, a):
    part = x.narrow(0, 0, 2)
    a[0] = part[0]
    return part.max(), a


def read_before(x, a):
    part = x.narrow(0, 0, 2)
    z = (a * 1).sin()
    a.copy_(part)
    return part.max(), a, (z * part).sum()


def masked(x, a):
    part = x.narrow(0, 0, 2)
    a.masked_fill_(part > 0, 0.0).mul_(part)
    return part.max(), a


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("asked", range(3))
@pytest.mark.parametrize("step", [copied, filled, filled_in_part, read_before, masked])
@pytest.mark.parametrize("made", MADE)
@pytest.mark.covering(2)
def test_as_in_eager(made, step, asked, backend):
    def run(called):
        leaf = torch.arange(16.0).reshape(4, 4).cos().requires_grad_()
        x = torch.arange(16.0).reshape(4, 4).sin().requires_grad_()
        a, hooked = MADE[made](leaf), []
        a.register_hook(lambda grad: hooked.append(grad)) if not a._is_view() else None
        try:
            outs = called(x * 1.5, a)
            if asked >= len(outs):
                return []
            found = torch.autograd.grad(outs[asked].sum(), (leaf, x), allow_unused=True)
        except RuntimeError as error:
            return [str(error)]
        return [*found, *hooked]

    captured = sidefx_train.compile(step, backend=backend, fullgraph=True, on_failure="raise")
    want = run(step)
    for _ in range(3):
        have = run(captured)
        assert [type(each) for each in want] == [type(each) for each in have]
        for one, other in zip(want, have, strict=True):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def heads(x, trunk, first, second):
    h = (x @ trunk).sin()
    return (h @ first).sum(), (h @ second).sigmoid().sum()


def heads_and_trunk(x, trunk, first, second):
    h = (x @ trunk).sin()
    return h, (h @ first).sum(), (h.cos() @ second).sigmoid().sum(), (h * x).sum()


@pytest.mark.parametrize(
    "asked", [(0,), (0, 1), (2, 1), *(pytest.param(asked, marks=pytest.mark.slow) for asked in ((1,), (1, 0), (2,)))]
)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("step", [heads, heads_and_trunk])
@pytest.mark.every(12)
def test_hooks_of_what_no_gradient_comes_to_are_not_called(step, backend, asked):
    """Two heads, one of which is differentiated: hooks of tensors used only by the other head do not run."""

    def run(called):
        torch.manual_seed(0)
        leaves = [torch.randn(4, 4, requires_grad=True) for _ in range(4)]
        heard = []
        for i, leaf in enumerate(leaves):
            leaf.register_hook(lambda grad, i=i: heard.append((i, grad.sum())))
            leaf.register_post_accumulate_grad_hook(lambda leaf, i=i: heard.append((i, "added")))
        given = [leaf * 1 for leaf in leaves[:2]] + leaves[2:]
        for i, each in enumerate(given[:2]):
            each.register_hook(lambda grad, i=i: heard.append((4 + i, grad.sum())))
            each.retain_grad()
        outs = called(*given)
        for out in outs:
            out.register_hook(lambda grad: heard.append(("out", grad.sum())))
        for number in asked:
            if number < len(outs):
                outs[number].backward(torch.ones_like(outs[number]), retain_graph=number != asked[-1])
        return heard, [each.grad for each in (*leaves, *given[:2])]

    captured = sidefx_train.compile(step, backend=backend, fullgraph=True, on_failure="raise")
    heard, grads = run(step)
    for _ in range(3):
        have, found = run(captured)
        assert [each[0] for each in heard] == [each[0] for each in have] or backend == "inductor"
        assert sorted(str(each[0]) for each in heard) == sorted(str(each[0]) for each in have)
        for want, grad in zip(grads, found, strict=True):
            assert (want is None) == (grad is None)
            assert want is None or torch.allclose(want, grad, rtol=1e-5, atol=1e-6)


def test_hooks_registered_between_calls_run():
    """A hook on a leaf that had none before triggers a recapture."""
    captured = sidefx_train.compile(heads, backend="aot_eager", fullgraph=True, on_failure="raise")
    leaves = [torch.ones(4, 4, requires_grad=True) for _ in range(4)]
    captured(*leaves)[0].backward()
    leaves[3].register_hook(lambda grad: grad * 2)
    captured(*leaves)[0].backward()
    assert leaves[3].grad is None and leaves[2].grad is not None


@pytest.mark.parametrize("residual", [False, True])
def test_attention_before_a_graph_break(residual):
    """The backward of a part before reaches attention with an undefined gradient, too: eager's kernel returns none."""

    def make() -> Program:
        inside, project, gate = nn.Linear(8, 8), nn.Linear(8, 24), nn.Linear(8, 3, bias=False)
        experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        modules = nn.ModuleList([inside, project, gate, experts])
        optimizer = torch.optim.SGD(modules.parameters(), lr=0.1)

        def routed(x, weights, chosen):
            out = torch.zeros_like(x)
            masks = F.one_hot(chosen, 3).permute(2, 1, 0)
            for expert in (masks.sum((-1, -2)) * 1 > 0).nonzero():
                place, rows = torch.where(masks[expert[0]])
                out.index_add_(0, rows, experts[int(expert)](x[rows]) * weights[rows, place, None])
            return out

        def step(x, y):
            hidden = inside(x)
            query, key, value = project(hidden).view(4, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
            found = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).reshape(4, 6, 8)
            flat = (hidden + found if residual else found).reshape(-1, 8)
            weights, chosen = torch.topk(F.softmax(gate(flat), -1), 2, -1)
            loss = F.mse_loss(flat + routed(flat, weights, chosen), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        def batch(i):
            generator = torch.Generator().manual_seed(i)
            return torch.randn(4, 6, 8, generator=generator), torch.randn(24, 8, generator=generator)

        return Program(step, batch, (modules, optimizer))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sidefx_train.errors.SideFXWarning)
        parity(make, steps=4, whole=False, captures=None)
