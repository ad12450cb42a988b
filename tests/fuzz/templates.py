"""The templates of random training steps.

A template is Python source with holes: ``{I}`` an int, ``{B}`` a truth value, ``{L}`` a list of ints, ``{C}`` a list of
anything, ``{D}`` a dict, ``{K}`` a key, ``{S}`` a set of ints, ``{V}`` any value, ``{T}`` a (4, 3) tensor, ``{N}`` a
small literal, ``{BODY}`` an indented block. ``{+I}`` is a new local int, ``{+T}`` tensor, ``{+L}`` list, ``{+O}``
object and ``{+F}`` function, visible to later statements; ``{L1}`` is the same list throughout the statement; ``{=I}``
is a local int that may be assigned, ``{O}`` an object.
"""

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
    os.getpid()
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

INTS = [
    "{N}",
    "box.n",
    "c_n",
    "G_N",
    "len({L})",
    "box.table.get({K}, {N})",
    "sum({L})",
    "len({D})",
    "x.shape[0]",
    "box.slots.a",
    "Box.total",
    "k_arg",
    "box.mydict[{K}]",
    "c_box.n",
    "box.other.owner.n",
    "({I} + {I})",
    "({I} - {I})",
    "({I} * {N})",
    "({I} % 7)",
    "({I} // 3)",
    "max({I}, {I})",
    "abs({I})",
    "({I} if {B} else {I})",
    "{O}.double",
    "box.bump({N})",
    "Box.count()",
    "bump_cell({N})",
    "len(push_cell({I}))",
    "add_global({N})",
    "outer_list({I})",
    "sum(v + 1 for v in {L})",
    "len([v for v in {L} if v > {N}])",
    "len({v: 1 for v in {L}})",
    "min({L}, default={N})",
    "sum(count_to({N}))",
    "len(box.bag)",
    "(lambda q: q + {I})({N})",
    "box.__dict__.get('extra', {N})",
    "getattr(box, 'extra', {N})",
    "{D}.setdefault({K}, {N})",
    "{D}.pop({K}, {N})",
    "len(box.weakset)",
    "box.weakkeys.get(box.other, {N})",
    "box.weak().n",
    "int({B})",
    "(int(box.it[0]) if getattr(box, 'it', ()) else {N})",
    "sum(map(lambda q: q * 2, {L}))",
    "sorted({L} + [0])[-1]",
    "hash('a') * 0",
    "id({L}) * 0",
    "next(iter({L}), {N})",
    "stepped()",
    "stepped({I})",
    "stepped({N}, by={I})",
    "stepped(*[{I}], **{{'by': {N}}})",
    "box.vague.of_{N}",
    "len(box.vague)",
    "(box.vague + {I})",
    "box.vague[{I}]",
    "box.vague({I}, {I}, by={N}, other=1)",
    "box.sub.bump({N})",
    "box.sub.half",
    "next(iter(box.fixed), {N})",
    "list(box.fixed)[-1]",
    "cached({N})",
    "int(math.sqrt({N}))",
    "round({I} / 3)",
    "functools.reduce(lambda q, r: q + r, {L}, 0)",
    "natively({I})",
    "int({T}.detach().sum() > 2)",
    "box.kind.twice()",
    "Kind({N} % 2 + 1).value",
    "box.reader.read",
    "box.reader.slow",
    "shown({V})",
    "box.view.get({K}, {N})",
    "len(box.view)",
    "int(time.time() > {N})",
]

BOOLS = [
    "box.flag",
    "{I} > {N}",
    "{I} == {I}",
    "{K} in {D}",
    "{N} in {L}",
    "{N} in {S}",
    "box.items is box.alias",
    "{C}",
    "not {B}",
    "({B} and {B})",
    "({B} or {B})",
    "hasattr(box, 'extra')",
    "isinstance(box.mylist, list)",
    "arg is box.items",
    "x.dim() == 2",
    "model.training",
    "model.bias.requires_grad",
    "box.buf.requires_grad",
    "box.weak() is box.other",
    "{N} < {I} <= 5",
    "box.name == 'box'",
    "box.name.startswith('b')",
    "any(v > 2 for v in {L})",
    "{S} <= {S}",
    "{L} == {L}",
    "torch.is_grad_enabled()",
    "model.bias.grad is None",
    "len({L}) > 2",
    "bool({D})",
    "box.row is box.other",
    "bool({T}.detach().mean() > 1)",
    "all(v < 9 for v in box.fixed)",
    "hasattr(box.vague, 'of_it')",
    "isinstance({O}, SubBox)",
    "{I} in box.fixed",
    "isinstance({O}, Named)",
    "box.kind is Kind.two",
]

LISTS = ["box.items", "box.alias", "c_list", "G_LIST", "box.rows[0]", "box.mylist", "arg", "Box.shared", "box.rows[-1]"]
ANY_LISTS = ["box.bag", "c_box.bag", "box.other.bag"]
DICTS = ["box.table", "box.odict", "box.mydict", "G_TABLE"]
KEYS = ['"a"', '"b"', '"c"', '"d"', '"new"']
SETS = ["box.names"]
HELD = ["box", "keep[0]", "keep[1]"]
OBJECTS = ["box", "box.other", "c_box", "box.other.owner", "box.sub"]

