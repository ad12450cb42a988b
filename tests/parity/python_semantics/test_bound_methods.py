"""Bound methods of C classes: the result of ``super()`` is called, stored and returned as that very method."""

from __future__ import annotations

import array
import collections
import decimal
import functools
import io
import queue
import random

import numpy as np
import pytest
import torch

import sidefx_train


class TwiceRandom(random.Random):
    def random(self):
        return super().random() * 2 + 10


class ThriceRandom(TwiceRandom):
    def random(self):
        return super().random() + 1000


class Text(io.StringIO):
    def write(self, s):
        return super().write("<" + s + ">")

    def raw(self):
        return super().write


class Bytes(io.BytesIO):
    def getvalue(self):
        return b"[" + super().getvalue() + b"]"


class Numbers(array.array):
    def append(self, v):
        super().append(v + 100)


class Array(np.ndarray):
    def sum(self, *args, **kwargs):
        return super().sum(*args, **kwargs) + 1000


class Generator(torch.Generator):
    def initial_seed(self):
        return super().initial_seed() + 1000


class ByteArray(bytearray):
    def append(self, v):
        super().append(v + 1)


class Queue(queue.SimpleQueue):
    def put(self, v):
        super().put(("w", v))


class Context(decimal.Context):
    def sqrt(self, v):
        return super().sqrt(v) + 100


class List(list):
    def append(self, v):
        super().append(("w", v))

    def __getitem__(self, i):
        return "got", super().__getitem__(i)

    def raw(self):
        return super().append

    def item(self):
        return super().__getitem__


class Dict(dict):
    def get(self, k, default=None):
        return "g", super().get(k, default)

    def raw(self):
        return super().get


class Deque(collections.deque):
    def append(self, v):
        super().append(("w", v))

    def raw(self):
        return super().append


class Tuple(tuple):
    def index(self, v):
        return 100 + super().index(v)

    def raw(self):
        return super().index


class Int(int):
    def bit_length(self):
        return 100 + super().bit_length()

    def raw(self):
        return super().bit_length


class Str(str):
    def upper(self):
        return "U" + super().upper()

    def raw(self):
        return super().upper


def world():
    held = {
        "random": TwiceRandom(1), "two": ThriceRandom(2), "text": Text(), "bytes": Bytes(b"q"),
        "array": Numbers("i", [1]), "nd": np.arange(3).view(Array), "generator": Generator(), "queue": Queue(),
        "bytearray": ByteArray(b"a"),        "context": Context(prec=5),
        "list": List(), "dict": Dict(a=1), "deque": Deque(), "tuple": Tuple((1, 2)),
        "int": Int(5), "str": Str("ab"), "box": {}, "plain": random.Random(3),
    }  # fmt: skip
    held["stored"] = {name: held[name].raw() for name in ("list", "dict", "deque", "tuple", "int", "str", "text")}
    return held


CALLED = {
    "a method of random.Random": lambda w: w["random"].random(),
    "two overrides over each other": lambda w: w["two"].random(),
    "text written to a StringIO": lambda w: (w["text"].write("a"), w["text"].getvalue()),
    "contents of a BytesIO": lambda w: w["bytes"].getvalue(),
    "array.array": lambda w: (w["array"].append(5), list(w["array"])),
    "ndarray": lambda w: int(w["nd"].sum()),
    "torch.Generator": lambda w: w["generator"].initial_seed() if w["generator"].manual_seed(4) else 0,
    "bytearray": lambda w: (w["bytearray"].append(5), bytes(w["bytearray"])),
    "SimpleQueue": lambda w: (w["queue"].put(5), w["queue"].get()),
    "decimal.Context": lambda w: str(w["context"].sqrt(decimal.Decimal(2))),
    "state of random.Random": lambda w: (w["plain"].getstate()[1][:3], len(w["plain"].getstate()[1])),
    "state saved and restored": lambda w: (
        lambda s: (w["plain"].random(), w["plain"].setstate(s), w["plain"].random())
    )(w["plain"].getstate()),
    "stored list.append": lambda w: (w["stored"]["list"](3), list(w["list"])),
    "stored dict.get": lambda w: w["stored"]["dict"]("a"),
    "stored deque.append": lambda w: (w["stored"]["deque"](3), list(w["deque"])),
    "stored tuple.index": lambda w: w["stored"]["tuple"](2),
    "stored int.bit_length": lambda w: w["stored"]["int"](),
    "stored str.upper": lambda w: w["stored"]["str"](),
    "stored write": lambda w: (w["stored"]["text"]("x"), w["text"].getvalue()),
    "a slot wrapper": lambda w: (w["list"].append(1), w["list"].item()(0), w["list"][0]),
    "mapped over": lambda w: (list(map(w["list"].raw(), [1, 2])), list(map(w["list"].append, [3])), list(w["list"])),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLED)
