"""Special methods of objects that exist before the step, called by C code and by operators, run in three ways."""

from __future__ import annotations

import functools
import itertools
import operator

import pytest

from tests.support.interpreter_compiled import cases, check_case, check_refused


class Noisy:
    """Its special methods append to a list that exists outside."""

    def __init__(self, value, log):
        self.value = value
        self.log = log

    def twice(self):
        return self.value * 2

    def __hash__(self):
        self.log.append(("hash", self.value))
        return hash(self.value)

    def __eq__(self, other):
        self.log.append(("eq", self.value))
        return isinstance(other, Noisy) and self.value == other.value

    def __lt__(self, other):
        self.log.append(("lt", self.value))
        return self.value < other.value

    def __repr__(self):
        self.log.append(("repr", self.value))
        return f"Noisy({self.value})"


def case_hash_and_eq_of_new_keys():
    log = []

    def body():
        table = {Noisy(1, log): "a", Noisy(2, log): "b"}
        return table[Noisy(2, log)], Noisy(3, log) in table, table.get(Noisy(1, log))

    return body, log


def refused_hash_and_eq_of_old_keys():
    log = []
    keys = [Noisy(1, log), Noisy(2, log)]
    table = {key: key.value for key in keys}
    log.clear()

    def body():
        return table[keys[0]], table.get(keys[1]), keys[0] in table

    return body, (log, keys)


def case_hash_in_sets():
    log = []

    def body():
        some = {Noisy(1, log), Noisy(1, log), Noisy(2, log)}
        some.add(Noisy(2, log))
        some.discard(Noisy(7, log))
        return len(some), len(frozenset([Noisy(5, log), Noisy(5, log)]))

    return body, log


def case_hash_in_set_operators():
    log = []

    def body():
        left, right = {Noisy(1, log), Noisy(2, log)}, {Noisy(2, log), Noisy(3, log)}
        return sorted(n.value for n in left | right), [n.value for n in left & right], [n.value for n in left - right]

    return body, log


def case_lt_in_sorting():
    log = []
    items = [Noisy(n, log) for n in (3, 1, 2)]

    def body():
        items.sort()
        return [n.value for n in sorted(items, reverse=True)], min(items).value, max(items).value

    return body, (log, items)


def case_callbacks_see_the_objects_own_classes():
    log = []
    items = [Noisy(n, log) for n in (3, 1, 2)]

    def larger(a, b):
        log.append((type(a) is Noisy, isinstance(b, Noisy), a.twice()))
        return a if b < a else b

    def body():
        found = functools.reduce(larger, items)
        return found.value, found is items[0], type(found).__name__, list(itertools.accumulate(items, larger))[-1].value

    return body, (log, items)


def case_repr_in_containers():
    log = []
    items = [Noisy(1, log), Noisy(2, log)]

    def body():
        return repr(items), str({"k": items[0]}), f"{items!r} {(items[1],)}", "%r" % (items,), "{}".format(items)

    return body, (log, items)


def case_eq_in_containers():
    log = []
    items = [Noisy(1, log), Noisy(2, log)]

    def body():
        return (
            Noisy(2, log) in items,
            items.index(Noisy(2, log)),
            items.count(Noisy(1, log)),
            items == [Noisy(1, log), Noisy(2, log)],
            (Noisy(1, log),) == (Noisy(1, log),),
            {"k": Noisy(1, log)} == {"k": Noisy(1, log)},
            [Noisy(1, log)] < [Noisy(2, log)],
        )

    return body, (log, items)


def case_list_remove_with_eq():
    log = []
    items = [Noisy(1, log), Noisy(2, log), Noisy(1, log)]

    def body():
        items.append(Noisy(9, log))
        items.remove(Noisy(9, log))
        return len(items)

    return body, (log, items)


def case_missing_of_dict_subclass():
    class Table(dict):
        def __missing__(self, key):
            self[key] = len(self)
            return self[key]

    table = Table(a=7)

    def body():
        return table["a"], table["b"], table[len(table)], "zz" in table

    return body, table