TENSORS = [
    "x",
    "box.buf",
    "(x * 2)",
    "({T} + {T})",
    "({T} * box.f)",
    "torch.relu({T})",
    "({T} - {I})",
    "({T} * model.weight.mean())",
    "{T}.clone()",
    "{T}.detach()",
    "({T} + box.buf[0])",
    "{T}.view(3, 4).reshape(4, 3)",
    "torch.cat([{T}[:2], {T}[2:]])",
    "torch.stack([r * 2 for r in {T}])",
    "torch.where({T} > 0, {T}, {T} * 0.5)",
    "({T} + box.row)",
    "torch.full((4, 3), float({I}))",
    "F.pad({T}, (1, 1))[:, 1:-1]",
    "{T}.t().contiguous().t()",
    "{T}.sigmoid()",
    "torch.softmax({T}, -1)",
    "({T} @ torch.eye(3))",
    "(x @ {T}.t()).mm({T})",
    "{T}.cumsum(0)",
    "{T}.flip(0)",
    "{T}.sort(dim=0).values",
    "{T}.masked_fill({T} > 1, 0.0)",
    "{T}.index_select(0, torch.tensor([3, 2, 1, 0]))",
    "{T}[[0, 2, 1, 3]]",
    "{T}[:, [2, 1, 0]]",
    "torch.einsum('ij,jk->ik', {T}, torch.ones(3, 3))",
    "torch.cat({T}.chunk(2), 0)",
    "torch.cat({T}.unbind(1)[::-1]).view(3, 4).t()",
    "{T}[0].expand(4, 3)",
    "{T}.permute(1, 0).permute(1, 0)",
    "{T}.unsqueeze(0).squeeze(0)",
    "F.dropout({T}, 0.5)",
    "F.layer_norm({T}, (3,))",
    "F.relu({T})",
    "({T} * box.vec.sum())",
    "torch.clamp({T}, -1, 1)",
    "({T} - {T}.mean(0, keepdim=True))",
    "({T}.abs() + 1).log()",
]

VALUES = [
    "{I}",
    "{L}",
    "{C}",
    "{T}.detach().sum()",
    "({I}, {I})",
    "[{I}, {I}]",
    "{{'k': {I}, 'l': {L}}}",
    "Box({I})",
    "{O}",
    "box.name + 'x'",
    "None",
    "{T}.detach()",
    "{{1, {N}}}",
    "MyList({L})",
    "MyDict({D})",
    "Slots({I})",
    "dict({D})",
    "lambda: {I}",
    "push_cell",
    "{O}.bump",
    "collections.deque({L}, maxlen=3)",
    "frozenset([{N}])",
    "f'{box.n}-{c_n}'",
    "{I} / 4",
    "collections.Counter({L})",
    "weakref.ref({W})",
    "({I}, [{V}])",
    "box.buf",
    "tuple({L})",
    "range({N})",
]

