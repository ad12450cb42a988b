"""Views of arguments that a custom ``autograd.Function`` creates and the step returns: base, gradient and errors."""

from __future__ import annotations

import pytest

from tests.fuzz.alias_run import check, source_of

_WHOLE = "torch.arange(12.0).reshape(3, 4).sin()"
_NON_LEAF = f"x = {_WHOLE}.requires_grad_() * 1.5"

# name: (arguments, step, statements afterwards)
PROGRAMS = {
    "the argument itself": (_NON_LEAF, "return Same.apply(x), x * 2", "attempt('outs[0].add_(1)', 'eval', outs, {})"),
    "a view, and what was computed from it": (
        _NON_LEAF,
        "a = Flat.apply(x); return a, a * 2, a.sum()",
        "attempt('x.add_(1)', 'eval', outs, {'x': x})",
    ),
    "a view of a leaf": (
        f"x = {_WHOLE}.requires_grad_()",
        "a = Flat.apply(x); return a, a * 2",
        "attempt('outs[0].add_(1)', 'eval', outs, {})",
    ),
    "a view of a part": (_NON_LEAF, "a = Flat.apply(x[1:]); return a, x.conj()", ""),
    "views of the whole and of a part": (
        f"{_NON_LEAF}; y = x[0]",
        "a = Flat.apply(x); b = Same.apply(y); return a, b, a.sum() * b",
        "attempt('y.detach().add_(1)', 'eval', outs, {'y': y})",
    ),
    "one view, twice": (_NON_LEAF, "a = Flat.apply(x); return a, a", "attempt('outs[1].mul_(2)', 'eval', outs, {})"),
    "without gradients": (
        f"x = {_WHOLE}",
        "a = Flat.apply(x); return a, a * 2",
        "attempt('outs[0].add_(1)', 'eval', outs, {})",
    ),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name, backend):
    assert check(source_of(PROGRAMS[name]), backend).replays == 3


def test_under_inductor():
    program = PROGRAMS["views of the whole and of a part"]
    assert check(source_of(program), "inductor", close=True).replays == 3


LEFT = {
    "of what was written": (_NON_LEAF, "a = x * 1; x.add_(1); b = Flat.apply(x); return b, x, a", ""),
    "with a view of its own": (_NON_LEAF, "b = Flat.apply(x); return b, b[1:]", ""),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_to_eager(name):
    outcome = check(source_of(LEFT[name]))
    assert outcome.reasons[0].startswith("SFX111")
