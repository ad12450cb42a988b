"""Views recreated over memory with several version counters: each counter has eager's value."""

from __future__ import annotations

import pytest

from tests.fuzz.alias_run import check, source_of

_WHOLE = "torch.arange(12.0).reshape(3, 4).sin()"
_NON_LEAF = f"x = {_WHOLE}.requires_grad_() * 1.5"

# name: (arguments, step, statements afterwards)
PROGRAMS = {
    "a part written with autograd off, a view of the whole transposed": (
        f"{_NON_LEAF}; y = x.unsafe_split(2)[0]",
        "torch.set_grad_enabled(False); y.mul_(y); torch.set_grad_enabled(True); a = x[..., :2]; a.t_(); return a.t(),",
        "",
    ),
    "the data of an argument written, a view of it unsqueezed": (
        f"{_NON_LEAF}; y = x.data",
        "y.mul_(2); a = x.view(-1); a.unsqueeze_(0); y.add_(1); return a, x",
        "",
    ),
    "metadata of views of an argument and of its data mutated": (
        f"{_NON_LEAF}; y = x.data",
        "y.mul_(2); a = x.view(-1); a.unsqueeze_(0); b = y.t(); b.t_(); return a, b",
        "",
    ),
    "a view of a part transposed, the whole saved for the backward": (
        f"{_NON_LEAF}; y = x.unsafe_split(2)[0]",
        "a = y[..., :2]; a.t_(); return a, x.sin()",
        "attempt('y.detach().add_(1)', 'eval', outs, {'y': y})",
    ),
    "a view of the whole transposed, a part saved for the backward": (
        f"{_NON_LEAF}; y = x.unsafe_split(2)[0]",
        "a = x[..., :2]; a.t_(); return a, y.exp()",
        "attempt('y.detach().add_(1)', 'eval', outs, {'y': y})",
    ),
    "views of a part and of the whole transposed, the whole saved and written later": (
        f"{_NON_LEAF}; y = x.unsafe_split(2)[0]",
        "a = y[..., :2]; a.t_(); b = x[1:]; b.t_(); return b, a, x.sin()",
        "attempt('x.detach().add_(1)', 'eval', outs, {'x': x})",
    ),
    "a view of a result transposed, its data written": (
        _NON_LEAF,
        "a = x * 2; b = a.data; c = a[..., :2]; c.t_(); b.mul_(2); return c, b, a",
        "",
    ),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name, backend):
    assert check(source_of(PROGRAMS[name]), backend).replays == 3
