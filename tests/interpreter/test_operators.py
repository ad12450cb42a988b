"""Operators, dunder methods, builtins with callbacks, containers, f-strings: the interpreter agrees with CPython."""

from __future__ import annotations

import collections
import functools
import itertools
import math
import operator

import pytest

from tests.support.interpreter import bodies, check

OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "@", "&", "|", "^", "<<", ">>")


class Logged:
    """Every binary operator returns its own name."""

    def __init__(self, name):
        self.name = name


def _add_operators():
    for word in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split():
        for form in ("", "r", "i"):
            name = f"__{form}{word}__"
            setattr(Logged, name, lambda self, other, name=name: (self.name, name, getattr(other, "name", other)))


_add_operators()


class Half:
    """Supports only numbers as its right operand."""

    def __add__(self, other):
        return ("add", other) if isinstance(other, int) else NotImplemented

    def __lt__(self, other):
        return True if isinstance(other, int) else NotImplemented


class Num:
    def __init__(self, v):
        self.v = v

    def __eq__(self, o):
        return self.v == o.v if isinstance(o, Num) else NotImplemented

    def __lt__(self, o):
        return self.v < o.v if isinstance(o, Num) else NotImplemented

    def __hash__(self):
        return hash(self.v)

    def __repr__(self):
        return f"Num({self.v})"

    def __bool__(self):
        return self.v != 0

    def __index__(self):
        return self.v

    def __int__(self):
        return self.v

    def __float__(self):
        return float(self.v)

    def __neg__(self):
        return Num(-self.v)

    def __pos__(self):
        return Num(self.v)

    def __invert__(self):
        return Num(~self.v)

    def __abs__(self):
        return Num(abs(self.v))

    def __round__(self, n=None):
        return ("round", n)

    def __add__(self, o):
        return Num(self.v + (o.v if isinstance(o, Num) else o))

    def __radd__(self, o):
        return Num(o + self.v)

    def __mod__(self, o):
        return ("mod", o)

    def __divmod__(self, o):
        return ("divmod", o)

    def __rdivmod__(self, o):
        return ("rdivmod", o)

    def __pow__(self, o, m=None):
        return ("pow", o, m)

    def __format__(self, spec):
        return f"<{self.v}:{spec}>"


class Box:
    def __init__(self, *items):
        self.items = list(items)
        self.log = []

    def __getitem__(self, k):
        self.log.append(("get", k))
        return self.items[k]

    def __setitem__(self, k, v):
        self.log.append(("set", k, v))
        self.items[k] = v

    def __delitem__(self, k):
        self.log.append(("del", k))
        del self.items[k]

    def __len__(self):
        return len(self.items)

    def __contains__(self, x):
        self.log.append(("in", x))
        return x in self.items


def body_arithmetic():
    a, b = 17, 5
    return a + b, a - b, a * b, a / b, a // b, a % b, a**b, a & b, a | b, a ^ b, a << b, a >> b, -a, +a, ~a, not a


def body_inplace():
    a = 10
    a += 1
    a -= 2
    a *= 3
    a //= 2
    a **= 2
    a %= 100
    a <<= 2
    a >>= 1
    a |= 1
    a &= 255
    a ^= 3
    b = 7
    b /= 2
    xs = ys = [1]
    xs += [2]
    xs *= 2
    return a, b, xs, xs is ys


def body_inplace_evaluates_once():
    log = []

    def at(i):
        log.append(i)
        return i

    xs = [1, 2]
    xs[at(0)] += 5
    return xs, log


def body_reflected_all():
    a, b = Logged("a"), Logged("b")
    return [
        a + b, 1 + a, a + 1, a - b, 2 - a, a * b, "s" * a, [1] + a, a / 2, 2 / a, a // b, 3 // a, a % b, 4 % a,
        a**b, 2**a, a @ b, [1] @ a, a & 1, 1 & a, a | 1, 1 | a, a ^ 1, 1 ^ a, a << 1, 1 << a, a >> 1,
        1 >> a,
    ]  # fmt: skip


def body_inplace_dunders():
    out = []
    for text in OPERATORS:
        space = {"a": Logged("a")}
        exec(f"a {text}= 5", space)
        out.append(space["a"] if type(space["a"]) is tuple else type(space["a"]).__name__)
    return out


def body_inplace_falls_back():
    x = Num(1)
    x += Num(2)
    y = 5
    y += Num(1)
    return x, y


def body_not_implemented_both():
    Half() + "a"


def body_not_implemented_inplace():
    h = Half()
    h -= 1


