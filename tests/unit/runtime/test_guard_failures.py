"""The specialization state, and how a report describes a guard failure."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import sidefx_train
from sidefx_train.compile.capture.guards.specialization import is_among, items_of_any_class
from sidefx_train.compile.capture.resume.driver import Parts
from sidefx_train.compile.pipeline.entry import Changes
from sidefx_train.compile.pipeline.run_context import Call
from sidefx_train.compile.runtime.guard_failures import SpecializationState
from sidefx_train.config import CompileConfig


def no_part(fn, name):
    raise AssertionError("no part is made")


def missed_by_size():
    """Returns an entry that misses a call by the first size of ``x``."""
    source = SimpleNamespace(label="x", kind="argument", parent=None)
    guard = SimpleNamespace(kind="tensor", source=source, value=3, location=None)
    changes = Changes({("x", 0)}, set(), [], {}, set(), set(), [])
    return SimpleNamespace(why=lambda args, kwargs: (guard, 4), changes=lambda args, kwargs: changes)


@pytest.mark.parametrize(("dynamic", "symbolic"), [(None, True), (True, True), (False, False)])
def test_a_size_that_changes(dynamic, symbolic):
    state = SpecializationState(CompileConfig(dynamic=dynamic), False, Parts(no_part))
    assert state.current.all_dynamic is bool(dynamic)
    missed = state.update_after(missed_by_size(), Call((), {}))
    assert (missed.label, missed.old, missed.new) == ("x", "3", "4")
    assert state.current.dynamic_sizes == (frozenset({("x", 0)}) if symbolic else frozenset())


def test_items_that_keep_changing_between_a_tensor_and_none():
    changes = tuple(f"batch[{i}].mask" for i in (1, 4, 1, 2))
    assert items_of_any_class(changes, known=False) == frozenset(), "four changes may be four patterns"
    found = items_of_any_class((*changes, "batch[7].mask", "other[0]"), known=False)
    assert found == {"batch[*].mask"}
    assert is_among(found, "batch[3].mask") and not is_among(found, "batch[3].image") and not is_among(found, "mask")
    assert items_of_any_class(("batch[1].mask",) * 9, known=True) == frozenset(), "one item has two patterns"
    assert items_of_any_class(("stack[0][1][2]", "stack[0][3][2]"), known=True) == {"stack[0][*][2]"}


def test_static_sizes_for_good():
    state = SpecializationState(CompileConfig(dynamic=True), False, Parts(no_part))
    state.current = replace(state.current, dynamic_sizes=frozenset({("x", 0)}))
    assert not state.with_static_sizes().has_symbolic_sizes and state.current.has_symbolic_sizes
    state.current = state.with_static_sizes()
    state.keep_sizes_static()
    state.update_after(missed_by_size(), Call((), {}))
    assert not state.current.has_symbolic_sizes


def test_what_else_is_remembered():
    state = SpecializationState(CompileConfig(), True, Parts(no_part))
    state.refetch("module")
    state.assume_nothing()
    assert state.current.refetched == {"module"} and state.current.assumes_nothing


def described(step, *calls):
    """Returns the failures that a report lists after some calls."""
    compiled = sidefx_train.compile(step, backend="eager")
    for args, kwargs in calls:
        compiled(torch.ones(2), *args, **kwargs)
    return [(found.source, found.old, found.new) for found in compiled.report().recaptures]


def test_an_argument_that_is_no_longer_passed_is_missing():
    def step(x, *more, flag="on"):
        return x + sum(more) if flag == "on" else x

    assert described(step, ((1,), {}), ((), {})) == [("more[0]", "1", "missing")]
    assert described(step, ((), {"flag": "off"}), ((), {"flag": "on"})) == [("flag", "'off'", "'on'")]


def test_another_number_or_other_names_of_arguments():
    def step(x, *more, **named):
        return x + len(more) + len(named)

    one, two = "1 positional argument", "2 positional arguments and a=, b="
    assert described(step, ((), {}), ((1,), {"a": 1, "b": 2})) == [("the call", one, two)]
