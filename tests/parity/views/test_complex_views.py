"""Arguments that are complex views of real memory, which torch cannot fakify itself."""

from __future__ import annotations

import pytest

from tests.fuzz.alias_run import check, source_of

_WHOLE = "torch.arange(12.0).reshape(3, 4).sin()"
_BOTH = f"x = {_WHOLE}; y = torch.view_as_complex(x.detach().view(-1, 2))"
_LATER = "attempt('y.add_(1)', 'eval', outs, {'y': y})"

# name: (arguments, step, statements afterwards)
PROGRAMS = {
    "the view written": (_BOTH, "y.mul_(1j); return x * 2, y * 2, y", _LATER),
    "the memory written": (_BOTH, "x.mul_(2); return y[1:], y.real", _LATER),
    "with a leaf": (
        f"x = {_WHOLE}.requires_grad_(); y = torch.view_as_complex(x.detach().view(-1, 2)); z = y[1:]",
        "y.mul_(2); return y[1:], y.real, x.sin(), z.t()",
        _LATER,
    ),
    "a part, conjugate": (
        f"y = torch.view_as_complex({_WHOLE}.view(-1, 2)[1:])",
        "a = y.conj(); return a[1:], a.real, y.sin()",
        _LATER,
    ),
    "a part, transposed": (
        f"y = torch.view_as_complex({_WHOLE}.view(-1, 2)[1:]).unflatten(0, (5, 1)).t()",
        "a = y.conj(); y.t_(); y.add_(1); return a[1:], a.real, y.sin()",
        _LATER,
    ),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name, backend):
    assert check(source_of(PROGRAMS[name]), backend).replays == 3


def test_under_inductor():
    assert check(source_of(PROGRAMS["the memory written"]), "inductor", close=True).replays == 3
