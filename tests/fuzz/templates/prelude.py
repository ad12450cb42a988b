"""The classes, functions and objects that every random program has before its step."""

from __future__ import annotations

PRELUDE = """
import abc
import collections
import contextlib
import dataclasses
import enum
import functools
import itertools
import math
import contextvars
import os
import queue
import sys
import threading
import time
import types
import weakref
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Box:
    total = 0
    shared = [1]

    def __init__(self, n=0):
        self.n = n
        self.bag = []

    def bump(self, k=1):
        self.n += k
        return self.n

    @property
    def double(self):
        return self.n * 2

    @classmethod
    def count(cls):
        cls.total += 1
        return cls.total


class SubBox(Box):
    def bump(self, k=1):
        return super().bump(k) + 1

    @property
    def half(self):
        return self.n // 2

    @half.setter
    def half(self, value):
        self.n = value * 2


class Vague:
    def __init__(self, n):
        self.n = n

    def __getattr__(self, name):
        if name.startswith("of_"):
            return len(name) + self.n
        raise AttributeError(name)

    def __len__(self):
        return abs(self.n) % 5

    def __add__(self, other):
        self.n += 1
        return self.n + other

    def __getitem__(self, key):
        return key + self.n

    def __call__(self, k, *rest, by=1, **named):
        return k * by + len(rest) + len(named) + self.n


class Slots:
    __slots__ = ("a", "b", "__weakref__")

    def __init__(self, a):
        self.a = a


class MyList(list):
    def push(self, value):
        self.append(value)
        self.pushed = len(self)


class MyDict(dict):
    def __missing__(self, key):
        return 0


class Loud(list):
    def append(self, value):
        super().append(value)
        super().append(value)

    def __iter__(self):
        return (value for value in super().__iter__())


class Louder(dict):
    def __setitem__(self, key, value):
        super().__setitem__(key, [value])


class Ring(collections.deque):
    pass


class Shout:
    def __init__(self, n):
        self.n = n

    def __repr__(self):
        return f"Shout({self.n}!)"

    def __eq__(self, other):
        return isinstance(other, Shout) and other.n == self.n

    def __hash__(self):
        return hash(self.n)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    a: int
    b: list


class Point(NamedTuple):
    a: int
    b: list


class Track:
    def __init__(self, where, tag):
        self.where, self.tag = where, tag

    def __enter__(self):
        self.where.append(("in", self.tag))
        return self

    def __exit__(self, kind, error, trace):
        self.where.append(("out", self.tag, kind is not None))
        return kind is KeyError


@contextlib.contextmanager
def recorded(where):
    where.append(1)
    try:
        yield len(where)
    finally:
        where.append(2)


class Named(abc.ABC):
    pass


class Kind(enum.Enum):
    one = 1
    two = 2

    def twice(self):
        return self.value * 2


class Reads:
    times = 0

    def __get__(self, obj, owner):
        self.times += 1
        return self.times


class Reader:
    read = Reads()

    def __init__(self, n):
        self.n = n

    @functools.cached_property
    def slow(self):
        return self.n * 2


@functools.singledispatch
def shown(value):
    return 1


@shown.register
def _(value: int):
    return 2


sys.modules["fuzz_imported"] = types.ModuleType("fuzz_imported")
sys.modules["fuzz_imported"].n = 1


VARIABLE = contextvars.ContextVar("VARIABLE")
G_N = 0
G_LIST = [3, 1]
G_TABLE = {"a": 1}


def echo():
    told = 0
    while told is not None:
        try:
            told = yield told
        except KeyError as error:
            told = str(error)
        finally:
            Box.total += 1
    return 7


def delegates(where):
    got = yield from echo()
    where.append(got)
    yield got


def count_to(n):
    for k in range(n):
        seen = yield k
        if seen:
            return seen


def add_global(k):
    global G_N
    G_N += k
    return G_N


def stepped(k=2, *, by=1):
    return k * by


def natively(k):
    os.times()
    return k


@functools.lru_cache(maxsize=None)
def cached(k):
    return k * 3


def outer_list(k):
    G_LIST.append(k)
    return len(G_LIST)
"""

SETUP = """
    box = Box(1)
    box.flag = True
    box.name = "box"
    box.f = 0.5
    box.items = [3, 1, 2]
    box.alias = box.items
    box.rows = [[1], [2, 3]]
    box.table = {"a": 1, "b": 2, "c": 3}
    box.odict = collections.OrderedDict(a=1, b=2)
    box.dd = collections.defaultdict(list)
    box.names = {1, 2}
    box.recent = collections.deque([1, 2], maxlen=4)
    box.mylist = MyList([5])
    box.mydict = MyDict(a=1)
    box.slots = Slots(1)
    box.loud = Loud([1])
    box.louder = Louder()
    box.ring = Ring([1], 3)
    box.other = Box(7)
    box.other.owner = box
    box.hist = []
    box.vague = Vague(2)
    box.sub = SubBox(3)
    box.fixed = {8, 0, 3}
    box.vec = torch.ones(2)
    box.handles = []
    box.stream = iter(range(1, 1000))
    box.fns = []
    box.reader = Reader(2)
    box.view = types.MappingProxyType(box.table)
    box.kind = Kind.one
    box.buf = torch.arange(12.0).reshape(4, 3)
    box.row = box.buf[1]
    box.lock = threading.Lock()
    box.queue = queue.Queue()
    box.weak = weakref.ref(box.other)
    box.weakset = weakref.WeakSet([box.other])
    box.weakkeys = weakref.WeakKeyDictionary({box.other: 1})
    c_n = 1
    c_list = [4]
    c_box = Box(2)
    keep = [box.other, c_box]

    def bump_cell(k=1):
        nonlocal c_n
        c_n += k
        return c_n

    def push_cell(k):
        c_list.append(k)
        return c_list
"""
