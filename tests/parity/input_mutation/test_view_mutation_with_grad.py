"""A step changes in place arguments that are views of one another with autograd history: they stay such views.

The values before and after the change have eager's gradients, and later changes have eager's effects.
"""

from __future__ import annotations

import pytest
import torch

import sidefx_train
from tests.fuzz.alias_run import check, source_of

_WHOLE = "torch.arange(12.0).reshape(3, 4).sin()"
_ROW = f"x = {_WHOLE}.requires_grad_() * 1.5; y = x[0]"

# name: (arguments, step, statements afterwards)
PROGRAMS = {
    "the whole written": (_ROW, "x.mul_(2); return x * y", ""),
    "a part written": (_ROW, "y.mul_(2); return x * y", ""),
    "a part overwritten": (_ROW, "y.zero_(); return x * y, y", ""),
    "the whole overwritten": (f"x = {_WHOLE}.requires_grad_() * 1.5", "x.zero_(); return x * 2, x", ""),
    "a part read before": (_ROW, "a = y + x.sum(); y.mul_(2); return a * 2, x * y", ""),
    "the whole is not an argument": (
        f"x = ({_WHOLE}.requires_grad_() * 1.5)[0]",
        "a = x + 1; x.mul_(2); return x * a,",
        "",
    ),
    "a part and a part of it, the whole is not an argument": (
        f"x = ({_WHOLE}.requires_grad_() * 1.5)[0]; y = x[:2]",
        "a = x + 1; y.mul_(2); x.sin_(); return x * a, y",
        "",
    ),
    "two parts that overlap, the whole is not an argument": (
        f"x = ({_WHOLE}.requires_grad_() * 1.5)[0]; y = x._base[:, 1]",
        "a = x + 1; y.mul_(2); x.sin_(); return x * a, y",
        "",
    ),
    "begins to have a history through a part": (
        f"x = {_WHOLE}; y = x[0]; w = torch.arange(4.0).requires_grad_()",
        "y.mul_(w); return x.sin(), y",
        "",
    ),
    "a part that begins to have a history, the whole is not an argument": (
        f"x = {_WHOLE}[0]; w = torch.arange(4.0).requires_grad_()",
        "x.mul_(w); return x.sin(), x",
        "",
    ),
    "a part written with autograd off": (
        _ROW,
        "torch.set_grad_enabled(False); y.mul_(2); torch.set_grad_enabled(True); return x * y, y",
        "",
    ),
    "detached before": (
        f"x = {_WHOLE}.requires_grad_() * 1.5; y = x.detach()",
        "x.mul_(2); return y * x, x",
        "",
    ),
    "a part with a counter of its own, both written": (
        f"x = {_WHOLE}.requires_grad_() * 1.5; y = x.unsafe_split(2)[0]",
        "y.exp_(); x.add_(1); return x * 3, y, x",
        "attempt('x.detach().add_(1)', 'eval', outs, {'x': x})",
    ),
    "such a part of what another is a view of": (
        f"x = {_WHOLE}.requires_grad_(); y = x.reshape(-1)[2:7]; z = y.unsafe_split(2)[0]; w = y.view(-1)",
        "z.neg_(); a = w * 2; return a, w, z",
        "",
    ),
    "later changes": (
        _ROW,
        "y.mul_(2); return x.sin(),",
        "attempt('y.mul_(2)', 'eval', outs, {'y': y}); attempt('x.add_(1)', 'eval', outs, {'x': x})\n"
        "attempt('outs[0].add_(y)', 'eval', outs, {'y': y})",
    ),
    "views of both leave": (
        _ROW,
        "y.mul_(2); return x.t(), y[1:], x * y",
        "attempt('outs[0].mul_(2)', 'eval', outs, {})",
    ),
    "views of both leave that were made before": (
        _ROW,
        "a = x.t(); b = y[1:]; y.mul_(2); return a, b, x * y",
        "attempt('outs[0].mul_(2)', 'eval', outs, {})",
    ),
    "a part of a part, written": (_ROW, "a = y[1:]; a.relu_(); return y, a", ""),
    "a view made before the memory is written unseen": (
        f"x = {_WHOLE}.requires_grad_(); y = x.unsqueeze(0)",
        "a = y.swapaxes(0, -1); y.detach().add_(1); return y, a",
        "",
    ),
    "a view made before a constant is stored elsewhere, and its memory is written": (
        f"x = {_WHOLE}.requires_grad_(); y = x.unsqueeze(0)",
        "a = y.mT; b = y * 2; b[0] = 3\n    with torch.no_grad():\n        y.zero_()\n    return a,",
        "",
    ),
    "a view of a part, made before the whole is written unseen": (
        f"{_ROW}",
        "a = y.swapaxes(0, -1); x.detach().add_(1); return y, a",
        "",
    ),
    "a view of a view that was made before the write": (
        f"x = ({_WHOLE}.requires_grad_() * 1.5)[0]",
        "a = x.view(2, 2); x.zero_(); return a.view(-1),",
        "",
    ),
    "a view of a view that was written": (
        f"x = {_WHOLE}.requires_grad_() * 1.5; y = torch.arange(24.0).cos()[6:18].view(3, 4)",
        "a = y.squeeze(); a.add_(x); b = a.t(); return b, y.clone(), y",
        "",
    ),
    "logits and loss": (_ROW, "y.mul_(2); a = x.sin(); b = a.sum(); return a, b, y", ""),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.every(3)
def test_program(name, backend):
    assert check(source_of(PROGRAMS[name]), backend).replays == 3


@pytest.mark.parametrize("name", ["a part written", "two parts that overlap, the whole is not an argument"])
def test_program_under_inductor(name):
    assert check(source_of(PROGRAMS[name]), "inductor", close=True).replays == 3


def test_an_argument_that_is_no_view_any_more_is_recaptured():
    def step(x, y):
        y.mul_(2)
        return x * y

    def run(called):
        found = []
        for shares in (True, True, False, True):
            leaf = torch.arange(12.0).reshape(3, 4).sin().requires_grad_()
            x = leaf * 1.5
            y = x[0] if shares else leaf[1] * 2
            out = called(x, y)
            found += [out.detach(), y.detach().clone(), *torch.autograd.grad(out.sum(), leaf)]
        return found

    compiled = sidefx_train.compile(step, backend="aot_eager", fullgraph=True, on_failure="raise")
    want, have = run(step), run(compiled)
    assert all(torch.equal(a, b) for a, b in zip(want, have, strict=True))
    assert compiled.report().replays == 4


def test_hooks_see_gradients_as_in_eager():
    """Hooks registered before the change apply to the old value, those registered after it to the new one."""

    def run(called):
        seen = []
        leaf = torch.arange(12.0).reshape(3, 4).sin().requires_grad_()
        x = leaf * 1.5
        y = x[0]
        x.register_hook(lambda grad: seen.append(("x before", grad.clone())))
        y.register_hook(lambda grad: seen.append(("y before", grad.clone())))
        out = called(x, y)
        x.register_hook(lambda grad: seen.append(("x after", grad.clone())))
        y.register_hook(lambda grad: seen.append(("y after", grad.clone())))
        x.retain_grad()
        (out.sum() + (x * y).sum()).backward()
        return [*seen, ("leaf", leaf.grad), ("kept", x.grad)]

    def step(x, y):
        a = y + 1
        y.mul_(2)
        return a + x * y

    want = run(step)
    have = run(sidefx_train.compile(step, backend="aot_eager", fullgraph=True, on_failure="raise"))
    assert [name for name, _ in have] == [name for name, _ in want]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(want, have, strict=True))
