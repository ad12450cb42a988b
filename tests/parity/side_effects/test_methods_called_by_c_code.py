"""Methods of the program that C code calls: their effects, and what they read elsewhere, are those of every call."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import io
import itertools
import math
import operator
import types
from typing import Any

import pytest
import torch

import sidefx_train

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")
LOG: list[Any] = []


class World:
    number = 1
    scale = 1.0
    on = True


class Key:
    def __init__(self, n: int) -> None:
        self.n = n

    def __hash__(self) -> int:
        LOG.append(("hash", self.n))
        return hash(self.n)

    def __eq__(self, other: object) -> bool:
        LOG.append(("eq", self.n))
        return isinstance(other, Key) and self.n == other.n and World.on


class Truth:
    def __init__(self, n: int) -> None:
        self.n = n

    def __bool__(self) -> bool:
        LOG.append(("bool", self.n))
        return self.n % 2 == World.number % 2


class Added:
    def __init__(self, value: float) -> None:
        self.value = value

    def __add__(self, other: Any) -> Added:
        LOG.append("add")
        return Added(self.value + other.value * World.scale)


class Text:
    def __str__(self) -> str:
        LOG.append("str")
        return "1" * World.number

    def __repr__(self) -> str:
        LOG.append("repr")
        return "2" * World.number


class Word(str):
    def __str__(self) -> str:
        LOG.append("str")
        return "3" * World.number


class Number(int):
    def __repr__(self) -> str:
        LOG.append("repr")
        return "4" * World.number

    def __float__(self) -> float:
        LOG.append("float")
        return 1.0 * World.number


class Lookup:
    def __getitem__(self, key: Any) -> Any:
        LOG.append(("get", key))
        return World.number


class Missing(dict):
    def __missing__(self, key: str) -> int:
        LOG.append(("missing", key))
        return World.number


class Stored(dict):
    def keys(self) -> Any:
        LOG.append("keys")
        return dict.keys(self)

    def items(self) -> Any:
        LOG.append("items")
        return dict.items(self)

    def __iter__(self) -> Any:
        LOG.append("iter")
        return dict.__iter__(self)

    def __getitem__(self, key: str) -> float:
        LOG.append(("get", key))
        return dict.__getitem__(self, key) * World.scale

    def __setitem__(self, key: str, value: float) -> None:
        LOG.append(("set", key))
        dict.__setitem__(self, key, value * World.scale)


class Ordered(collections.OrderedDict):
    def __getitem__(self, key: str) -> float:
        LOG.append(("get", key))
        return super().__getitem__(key) * World.scale

    def __setitem__(self, key: str, value: float) -> None:
        LOG.append(("set", key))
        super().__setitem__(key, value * World.scale)


class Items:
    def __init__(self, *items: Any) -> None:
        self.items = items

    def __iter__(self) -> Any:
        LOG.append("iter")
        return iter([item * World.number for item in self.items])

    def __len__(self) -> int:
        LOG.append("len")
        return len(self.items)


class Pages(list):
    def __iter__(self) -> Any:
        LOG.append("iter")
        return iter([item * World.number for item in list.__iter__(self)])

    def __len__(self) -> int:
        LOG.append("len")
        return list.__len__(self)

    def __getitem__(self, index: Any) -> Any:
        LOG.append("get")
        return list.__getitem__(self, index)


class Members(set):
    def __iter__(self) -> Any:
        LOG.append("iter")
        return set.__iter__(self)

    def __len__(self) -> int:
        LOG.append("len")
        return set.__len__(self)


class Reduced:
    def __init__(self, n: int) -> None:
        self.n = n

    def __reduce__(self) -> Any:
        LOG.append("reduce")
        return Reduced, (self.n * World.number,)


class State:
    def __init__(self, n: int) -> None:
        self.n = n

    def __getstate__(self) -> Any:
        LOG.append("getstate")
        return {"n": self.n * World.number}


class Position:
    def __index__(self) -> int:
        LOG.append("index")
        return 2 + World.number % 2


ONE, SAME, TWO, TEXT, WORD, NUMBER = Key(1), Key(1), Key(2), Text(), Word("ab"), Number(3)
STORED, ORDERED, DEFAULTS = Stored(x=1.0, y=2.0), Ordered(x=1.0), collections.defaultdict(float)
MEMBERS, SINK = Members({1.0, 2.0}), io.StringIO()


def _store_slice() -> float:
    made = [0.0, 0.0]
    made[0:1] = Items(1.0, 2.0)
    return sum(made)


def _add_in_place() -> float:
    made: list[float] = []
    made += Items(1.0, 2.0)
    return sum(made)


def _after(change: Any, made: Any) -> Any:
    change(made)
    return made


USES: dict[str, Any] = {
    "set display": lambda: len({ONE, SAME}),
    "dict display": lambda: len({ONE: 1, SAME: 2}),
    "new keys": lambda: len({Key(1), Key(1)}),
    "comprehension": lambda: len({key: 1 for key in (ONE, SAME)}),
    "set": lambda: len(set(iter([ONE, SAME]))),
    "frozenset": lambda: len(frozenset([ONE, SAME])),
    "set.update": lambda: len(_after(lambda made: made.update([ONE, SAME]), set())),
    "tuple key": lambda: {(ONE, 2): 1.0}.get((SAME, 2), 5.0),
    "hash of a tuple": lambda: hash((ONE, TWO)) % 7,
    "fromkeys": lambda: len(dict.fromkeys([ONE, SAME])),
    "Counter": lambda: len(collections.Counter([ONE, SAME])),
    "OrderedDict": lambda: len(collections.OrderedDict([(ONE, 1), (SAME, 2)])),
    "pairs": lambda: len(dict([(ONE, 1), (SAME, 2)])),  # noqa: C406
    "defaultdict": lambda: _after(lambda made: made[ONE], collections.defaultdict(float))[SAME],
    "groupby": lambda: len(list(itertools.groupby([ONE, SAME, TWO]))),
    "values of dicts": lambda: {"a": ONE} == {"a": SAME},
    "in values": lambda: SAME in {1: ONE}.values(),
    "deque": lambda: collections.deque([ONE]) == collections.deque([SAME]),
    "in a deque": lambda: SAME in collections.deque([ONE]),
    "filter": lambda: len(list(filter(None, [Truth(1), Truth(2), Truth(3)]))),
    "filterfalse": lambda: len(list(itertools.filterfalse(None, [Truth(1), Truth(2), Truth(3)]))),
    "takewhile": lambda: len(list(itertools.takewhile(lambda item: item, [Truth(1), Truth(2)]))),
    "compress": lambda: len(list(itertools.compress([1, 2, 3], [Truth(1), Truth(2), Truth(3)]))),
    "accumulate": lambda: list(itertools.accumulate([Added(1.0), Added(2.0)]))[-1].value,
    "format_map": lambda: len("{a}".format_map(Lookup()) + "{a}".format_map(Missing())),
    "percent with a mapping": lambda: float("%(a)s" % Lookup()) + float("%(a)d" % Missing()),
    "percent of a string": lambda: float("%s" % WORD),
    "percent of a number": lambda: float("%s" % NUMBER) + float(f"{NUMBER}"),
    "square root": lambda: math.sqrt(NUMBER),
    "print": lambda: print(TEXT, [TEXT], file=SINK) or 1.0,
    "text of containers": lambda: len(str(collections.deque([TEXT])) + repr(types.SimpleNamespace(a=TEXT))),
    "text of an error": lambda: len(str(ValueError(TEXT)) + repr(ValueError(TEXT))),
    "translate": lambda: len("ab".translate(_after(lambda made: None, Lookup()))),
    "center": lambda: len("a".center(Position())),
    "a dict subclass of itself": lambda: Stored(STORED)["x"],
    "copy of a dict subclass": lambda: copy.copy(STORED)["x"],
    "its copy()": lambda: STORED.copy()["x"],
    "its fromkeys": lambda: Stored.fromkeys(["x"], 2.0)["x"],
    "its union in place": lambda: _after(lambda made: made.__ior__(STORED), Stored())["x"],
    "its items in a Counter": lambda: collections.Counter(STORED)["x"],
    "a changing item": lambda: _after(lambda made: made.__setitem__("x", World.scale), Ordered())["x"],
    "an OrderedDict subclass": lambda: Ordered(ORDERED)["x"] + Ordered(x=2.0)["x"],
    "its own copy()": lambda: ORDERED.copy()["x"],
    "its own fromkeys": lambda: Ordered.fromkeys(["x"], 2.0)["x"],
    "its own update": lambda: _after(lambda made: made.update(ORDERED, y=1.0), Ordered())["x"],
    "its own setdefault": lambda: Ordered().setdefault("x", 2.0),
    "a view of a mapping": lambda: types.MappingProxyType(STORED)["x"],
    "copy by reduce": lambda: copy.copy(Reduced(2)).n + copy.deepcopy([Reduced(2)])[0].n,
    "copy by getstate": lambda: copy.copy(State(2)).n + copy.deepcopy(State(2)).n,
    "list.__iadd__": lambda: sum(_after(lambda made: made.__iadd__(Items(1.0, 2.0)), [])),
    "in place": _add_in_place,
    "slice": _store_slice,
    "slice by method": lambda: sum(_after(lambda made: made.__setitem__(slice(0, 1), Pages([1.0])), [0.0])),
    "arguments": lambda: (lambda *items: sum(items))(*Items(1.0, 2.0)),
    "reversed": lambda: sum(reversed(Pages([1.0, 2.0]))),
    "a set of a subclass": lambda: len(set(MEMBERS)) + len(MEMBERS),
    "starmap": lambda: list(itertools.starmap(operator.add, [Pages([1.0, 2.0])]))[0],
    "chained": lambda: sum(itertools.chain.from_iterable([Items(1.0), Pages([2.0])])),
}


def outcome(use: Any, captured: bool) -> Any:
    LOG.clear()
    SINK.truncate(0)
    SINK.seek(0)

    def step(x):
        return x * float(use())

    fn = sidefx_train.compile(step, backend="eager") if captured else step
    results = []
    for call in range(4):
        World.number, World.scale, World.on = call + 1, float(call + 1), call % 2 == 0
        LOG.append(call)
        results.append(fn(torch.ones(2)).tolist())
    return results, list(LOG), SINK.getvalue()


@pytest.mark.parametrize("use", USES)
def test_they_run_at_each_call(use):
    assert outcome(USES[use], captured=True) == outcome(USES[use], captured=False)


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: int


class Color(enum.Enum):
    RED = 1


Pair = collections.namedtuple("Pair", "a b")
SALT = 3


def salted(value: Any) -> int:
    return hash((value, SALT))


class Salted:
    FIELDS = ("a",)

    def __init__(self, a: int) -> None:
        self.a = a

    def __hash__(self) -> int:
        return salted(tuple(getattr(self, name) for name in self.FIELDS))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Salted) and all(getattr(self, name) == getattr(other, name) for name in self.FIELDS)


LAYER = torch.nn.Linear(2, 2)
KEYS: dict[str, Any] = {
    "dataclass": lambda: Frozen(1),
    "enum": lambda: Color.RED,
    "named tuple": lambda: Pair(Frozen(1), Color.RED),
    "dtype": lambda: torch.float32,
    "device": lambda: torch.device("cpu"),
    "module": lambda: LAYER,
    "helper": lambda: Salted(1),
}
OUTSIDE = {name: {make(): 2.0} for name, make in KEYS.items()}


@pytest.mark.parametrize("kind", KEYS)
def test_keys_whose_methods_only_read_stay_in_one_graph(kind):
    make, outside = KEYS[kind], OUTSIDE[kind]

    def step(x):
        counts = collections.Counter([make(), make()])
        found = {make(): 1.0}.get(make(), 5.0) + len({make(), make()}) + len(dict.fromkeys([make()])) + counts[make()]
        return x * (found + outside[make()] + (make() in [make()]))

    compiled = sidefx_train.compile(step, backend="eager", fullgraph=True)
    assert [compiled(torch.ones(2)).tolist() for _ in range(3)] == [step(torch.ones(2)).tolist()] * 3


def test_what_a_function_that_a_hash_calls_reads_is_guarded(monkeypatch):
    def step(x):
        return x * len({Salted(1)}) * (hash((Salted(1), 2)) % 97)

    compiled = sidefx_train.compile(step, backend="eager")
    assert compiled(torch.ones(2)).tolist() == step(torch.ones(2)).tolist()
    monkeypatch.setitem(globals(), "SALT", 5)
    assert compiled(torch.ones(2)).tolist() == step(torch.ones(2)).tolist()


class CountsReads(collections.Counter):
    def get(self, key, default=None):
        LOG.append(("get", key))
        return super().get(key, default)


class ChecksWrites(collections.defaultdict):
    def __contains__(self, key):
        LOG.append(("contains", key))
        return super().__contains__(key)

    def __setitem__(self, key, value):
        LOG.append(("set", key))
        super().__setitem__(key, value)

    def __missing__(self, key):
        LOG.append(("missing", key))
        return super().__missing__(key)


class Answers(str):
    def __rmod__(self, template):
        LOG.append(template)
        return "answered"


class Reversed(tuple):
    def __iter__(self):
        LOG.append("iter")
        return iter([*super().__iter__()][::-1])


def counts(held):
    held[0].update("ab")
    return held[0]["a"], held[0]["b"]


def fills(held):
    held[1]["b"] += 1.0
    return held[1]["new"], len(held[1])


OVERRIDES: dict[str, Any] = {
    "count elements": counts,
    "missing keys": fills,
    "reflected modulo": lambda held: "%s" % held[2],
    "iteration": lambda held: (list(held[3]), len(held[3]), held[3][0], [*held[3]]),
}


@pytest.mark.parametrize("use", OVERRIDES)
def test_overridden_methods_that_c_code_calls(use):
    def outcome(captured):
        held = (CountsReads("a"), ChecksWrites(float, a=1.0), Answers("text"), Reversed((1.0, 2.0)))
        LOG.clear()

        def step(x):
            return OVERRIDES[use](held), x + 1

        fn = sidefx_train.compile(step, backend="eager") if captured else step
        return [str(fn(torch.ones(1))) for _ in range(4)], list(LOG), [*dict.items(held[1])], dict(held[0])

    assert outcome(captured=True) == outcome(captured=False)
