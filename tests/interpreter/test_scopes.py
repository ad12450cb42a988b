"""Closures, local and global names, unpacking and imports: the interpreter agrees with CPython."""

from __future__ import annotations

import pytest

from tests.support.interpreter import bodies, check

COUNTER = 10


LOG = []


def body_closure_reads_later_value():
    x = 1

    def f():
        return x

    x = 2
    return f()


def body_closure_nonlocal():
    n = 0

    def inc():
        nonlocal n
        n += 1
        return n

    return inc(), inc(), n


def body_closure_shared_by_two():
    def make():
        n = 0

        def inc():
            nonlocal n
            n += 1

        def get():
            return n

        return inc, get

    a, b = make(), make()
    a[0]()
    a[0]()
    b[0]()
    return a[1](), b[1]()


def body_closure_of_argument():
    def f(x):
        def g():
            return x

        x = x + 1
        return g

    return f(1)()


def body_closure_in_loop():
    fs = [lambda: i for i in range(3)]
    gs = [lambda i=i: i for i in range(3)]
    return [f() for f in fs], [g() for g in gs]


def body_closure_three_levels():
    def a(x):
        def b(y):
            def c(z):
                nonlocal x
                x += 1
                return x, y, z

            return c

        return b

    c = a(1)(2)
    return c(3), c(4)


def body_closure_unbound():
    def f():
        return x

    try:
        f()
    except NameError as e:
        message = str(e)
    x = 1
    return message, f()


def body_closure_deleted():
    x = 1

    def f():
        return x

    del x
    f()


def body_local_unbound():
    if COUNTER < 0:
        y = 1
    return y


def body_local_deleted():
    y = 1
    del y
    return y


def body_delete_unbound_local():
    if COUNTER < 0:
        y = 1
    del y


def body_global_missing():
    return no_such_name  # noqa: F821


def body_global_write():
    global COUNTER
    COUNTER += 1
    value = COUNTER
    COUNTER = 10
    return value


def body_global_delete():
    global TEMPORARY
    TEMPORARY = 1
    seen = TEMPORARY
    del TEMPORARY
    try:
        TEMPORARY
    except NameError as e:
        return seen, str(e)


def body_builtin_shadowed():
    len = lambda x: 42
    return len([])


def body_cell_contents():
    x = 5

    def f():
        return x

    return f.__closure__[0].cell_contents, f.__code__.co_freevars


def body_unpacking():
    a, b = 1, 2
    a, b = b, a
    (c, d), e = (3, 4), 5
    first, *rest = range(5)
    *init, last = "abc"
    x, *y, z = [1, 2]
    return a, b, c, d, e, first, rest, init, last, x, y, z


def body_unpack_too_many():
    a, b = 1, 2, 3


def body_unpack_too_few():
    a, b, c = 1, 2


def body_unpack_too_few_star():
    a, b, *c = (1,)


def body_unpack_after_star():
    a, *b, c, d = (1, 2)


def body_unpack_not_iterable():
    a, b = 3


def body_walrus():
    if (n := len("abc")) > 2:
        pass
    return n, [y := 1, y**2], [last := x for x in range(3)], last


def body_conditional_and_chain():
    x = 5
    return 1 < x < 10, 1 < x > 7, x and 0 or "z", not x, x if x > 9 else -x


def body_chained_assignment():
    a = b = []
    a.append(1)
    return a is b, b


def body_star_tuple_and_merge():
    return [*range(2), *"ab"], (*[1], 2), {*[1, 2], 3}, {**{"a": 1}, "b": 2, **{"a": 3}}


def body_locals():
    a = 1
    b = 2

    def f():
        return b

    return sorted(locals()), f()


def body_vars_of_object():
    class A:
        def __init__(self):
            self.x = 1

    return vars(A())


def body_globals():
    return globals()["COUNTER"], "free" in globals()


def body_eval_and_exec():
    x = 3
    space = {"y": 4}
    exec("z = y + 1\ndef f(a): return a * z", space)
    return eval("x + 1"), eval("y * 2", space), space["z"], space["f"](10), eval("[i for i in range(3)]")


def body_imports():
    import collections.abc
    import os.path as p
    from math import pi
    from math import sqrt as root

    return p.join("a", "b"), root(4) + pi, collections.abc.Mapping.__name__


def body_import_missing():
    import no_such_module_at_all  # noqa: F401


def body_import_missing_name():
    from math import no_such_name  # noqa: F401


def body_assertion():
    x = 2
    assert x == 2, "fine"
    assert x == 3, f"x is {x}"


def body_side_effects_on_global_list():
    LOG.clear()
    for i in range(3):
        LOG.append(i)
    return list(LOG)


def body_print():
    print("a", 1, [2], sep="-", end="!\n")
    print()


@pytest.mark.parametrize("body", bodies(globals()), ids=lambda body: body.__name__)
def test_agrees_with_cpython(body):
    check(body)
