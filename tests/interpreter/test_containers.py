"""Lists, dicts, sets, tuples and containers of users: the interpreter agrees with CPython."""

from __future__ import annotations

import collections

import pytest

from tests.support.interpreter import bodies, check
from tests.support.interpreter_values import Num


def body_hash_and_eq_in_containers():
    d = {Num(1): "one"}
    return d[Num(1)], Num(1) in d, Num(2) in d, len({Num(1), Num(1), Num(2)}), hash(Num(5)) == hash(5)


def body_unhashable():
    class A:
        def __eq__(self, o):
            return True

    hash(A())


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


@pytest.mark.parametrize("body", bodies(globals()), ids=lambda body: body.__name__)
def test_agrees_with_cpython(body):
    check(body)
