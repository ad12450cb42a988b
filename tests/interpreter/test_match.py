"""``match``: the interpreter agrees with CPython."""

from __future__ import annotations

import dataclasses

import pytest

from tests.support.interpreter import bodies, check


@dataclasses.dataclass
class P2:
    x: int
    y: int


def _match(value):
    match value:
        case None:
            return "none"
        case True | False:
            return "bool"
        case 0 | 1:
            return "small"
        case int(n) if n < 0:
            return f"negative {n}"
        case int() | float():
            return "number"
        case "a" | "b" as letter:
            return f"letter {letter}"
        case str(s):
            return f"text {s}"
        case []:
            return "empty"
        case [x]:
            return f"one {x}"
        case [P2(x=0), *_]:
            return "list with point"
        case [first, *middle, last]:
            return f"{first} {middle} {last}"
        case {"kind": "point", "x": x, **rest}:
            return f"point {x} {sorted(rest)}"
        case {}:
            return "mapping"
        case P2(0, y):
            return f"on axis {y}"
        case P2(x, y) if x == y:
            return "diagonal"
        case P2():
            return "a point"
        case _:
            return "other"


def body_match_all():
    values = [
        None, True, 1, -4, 9, 2.5, "a", "zz", [], [1], (1, 2, 3), [P2(0, 1), 2], {"kind": "point", "x": 1, "z": 2},
        {"q": 1}, {}, P2(0, 3), P2(2, 2), P2(1, 2), object, {1, 2}, b"x",
    ]  # fmt: skip
    return [_match(v) for v in values]


def body_match_dotted_names():
    class C:
        A = 1
        B = 2

    def f(v):
        match v:
            case C.A:
                return "A"
            case C.B:
                return "B"

    return f(1), f(2), f(3)


def body_match_nested():
    match {"a": [1, {"b": (2, 3)}]}:
        case {"a": [int(x), {"b": (y, z)}]}:
            return x, y, z


def body_match_too_many_positional():
    match P2(1, 2):
        case P2(a, b, c):
            return a, b, c


def body_match_attribute_twice():
    match P2(1, 2):
        case P2(1, x=1):
            return 1


def body_match_no_match_args():
    class C:
        pass

    match C():
        case C(1):
            return 1


def body_match_sequence_kinds():
    def f(v):
        match v:
            case [a, b]:
                return a, b
        return "no"

    return f((1, 2)), f(range(2)), f("ab"), f(b"ab"), f({1: 2}), f(iter([1, 2]))


def body_match_custom_mapping():
    import collections

    match collections.OrderedDict(a=1, b=2):
        case {"a": a, **rest}:
            return a, rest


@pytest.mark.parametrize("body", bodies(globals()), ids=lambda body: body.__name__)
def test_agrees_with_cpython(body):
    check(body)