STATEMENTS = [
    "box.n = {I}",
    "box.n += 1",
    "{D1}[{K1}] = {I}\ndel {D1}[{K1}]",
    "{D1}[{K1}] = {I}\n{D1}.pop({K1})",
    "box.once = {I}\ndel box.once",
    "box.slots.b = {I}\ndel box.slots.b",
    "{S1}.add({N1})\n{S1}.remove({N1})",
    "G_TABLE['gone'] = {I}\nbox.bag.append(G_TABLE.pop('gone'))",
    "q_held = Box({I})\ndef q_scaled(k, by=q_held, *, more={I}):\n    return k * q_held.n + by.n + more\nnatively(1)\nq_held.n += 1\nbox.n = q_scaled({I})",
    "q_part = functools.partial(max, {I}, default=box)\nnatively(1)\nbox.bag.append(len(q_part.args))",
    "q_made = [lambda k, i=i: k + i + box.n for i in range(2)]\nnatively(1)\nbox.recent.extend(f({I}) for f in q_made)",
    "q_ref = weakref.ref({W}, lambda ref: box.items.append(1))\nnatively(1)\nbox.flag = q_ref() is {W}",
    "q_dying = Box({I})\nq_ref = weakref.ref(q_dying, lambda ref: box.items.append(2))\ndel q_dying\nbox.flag = q_ref() is None",
    "q_member = Box({I})\nbox.weakset.add(q_member)\nbox.n = len(box.weakset)\ndel q_member\nc_n = len(box.weakset)",
    "if box.lock.acquire(False):\n    box.flag = box.lock.locked()\n    {BODY}\n    box.lock.release()",
    "box.queue.put({I})\nbox.n = box.queue.get() + box.queue.qsize()",
    "try:\n    box.name = f'{{box.n:.{{c_n}}q}}'\nexcept ValueError as error:\n    box.name = str(error)",
    "q_sum = {T}.detach().sum()\ntry:\n    box.name = f'{{q_sum:s}}' if ({B}) else '{{:d}} {{}}'.format({I})\nexcept (ValueError, IndexError, TypeError) as error:\n    box.name = type(error).__name__",
    "box.name = 'n' + str({I}) + f'-{{c_n}}'",
    "q_truth = {I} > {I}\nbox.flag = (q_truth is True, q_truth == ({B}), q_truth is not False)[{N} % 3]",
    "try:\n    box.n = int({T}.detach().sum() > 2) // ({I} % 3)\nexcept ZeroDivisionError:\n    box.items.append(0)",
    "{+T} = {T}.detach() * 2\n{T}.detach().sum()\nbox.tagged = x.detach() + 1\nbox.tagged.note = {I}",
    "q_weight = nn.Parameter({T}.detach().clone())\n(q_weight * 2).sum().backward()\nbox.made = q_weight",
    "box.bag.append(VARIABLE.get(None))\nq_token = VARIABLE.set({I})\nc_n = VARIABLE.get()\nVARIABLE.reset(q_token)",
    "{+I} = {I}",
    "c_n = {I}",
    "c_n += {N}",
    "G_N = {I}",
    "{L}.append({I})",
    "{C}.append({V})",
    "{D}[{K}] = {I}",
    "{D}.pop({K}, None)",
    "print('say', {I}, {B})",
    "{+T} = {T}",
    "box.hist.append({T}.detach().mean())",
    "box.flag = {B}",
    "{=I} += {I}",
    "{+L} = [v * 2 for v in {L}]",
    "{+L} = {L}",
    "{L}.extend({L})",
    "{L}.extend(v + 1 for v in list({L}))",
    "{L}.insert(0, {I})",
    "{L}.sort()",
    "{L}.sort(reverse=True)",
    "{L}.sort(key=lambda v: -v)",
    "{L}.reverse()",
    "{L}[:1] = [{I}, {I}]",
    "{L}[:] = {L}[::-1]",
    "{L}[1:] = []",
    "del {L}[2:]",
    "if {L1}:\n    {L1}.pop()",
    "if len({L1}) > 1:\n    {L1}.pop(0)",
    "{L}.clear()",
    "box.items += [{I}]",
    "box.items = {L}",
    "box.items = list({L})",
    "box.alias = box.items",
    "box.rows.append({L})",
    "box.rows = [{L}, [{I}]]",
    "box.rows[0], box.rows[-1] = box.rows[-1], box.rows[0]",
    "c_list = {L}",
    "c_list = [{I}]",
    "G_LIST = [{I}, {I}]",
    "G_TABLE = {{'a': {I}}}",
    "box.f = box.f * 0.5 + {I}",
    "box.f += 1",
    "if {K1} in {D1}:\n    del {D1}[{K1}]",
    "if {K1} in {D1}:\n    {D1}[{K1}] = {D1}.pop({K1})",
    "{D}.update({{{K}: {I}, {K}: {I}}})",
    "{D}.update(a={I})",
    "{D} |= {{{K}: {I}}}",
    "{D}.clear()",
    "if {D1}:\n    {D1}.popitem()",
    "if 'a' in box.odict:\n    box.odict.move_to_end('a')",
    "box.dd[{K}].append({I})",
    "box.dd[{K}] = {L}",
    "for {+I} in list({D}.values()):\n    {BODY}",
    "for q_key, {+I} in {D}.items():\n    {BODY}",
    "box.table = {{key: v + 1 for key, v in {D}.items()}}",
    "{S}.add({I})",
    "{S}.discard({N})",
    "{S} |= {{{N}, {I}}}",
    "{S}.update({L})",
    "{S}.clear()",
    "box.names = {S} - {{{N}}}",
    "box.recent.append({I})",
    "box.recent.appendleft({I})",
    "box.recent.rotate(1)",
    "box.recent.extend({L})",
    "if box.recent:\n    box.recent.popleft()",
    "box.mylist.push({I})",
    "box.mylist.tag = {I}",
    "box.slots.a = {I}",
    "box.slots.b = {V}",
    "if hasattr(box.slots, 'b'):\n    del box.slots.b",
    "{O}.extra = {I}",
    "if hasattr(box, 'extra'):\n    del box.extra",
    "setattr({O}, 'extra', {I})",
    "{O}.bag = {C}",
    "{O}.bag = [{V}]",
    "{O}.__dict__['extra'] = {I}",
    "vars({O}).update(extra={I}, more={I})",
    "Box.total = {I}",
    "Box.total += 1",
    "Box.shared = [{I}]",
    "box.other = {O}",
    "box.name = 'box' + str({N})",
    "box.bump({I})",
    "{O}.me = {O}",
    "{+O} = Box({I})",
    "{+O} = Box({I})\nbox.bag.append({+O})\n{+O}.me = {+O}",
    "{+O} = Box({I})\n{+O}.bag.append({+O})\nbox.bag.append([{+O}, {+O}.bag])",
    "box.bag.append({V})\nbox.bag.append(box.bag[-1])",
    "box.pair = ({C}, {C})",
    "box.bag.append(box.bag)",
    "if box.bag:\n    box.bag.pop()",
    "del box.bag[:]",
    "box.fns.append(lambda k: k + {I})",
    "def {+F}(k):\n    DECLARE\n    {BODY}\n    return k + {I}\n{+I} = {+F}({I})",
    "def {+F}(k):\n    DECLARE\n    {BODY}\n    return k + {I}\nbox.fns.append({+F})",
    "def {+F}(n):\n    return 0 if n <= 0 else 1 + {+F}(n - 1)\n{+I} = {+F}({N})",
    "def {+F}():\n    DECLARE\n    yield {I}\n    {BODY}\n    yield {I}\n{+L} = list({+F}())",
    "def {+F}():\n    DECLARE\n    try:\n        yield {I}\n    finally:\n        {BODY}\nfor {+I} in {+F}():\n    {BODY}",
    "made = 0\ndef {+F}():\n    nonlocal made\n    made += 1\n    return made\n{+F}()\nbox.fns.append({+F})\nbox.n = made",
    "class Local:\n    k = {I}\n    def get(self):\n        return self.k\nbox.n = Local().get()",
    "{+I} = sum(f(1) for f in box.fns if getattr(f, '__code__', box.bump.__code__).co_argcount == 1)",
    "box.fns = box.fns[-2:]",
    "if {B}:\n    {BODY}",
    "if {B}:\n    {BODY}\nelse:\n    {BODY}",
    "for {+I} in range({N}):\n    {BODY}",
    "for {+I} in list({L}):\n    {BODY}",
    "for {+I}, q_other in zip({L}, {L}):\n    {BODY}\n    break",
    "for q_index, {+I} in enumerate({L}):\n    if q_index > 1:\n        continue\n    {BODY}\n    break\nelse:\n    {BODY}",
    "q_left = 2\nwhile q_left > 0:\n    q_left -= 1\n    {BODY}",
    "try:\n    {BODY}\n    raise ValueError({I})\nexcept ValueError as error:\n    {BODY}\n    print(error)",
    "try:\n    {BODY}\n    {+I} = {D}[{K}]\nexcept KeyError as error:\n    print('no', error)",
    "try:\n    {BODY}\n    {+I} = {I} // {I}\nexcept ZeroDivisionError as error:\n    print(error)\nfinally:\n    {BODY}",
    "try:\n    {BODY}\n    {+I} = {L}[{I}]\nexcept IndexError as error:\n    print(type(error).__name__, error)\nelse:\n    {BODY}",
    "try:\n    {+I} = box.nothing\nexcept AttributeError as error:\n    print(error)\n    {BODY}",
    "with Track({C}, {I}):\n    {BODY}",
    "with Track({C}, {I}):\n    {BODY}\n    raise KeyError({K})",
    "try:\n    with Track({C}, {I}):\n        {BODY}\n        raise ValueError('inside')\nexcept ValueError as error:\n    print(error)",
    "with recorded({L}) as {+I}:\n    {BODY}",
    "with torch.no_grad():\n    {BODY}",
    "match {I}:\n    case 0:\n        {BODY}\n    case 1 | 2:\n        {BODY}\n    case _:\n        {BODY}",
    "print(f'{box.n:>4}|{box.name!r}|{box.f:.2f}')",
    "print({L}, {D})",
    "print('sum', {T}.detach().sum().item())",
    "print(sorted({S}))",
    "{+T} = {T}\n{+T}.add_(0) if {+T}.grad_fn else None",
    "box.buf.add_(1)",
    "box.buf.mul_(0.5)",
    "box.buf[{N} % 4] = {I}",
    "box.buf = {T}.detach()",
    "box.buf = {T}.detach().clone()",
    "box.row = box.buf[0]",
    "box.row.add_(1)",
    "box.buf[0].add_(box.row)",
    "box.buf.copy_({T}.detach())",
    "x.mul_(2)",
    "box.hist.append({T}.detach())",
    "box.hist.append(box.buf)",
    "box.hist = box.hist[-2:]",
    "box.hist.append(loss_before.detach())",
    "with torch.no_grad():\n    model.weight.mul_(0.9)",
    "model.bias.grad = None",
    "model.bias.grad = torch.ones(2)",
    "if model.weight.grad is not None:\n    model.weight.grad.mul_(0.5)",
    "model.steps = getattr(model, 'steps', 0) + 1",
    "model.tag = {V}",
    "box.last = {T}",
    "{C}.append(({T}.detach(), {I}))",
    "{+T} = {T}.clone()\n{+T}[0] = {I}",
    "box.weakset.add({W})",
    "box.weakset.discard({W})",
    "box.weakkeys[{W}] = {I}",
    "box.weak = weakref.ref({W})",
    "assert {I} != 12345, 'unlikely'",
    "if {I} == 5:\n    raise RuntimeError(f'five {box.n}')",
    "if {I} > 40:\n    return {I}",
    "try:\n    del {D}[{K}]\nexcept KeyError as error:\n    print('missing', error)",
    "try:\n    box.names.remove({N})\nexcept KeyError:\n    {BODY}",
    "{+I}, *q_rest = {L} or [0]",
    "{+L} = [*{L}, {I}]",
    "({+I} := {I})",
    "{+L} = sorted({L}, key=lambda v: (v % 2, v))",
    "{+L} = list(filter(None, {L}))",
    "{+L} = [*reversed({L})]",
    "q_first, q_second = [1], [2]\nq_first, q_second = q_second, q_first\n{C}.append(q_first)\n{C}.append(q_first)",
    "{C}.append(model)",
    "{C}.append(arg)",
    "arg.append({I})",
    "{C}.append(x)",
    "print({C}, {O}.n)",
    "print({D1})\n{D1}[{K}] = {I}",
    "print(box.recent, box.dd)",
    "box.keep_me = [Shout({I})]\nprint(box.keep_me, Shout({I}))",
    "box.loud = Loud([{I}])\nbox.loud.append({I})",
    "box.loud.append({I})",
    "box.louder[{K}] = {I}",
    "box.ring.append({I})",
    "box.frozen = Frozen({I}, {L})",
    "{C}.append(Point({I}, {L}))",
    "if hasattr({O}, 'extra'):\n    del box.other.extra\n    box.other.extra = {I}",
    "box.order = [*vars({O})]",
    "box.made = {{{N}: {I}, 'z': {V}}}",
    "box.nested = {{'a': {{'b': [{V}]}}}}\nbox.nested['a']['b'].append({I})",
    "box.nested = {{'a': box.nested}} if hasattr(box, 'nested') else {{}}\nbox.nested.pop('a', None)",
    "box.names = set({L})",
    "box.seq = sorted(box.names)",
    "box.fns.append(functools.partial(outer_list, {I}))",
    "box.items = box.items[:]\nbox.items[0:1] = [{I}]",
    "box.pairs = list(zip({L}, {D}.items()))",
    "box.it = tuple(map(str, {L}))",
    "box.bag.append({{**{D}, {K}: {I}}})",
    "box.n, c_n = c_n, box.n",
    "box.__class__.total += {N}",
    "type(box).shared.append({I})",
    "box.other, box.mate = c_box, box.other",
    "box.counter = collections.Counter({L})\nbox.counter[{I}] += 1",
    "box.chain = [{L}]\nfor q_a in box.chain:\n    q_a.append({I})",
    "q_iter = iter({L})\nbox.firsts = [next(q_iter, None), next(q_iter, None)]",
    "box.flag ^= True",
    "box.f = -box.f if box.f > 1 else box.f + 0.25",
    "box.hist.append(box.buf[{N} % 4])",
    "box.hist.append(box.buf.view(12))",
    "box.buf.view(12)[{N}] = 5.0",
    "box.buf.t_()\nbox.buf.t_()",
    "box.scale = torch.tensor(float({N}))",
    "box.row = box.row.clone()",
    "box.buf += box.row",
    "box.grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]",
    "model.weight.grad = None",
    "model.train(not model.training)",
    "opt.param_groups[0]['lr'] = opt.param_groups[0]['lr'] * 0.9",
    "for group in opt.param_groups:\n    group['tag'] = {I}",
    "if {T}.detach().sum() > 3:\n    {BODY}\nelse:\n    {BODY}",
    "{+I} = int({T}.detach().max() * 0)\n{BODY}",
    "natively({I})",
    "box.f = float({T}.detach().mean() * 0) + {N}",
    "box.last_rows = {T}.detach()[0].tolist()",
    "for {+I} in box.fixed:\n    {BODY}",
    "box.order = [*box.fixed]",
    "box.table = {{str(v): v for v in box.fixed}}",
    "box.sub.half = {I}",
    "box.vague.n = {I}",
    "try:\n    box.vague.nothing\nexcept AttributeError as error:\n    print(error)",
    "def {+F}(k, *rest, more=2, **named):\n    DECLARE\n    {BODY}\n    return k + len(rest) * more + len(named)\n{+I} = {+F}({I}, {I}, more={I}, z={I})",
    "def {+F}(k, seen=[]):\n    seen.append(k)\n    return len(seen)\n{+I} = {+F}({I}) + {+F}({I})",
    "for q_row in [[{I}, {I}], {L}]:\n    for {+I} in q_row[:2]:\n        if {+I} > {N}:\n            break\n        {BODY}\n    else:\n        continue\n    {BODY}",
    "for {+I} in range(3):\n    try:\n        if {+I} == 1:\n            continue\n        {BODY}\n    finally:\n        box.n += 1",
    "while True:\n    try:\n        {BODY}\n        break\n    finally:\n        {BODY}",
    "try:\n    try:\n        raise KeyError({K})\n    except KeyError as error:\n        raise ValueError('again') from error\nexcept ValueError as error:\n    print(error, error.__cause__)\n    {BODY}",
    "with Track({C}, 1), Track({C}, 2) as q_track:\n    {BODY}",
    "class Made(Box):\n    k = {I}\n    def bump(self, k=1):\n        return super().bump(k) + self.k\n{+I} = Made({I}).bump({I})",
    "box.buf.t()[0].add_(1)",
    "box.buf[:, 1].mul_(2)",
    "box.buf[1:3] = box.buf[0:2].clone()",
    "box.buf.narrow(0, 1, 2).zero_()",
    "box.buf.view(-1)[::2].add_({N})",
    "box.buf.clamp_(-3, 3)",
    "box.buf.relu_()",
    "box.buf.index_add_(0, torch.tensor([0, 2]), torch.ones(2, 3))",
    "box.buf[box.buf > 4] = 0.5",
    "box.buf.chunk(2)[1].sub_(1)",
    "box.buf.unbind(0)[{N} % 4].fill_({N})",
    "box.part = box.buf[1:3]",
    "if hasattr(box, 'part'):\n    box.part.add_(1)",
    "box.flat = box.buf.view(-1)",
    "{+T} = {T}.clone()\n{+T}.t()[0] = {N}\n{+T}.relu_()",
    "{+T} = torch.zeros(4, 3)\n{+T}.copy_({T})\n{+T}[1] += {T}[0]",
    "{+T} = torch.zeros(4, 3)\nfor q_i, q_r in enumerate({T}):\n    {+T}[q_i] = q_r * q_i",
    "box.vec.add_(1)",
    "box.vec.mul_(0.5)",
    "box.vec = box.vec + 1",
    "with torch.no_grad():\n    model.bias.add_(box.vec)",
    "with torch.no_grad():\n    model.bias.copy_(box.vec)",
    "box.hist.append(model.bias.detach())",
    "box.hist.append(model.weight.detach().clone().view(-1)[0])",
    "box.handles.append(model.register_forward_hook(lambda m, i, o: box.items.append({N})))",
    "if box.handles:\n    box.handles.pop().remove()",
    "with torch.enable_grad():\n    {BODY}",
    "box.rng = torch.rand(2)",
    "box.made_of = torch.tensor([{I}, {I}])",
    "print(box.vague.n, box.sub.n, len(box.handles))",
    "box.counted = {{v: {L}.count(v) for v in {L}}}",
    "box.text = ','.join(map(str, {L})) + box.name.upper() + '%d' % {I}",
    "box.cut = box.name[{N}:]",
    "try:\n    {BODY}\n    raise ExceptionGroup('some', [ValueError({I}), KeyError({K})])\nexcept* ValueError as group:\n    print(len(group.exceptions))\n    box.n += {I}\nexcept* KeyError:\n    {L}.append({I})",
    "with contextlib.ExitStack() as q_stack:\n    q_stack.enter_context(Track({C}, 1))\n    q_stack.callback({L}.append, {I})\n    {BODY}",
    "with contextlib.suppress(KeyError, ZeroDivisionError):\n    {BODY}\n    {+I} = {D}[{K}] // {I}\n    {BODY}",
    "try:\n    raise KeyError({K})\nexcept KeyError:\n    natively(1)\n    {BODY}\n    box.n += natively(2)",
    "try:\n    natively({I})\n    raise ValueError({I})\nexcept ValueError as error:\n    box.n += natively(len(error.args))\nfinally:\n    natively(0)\n    {BODY}",
    "def {+F}():\n    DECLARE\n    got = yield natively({N})\n    {BODY}\n    yield from (natively(v) for v in {L})\nfor {+I} in {+F}():\n    {BODY}",
    "q_gen = echo()\nnext(q_gen)\nbox.told = [q_gen.send({I}), q_gen.send({N})]\nq_gen.close()",
    "q_gen = echo()\nnext(q_gen)\nbox.told = q_gen.throw(KeyError({K}))\n{BODY}\nbox.n += len(str(q_gen.send({I})))",
    "q_gen = delegates({C})\nnext(q_gen)\nbox.told = [q_gen.send({I}), q_gen.send(None)]",
    "q_gen = delegates({C})\nnext(q_gen)\nnatively({I})\nq_gen = None\n{BODY}",
    "for {+I} in echo():\n    natively(1)\n    {BODY}\n    break\nbox.n += Box.total",
    "def {+F}():\n    DECLARE\n    try:\n        yield {I}\n        yield {N}\n    finally:\n        {BODY}\nfor q_index, {+I} in enumerate({+F}()):\n    natively({N})\n    {BODY}\n    if {B}:\n        break",
    "for {+I} in map(lambda v: v + {I}, {L}):\n    natively({I})\n    {BODY}\n    break",
    "for {+I} in itertools.islice(itertools.chain({L}, {L}), {N}):\n    {BODY}\n    natively(1)",
    "for q_one, {+I} in itertools.zip_longest(filter(None, {L}), {L}, fillvalue=0):\n    natively(1)\n    {BODY}\n    break",
    "box.walked = itertools.accumulate(list({L}))\nnatively({N})\n{BODY}\nbox.walked = list(box.walked)",
    "box.kind = Kind.two if {B} else Kind.one",
    "box.kind.seen = {I}",
    "match {O}:\n    case Box(n=0):\n        {BODY}\n    case Box(n=q_n, bag=[]) if q_n > 0:\n        box.n -= 1\n    case Box(bag=[*_]):\n        {BODY}",
    "match {V}:\n    case {{'k': int(q_k), **q_more}}:\n        box.n += q_k\n    case [int(), int() as q_k]:\n        box.n -= q_k\n    case (Box() | Slots()) as q_taken:\n        {BODY}\n    case _:\n        {BODY}",
    "import fuzz_imported\nbox.n += fuzz_imported.n",
    "from fuzz_imported import n as {+I}\nbox.n -= {+I}",
    "box.frozen = dataclasses.replace(Frozen({I}, {L}), a={I})\nbox.fields = [field.name for field in dataclasses.fields(box.frozen)]",
    "box.reader.n = {I}\nvars(box.reader).pop('slow', None)",
    "{+T} = torch.as_strided(box.buf, (4, 3), (3, 1))\n{+T}.mul_(0.5)",
    "box.buf.swapaxes_(0, 1).swapaxes_(0, 1)",
    "{+T} = box.buf[{N} % 3:][:1].expand(4, 3)",
    "with torch.inference_mode():\n    box.inferred = box.buf * 2",
    "with torch.autocast('cpu', dtype=torch.bfloat16):\n    box.cast = model(x).detach()",
    "box.mask = (box.buf > {N}).nonzero().shape[0]",
    "torch.manual_seed({N})\nbox.rng = torch.rand(2)",
    "box.as_array = box.buf.detach().numpy().copy()",
]

