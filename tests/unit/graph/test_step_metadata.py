"""Metadata of inputs and outputs, one kind at a time."""

from __future__ import annotations

import pytest
import torch

import sidefx_train
from sidefx_train.compile.capture.guards.specialization import Specialization
from sidefx_train.compile.graph.step_metadata import in_words
from sidefx_train.compile.pipeline import capture_step


def facts_of(step, *args):
    captured = capture_step.capture(step, args, {}, "step", Specialization(), in_parts=False)
    return captured.residual.metadata


def outputs(step, *args):
    return [(each.kind, each.base) for each in facts_of(step, *args).outputs]


def leaf():
    return torch.arange(6.0).view(2, 3).clone().requires_grad_()


class Viewed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view(-1)

    @staticmethod
    def backward(ctx, grad):
        return grad.view(2, 3)


def one_base(x):
    y = x * 2
    return y[0], y[1]


def base_and_view(x):
    y = x * 2
    return y, y[0]


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (lambda x: x * 2, [("non_alias", 0)]),
        (lambda x: x, [("is_input", 0)]),
        (lambda x: x[0], [("alias_of_input", 0)]),
        (lambda x: x[0].t(), [("alias_of_input", 0)]),
        (one_base, [("alias_of_intermediate_save_as_output", 0), ("alias_of_intermediate", 0)]),
        (base_and_view, [("non_alias", 0), ("alias_of_intermediate_base_is_user_output", 0)]),
        (lambda x: x.detach().unsafe_split(1)[0], [("unsafe_view_alias", 0)]),
    ],
    ids=["made", "input", "view", "view of a view", "one base", "base and view", "unsafe"],
)
def test_kinds_of_outputs(step, expected):
    assert sorted(outputs(step, leaf())) == sorted(expected)


def test_views_made_by_custom_functions_are_named():
    found = facts_of(lambda x: Viewed.apply(x * 2), leaf()).outputs
    assert [each.kind for each in found] == ["custom_function_view"]


def test_bases_that_leave_only_for_their_views():
    assert facts_of(one_base, leaf()).intermediate_bases == (0,)
    assert facts_of(base_and_view, leaf()).intermediate_bases == ()


def test_what_needs_autograd_has_a_tangent():
    metadata = facts_of(lambda x: (x * 2, x.detach() * 3), leaf())
    assert metadata.tangents == (0,)
    assert [each.requires_grad for each in metadata.outputs] == [True, False]


def write(x):
    x.mul_(2)


def hidden(x):
    with torch.no_grad():
        x.mul_(2)


def in_inference(x):
    with torch.inference_mode():
        x.mul_(2)


def transpose_in_place(x):
    x.t_()


def grow(x):
    x.resize_(4, 3)


def shrink(x):
    x.resize_(3)


def ask(x):
    x.requires_grad_()


def cease(x):
    x.requires_grad_(False)


def partly_hidden(x):
    x.mul_(2)
    hidden(x)


def set_to_new_storage(x):
    x.set_(torch.ones(4))


def other_data(x):
    x.data = torch.ones(2, 3)


def both_at_once(x):
    x.mul_(2).t_()


WEIGHT = torch.ones(2, 3, requires_grad=True)


def begin(x):
    x.mul_(WEIGHT)


@pytest.mark.parametrize(
    ("step", "given", "expected"),
    [
        (lambda x: x * 2, leaf, {"leaf", "requires_grad"}),
        (lambda x: x * 2, lambda: leaf() * 2, {"requires_grad"}),
        (write, lambda: torch.ones(2, 3), {"leaf", "mutates_data"}),
        (hidden, leaf, {"leaf", "requires_grad", "mutates_data", "mutation_hidden"}),
        (in_inference, lambda: torch.ones(2, 3), {"leaf", "mutates_data", "mutation_hidden", "mutation_in_inference"}),
        (transpose_in_place, lambda: torch.ones(2, 3), {"leaf", "mutates_metadata"}),
        (grow, lambda: torch.ones(2, 3), {"leaf", "mutates_metadata", "resizes_storage"}),
        (shrink, lambda: torch.ones(2, 3), {"leaf", "mutates_metadata"}),
        (ask, lambda: torch.ones(2, 3), {"leaf", "changes_requires_grad"}),
        (write, lambda: leaf() * 2, {"requires_grad", "mutates_data", "updates_history"}),
        (begin, lambda: torch.ones(2, 3), {"leaf", "mutates_data", "updates_history"}),
        (cease, leaf, {"leaf", "requires_grad", "changes_requires_grad"}),
        (partly_hidden, lambda: torch.ones(2, 3), {"leaf", "mutates_data"}),
        (set_to_new_storage, lambda: torch.ones(2, 3), {"leaf", "mutates_metadata", "replaces_storage"}),
        (other_data, leaf, {"leaf", "requires_grad", "replaces_storage"}),
        (both_at_once, lambda: torch.ones(2, 3), {"leaf", "mutates_data", "mutates_metadata"}),
    ],
)
def test_facts_of_inputs(step, given, expected):
    facts = facts_of(step, given()).inputs[0]
    named = {name for name in type(facts).__dataclass_fields__ if getattr(facts, name) is True}
    assert named == expected


def test_symbolic_sizes_are_named():
    x = torch.ones(4, 3)
    spec = Specialization(dynamic_sizes=frozenset({("x", 0)}))
    captured = capture_step.capture(lambda x: x * 2, (x,), {}, "step", spec, in_parts=False)
    (made,) = captured.residual.metadata.outputs
    assert made.dynamic_dims == {0}
    assert "dynamic dimensions [0]" in in_words(captured.residual.metadata)


def test_the_report_shows_them():
    step = sidefx_train.compile(write, backend="eager")
    step(torch.ones(2, 3))
    assert "x: leaf, mutates_data" in step.report().sources()["facts"].splitlines()