def case_index_bool_len_float():
    log = []

    class Number:
        def __index__(self):
            log.append("index")
            return 1

        def __bool__(self):
            log.append("bool")
            return False

        def __len__(self):
            log.append("len")
            return 3

        def __float__(self):
            log.append("float")
            return 1.5

    number = Number()

    def body():
        return [5, 6][number], not number, len(number), float(number), range(3)[number], hex(number), "ab" * number

    return body, log


def case_iter_protocol():
    log = []

    class Count:
        def __init__(self, n):
            self.n = n

        def __iter__(self):
            log.append("iter")
            return self

        def __next__(self):
            log.append("next")
            self.n -= 1
            if self.n < 0:
                raise StopIteration
            return self.n

        def __length_hint__(self):
            log.append("hint")
            return self.n

    def body():
        first, *rest = Count(3)
        return first, rest, dict.fromkeys(Count(2)), sum(Count(3)), max(Count(2)), list(zip(Count(2), "ab"))

    return body, log


def case_getitem_iteration():
    log = []

    class Row:
        def __getitem__(self, index):
            log.append(index)
            return ["a", "b"][index]

    row = Row()

    def body():
        return list(row), "b" in row, [*row]

    return body, log


def case_operators_with_reflected_forms():
    log = []

    class Left:
        def __add__(self, other):
            log.append("add")
            return NotImplemented

        def __iadd__(self, other):
            log.append("iadd")
            return self

        def __matmul__(self, other):
            return "matmul"

        def __eq__(self, other):
            log.append("eq")
            return NotImplemented

        __hash__ = None

    class Right:
        def __radd__(self, other):
            log.append("radd")
            return "sum"

        def __rpow__(self, other):
            return "rpow"

        def __lt__(self, other):
            log.append("lt")
            return True

    left, right = Left(), Right()

    def body():
        value = left
        value += 1
        found = [left + right, value is left, left @ 1, left == right, 2**right, left > right, divmod(7, 2)]
        try:
            left - 1
        except TypeError as error:
            found.append(str(error))
        try:
            {left: 1}
        except TypeError as error:
            found.append(str(error))
        return found

    return body, log


def case_formatting():
    log = []

    class Money:
        def __format__(self, spec):
            log.append(spec)
            return f"<{spec}>"

        def __str__(self):
            return "money"

    money, width = Money(), 6

    def body():
        return (
            f"{money:>{width}} {money!s:>8} {3.14159:.2f} {width=} {1_000_000:,} {'q'!r}",
            "{:x} {0.real} {k[a]}".format if False else "{:x} {k[a]}".format(255, k={"a": 1}), format(money, "z"),
            "%s %5d|%-4s|%r" % (money, 3, "ab", "c"), str(money), "{0!s}{0:y}".format(money),
        )  # fmt: skip

    return body, log


def case_operator_objects():
    log = []

    class Point:
        def __init__(self, x):
            self.x = x

        @property
        def y(self):
            log.append("y")
            return -self.x

        def plus(self, n, by=1):
            return self.x + n * by

    points = [Point(3), Point(1)]

    def body():
        return (
            [p.x for p in sorted(points, key=operator.attrgetter("y"))],
            list(map(operator.methodcaller("plus", 2), points)), operator.methodcaller("plus", 2, by=3)(points[0]),
            list(map(operator.attrgetter("x", "y"), points)),
            operator.itemgetter(1, 0)("ab"), operator.attrgetter("x.real")(points[1]),
        )  # fmt: skip

    return body, log


@pytest.mark.parametrize("case", cases(globals(), "refused_"), ids=lambda case: case.__name__.removeprefix("refused_"))
def test_refused(case):
    """Code that is not captured gives a reason, and runs as before."""
    check_refused(case, "SFX111")


@pytest.mark.parametrize("case", cases(globals()), ids=lambda case: case.__name__.removeprefix("case_"))
def test_three_ways(case):
    check_case(case)