BEFORE_BACKWARD = [
    "h.register_hook(lambda g: g * 2)",
    "h.register_hook(lambda g: box.items.append(len(box.items)))",
    "h.register_hook(lambda g: box.hist.append(g.sum()))",
    "h.retain_grad()",
    "handle = h.register_hook(lambda g: g + 1)\nhandle.remove()",
    "h = h * box.f",
    "h = h + {T}[:, :2]",
    "loss_before = loss_before + model.weight.pow(2).sum() * 0.1",
    "loss_before = loss_before * {N} + 0.5",
    "h = h + box.vec",
    "h = torch.relu(h) * 2",
    "h.mul_(2)",
    "h = h.clone()\nh[0] = 0",
    "h[:, 0].register_hook(lambda g: box.hist.append(g.mean()))",
    "h.register_hook(natively)",
    "handle = model.weight.register_hook(lambda g: g * 0.5)\nbox.handles.append(handle)",
    "box.handles.append(model.register_full_backward_hook(lambda m, gi, go: box.items.append(len(go))))",
    "handle = model.bias.register_post_accumulate_grad_hook(lambda p: box.items.append(1))\nbox.handles.append(handle)",
    "if loss_before > 100:\n    {BODY}",
    "with torch.no_grad():\n    box.hist.append(model(x).mean())",
    "h = checkpoint(lambda v: torch.tanh(v) * box.f, h, use_reentrant=False)",
]

