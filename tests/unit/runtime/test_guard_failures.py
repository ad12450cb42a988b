"""The specialization state."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from sidefx_train.compile.pipeline.entry import Changes
from sidefx_train.compile.pipeline.run_context import Call
from sidefx_train.compile.runtime.guard_failures import SpecializationState
from sidefx_train.config import CompileConfig


def missed_by_size():
    """Returns an entry that misses a call by the first size of ``x``."""
    source = SimpleNamespace(label="x")
    guard = SimpleNamespace(kind="tensor", source=source, value="f32[3]", location=None)
    changes = Changes({("x", 0)}, set(), [], [], set())
    return SimpleNamespace(why=lambda args, kwargs: (guard, "f32[4]"), changes=lambda args, kwargs: changes)


@pytest.mark.parametrize(("dynamic", "symbolic"), [(None, True), (True, True), (False, False)])
def test_a_size_that_changes(dynamic, symbolic):
    state = SpecializationState(CompileConfig(dynamic=dynamic), False)
    assert state.current.all_dynamic is bool(dynamic)
    missed = state.update_after(missed_by_size(), Call((), {}))
    assert (missed.label, missed.old, missed.new) == ("x", "f32[3]", "f32[4]")
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
