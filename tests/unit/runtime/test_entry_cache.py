"""Which entries calls try, and which captures count."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
from torch import nn

from sidefx_train.compile.capture.guards.guard import Guard
from sidefx_train.compile.capture.guards.source import SourceTable
from sidefx_train.compile.native import guards_module
from sidefx_train.compile.runtime.entry_cache import _AMORTIZED_AFTER, EntryCache


class Entry:
    """What a cache needs of an entry."""

    shared, dispatch, family = (), None, 0

    def __init__(self, result, symbolic=False, guards=(), host_draws=True, draw_decisions=0):
        self.replay = lambda args, kwargs: result
        self.guards = guards
        specialization = SimpleNamespace(host_draws=host_draws, draw_decisions=draw_decisions)
        self.captured = SimpleNamespace(symbolic_sizes=symbolic, specialization=specialization)


class Step:
    """Counts calls, and keeps what the cache publishes."""

    def __init__(self):
        guards_module()
        self.calls, self.forgotten = 0, []
        self.cache = EntryCache(self.publish, lambda: self.calls, self.forgotten.append)

    def publish(self, holders):
        self.replays = holders

    def results(self):
        return [replay((), {}) for replay in self.replays]


def test_entries_in_parts_around_random_decisions_come_last():
    step = Step()
    for name, symbolic, host_draws in (("parts", False, False), ("dynamic", True, True), ("new", False, True)):
        step.cache.add(Entry(name, symbolic, host_draws=host_draws))
    assert step.results() == ["new", "dynamic", "parts"]


def test_of_entries_for_random_decisions_the_oldest_comes_first():
    step = Step()
    for name, decisions in (("usual", 0), ("rare", 1), ("rarest", 2), ("other object", 2), ("its rare", 3)):
        step.cache.add(Entry(name, draw_decisions=decisions))
    assert step.results() == ["other object", "its rare", "usual", "rare", "rarest"]


def test_new_entries_come_first_and_dynamic_ones_last():
    step = Step()
    assert step.replays == [] and step.cache.newest is None
    entries = {name: Entry(name, name == "dynamic") for name in ("old", "dynamic", "new")}
    for entry in entries.values():
        step.cache.add(entry)
        assert step.cache.newest is entry
    assert step.results() == ["new", "old", "dynamic"]
    assert [entry.captured.symbolic_sizes for entry in step.cache.entries] == [False, False, True]
    assert step.cache.captures == 3


def test_a_call_may_iterate_while_entries_change():
    step = Step()
    for name in "ab":
        step.cache.add(Entry(name))
    tried = []
    for replay in step.replays:
        tried.append(replay((), {}))
        step.cache.retire(step.cache.entries[0])
    assert tried == ["b", "a"] and step.replays == []


def test_retired_entries_explain_misses_and_dropped_ones_do_not():
    step = Step()
    first, second = Entry(1), Entry(2)
    step.cache.add(first)
    step.cache.add(second)
    step.cache.retire(second)
    assert step.results() == [1] and step.cache.newest is second
    step.cache.add(second)
    step.cache.drop(first)
    assert step.results() == [2] and step.cache.newest is second
    step.cache.drop(second)
    assert step.replays == [] and step.cache.newest is None


@pytest.mark.parametrize("calls", [_AMORTIZED_AFTER - 1, _AMORTIZED_AFTER])
def test_entries_of_dropped_models(calls):
    step = Step()
    step.calls = 7
    model = nn.Linear(1, 1)
    source = SourceTable().const(model, "model")
    step.cache.add(Entry("kept"))
    step.cache.add(Entry("model", guards=(Guard("is", source, model),)))
    assert step.results() == ["model", "kept"]
    step.calls += calls
    del model, source
    gc.collect()
    assert step.results() == ["kept"] and step.forgotten == ["model"]
    amortized = calls == _AMORTIZED_AFTER
    assert step.cache.unamortized == ([] if amortized else ["model"])
    assert step.cache.captures == (1 if amortized else 2)
