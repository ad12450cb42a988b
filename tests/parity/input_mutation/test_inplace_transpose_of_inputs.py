"""Arguments that a step restrides (``t_``, ``as_strided_``) or detaches: with history, written, overlapping."""

from __future__ import annotations

import pytest
import torch

import sidefx_train
from tests.fuzz.alias_run import check, source_of

_WHOLE = "torch.arange(12.0).reshape(3, 4).sin()"
_NON_LEAF = f"x = {_WHOLE}.requires_grad_() * 1.5"

# name: (arguments, step, statements afterwards)
PROGRAMS = {
    "transposed": (_NON_LEAF, "x.t_(); return x * 2,", ""),
    "transposed, and nothing else": (_NON_LEAF, "x.t_(); return x,", "attempt('x.t_()', 'eval', outs, {'x': x})"),
    "read before it is transposed": (_NON_LEAF, "a = x.sum(0); x.t_(); return x * 2, a, x", ""),
    "transposed and written": (_NON_LEAF, "x.t_(); x.mul_(2); return x * 2,", ""),
    "unsqueezed, and a view of it": (
        _NON_LEAF,
        "x.unsqueeze_(0); return x[0], x * 2",
        "attempt('x.squeeze_()', 'eval', outs, {'x': x})",
    ),
    "restrided, with its gradient": (
        _NON_LEAF,
        "a = x.sum(1); x.as_strided_((2,), (1,)); x.exp_(); return a, x",
        "",
    ),
    "restrided, then written": (f"x = {_WHOLE}", "x.as_strided_((2,), (1,)); x.add_(1); return x * 3,", ""),
    "written, then restrided": (f"x = {_WHOLE}", "x.add_(1); x.as_strided_((2,), (1,), 5); return x * 3,", ""),
    "restrided to what is in front of it": (
        f"x = {_WHOLE}[1:]",
        "a = x[0]; x.add_(1); x.as_strided_((2,), (1,), 1); x.mul_(2); return x * 3, a, x.view(2, 1)",
        "",
    ),
    "not contiguous, restrided and written": (
        f"x = {_WHOLE}.t()",
        "x.as_strided_((2,), (1,)); x.add_(1); return x * 3, x[1:]",
        "",
    ),
    "a part transposed, the whole written": (
        f"x = {_WHOLE}; y = x[1:]",
        "y.t_(); x.add_(1); return x * 3, y, y[1:]",
        "attempt('y.add_(1)', 'eval', outs, {'y': y})",
    ),
    "a part restrided, the whole written": (
        f"x = {_WHOLE}; y = x[0]",
        "y.as_strided_((2,), (1,)); x.add_(1); y.mul_(3); return x * 3, y",
        "",
    ),
    "a view made before it is transposed": (
        f"x = {_WHOLE}.t()",
        "a = x.swapaxes(0, -1); b = a.unsqueeze(0); x.t_(); return a, b, torch._neg_view(a)",
        "attempt('outs[0].add_(1)', 'eval', outs, {})",
    ),
    "a view with a history made before it is transposed": (
        _NON_LEAF,
        "a = x[0]; x.t_(); b = x[0]; return a, b, x",
        "attempt('outs[0].add_(1)', 'eval', outs, {})",
    ),
    "a part with a counter of its own made before it is restrided": (
        "x = torch.arange(4.0).cos()",
        "a = x.unsafe_split(2)[0]; x.as_strided_((2,), (1,)); return a, x",
        "",
    ),
    "detached": (_NON_LEAF, "a = x * 2; x.detach_(); return a, x * 3", ""),
    "detached, and nothing else": (_NON_LEAF, "x.detach_(); return x * 3,", ""),
    "detached and written": (_NON_LEAF, "a = x * 2; x.detach_(); x.mul_(2); return a, x * 3", ""),
    "detached, and has a view": (
        f"{_NON_LEAF}; y = x[0]",
        "a = y * 2; x.detach_(); return a, x * y, y",
        "",
    ),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name, backend):
    assert check(source_of(PROGRAMS[name]), backend).replays == 3


UNDER_INDUCTOR = (
    "transposed and written",
    "written, then restrided",
    "a part restrided, the whole written",
    "detached",
)


@pytest.mark.parametrize("name", UNDER_INDUCTOR)
@pytest.mark.every(2)
def test_program_under_inductor(name):
    assert check(source_of(PROGRAMS[name]), "inductor", close=True).replays == 3


EAGERS_ERRORS = {
    "detached, and saved for a backward": (_NON_LEAF, "a = x.sin(); x.detach_(); return a, x * 3", ""),
    "transposed, and saved for a backward": (_NON_LEAF, "a = x.sin(); x.t_(); return a, x", ""),
    "a negative view of what is restrided": (
        f"{_NON_LEAF}; y = x.t()",
        "a = torch._neg_view(x); x.as_strided_((2,), (1,)); return x.view(torch.int32), a",
        "",
    ),
    "a leaf transposed": (f"x = {_WHOLE}.requires_grad_()", "x.t_(); return x * 3,", ""),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", EAGERS_ERRORS)
def test_what_eager_refuses(name, backend):
    check(source_of(EAGERS_ERRORS[name]), backend)


def test_a_row_transposed_to_a_column_keeps_the_strides_of_its_results():
    """A stride of a dimension of size 1 does not affect the memory, but the layout of computed tensors."""

    def step(line, row):
        wide = line.to(torch.float64).relu_()
        row.t_()
        return row.transpose(0, -1) * 2, wide

    compiled = sidefx_train.compile(step, backend="aot_eager", fullgraph=True, on_failure="raise")
    strides = []
    for called in (step, compiled):
        line = torch.arange(4.0).cos()
        row = line.unsqueeze(0)
        strides.append([made.stride() for made in called(line, row)] + [row.stride()])
    assert strides[0] == strides[1]
