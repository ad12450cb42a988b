"""Arguments that a backward does not come to keep no gradient, where their contents were replaced: not zeros either."""

from __future__ import annotations

import pytest
import torch

import sidefx_train

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
    z = a.sin()
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