def test_calls_what_super_gives(name):
    eager, captured = world(), world()
    step = sidefx_train.compile(lambda x: (x.sin(), CALLED[name](captured)), backend="eager")
    for _ in range(3):
        assert str(step(torch.ones(2))[1]) == str(CALLED[name](eager))


MADE = {
    "list": (lambda w: w["list"].raw(), (7,)),
    "made in the step": (lambda w: List([1]).raw(), (7,)),
    "dict": (lambda w: w["dict"].raw(), ("a",)),
    "tuple made in the step": (lambda w: Tuple((1, 2)).raw(), (2,)),
    "str": (lambda w: Str("q").raw(), ()),
    "int": (lambda w: w["int"].raw(), ()),
    "a slot wrapper": (lambda w: w["dict"].__class__.__mro__[1].__setitem__.__get__(w["dict"]), ("z", 1)),
    "of a stream": (lambda w: w["text"].raw(), ("y",)),
    "in a partial": (lambda w: functools.partial(w["list"].raw(), 3), ()),
    "in an item": (lambda w: w["box"].__setitem__("f", w["list"].raw()) or w["box"]["f"], (1,)),
    "in a default": (lambda w: lambda f=w["list"].raw(): f(3), ()),
}


@pytest.mark.parametrize("name", MADE)
def test_a_bound_method_that_leaves_is_the_same_method(name):
    make, args = MADE[name]
    eager, captured = world(), world()
    step = sidefx_train.compile(lambda x: (x.sin(), make(captured)), backend="eager")
    for _ in range(3):
        want, have = make(eager), step(torch.ones(2))[1]
        assert type(have) is type(want)
        assert str(have(*args)) == str(want(*args))
        seen = [(w["list"], w["dict"], w["text"].getvalue()) for w in (eager, captured)]
        assert str(seen[0]) == str(seen[1])


def test_arguments_that_are_methods_of_other_classes_are_guarded():
    step = sidefx_train.compile(lambda x, f: (x.sin(), f(2)), backend="eager")
    for _ in range(2):
        held = List()
        for method, want in ((held.append, [("w", 2)]), (held.raw(), [("w", 2), 2])):
            step(torch.ones(2), method)
            assert list.__eq__(held, want)


def test_keywords_that_are_no_names_leave_in_a_partial():
    def step(x):
        return functools.partial(dict, x.sum(), **{"a-b": 1, "class": 2, "c": 3})

    made = sidefx_train.compile(step, backend="eager")(torch.ones(2))
    assert made.keywords == {"a-b": 1, "class": 2, "c": 3}
    assert list(made.keywords) == ["a-b", "class", "c"]


class Adding(functools.partial):
    def __call__(self, v):
        return super().__call__(v) + 1


def test_a_call_through_super_of_a_partial():
    """Regression: ``super().__call__`` called the override again, without end."""
    adding = Adding(max, 4)
    step = sidefx_train.compile(lambda x: (x.sin(), adding(3), Adding(min, 9)(2)), backend="eager")
    for _ in range(3):
        assert step(torch.ones(2))[1:] == (5, 3)
    assert step.report().replays == 3


BOUND = {
    "append": lambda: ([], "append", (1,)),
    "pop": lambda: ([5, 6, 7, 8], "pop", ()),
    "append of a deque": lambda: (collections.deque(), "append", (1,)),
    "setdefault": lambda: ({}, "setdefault", ("key", 3)),
    "add": lambda: (set(), "add", (4,)),
    "extend": lambda: (bytearray(), "extend", (b"a",)),
    "add_": lambda: (torch.zeros(2), "add_", (1,)),
}


@pytest.mark.parametrize("given", BOUND)
@pytest.mark.parametrize("place", ["module", "global", "class"])
def test_a_method_of_a_container_that_a_library_holds(given, place, monkeypatch):
    """Regression: it was called once, at the capture, and its result was a constant."""

    def run(compiled):
        owner, name, args = BOUND[given]()
        method = getattr(owner, name)
        holder = type("Holder", (), {"__module__": "queue", "hook": method}) if place == "class" else queue
        monkeypatch.setattr(holder, "hook", method, raising=False)
        space = vars(queue)
        exec("def call(*args): return hook(*args)", space)
        call = space["call"] if place == "global" else lambda *args: holder.hook(*args)
        monkeypatch.setitem(space, "call", space["call"])

        def step(x):
            found = call(*args)
            return x + 1, found * 1 if isinstance(found, torch.Tensor) else found

        step = sidefx_train.compile(step, backend="eager", warmup="now") if compiled else step
        return [repr(step(torch.ones(2))) for _ in range(3)], repr(owner)

    assert run(True) == run(False)
