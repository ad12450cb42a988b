"""Classes that exist before the step, and their instances, run in three ways."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
from typing import NamedTuple

import pytest

from tests.support.interpreter_compiled import cases, check_case, compiled
from tests.support.interpreter_values import Color


def case_super_both_ways():
    class A:
        def __init__(self):
            self.log = []

        def f(self, x):
            self.log.append(("A", x))
            return [x]

        @classmethod
        def make(cls):
            return cls()

    class B(A):
        def f(self, x):
            return [*super().f(x + 1), *super(B, self).f(x + 2)]

        @classmethod
        def make(cls):
            made = super().make()
            made.log.append("made")
            return made

    b = B()

    def body():
        return b.f(1), B.make().log

    return body, b


def case_metaclass_call_and_attributes():
    class Meta(type):
        made = []

        def __call__(cls, *args):
            obj = super().__call__(*args)
            cls.made.append(cls.__name__)
            return obj

        @property
        def size(cls):
            return len(cls.made)

        def __getitem__(cls, key):
            return (cls.__name__, key)

        def __len__(cls):
            return 4

        def __contains__(cls, item):
            return item == 1

        def __iter__(cls):
            return iter("xyz")

    class Thing(metaclass=Meta):
        def __init__(self, x):
            self.x = x

    def body():
        thing = Thing(3)
        return thing.x, Thing.size, Thing["k"], len(Thing), 1 in Thing, list(Thing)

    return body, Meta.made


def case_class_made_in_the_step():
    registry = []

    def body():
        class Base:
            kinds = []

            def __init_subclass__(cls, tag="none", **kwargs):
                super().__init_subclass__(**kwargs)
                cls.kinds.append((cls.__name__, tag))

        class Name:
            def __set_name__(self, owner, name):
                registry.append((owner.__name__, name))

        class Child(Base, tag="child"):
            field = Name()

            def __init__(self):
                self.x = len(self.kinds)

        Child.extra = 5
        made = Child()
        del Child.extra
        return made.x, Base.kinds, hasattr(Child, "extra"), Child.__mro__[1].__name__, __class__ if False else None

    return body, registry


def case_init_subclass_of_an_outside_base():
    class Plugin:
        known = []

        def __init_subclass__(cls):
            cls.known.append(cls.__name__)

    def body():
        class Local(Plugin):
            pass

        return len(Plugin.known)

    return body, Plugin.known


def case_dataclasses_in_and_out():
    @dataclasses.dataclass
    class Config:
        rate: float
        tags: list = dataclasses.field(default_factory=list)

    @dataclasses.dataclass(frozen=True, order=True)
    class Key:
        a: int
        b: str = "x"

    @dataclasses.dataclass(slots=True)
    class Slim:
        n: int = 0

    config, slim, table = Config(0.5), Slim(), {}

    def body():
        config.tags.append(len(config.tags))
        slim.n += 1
        table[Key(slim.n)] = slim.n
        try:
            Key(1).a = 2
        except dataclasses.FrozenInstanceError as error:
            refused = str(error)
        changed = dataclasses.replace(config, rate=1.0)
        names = [field.name for field in dataclasses.fields(config)]
        return (
            config == Config(0.5, list(config.tags)), changed.rate, names, refused, Key(1) < Key(2),
            dataclasses.asdict(config), dataclasses.astuple(slim), repr(Key(3)), hash(Key(1)) == hash(Key(1)),
        )  # fmt: skip

    return body, (config, slim, table)


def case_dataclass_made_in_the_step():
    def body():
        @dataclasses.dataclass(order=True)
        class Pair:
            a: int
            b: int = 2

        @dataclasses.dataclass(frozen=True, slots=True)
        class Frozen:
            x: int

        return repr(Pair(1)), Pair(1) < Pair(2), Pair(1) == Pair(1, 2), Frozen(3).x, hash(Frozen(3)) == hash((3,))

    return body, None


class Bits(enum.Flag):
    A = 1
    B = 2
    C = A | B


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


def case_enums():
    counts = collections.Counter()
    seen = {}

    def body():
        for color in Color:
            counts[color] += 1
            seen[color.label] = color
        return (
            Color(1) is Color.RED, Color["GREEN"].label, Bits.A | Bits.B is Bits.C, Bits.A in Bits.C, Level.HIGH > 1,
            Level(2).name, [c.value for c in Color], repr(Color.RED), f"{Level.LOW}", Color.RED in seen.values(),
            isinstance(Color.RED, Color), list(Bits.C),
        )  # fmt: skip

    return body, (counts, seen)


class Pair(NamedTuple):
    a: int
    b: list

    def total(self):
        return self.a + len(self.b)


def case_namedtuples():
    Point = collections.namedtuple("Point", "x y", defaults=[0])
    pair = Pair(1, [])

    def body():
        pair.b.append(pair.total())
        a, b = pair
        point = Point(2)._replace(y=5)
        return a, b, pair.total(), tuple(point), point.x, point._asdict(), Pair._fields, repr(point), pair[1] is pair.b

    return body, pair


def case_singledispatch():
    log = []

    @functools.singledispatch
    def show(value):
        log.append("any")
        return "any"

    @show.register
    def _(value: int):
        log.append("int")
        return "int"

    @show.register(list)
    def _(value):
        log.append("list")
        return "list"

    class Shower:
        @functools.singledispatchmethod
        def show(self, value):
            return "any"

        @show.register
        def _(self, value: str):
            return "str"

    shower = Shower()

    def body():
        return show(1), show([]), show("s"), show(True), shower.show("s"), shower.show(1)

    return body, log


def case_total_ordering():
    @functools.total_ordering
    class Version:
        def __init__(self, n):
            self.n = n

        def __eq__(self, other):
            return self.n == other.n

        def __lt__(self, other):
            return self.n < other.n

    one, two = Version(1), Version(2)

    def body():
        return one <= two, one >= two, one > two, sorted([two, one])[0] is one, max(one, two) is two

    return body, None


def case_abstract_and_runtime_protocols():
    import abc
    from collections.abc import Iterable, Mapping, Sized

    class Shape(abc.ABC):
        @abc.abstractmethod
        def area(self): ...

        @classmethod
        def __subclasshook__(cls, other):
            return NotImplemented

    class Square(Shape):
        def area(self):
            return 4

    Shape.register(int)
    square = Square()

    class Sizes:
        def __len__(self):
            return 2

    def body():
        try:
            Shape()
        except TypeError as error:
            refused = str(error)
        return (
            square.area(), isinstance(square, Shape), isinstance(3, Shape), issubclass(Square, Shape),
            isinstance(Sizes(), Sized), isinstance({}, Mapping), isinstance(3, Iterable), refused,
        )  # fmt: skip

    return body, None


def test_class_changed_between_calls():
    """An object's class is guarded in addition to its identity."""

    class A:
        def name(self):
            return "A"

    class B(A):
        def name(self):
            return "B"

    obj = A()
    step = compiled(lambda: obj.name())
    assert step() == "A"
    obj.__class__ = B
    assert step() == "B"


@pytest.mark.parametrize("case", cases(globals()), ids=lambda case: case.__name__.removeprefix("case_"))
def test_three_ways(case):
    check_case(case)
