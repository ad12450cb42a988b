"""Dataclasses, enums and named tuples: the interpreter agrees with CPython."""

from __future__ import annotations

import collections
import dataclasses
import enum
import typing

import pytest

from tests.support.interpreter import bodies, check


def body_dataclass():
    @dataclasses.dataclass(order=True)
    class P:
        x: int
        y: int = 0
        tags: list = dataclasses.field(default_factory=list, compare=False)

        def __post_init__(self):
            self.total = self.x + self.y

    a, b = P(1, 2), P(1)
    a.tags.append(1)
    return (
        str(a),
        a > b,
        a == P(1, 2),
        a.total,
        dataclasses.asdict(a),
        dataclasses.replace(a, y=5).total,
        repr(b),
        b.tags,
    )


def body_dataclass_frozen():
    @dataclasses.dataclass(frozen=True)
    class P:
        x: int

    p = P(1)
    assert hash(p) == hash(P(1))
    p.x = 2


def body_dataclass_inheritance():
    @dataclasses.dataclass
    class A:
        x: int = 1

    @dataclasses.dataclass(kw_only=True)
    class B(A):
        y: str = "b"

        def both(self):
            return f"{self.x}{self.y}"

    return B().both(), str(B(5, y="q")), [f.name for f in dataclasses.fields(B)]


def body_enum():
    class Color(enum.Enum):
        RED = 1
        GREEN = "g"

        def low(self):
            return self.name.lower()

        @property
        def twice(self):
            return self.value * 2

    return (
        Color.RED.name, Color("g").low(), Color["RED"].twice, [c.name for c in Color], Color.RED is Color(1),
        Color.RED == 1, Color.GREEN in Color, len(Color), repr(Color.RED), str(Color.GREEN),
    )  # fmt: skip


def body_enum_kinds():
    class F(enum.Flag):
        A = enum.auto()
        B = enum.auto()
        AB = A | B

    class N(enum.IntEnum):
        ONE = 1
        TWO = 2

    class S(str, enum.Enum):
        X = "x"

    return F.A | F.B is F.AB, (F.AB & F.B).name, N.ONE + N.TWO, N(2) > 1, S.X == "x", f"{N.TWO}", F.A in F.AB


def body_enum_unknown():
    class Color(enum.Enum):
        RED = 1

    Color(9)


def body_namedtuple():
    P = collections.namedtuple("P", "x y", defaults=[7])
    p = P(1)

    class Q(typing.NamedTuple):
        a: int
        b: str = "z"

        def hello(self):
            return f"{self.a}{self.b}"

    return p, p.y, p._replace(x=5), p._asdict(), Q(3).hello(), Q(1, "b").b, P._make([8, 9]), P._fields


@pytest.mark.parametrize("body", bodies(globals()), ids=lambda body: body.__name__)
def test_agrees_with_cpython(body):
    check(body)