def body_not_implemented_falls_to_right():
    class R:
        def __radd__(self, o):
            return "radd"

    return Half() + R(), Half() + 1


def body_subclass_reflected_first():
    class A:
        def __add__(self, o):
            return "A.add"

        def __radd__(self, o):
            return "A.radd"

    class B(A):
        def __radd__(self, o):
            return "B.radd"

    class C(A):
        pass

    return A() + B(), A() + C(), B() + A(), A() + A()


def body_unary():
    n = Num(3)
    return -n, +n, ~n, abs(Num(-4)), round(n), round(n, 2), bool(Num(0)), not n


def body_conversions():
    n = Num(3)
    return int(n), float(n), [0, 1, 2, 3][n], list(range(n)), operator.index(n), complex(1, 2), "ab" * 2, hex(255)


def body_conversion_wrong_type():
    class A:
        def __int__(self):
            return "x"

    int(A())


def body_bool_wrong_type():
    class A:
        def __bool__(self):
            return 1

    if A():
        pass


def body_len_wrong():
    class A:
        def __len__(self):
            return -1

    len(A())


def body_len_not_int():
    class A:
        def __len__(self):
            return "x"

    len(A())


def body_len_missing():
    len(3)


def body_truth_by_len():
    class A:
        def __init__(self, n):
            self.n = n

        def __len__(self):
            return self.n

    return bool(A(0)), bool(A(2)), [1 if A(0) else 2], not A(1), bool(A(0) and 1), (A(0) or "x")


def body_comparisons():
    a, b = Num(1), Num(2)
    return a < b, a > b, a == Num(1), a != b, a == 1, a != 1, [a] == [Num(1)], (a, b) < (a, Num(3)), a in [Num(1)]


def body_comparison_unsupported():
    Num(1) < 5


def body_comparison_unsupported_builtin():
    return 1 < "a"


def body_comparison_default_eq():
    class A:
        pass

    a = A()
    return a == a, a == A(), a != A(), a is a, a is not A()


def body_comparison_ne_from_eq():
    class A:
        def __eq__(self, o):
            return "yes"

    return A() == 1, A() != 1


def body_comparison_returns_object():
    class A:
        def __lt__(self, o):
            return [o]

        def __eq__(self, o):
            return {}

    return A() < 1, 1 > A(), A() == 2, 2 == A()


def body_comparison_chain():
    calls = []

    def f(x):
        calls.append(x)
        return x

    return f(1) < f(3) < f(2) < f(9), calls


def body_reflected_comparison_subclass():
    class A:
        def __lt__(self, o):
            return "A.lt"

        def __gt__(self, o):
            return "A.gt"

    class B(A):
        def __gt__(self, o):
            return "B.gt"

    return A() < B(), A() < A(), B() < A()


def body_hash_and_eq_in_containers():
    d = {Num(1): "one"}
    return d[Num(1)], Num(1) in d, Num(2) in d, len({Num(1), Num(1), Num(2)}), hash(Num(5)) == hash(5)


def body_unhashable():
    class A:
        def __eq__(self, o):
            return True

    hash(A())


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


def body_str_repr():
    class A:
        def __str__(self):
            return "str"

        def __repr__(self):
            return "repr"

    class B:
        def __repr__(self):
            return "only repr"

    class C(A):
        pass

    return str(A()), repr(A()), str(B()), str(C()), [A()].__repr__(), str([B()]), ascii(B()), "%s %r" % (A(), A())


def body_str_wrong_type():
    class A:
        def __str__(self):
            return 3

    str(A())


def body_fstrings():
    n, x, w = Num(3), 3.14159, 10
    name = "é"
    return (
        f"{n}", f"{n:>5}", f"{x:.2f}", f"{x:{w}.{2}f}|", f"{name!r} {name!a} {name!s:>4}", f"{n=}", f"{x=:.1f}",
        f"{'nested ' + f'{w}'}", "{literal}", f"{[1, 2]}", f"{None} {True}", f"{w:,} {w:#x} {w:08b}", f"{w!r:^6}|",
    )  # fmt: skip


def body_fstring_order():
    log = []

    class A:
        def __init__(self, n):
            self.n = n

        def __format__(self, spec):
            log.append((self.n, spec))
            return str(self.n)

    return f"{A(1)}{A(2):x}{A(3)!s:.0}", log


def body_fstring_bad_spec():
    return f"{'a':d}"


def body_format_method():
    n = Num(3)
    return "{} {1} {k:>4} {k!r} {d[a]} {n.v}".replace("{}", "{0}").format(n, 2, k=n, d={"a": 5}, n=n), format(n, "zz")


