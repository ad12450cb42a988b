"""A value deleted right after it was written, unread: the old value must be deleted too, now and in later calls."""

from __future__ import annotations

import collections
import os
import warnings
import weakref

import pytest
import torch

import sidefx_train
from sidefx_train.errors import SideFXWarning

GLOBAL = 1


class Holder:
    shared = 1


class Slots:
    __slots__ = ("a", "b")


class Table(dict):
    pass


def made():
    """Returns a new world."""
    globals()["GLOBAL"], Holder.shared = 1, 1
    box = Holder()
    box.table = {"a": 1, "b": 2, "c": 3}
    box.ordered = collections.OrderedDict(a=1, b=2, c=3)
    box.lists = collections.defaultdict(list, a=[1])
    box.own = Table(a=1, b=2)
    box.counts = collections.Counter("aab")
    box.members = {1, 2, 3}
    box.queue = collections.deque([1, 2])
    box.items = [1, 2, 3]
    box.slots = Slots()
    box.slots.a = 1
    box.plain = Holder()
    box.plain.x, box.plain.y = 1, 2
    box.weak = weakref.WeakKeyDictionary({box.plain: 1})
    box.fn = lambda: 1
    box.fn.z = 1
    return box


def seen(box):
    return [
        *(list(getattr(box, name).items()) for name in ("table", "ordered", "lists", "own", "counts")),
        sorted(box.members),
        list(box.queue),
        list(box.items),
        [getattr(box.slots, name, None) for name in "ab"],
        list(vars(box.plain).items()),
        list(box.weak.values()),
        dict(vars(box.fn)),
        vars(Holder).get("shared", "gone"),
        globals().get("GLOBAL", "gone"),
    ]


DICTS = ("table", "ordered", "lists", "own", "counts")
OF_DICTS = (
    "box.{d}['a'] = 5; del box.{d}['a']",
    "box.{d}['a'] = 5; box.{d}.pop('a')",
    "box.{d}['a'] = 5; box.{d}.popitem()",
    "box.{d}['a'] = 5; box.{d}.clear()",
    "box.{d}['a'] = 5; del box.{d}['a']; box.{d}['a'] = 6",
    "box.{d}['n'] = 5; del box.{d}['n']",
    "box.{d}['a'] = 5; box.{d}['n'] = 1; box.{d}.pop('a', None); box.{d}['a'] = 7",
    "box.{d}.update(a=5); box.{d}.pop('a'); box.{d}.setdefault('a', 9)",
    "box.{d}['a'] = 5; box.{d}['z'] = list(box.{d}); del box.{d}['a']",
    "box.{d} |= {{'a': 7}}; del box.{d}['a']",
)
OTHERS = (
    "box.ordered['a'] = 5; box.ordered.move_to_end('a'); del box.ordered['a']",
    "box.ordered['a'] = 5; box.ordered.popitem(last=False)",
    "box.members.add(1); box.members.remove(1)",
    "box.members.add(9); box.members.discard(9)",
    "box.members.add(1); box.members.clear()",
    "box.members.add(1); box.members ^= {1}",
    "box.members.update([1, 4]); box.members &= {4}",
    "box.plain.x = 5; del box.plain.x",
    "box.plain.x = 5; delattr(box.plain, 'x')",
    "box.plain.x = 5; vars(box.plain).pop('x')",
    "box.plain.x = 5; del box.plain.x; box.plain.x = 7",
    "box.plain.n = 5; del box.plain.n",
    "box.plain.x = 5; box.plain.__dict__.clear()",
    "box.plain.__dict__['x'] = 5; del box.plain.x",
    "setattr(box.plain, 'x', 4); box.plain.__delattr__('x')",
    "box.slots.a = 5; del box.slots.a",
    "box.slots.b = 5; del box.slots.b",
    "box.slots.a = 5; del box.slots.a; box.slots.a = 4",
    "Holder.shared = 5; del Holder.shared",
    "Holder.other = 5; del Holder.other",
    "GLOBAL = 5; del GLOBAL",
    "GLOBAL = 5; del globals()['GLOBAL']",
    "globals()['GLOBAL'] = 5; del GLOBAL",
    "box.fn.z = 5; del box.fn.z",
    "box.weak[box.plain] = 5; del box.weak[box.plain]",
    "box.weak[box.plain] = 5; box.weak.clear()",
    "box.queue.append(3); box.queue.popleft()",
    "box.items.append(3); del box.items[:]",
    "box.items += [3]; box.items.remove(3)",
)
BODIES = [body.format(d=name) for body in OF_DICTS for name in DICTS] + list(OTHERS)


def _step(body, broken):
    """Compiles the statements to a function, with a break between them if ``broken``."""
    if broken:
        body = body.replace("; ", "; os.times(); ")
    text = "def step(x, box):\n    global GLOBAL\n    " + body.replace("; ", "\n    ") + "\n    return x * 2\n"
    exec(text, globals())
    return globals().pop("step")


def _history(run):
    """Returns the results of four calls: in a new world, in the same world again, and in two more worlds."""
    results, kept = [], []
    for new in (True, False, True, True):
        if new:
            kept.append(made())
        try:
            results.append(run(torch.ones(1), kept[-1]).item())
        except (KeyError, AttributeError, NameError) as error:
            results.append(f"{type(error).__name__}: {error}")
        results.append(seen(kept[-1]))
    return results


@pytest.mark.parametrize("broken", [False, True], ids=["whole", "in parts"])
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.every(3)
def test_what_was_there_before_is_gone(body, broken):
    step = _step(body, broken)
    compiled = sidefx_train.compile(step, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        assert _history(compiled) == _history(step)
    assert os.times() and compiled.report().replays, str(compiled.report())


@pytest.mark.parametrize("again", [False, True])
def test_a_variable_of_the_function_around(again):
    def around():
        held = 3

        def step(x):
            nonlocal held
            held = 5
            del held
            if again:
                held = 7
            return x

        def look():
            try:
                return held
            except NameError:
                return "empty"

        def put(value):
            nonlocal held
            held = value

        return step, look, put

    def history(compile):
        step, look, put = around()
        run, found = compile(step), []
        for call in range(4):
            if call == 2:
                put(9)
            run(torch.ones(1))
            found.append(look())
        return found

    assert history(lambda step: sidefx_train.compile(step, backend="eager")) == history(lambda step: step)
