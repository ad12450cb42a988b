"""Loops and comprehensions: the interpreter agrees with CPython."""

from __future__ import annotations

import pytest

from tests.support.interpreter import bodies, check


def body_loops():
    out = []
    for i in range(5):
        if i == 1:
            continue
        if i == 3:
            break
        out.append(i)
    else:
        out.append("never")
    while len(out) < 4:
        out.append(len(out))
    else:
        out.append("else")
    for i, (a, *b) in enumerate([(1, 2, 3), "xy"]):
        out.append((i, a, b))
    return out


def body_loop_over_changing_list():
    xs = [1, 2, 3]
    for x in xs:
        if x < 3:
            xs.append(x + 10)
    return xs


def body_loop_over_changing_dict():
    d = {1: 1}
    for k in d:
        d[k + 1] = 1


def body_comprehensions():
    xs = [[1, 2], [3]]
    return (
        [y for x in xs for y in x if y != 2], {k: v for k, v in zip("ab", (1, 2))}, {x % 3 for x in range(9)},
        [[j for j in range(i)] for i in range(3)], [(lambda: i)() for i in range(3)],
    )  # fmt: skip


def body_comprehension_scope():
    i = "kept"
    squares = [i * i for i in range(3)]
    return i, squares, [i for i in range(2)] + [i]


def body_comprehension_exception():
    return [1 // x for x in (1, 0)]


def body_comprehension_with_closure():
    def f(n):
        return [lambda x, i=i: x * i + n for i in range(3)]

    return [g(10) for g in f(1)]


def body_nested_functions_in_comprehension_condition():
    def ok(x):
        return x % 2

    return [x for x in range(6) if ok(x) if x > 1]


@pytest.mark.parametrize("body", bodies(globals()), ids=lambda body: body.__name__)
def test_agrees_with_cpython(body):
    check(body)