def body_percent_format():
    return "%s-%d-%.2f-%r-%%" % ("a", 3, 2.5, "q"), "%(a)s" % {"a": 1}, "%5s|%-5s|" % ("x", "y")


def body_string_methods():
    return "a,b".split(","), "-".join(["a", "b"]), " x ".strip(), "abc"[::-1], "abc".find("c"), "x".zfill(3)


def body_list_methods():
    xs = [3, 1]
    xs.append(2)
    xs.extend((5, 6))
    xs.extend(i for i in range(2))
    xs.insert(0, 9)
    popped = xs.pop()
    xs.remove(5)
    xs.reverse()
    ys = xs.copy()
    ys.clear()
    return xs, popped, xs.index(9), xs.count(1), ys, xs[1:3], xs[::-2]


def body_list_of_objects():
    xs = [Num(1), Num(2), Num(3)]
    index = xs.index(Num(2))
    xs.remove(Num(1))
    return index, xs, xs.count(Num(3)), Num(9) in xs


def body_list_remove_missing():
    [1, 2].remove(3)


def body_list_keeps_functions():
    def f():
        return 1

    xs = [lambda: 2]
    xs.append(f)
    d = {}
    d["f"] = f
    d.setdefault("g", f)
    return f in xs, xs.index(f), d["f"] is f, d["g"] is f, [g() for g in xs], {f: 1}[f], (f,).count(f)


def body_slice_assignment():
    xs = list(range(6))
    xs[1:3] = [9]
    xs[::2] = [0] * len(xs[::2])
    del xs[-1:]
    xs[1:1] = (i for i in "ab")
    return xs


def body_dict_methods():
    d = {"a": 1}
    d.update(b=2)
    d.update([("c", 3)])
    d |= {"d": 4}
    first = d.pop("a")
    return (
        d, first, d.get("z", 0), d.setdefault("e", []), list(d.items()), d | {"x": 1}, d.keys() & {"b", "q"},
        dict(zip("ab", range(2))), {**d}, dict(a=1), dict({"k": 2}, m=3), "b" in d, d.popitem(), len(d),
    )  # fmt: skip


def body_dict_missing_and_default():
    class D(dict):
        def __missing__(self, k):
            self[k] = k * 2
            return self[k]

    d = D()
    e = collections.defaultdict(list)
    e["a"].append(1)
    f = collections.defaultdict(lambda: 7)
    return d["x"], d, e, f["q"], dict(f)


def body_dict_from_mapping_class():
    class M:
        def keys(self):
            return ["a", "b"]

        def __getitem__(self, k):
            return k * 2

    def f(**k):
        return k

    return dict(M()), {**M()}, f(**M())


def body_dict_order_and_views():
    d = {"z": 1, "a": 2}
    keys = d.keys()
    d["m"] = 3
    return list(keys), list(d.values()), list(reversed(d)), d == {"a": 2, "z": 1, "m": 3}


def body_set_operations():
    a, b = {1, 2, 3}, {2, 5}
    c = a.copy()
    c.add(9)
    c.discard(1)
    c |= {7}
    return (
        a | b,
        a & b,
        a - b,
        a ^ b,
        a <= {1, 2, 3, 4},
        c,
        a.isdisjoint({8}),
        frozenset(a) == a,
        a.union(x for x in "a"),
    )


def body_tuple_operations():
    t = (1, 2) + (3,)
    return t, t * 2, t[1:], t.index(2), t.count(3), (1, 2) < (1, 3), hash(t) == hash((1, 2, 3)), *t


def body_deque_counter_ordered():
    q = collections.deque([1, 2], maxlen=3)
    q.append(3)
    q.appendleft(0)
    c = collections.Counter("abca")
    c.update("b")
    o = collections.OrderedDict(a=1, b=2)
    o.move_to_end("a")
    m = collections.ChainMap({"x": 1}, {"y": 2})
    return list(q), c.most_common(2), list(o), m["y"], c["q"], collections.Counter(a=1) + collections.Counter(a=2)


def body_user_containers():
    class L(collections.UserList):
        pass

    class D(collections.UserDict):
        def __setitem__(self, k, v):
            super().__setitem__(k, v * 2)

    d = D(a=1)
    d["b"] = 2
    xs = L([3, 1, 2])
    xs.sort()
    return d.data, xs.data, xs + [4] == [1, 2, 3, 4], len(d), "a" in d, d.get("z")


