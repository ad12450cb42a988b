"""Errors of a backward about a tensor that was saved, and transposed in place after the step: its current sizes."""

from __future__ import annotations

import pytest
import torch

import sidefx_train
from tests.fuzz.alias_run import check, source_of

_X, _W = "x = torch.arange(12.0).reshape(3, 4).sin()", "w = torch.arange(12.0).reshape(3, 4).cos().requires_grad_()"
_LEAF = f"{_X}.requires_grad_()"

# name: (arguments, step, transposed tensor)
PROGRAMS = {
    "an argument": (f"{_LEAF} * 1.5", "return (x * x).max().sin(),", "x"),
    "an argument, a factor": (f"{_X}; {_W}", "return (x * w).sum(),", "x"),
    "an argument with a new value": (f"{_X}; {_W}", "x.mul_(w); return x.max().sin(),", "x"),
    "an argument that keeps its result": (f"{_LEAF} * 1.5", "x.exp_(); return x.sum(),", "x"),
    "a view of an argument with a new value": (f"{_X}; {_W}; v = x[0:2]", "x.mul_(w); return v.max().sin(),", "v"),
    "a result": (_LEAF, "y = x.sin(); return y.max().sin(), y", "outs[1]"),
    "what an operation saves of its own": (_LEAF, "y = x.exp(); return y.sum(), y", "outs[1]"),
    "what an operation in place saves of its own": (_LEAF, "y = (x * 1)[0:2]; y.exp_(); return y.sum(), y", "outs[1]"),
    "a view of a result": (_LEAF, "y = x.sin(); v = y[0:2]; return v.max().sin(), v, y", "outs[1]"),
    "a view of an argument": (f"{_LEAF} * 1.5", "v = x[0:2]; return v.max().sin(), v", "outs[1]"),
    "a view that autograd does not know": (f"{_X}; {_W}", "v = x.view_as(x); return (v * w).sum(), v", "outs[1]"),
    "a result that autograd does not know": (f"{_X}; {_W}", "v = x.sin(); return (v * w).sum(), v", "outs[1]"),
    "a view of one": (f"{_X}; {_W}", "v = x.sin().t().t(); return (v * w).sum(), v", "outs[1]"),
    "a view of one that leaves": (f"{_X}; {_W}", "y = x.sin(); v = y.t().t(); return (v * w).sum(), v, y", "outs[1]"),
    "a detached one": (_LEAF, "v = x.detach(); return (v * x).sum(), v", "outs[1]"),
    "one whose storage was replaced": (f"{_X}; {_W}", "x.data = w.data.clone(); return (x * w).sum(),", "x"),
    "one that was enlarged": (f"{_X}; {_W}", "x.resize_(5, 4).fill_(1.5); return (x.max() * w).sum(),", "x"),
}


@pytest.mark.parametrize("then", ["", "; {0}.mul_(2)"])
@pytest.mark.parametrize("turn", ["t_()", "unsqueeze_(0)", "as_strided_((2,), (1,))"])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.every(3)
def test_metadata_mutated_after_save(name, turn, then):
    arguments, step, changed = PROGRAMS[name]
    line = f"with torch.no_grad(): {changed}.{turn}{then.format(changed)}"
    names = ", ".join(f"{part[0]!r}: {part[0]}" for part in arguments.split("; "))
    after = f"attempt({line!r}, 'exec', outs, {{{names}}})"
    assert check(source_of((arguments, step, after))).replays == 3


BITS = {
    "negative": torch._neg_view,
    "conjugate": lambda t: torch.view_as_complex(t.view(3, 2, 2)).conj(),
    "pairs": lambda t: torch.view_as_real(torch.view_as_complex(t.view(3, 2, 2))),
    "plain": lambda t: t.view(3, 4),
}
WRITES = {
    "nothing": lambda whole, view: None,
    "whole": lambda whole, view: whole.index_fill_(0, torch.tensor([0]), 2.0),
    "view": lambda whole, view: view.mul_(2),
}


@pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")
@pytest.mark.parametrize("written", WRITES)
@pytest.mark.parametrize("turn", ["transpose_(0, 1)", "unsqueeze_(0)"])
@pytest.mark.parametrize("kind", BITS)
def test_metadata_mutation_of_a_conjugate_or_negative_view(kind, turn, written):
    """Autograd drops such a view's transpose once its memory is written, and may raise for it later."""
    view_of, write = BITS[kind], WRITES[written]

    def step(x):
        whole = x * 2
        view = view_of(whole)
        eval(f"view.{turn}")
        write(whole, view)
        made = view * 1
        made.abs().sum().backward()
        return made.detach()

    def run(called):
        x = torch.arange(12.0).view(3, 4).sin().requires_grad_()
        try:
            made = called(x)
        except RuntimeError as error:
            return str(error).partition(" returned an invalid gradient")[2]
        return made.resolve_conj().resolve_neg().tolist(), x.grad.tolist()

    captured = sidefx_train.compile(step, backend="aot_eager")
    for _ in range(2):
        assert run(captured) == run(step)
