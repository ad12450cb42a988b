"""Functions, closures and scopes that exist before the step, run in three ways."""

from __future__ import annotations

import collections
import functools
import itertools
import math
import re

import pytest

from tests.support.interpreter_compiled import cases, check_case, check_refused

TOTAL = 0


HISTORY = []


def case_globals_written():
    global TOTAL
    TOTAL = 0
    HISTORY.clear()

    def body():
        global TOTAL
        TOTAL += 2
        HISTORY.append(TOTAL)
        return TOTAL

    return body, HISTORY


def case_nonlocals_written():
    count, log = 0, []

    def bump(by=1):
        nonlocal count
        count += by
        log.append(count)
        return count

    def body():
        bump()
        bump(by=3)
        return count

    return body, log


def case_mutable_default_argument():
    def collect(item, into=[], *, also={}):  # noqa: B006
        into.append(item)
        also[item] = len(into)
        return len(into), dict(also)

    def body():
        return collect(1), collect(2, []), collect(3)

    return body, (collect.__defaults__, collect.__kwdefaults__)


def case_lru_cache_made_in_the_step():
    log = []

    def body():
        @functools.lru_cache(maxsize=None)
        def square(x):
            log.append(x)
            return [x * x]

        same = square(2) is square(2)
        square(3)
        info = square.cache_info()
        square.cache_clear()
        return same, info.hits, info.misses, square(2)

    return body, log


def case_lru_cache_outside():
    @functools.lru_cache
    def table(n):
        return tuple(range(n))

    def body():
        return table(3), table(3) is table(3), table(2)

    return body, None


def case_partial_objects():
    log = []

    def note(*args, **kwargs):
        log.append((args, tuple(kwargs.items())))
        return args

    bound = functools.partial(note, 1, key="a")

    def body():
        twice = functools.partial(bound, 2, other="b")
        return bound(5), twice(6, key="c"), list(map(functools.partial(note, 0), [1, 2])), bound.args, bound.keywords

    return body, log


def case_partialmethod_and_wraps():
    class Cell:
        def __init__(self):
            self.alive = False

        def set_state(self, state):
            self.alive = state
            return state

        on = functools.partialmethod(set_state, True)

    def traced(fn):
        @functools.wraps(fn)
        def inner(*args):
            inner.calls.append(args)
            return fn(*args)

        inner.calls = []
        return inner

    @traced
    def add(a, b):
        """Adds."""
        return a + b

    cell = Cell()

    def body():
        return cell.on(), add(1, 2), add.__name__, add.__doc__, add.__wrapped__(3, 4), len(add.calls)

    return body, (cell, add.calls)


def case_callbacks_of_c_functions():
    log = []

    def key(x):
        log.append(x)
        return -x

    data = [3, 1, 2]

    def body():
        data.sort(key=key)
        return (
            sorted(data, key=key), list(map(key, data)), list(filter(key, [0, 1])), max(data, key=key),
            re.sub(r"\d", lambda m: str(key(int(m.group()))), "a1b2"), functools.reduce(lambda a, b: a + key(b), data),
            [list(g) for _, g in itertools.groupby(data, key)], list(itertools.accumulate(data, lambda a, b: key(a))),
            list(itertools.takewhile(key, [1, 0])), sum(map(key, data)), any(map(key, data)),
            list(itertools.starmap(pow, [(2, 3)])), collections.defaultdict(lambda: key(1))["k"],
        )  # fmt: skip

    return body, (log, data)


def case_exec_and_eval():
    space = {"x": 3}

    def body():
        exec("y = x + 1\ndef double(v):\n    return v * 2\n", space)
        made = {}
        exec("z = [i * k for i in range(3)]", {"k": 2}, made)
        return space["y"], space["double"](5), made["z"], eval("x * y", space), eval("1 + 1")

    def watched():
        return None

    return body, watched


def case_imports_inside():
    def body():
        import math
        import os.path as p
        from collections import OrderedDict as Ordered
        from math import sqrt as root

        return math.floor(2.5), p.join("a", "b"), root(9.0), list(Ordered(a=1))

    return body, None


def case_comprehensions_and_scopes():
    log = []

    def body():
        squares = [log.append(i) or i * i for i in range(3)]
        pairs = {k: v for k, v in zip("ab", squares)}
        nested = [[j for j in range(i)] for i in range(3)]
        total = sum(last := n for n in squares)
        lazy = (log.append("lazy") or n for n in squares)
        next(lazy)
        return squares, pairs, nested, total, last, {n % 2 for n in squares}, list(lazy)

    return body, log


def case_argument_kinds():
    def f(a, b=2, /, c=3, *args, d, e=5, **kwargs):
        return a, b, c, args, d, e, kwargs

    options = {"d": 1, "z": 9}
    more = [7, 8]

    def body():
        found = [f(1, d=0), f(1, *more, **options), f(*more, c=1, d=2), f(1, 2, 3, 4, 5, d=6, e=7, y=8)]
        for bad in (lambda: f(), lambda: f(1), lambda: f(1, d=1, a=2, **{"d": 3}), lambda: f(**options)):
            try:
                found.append(bad())
            except TypeError as error:
                found.append(str(error))
        return found

    return body, (options, more)


def case_globals_as_a_dict():
    space = globals()
    space["TEMPORARY"] = 0

    def body():
        globals()["TEMPORARY"] += 1
        found = [globals()["TEMPORARY"], TEMPORARY, "TEMPORARY" in globals(), globals().get("nothing", 5)]  # noqa: F821
        globals()["OTHER"] = found[0]
        del globals()["OTHER"]
        return found, vars(math)["pi"]

    return body, None


def refused_globals_as_a_whole():
    def body():
        return len(globals()) > 0

    return body, None


def case_assert_and_del():
    values = {"n": 1}

    def body():
        x = values["n"]
        assert x, "never"
        del x
        try:
            return x
        except UnboundLocalError as error:
            text = str(error)
        try:
            assert not values, f"values {values}"
        except AssertionError as error:
            return text, str(error)

    return body, values


@pytest.mark.parametrize("case", cases(globals(), "refused_"), ids=lambda case: case.__name__.removeprefix("refused_"))
def test_refused(case):
    """Code that is not captured gives a reason, and runs as before."""
    check_refused(case, "SFX111")


@pytest.mark.parametrize("case", cases(globals()), ids=lambda case: case.__name__.removeprefix("case_"))
def test_three_ways(case):
    check_case(case)