def body_abstract_sequence():
    class S(collections.abc.Sequence):
        def __init__(self, n):
            self.n = n

        def __len__(self):
            return self.n

        def __getitem__(self, i):
            if not 0 <= i < self.n:
                raise IndexError(i)
            return i * 10

    s = S(3)
    return list(s), 10 in s, s.index(20), s.count(0), list(reversed(s)), isinstance(s, collections.abc.Sequence)


def body_abstract_mapping():
    class M(collections.abc.MutableMapping):
        def __init__(self):
            self.d = {}

        def __getitem__(self, k):
            return self.d[k]

        def __setitem__(self, k, v):
            self.d[k] = v

        def __delitem__(self, k):
            del self.d[k]

        def __iter__(self):
            return iter(self.d)

        def __len__(self):
            return len(self.d)

    m = M()
    m["a"] = 1
    m.update(b=2)
    return dict(m), m.pop("a"), list(m.items()), m.setdefault("c", 5), "b" in m, m == {"b": 2, "c": 5}, m.get("q")


def body_itertools():
    return (
        list(itertools.accumulate([1, 2, 3], lambda a, b: a * b)), [(k, list(g)) for k, g in
        itertools.groupby("aabb")], list(itertools.product("ab", repeat=2))[:2], list(itertools.starmap(pow, [(2, 3)])),
        list(itertools.dropwhile(lambda x: x < 2, range(4))), list(itertools.combinations("abc", 2)),
        list(itertools.filterfalse(lambda x: x % 2, range(4))), list(itertools.zip_longest("ab", "c", fillvalue="-")),
        [(k, list(g)) for k, g in itertools.groupby(range(5), key=lambda x: x // 2)], list(itertools.pairwise("abc")),
        list(itertools.chain.from_iterable([x, x] for x in "ab")), list(itertools.repeat(1, 2)),
    )  # fmt: skip


def body_operator_module():
    class A:
        v = 3

    return (
        operator.add(Num(1), 2), operator.attrgetter("v")(A()), operator.itemgetter(1)([4, 5]),
        operator.lt(Num(1), Num(2)),
        operator.methodcaller("upper")("a"), operator.not_(Num(0)), operator.getitem([1], 0), operator.concat([1], [2]),
    )  # fmt: skip


def body_math_dunders():
    class A:
        def __floor__(self):
            return "floor"

        def __ceil__(self):
            return "ceil"

        def __trunc__(self):
            return "trunc"

    return math.floor(A()), math.ceil(A()), math.trunc(A()), math.floor(2.5), math.sqrt(Num(9))


def body_matmul():
    class M:
        def __init__(self, v):
            self.v = v

        def __matmul__(self, o):
            return self.v * o.v

        def __imatmul__(self, o):
            self.v = -self.v
            return self

    a = M(2)
    product = a @ M(5)
    b = a
    a @= M(1)
    return product, a.v, a is b


def body_operators_as_none():
    class A:
        __add__ = None

    A() + 1


def body_getattr_only_on_class_for_operators():
    class A:
        def __getattr__(self, name):
            return lambda *a: 42

    A() + 1


def body_bool_short_circuit():
    log = []

    def f(name, value):
        log.append(name)
        return value

    return f("a", 0) and f("b", 1), f("c", []) or f("d", "d"), f("e", 1) and f("f", 2) or f("g", 3), log


def body_del_items():
    d = {"a": 1, "b": 2}
    xs = [1, 2, 3, 4]
    del d["a"], xs[0], xs[-1:]
    return d, xs


def body_del_missing_key():
    d = {}
    del d["a"]


def body_string_building():
    out = ""
    for i in range(3):
        out += str(i) + ("," if i < 2 else "")
    return out, "".join(reversed(out)), out * 2, out.replace(",", "")


def body_numbers():
    return 0.1 + 0.2, 1e300 * 1e10, -7 // 2, -7 % 3, 2**100, 1j * 1j, True + True, int("ff", 16), float("inf"), 5 // 2.0


def body_ternary_and_lambda_default():
    fs = {n: (lambda x, n=n: x**n) for n in range(3)}
    return [fs[n](3) for n in fs], (lambda: (yield))() is not None


def body_identity():
    x = None
    y = []
    return x is None, y is not None, y is y, y == [], ... is Ellipsis, NotImplemented is NotImplemented


def body_print_objects():
    class A:
        def __str__(self):
            return "an A"

    print(A(), [1], None, sep="|")
    print("%s" % A(), end="")


@pytest.mark.parametrize("body", bodies(globals()), ids=lambda body: body.__name__)
def test_agrees_with_cpython(body):
    check(body)
