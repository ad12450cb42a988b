"""Iteration, item access and builtin functions: the interpreter agrees with CPython."""

from __future__ import annotations

import functools
import itertools
import operator

import pytest

from tests.support.interpreter import bodies, check
from tests.support.interpreter_values import Box, Num


def body_container_protocol():
    b = Box(1, 2, 3)
    b[0] = 9
    del b[1]
    b[0:1] = [7]
    return b[0], b[-1], len(b), 3 in b, 8 in b, b.items, [x for x in b], list(reversed(b)), b.log


def body_getitem_iteration_only():
    class A:
        def __getitem__(self, i):
            if i > 3:
                raise IndexError
            return i * i

    return list(A()), 4 in A(), [x for x in A()], tuple(zip(A(), "ab")), sum(A()), max(A())


def body_contains_by_iter():
    class A:
        def __iter__(self):
            return iter([Num(1), Num(2)])

    return Num(2) in A(), Num(3) in A(), 5 not in A()


def body_contains_not_iterable():
    return 1 in 3


def body_not_subscriptable():
    return (3)[0]


def body_item_assignment_unsupported():
    (1, 2)[0] = 3


def body_iterator_class():
    class Count:
        def __init__(self, n):
            self.n = n

        def __iter__(self):
            return self

        def __next__(self):
            if self.n <= 0:
                raise StopIteration
            self.n -= 1
            return self.n

    a, b, *c = Count(4)
    return (
        list(Count(3)), [*Count(2)], a, b, c, next(Count(5)), next(Count(0), "none"), 1 in Count(3), sorted(Count(3)),
        list(map(str, Count(2))), list(zip(Count(2), Count(3))), dict(zip("ab", Count(2))), set(Count(3)),
        list(itertools.chain(Count(2), Count(1))), list(enumerate(Count(2))), " ".join(str(i) for i in Count(3)),
    )  # fmt: skip


def body_iter_not_iterable():
    for _ in 3:
        pass


def body_iter_returns_non_iterator():
    class A:
        def __iter__(self):
            return 3

    for _ in A():
        pass


def body_iter_sentinel():
    xs = [3, 2, 1, 0, 5]
    return list(iter(lambda: xs.pop(0), 0)), xs


def body_next_not_iterator():
    next([1])


def body_next_exhausted():
    next(iter([]))


def body_call_next_default():
    it = iter([1])
    return next(it, "x"), next(it, "x")


def body_sorted_keys():
    words = ["pear", "fig", "apple"]
    return (
        sorted(words, key=len), sorted(words, key=lambda w: w[-1], reverse=True), sorted([Num(3), Num(1)]),
        sorted([Num(3), Num(1)], reverse=True), sorted([(2, "b"), (1, "z"), (2, "a")]), sorted({"b": 1, "a": 2}),
        sorted(words, key=functools.cmp_to_key(lambda a, b: (a > b) - (a < b))),
    )  # fmt: skip


def body_sort_stability_and_in_place():
    xs = [(1, "b"), (0, "z"), (1, "a")]
    xs.sort(key=lambda t: t[0])
    ys = [Num(2), Num(1)]
    result = ys.sort()
    return xs, ys, result


def body_sort_unorderable():
    sorted([1, "a"])


def body_sort_modified():
    xs = [3, 1, 2]
    xs.sort(key=lambda v: xs.append(v) or v)


def body_min_max():
    return (
        min(3, 1, 2), max([3, 1, 2]), min("bca"), max(["a", "bbb", "cc"], key=len), min([], default=7),
        max(Num(1), Num(5)), min([Num(4), Num(2)], key=lambda n: -n.v), max({"a": 1, "b": 2}, key={"a": 1, "b": 2}.get),
    )  # fmt: skip


def body_min_empty():
    min([])


def body_sum_kinds():
    return sum([1, 2]), sum([0.1] * 10), sum([[1], [2]], []), sum([Num(1), Num(2)], Num(0)), sum(x for x in (1, 2))


def body_sum_strings():
    sum(["a"], "")


def body_any_all():
    seen = []

    def f(x):
        seen.append(x)
        return Num(x)

    return any(f(x) for x in (0, 1, 2)), all(f(x) for x in (1, 0, 5)), any([]), all([]), seen


def body_map_filter_zip():
    class Scale:
        def __call__(self, x):
            return x * 3

    return (
        list(map(lambda x, y: x + y, [1, 2], [3, 4])), list(map(Scale(), [1, 2])), list(map(Num, [1, 2])),
        list(filter(lambda x: x % 2, range(5))), list(filter(None, [0, 1, ""])), list(map(str.upper, "ab")),
        list(zip("ab", [1, 2])), list(zip([1], [1, 2], strict=False)), list(map(operator.add, [1], [2])),
    )  # fmt: skip


def body_zip_strict():
    list(zip([1], [1, 2], strict=True))


def body_enumerate_reversed():
    return list(enumerate("ab", 5)), list(reversed([1, 2])), list(reversed(range(3))), list(reversed({"a": 1}))


def body_reversed_dunder():
    class A:
        def __reversed__(self):
            return iter("xyz")

    return list(reversed(A()))


def body_getattr_family():
    class A:
        x = 1

        @property
        def bad(self):
            raise ValueError("property failed")

    a = A()
    out = [getattr(a, "x"), getattr(a, "y", None), hasattr(a, "x"), hasattr(a, "y")]
    setattr(a, "y", 2)
    out.append(a.y)
    delattr(a, "y")
    out.append(hasattr(a, "y"))
    try:
        hasattr(a, "bad")
    except ValueError as e:
        out.append(str(e))
    return out


def body_getattr_not_a_string():
    getattr(3, 5)


def body_divmod_pow_round():
    n = Num(1)
    return divmod(7, 2), divmod(n, 2), divmod(2, n), pow(2, 5), pow(2, 5, 7), pow(n, 3), round(2.567, 1), round(3.5)


def body_itertools():
    return (
        list(itertools.accumulate([1, 2, 3], lambda a, b: a * b)), [(k, list(g)) for k, g in
        itertools.groupby("aabb")], list(itertools.product("ab", repeat=2))[:2], list(itertools.starmap(pow, [(2, 3)])),
        list(itertools.dropwhile(lambda x: x < 2, range(4))), list(itertools.combinations("abc", 2)),
        list(itertools.filterfalse(lambda x: x % 2, range(4))), list(itertools.zip_longest("ab", "c", fillvalue="-")),
        [(k, list(g)) for k, g in itertools.groupby(range(5), key=lambda x: x // 2)], list(itertools.pairwise("abc")),
        list(itertools.chain.from_iterable([x, x] for x in "ab")), list(itertools.repeat(1, 2)),
    )  # fmt: skip


def body_del_items():
    d = {"a": 1, "b": 2}
    xs = [1, 2, 3, 4]
    del d["a"], xs[0], xs[-1:]
    return d, xs


def body_del_missing_key():
    d = {}
    del d["a"]


@pytest.mark.parametrize("body", bodies(globals()), ids=lambda body: body.__name__)
def test_agrees_with_cpython(body):
    check(body)
