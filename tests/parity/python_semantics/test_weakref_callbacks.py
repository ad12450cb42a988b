"""Objects created and freed in the step, while a weak reference with a callback refers to them."""

from __future__ import annotations

import warnings
import weakref

import pytest
import torch

import sidefx_train
from sidefx_train.errors import SideFXWarning


class Thing:
    pass


class World:
    def __init__(self):
        self.log, self.references, self.members = [], [], weakref.WeakSet()


def deleted(world, x):
    thing = Thing()
    reference = weakref.ref(thing, lambda ref: world.log.append("dead"))
    world.log.append(reference() is thing)
    del thing
    world.log.append(reference() is None)
    return x


def variable_of_a_function(world, x):
    def inner():
        thing = Thing()
        world.references.append(weakref.ref(thing, lambda ref: world.log.append("dead")))

    inner()
    world.log.append(world.references[-1]() is None)
    return x


def member_of_a_set(world, x):
    thing = Thing()
    world.members.add(thing)
    world.log.append(len(world.members))
    del thing
    world.log.append(len(world.members))
    return x


def key_of_a_dict(world, x):
    thing = Thing()
    table = weakref.WeakKeyDictionary()
    table[thing] = 1
    world.log.append(len(table))
    del thing
    world.log.append(list(table.values()))
    return x


def finalized_later(world, x):
    world.kept = thing = Thing()
    world.members.add(thing)
    weakref.finalize(thing, world.log.append, "final")
    world.log.append(len(world.members))
    return x


def that_lives_on(world, x):
    world.kept = thing = Thing()
    world.references.append(weakref.ref(thing, lambda ref: world.log.append("dead")))
    return x


STEPS = (deleted, variable_of_a_function, member_of_a_set, key_of_a_dict, finalized_later, that_lives_on)


def _history(run):
    world, history = World(), []
    for _ in range(4):
        run(world, torch.ones(1))
        history.append((list(world.log), len(world.members)))
    return history


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_the_callback_runs_where_eager_runs_it(step):
    compiled = sidefx_train.compile(step, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        assert _history(compiled) == _history(step)
    report = compiled.report()
    assert report.replays == 4 and (step is finalized_later or not report.breaks), str(report)


def test_a_slice_is_shown_with_its_numbers():
    def step(log, x, n):
        log.append((repr(slice(1, n)), str([slice(n)]), f"{slice(0, n, 2)}"))
        return x

    compiled, log, expected = sidefx_train.compile(step, backend="eager"), [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        for n in range(4):
            compiled(log, torch.ones(1), n)
            step(expected, torch.ones(1), n)
    assert log == expected
