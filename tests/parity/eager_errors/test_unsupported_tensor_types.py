"""Sparse, quantized and nested tensors, leaves of a subclass: refused by name before anything runs, from anywhere."""

from __future__ import annotations

import types

import pytest
import torch

import sidefx_train
from sidefx_train.errors import SideFXError

pytestmark = pytest.mark.filterwarnings("ignore")


class Tagged(torch.Tensor):
    """A subclass without its own members."""


KINDS = {
    "sparse_coo": lambda: torch.eye(3).to_sparse().requires_grad_(),
    "sparse_csr": lambda: torch.eye(3, dtype=torch.int64).to_sparse_csr(),
    "sparse_csc": lambda: torch.eye(3).to_sparse_csc(),
    "qint8": lambda: torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "Tagged": lambda: torch.eye(3).as_subclass(Tagged).requires_grad_(),
}
NAMED = {
    "sparse_coo": "sparse_coo",
    "sparse_csr": "sparse_csr",
    "sparse_csc": "sparse_csc",
    "qint8": "quantized",
    "nested": "nested",
    "Tagged": "Tagged",
}


def worlds(kind, place):
    """Returns a step that writes to a tensor before it uses the other kind, its arguments, and the tensor."""
    odd, seen = KINDS[kind](), torch.zeros(2)
    holder = types.SimpleNamespace(odd=odd)

    def by_argument(x, given):
        seen.add_(1)
        return x.sum(), given.dtype

    def by_closure(x):
        seen.add_(1)
        return x.sum(), odd.dtype

    def by_attribute(x):
        seen.add_(1)
        return x.sum(), holder.odd.dtype

    step = {"argument": by_argument, "closure": by_closure, "attribute": by_attribute}[place]
    return step, (torch.ones(3), odd) if place == "argument" else (torch.ones(3),), seen


@pytest.mark.parametrize("place", ["argument", "closure", "attribute"])
@pytest.mark.parametrize("kind", KINDS)
def test_refused_by_name_and_run_eagerly(kind, place):
    step, given, seen = worlds(kind, place)
    call = sidefx_train.compile(step, backend="aot_eager")
    for count in (1, 2):
        total, dtype = call(*given)
        assert (total.item(), dtype, seen.tolist()) == (3.0, KINDS[kind]().dtype, [count, count])
    report = call.report()
    reasons = [item for item in (*report.fallbacks, *report.breaks) if item.code == "SFX109"]
    assert reasons, f"{report.fallbacks} {report.breaks}"
    assert NAMED[kind] in reasons[0].reason


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_where_the_whole_step_was_asked_for(kind):
    step, given, seen = worlds(kind, "argument")
    call = sidefx_train.compile(step, backend="aot_eager", fullgraph=True, on_failure="raise")
    with pytest.raises(SideFXError, match="SFX109"):
        call(*given)
    assert seen.tolist() == [0, 0]


@pytest.mark.parametrize("use", ["written", "differentiated", "asked"])
def test_views_made_in_no_grad_mode(use):
    """Torch calls such a view of a parameter a leaf that requires a gradient, and gives it none."""

    def world():
        weight = torch.nn.Parameter(torch.ones(2, 3))
        with torch.no_grad():
            flat = weight.view(-1)

        def step(x):
            if use == "asked":
                return flat.requires_grad, flat.is_leaf, (flat * 2).requires_grad
            loss = ((flat.view(2, 3) if use == "differentiated" else weight) * x * weight).sum()
            loss.backward()
            gradient, weight.grad = weight.grad, None
            if use == "written":
                with torch.no_grad():
                    flat.sub_(gradient.view(-1), alpha=0.1)
            return loss.detach(), flat.grad, gradient

        return step, weight

    (step, weight), (plain, wanted) = world(), world()
    compiled = sidefx_train.compile(step, backend="eager")
    for value in (1.0, 2.0, 3.0):
        x = torch.full((2, 3), value)
        assert str(compiled(x)) == str(plain(x))
        assert torch.equal(weight, wanted)
    report = compiled.report()
    assert {found.code for found in report.breaks} == {"SFX109"}, str(report)
