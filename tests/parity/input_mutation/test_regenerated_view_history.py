"""Views whose memory was written after they were created: autograd regenerates their history from their base.

The time of the regeneration decides the order in which gradients are added; its operations decide the gradient.
"""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch

import sidefx_train
from tests.fuzz.alias_run import check, source_of
from tests.opinfo.compare import same_contents

_WHOLE = "torch.arange(12.0).reshape(3, 4).cos()"
_OF_A_LEAF = f"x = {_WHOLE}.requires_grad_() * 1.5"

# name: (arguments, step, statements afterwards)
PROGRAMS = {
    "a view written, another of the same argument asked for later": (
        f"{_OF_A_LEAF}; y = x.unsqueeze(0); z = torch.tensor(1.5); w = y",
        "a = y[::2]; b = w[..., :2]; a.index_fill_(0, torch.tensor([0]), 2.0); c = torch.stack([w, w])\n"
        "    return b, w, c, a",
        "",
    ),
    "used before it was written, not since": (
        f"{_OF_A_LEAF}; y = x.unsqueeze(0)",
        "a = y[0]; b = a * 2; y.mul_(3); c = y.sum(); return a, b, c, y",
        "",
    ),
    "a view of another restrided by as_strided_": (
        f"{_OF_A_LEAF}",
        "a = x.diagonal(); b = a[1:]; c = torch.stack([b, b]); a.as_strided_((2,), (1,)); b.zero_()\n"
        "    return a.view(-1), c, b",
        "",
    ),
    "restrided by as_strided_, its storage replaced later": (
        f"{_OF_A_LEAF}",
        "a = x.conj(); b = x.transpose(0, -1); a.as_strided_((2,), (1,)); x.set_(x.clone()); return b, x",
        "",
    ),
    "a list of views of one another written": (
        f"{_OF_A_LEAF}; y = x.view(-1); z = x.reshape(-1)[2:7]",
        "torch._foreach_add_([y, z], 1); a = y.permute(0); a.unsqueeze_(0); return a, x * 2",
        "",
    ),
    "a part of an expanded view written": (
        f"x = {_WHOLE}.t(); y = x.chunk(2, -1)[1]",
        "a = x.expand(2, *x.shape); b = a.unbind(0)[0]; b.masked_fill_(b > 0, -1.0); x.sin_(); return y * 1.5, a",
        "",
    ),
    "what is saved is in the memory of one argument, with the version of another": (
        f"x = {_WHOLE}.requires_grad_(); y = x.data; z = y.view(-1)",
        "a = x * z[0]; return a, y.clone()",
        "attempt('z.t_()', 'eval', outs, {'z': z})",
    ),
    "a view made with autograd off, written under another version": (
        f"x = {_WHOLE}.requires_grad_(); y = x.detach()",
        "torch.set_grad_enabled(False); a = x.as_strided((2,), (1,)); torch.set_grad_enabled(True)\n"
        "    b = a[1:]; c = a.swapaxes(0, -1); a.data.mul_(2); return c, c, b",
        "",
    ),
    "a view of what is written, restrided by as_strided_": (
        f"{_OF_A_LEAF}; y = x",
        "a = x.unflatten(0, (1, -1)); b = a.as_strided((2,), (1,)); y.neg_(); b.as_strided_((2,), (1,)); return b,",
        "attempt('torch._foreach_add_([y, outs[0]], 1)', 'eval', outs, {'y': y})",
    ),
    "written, then used and viewed": (
        f"{_OF_A_LEAF}",
        "a = torch._neg_view(x); a.sin_(); b = a * torch.full((3, 4), 2.0); c = a.T\n"
        "    d = x.unfold(0, 2, 1); return d, b, c, c",
        "",
    ),
    "unsqueezed, while its base gets a history": (
        f"x = {_WHOLE}; y = x.view(-1); z = {_WHOLE}.requires_grad_()",
        "y.unsqueeze_(0); x.add_(z); a = torch.where(y > 0, y, y); return a,",
        "",
    ),
}

MADE = {
    "restrided": "a = x.diagonal(); a.as_strided_((2,), (1,))",
    "a view of a view": "a = x.diagonal().as_strided((2,), (1,))",
    "wider than what it is of": "a = x[0]; a.as_strided_((2, 3), (1, 2))",
    "a view": "a = x.as_strided((3,), (2,), 2)",
}
WRITTEN = ("pass", "b.zero_()", "x.mul_(2)", "a.mul_(3)")
LEFT = ("a,", "a, a * 2", "a * 2,", "a.view(a.shape), x * 2", "a.unsqueeze(0), c", "a, b")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name, backend):
    check(source_of(PROGRAMS[name]), backend)


@pytest.mark.parametrize(
    "argument", ["y * 1.5", pytest.param("(y * 1.5).view(2, 6).view(3, 4)", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("made", MADE)
@pytest.mark.every(2)
def test_views_by_as_strided(made, argument):
    """Their derivative depends on their input, which is another tensor after its history was regenerated."""
    for written, left in itertools.product(WRITTEN, LEFT):
        source = f"def step(x):\n    b = x.diagonal()[1:]; c = x * 1; {MADE[made]}; {written}\n    return {left}\n"
        space: dict = {}
        exec(source, space)
        compiled = sidefx_train.compile(space["step"], backend="aot_eager")
        want, have = _gradients(space["step"], argument), _gradients(compiled, argument)
        assert all(same_contents(a, b) for a, b in zip(want, have, strict=True)), source


def _gradients(step, argument):
    y = torch.arange(12.0).reshape(3, 4).cos().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outs = step(eval(argument, {"y": y}))
    found = [torch.tensor([out._version, out._is_view(), out.is_leaf]) for out in outs]
    for out in outs:
        weighed = (out * torch.linspace(0.5, 2, out.numel()).view(out.shape)).sum()
        found += [out.detach(), *torch.autograd.grad(weighed, y, retain_graph=True)]
    return found
