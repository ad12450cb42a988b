"""Arguments that are conjugate or negative views of one another, and are written."""

from __future__ import annotations

import warnings

import pytest
import torch

import sidefx_train
from sidefx_train.errors import SideFXWarning

STEPS = (
    "x.mul_(2 + 1j); return (y * w).abs().sum(),",
    "y.mul_(w); return (x * (1 + 2j)).sum().real, x",
    "y.add_(w.sum() * 1j); return (x * y).sum().abs(), y",
    "x.copy_(w * 1j); return (y * (2 + 1j)).sum().real, y.conj()",
    "y.real.mul_(w); return (x * x).sum().imag, x",
    "y.imag.add_(w.sum()); x.mul_(1j); return (x + y * 2j).abs().sum(), y, x",
    "x[0].mul_(w[0]); y[1].mul_(1j); return (x * y.conj() * (1 + 1j)).sum().real,",
    "y.zero_(); y.add_(w); return (x * 1j * x).sum().imag,",
    "y.detach().mul_(2j); return (x * w).sum().imag, y",
    "y.mul_(2); x.add_(1); return (x * w).sum().real, x.conj(), y",
)
VIEWS = {
    "a conjugate": lambda b: (b, b.conj()),
    "of a conjugate": lambda b: (b.conj(), b),
    "conjugated twice": lambda b: (b.conj().conj(), b.conj()),
    "a part": lambda b: (b, b.conj()[:3]),
}


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("views", VIEWS)
@pytest.mark.parametrize("body", STEPS)
@pytest.mark.every(6)
def test_as_in_eager(body, views, known):
    names = {}
    exec(f"def step(x, y, w):\n    {body}", names)

    def run(called):
        made = torch.complex(torch.arange(12.0).view(3, 4).sin(), torch.arange(12.0).view(3, 4).cos())
        leaf = made.requires_grad_(known)
        w = torch.arange(12.0).view(3, 4).cos().requires_grad_()
        x, y = VIEWS[views](leaf * 1)
        outs = called(x, y, w)
        total = sum((out * torch.ones_like(out)).sum().abs() for out in outs if out.requires_grad)
        grads = torch.autograd.grad(total, [w, leaf] if known else [w], allow_unused=True)
        values = [None if t is None else t.detach().resolve_conj() for t in (*outs, x, y, *grads)]
        return values, [(t._version, t.is_conj(), t.requires_grad) for t in (x, y, *outs)]

    captured = sidefx_train.compile(names["step"], backend="aot_eager")
    try:
        values, facts = run(names["step"])
    except RuntimeError as error:
        with warnings.catch_warnings(), pytest.raises(RuntimeError, match=str(error)[:30].split("(")[0]):
            warnings.simplefilter("ignore", SideFXWarning)
            run(captured)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        for _ in range(3):
            have, told = run(captured)
            assert told == facts
            for one, other in zip(values, have, strict=True):
                assert other is None if one is None else torch.equal(one, other)


def test_a_conjugate_that_is_written_by_out():
    """Regression: with bases for conjugate arguments, the argument kept the wrong half of the written values."""

    def run(called):
        x = torch.arange(12.0).view(3, 4).cos().requires_grad_()
        y = torch.view_as_complex(x.detach().view(-1, 2))
        return [*called(x, y, y, x.unsafe_split(2)[0]), x]

    def step(x, y, z, part):
        conjugate, row = y.conj(), part.unbind(0)[0]
        torch.sin(conjugate.unsafe_split(2)[0], out=conjugate)
        return conjugate.clone().detach(), row.max(), row

    captured = sidefx_train.compile(step, backend="aot_eager")
    for _ in range(3):
        for ours, eager in zip(run(captured), run(step), strict=True):
            assert torch.equal(ours.resolve_conj(), eager.resolve_conj())
