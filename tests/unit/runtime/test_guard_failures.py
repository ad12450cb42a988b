"""The specialization state, and how a report describes a guard failure."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import sidefx_train
from sidefx_train.compile.pipeline.entry import Changes
from sidefx_train.compile.pipeline.run_context import Call
from sidefx_train.compile.runtime.guard_failures import SpecializationState
from sidefx_train.config import CompileConfig


def missed_by_size():
    """Returns an entry that misses a call by the first size of ``x``."""
    source = SimpleNamespace(label="x", kind="argument", parent=None)
    guard = SimpleNamespace(kind="tensor", source=source, value=3, location=None)
    changes = Changes({("x", 0)}, set(), [], {}, set(), set())
    return SimpleNamespace(why=lambda args, kwargs: (guard, 4), changes=lambda args, kwargs: changes)


@pytest.mark.parametrize(("dynamic", "symbolic"), [(None, True), (True, True), (False, False)])
def test_a_size_that_changes(dynamic, symbolic):
    state = SpecializationState(CompileConfig(dynamic=dynamic), False)
    assert state.current.all_dynamic is bool(dynamic)
    missed = state.update_after(missed_by_size(), Call((), {}))
    assert (missed.label, missed.old, missed.new) == ("x", "3", "4")
    assert state.current.dynamic_sizes == (frozenset({("x", 0)}) if symbolic else frozenset())


def test_static_sizes_for_good():
    state = SpecializationState(CompileConfig(dynamic=True), False)
    state.current = replace(state.current, dynamic_sizes=frozenset({("x", 0)}))
    assert not state.with_static_sizes().has_symbolic_sizes and state.current.has_symbolic_sizes
    state.current = state.with_static_sizes()
    state.keep_sizes_static()
    state.update_after(missed_by_size(), Call((), {}))
    assert not state.current.has_symbolic_sizes


def test_what_else_is_remembered():
    state = SpecializationState(CompileConfig(), True)
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