AFTER_BACKWARD = [
    "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    "box.hist.append(model.weight.grad.norm())",
    "for p in model.parameters():\n    if p.grad is not None:\n        p.grad.mul_(0.5)",
    "box.grads = [p.grad for p in model.parameters()]",
    "box.hist.append(h.grad)",
    "model.bias.grad.clamp_(-0.1, 0.1)",
    "box.norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()",
    "opt.param_groups[0]['lr'] *= 0.5",
    "natively({I})",
    "if model.weight.grad.abs().max() > 1:\n    box.n += 1",
    "opt.zero_grad(set_to_none=False)",
    "g = torch.autograd.grad(model(x).sum(), model.weight)[0]\nbox.hist.append(g)",
]

RETURNS = [
    "{I}",
    "loss_before.detach()",
    "{V}",
    "(loss_before.detach(), {I}, {V})",
    "{{'loss': loss_before.detach(), 'n': {I}, 'bag': {C}}}",
    "None",
    "loss_before.item()",
    "[{T}.detach(), {L}]",
]

MUTATIONS = [
    "box.flag = not box.flag",
    "box.n = {N}",
    "box.n = float(box.n)",
    "box.items.append({N})",
    "box.items = list(box.items)",
    "box.alias = box.items",
    "box.alias = list(box.items)",
    "box.table = dict(box.table)",
    "box.table['d'] = {N}",
    "box.table = dict(reversed(box.table.items()))",
    "box.table.pop('a', None)",
    "box.names.add(9)",
    "box.buf.detach().add_(1)",
    "box.buf = torch.ones(4, 3)",
    "box.buf = torch.ones(3, 4).t()",
    "box.buf = torch.ones(4, 3, dtype=torch.float64)",
    "box.row = box.buf[2]",
    "box.row = torch.ones(3)",
    "box.row = x_next[0]",
    "box.other = Box({N})\nbox.other.owner = box",
    "box.other.bag = box.bag",
    "box.bag = []",
    "box.f = 0.25",
    "box.name = 'other'",
    "box.extra = {N}",
    "vars(box).pop('extra', None)",
    "box.slots = Slots({N})",
    "box.slots.b = {N}",
    "box.mylist = MyList([{N}])",
    "Box.total = {N}",
    "Box.shared = [{N}, {N}]",
    "Box.bump = lambda self, k=1: 3",
    "c_n = {N}",
    "c_list = box.items",
    "c_list = [{N}]",
    "c_box = box",
    "G_N = {N}",
    "G_LIST = box.items",
    "G_TABLE['new'] = {N}",
    "add_global = lambda k: k + 1",
    "model.bias.requires_grad_(not model.bias.requires_grad)",
    "model.eval()",
    "model.weight.data.mul_(1.5)",
    "model.bias = nn.Parameter(torch.ones(2))",
    "model.register_forward_hook(lambda m, i, o: box.items.append(7))",
    "model.weight.register_hook(lambda g: g * 3)",
    "opt.param_groups[0]['lr'] *= 0.5",
    "opt.param_groups[0]['weight_decay'] = 0.1",
    "model.weight.grad = torch.ones(2, 3)",
    "box.dd['a'] = box.items",
    "box.rows = [box.items, box.items]",
    "box.fns = [f for f in box.fns[-1:]]",
    "x_next = torch.cat([x_next, x_next])[:, :3][1:5]",
    "x_next = x_next.clone().requires_grad_()",
    "arg_next = box.items",
    "arg_next = [1]",
    "k_next = {N}",
    "k_next = k_next + 1",
    "k_next = True",
    "x_next = box.buf",
    "model.steps = {N}",
    "model.tag = None",
    "box.recent = collections.deque([{N}], maxlen=2)",
    "box.weakset.discard(box.other)",
    "box.buf = box.buf.detach().requires_grad_()",
    "torch.set_grad_enabled(True)",
    "box.bag.append(1)",
    "stepped.__defaults__ = ({N},)",
    "stepped.__kwdefaults__ = {{'by': {N}}}",
    "stepped.__kwdefaults__['by'] = {N}",
    "stepped.__code__ = (lambda k, *, by: k - by).__code__",
    "outer_list.__code__ = (lambda k: k).__code__",
    "F.relu = lambda v: v.abs()",
    "torch.relu = lambda v: v * 0.5",
    "math.sqrt = lambda v: v + 1",
    "torch.Tensor.sigmoid = lambda v: v * 0.25",
    "nn.Linear.forward = lambda self, v: F.linear(v, self.weight, self.bias) * 2",
    "SubBox.bump = lambda self, k=1: 4",
    "Box.double = property(lambda self: 3)",
    "SubBox.double = property(lambda self: 5)",
    "Box.__len__ = lambda self: 3",
    "Vague.__getattr__ = lambda self, name: 9",
    "Vague.__add__ = lambda self, other: 1",
    "box.other.__class__ = SubBox",
    "box.fixed = {{0, 8, 3}}",
    "box.fixed = {{3, 16, 8, 0}}",
    "box.fixed.add(16)",
    "box.fixed.discard(8)",
    "box.fixed = {{True, 8}}",
    "box.f = -0.0",
    "box.n = bool(box.n)",
    "arg_next = (1, 2)",
    "model.bias.data = box.vec",
    "model.bias.data = box.vec.clone()",
    "box.vec = model.bias.data",
    "box.vec = model.bias.detach()",
    "model.weight.data = model.weight.data.t().contiguous().t()",
    "opt.state.clear()",
    "opt.load_state_dict(opt.state_dict())",
    "model.load_state_dict(model.state_dict())",
    "opt.param_groups[0]['momentum'] = 0.5",
    "model.float()",
    "model.zero_grad()",
    "box.handles.append(model.register_forward_pre_hook(lambda m, i: (i[0] * 2,)))",
    "box.handles.append(model.weight.register_post_accumulate_grad_hook(lambda p: box.items.append(1)))",
    "box.handles.append(model.register_full_backward_hook(lambda m, i, o: box.items.append(3)))",
    "if box.handles:\n    box.handles.pop().remove()",
    "x_next = x_next.double().float()",
    "x_next = torch.arange(12.0).reshape(3, 4).t()",
    "box.buf = box.buf[:]",
    "box.part = box.buf[0:2]",
    "box.buf.resize_(4, 3)",
    "cached.cache_clear()",
    "Named.register(Box)",
    "Named.register(SubBox)",
    "Kind.one._value_ = {N}",
    "Kind.twice = lambda self: 5",
    "box.dd.default_factory = lambda: [{N}]",
    "vars(Reader)['read'].times = {N}",
    "Reader.read = {N}",
    "vars(box.reader).pop('slow', None)",
    "shown.register(Box)(lambda value: {N})",
    "sys.modules['fuzz_imported'] = types.SimpleNamespace(n={N})",
    "sys.modules['fuzz_imported'].n = {N}",
    "box.kind = Kind.two",
    "box.view = types.MappingProxyType({{'a': {N}}})",
    "for f in box.fns:\n    f(1) if getattr(f, '__code__', box.bump.__code__).co_argcount else f()",
]

BREAKS = (
    "natively",
    "time.time()",
    "nonzero()",
    "torch.manual_seed(",
    ".numpy()",
    ".detach().sum() >",
    ".detach().mean() > 1)",
    ".detach().mean() * 0)",
    ".detach().max() * 0)",
    ".tolist()",
    ".item()",
    "loss_before > 100",
    "model.register_",
    ".abs().max() > 1",
    "box.buf > 4",
    ".register_hook(lambda g: g * 0.5)",
    ".register_post_accumulate_grad_hook(lambda p: box.items.append(1))\n",
)
"""Parts of statements that no capture includes."""
