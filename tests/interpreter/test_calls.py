"""Calls, arguments, and functions that make functions: the interpreter agrees with CPython."""

from __future__ import annotations

import functools

import pytest

from tests.support.interpreter import bodies, check


def free(a, b=2, *rest, c, d=4, **more):
    return a, b, rest, c, d, more


def positional(a, b, /, c, *, d=1):
    return a, b, c, d


def body_defaults():
    def f(a, b=2, c=3):
        return a, b, c

    return f(1), f(1, 5), f(1, c=7), f(c=1, b=2, a=3)


def body_star_arguments():
    return free(1, c=3), free(1, 2, 3, 4, c=5, e=6), free(*[1, 2, 3], **{"c": 1, "z": 2})


def body_star_in_the_middle():
    def f(*args, **kwargs):
        return args, kwargs

    return f(1, *[2, 3], 4, *(5,), x=1, **{"y": 2}, z=3, **{})


def body_star_of_generator():
    def f(*args):
        return args

    return f(*(i * i for i in range(4)), *"ab", *{"k": 1})


def body_positional_only():
    return positional(1, 2, 3), positional(1, 2, c=3, d=4)


def body_positional_only_by_keyword():
    return positional(a=1, b=2, c=3)


def body_positional_only_name_in_kwargs():
    def f(a, /, **kw):
        return a, kw

    return f(1, a=2)


def body_too_few():
    def f(a, b, c):
        return a

    f(1)


def body_too_few_keyword_only():
    def f(*, a, b):
        return a

    f()


def body_too_many():
    def f(a, b=1):
        return a

    f(1, 2, 3)


def body_too_many_with_keyword_only():
    def f(a, *, k=1):
        return a

    f(1, 2, k=3)


def body_unexpected_keyword():
    def f(a):
        return a

    f(1, zz=2)


def body_multiple_values():
    def f(a, b):
        return a

    f(1, a=2)


def body_no_arguments_wanted():
    def f():
        return 1

    f(1)


def body_method_too_many():
    class A:
        def m(self, a):
            return a

    A().m(1, 2)


def body_method_unbound_missing():
    class A:
        def m(self, a):
            return a

    A.m()


def body_star_not_iterable():
    def f(*a):
        return a

    f(*3)


def body_double_star_not_mapping():
    def f(**a):
        return a

    f(**[1])


def body_double_star_twice():
    def f(**a):
        return a

    f(**{"a": 1}, **{"a": 2})


def body_double_star_non_string():
    def f(**a):
        return a

    f(**{1: 2})


def body_call_not_callable():
    x = 3
    x()


def body_call_none_method():
    class A:
        pass

    A().missing()


def body_mutable_default_is_shared():
    def f(x, acc=[]):
        acc.append(x)
        return list(acc)

    return f(1), f(2), f(3)


def body_default_is_evaluated_once():
    calls = []

    def make():
        calls.append(1)
        return 5

    def f(x=make()):
        return x

    return f(), f(), calls


def body_lambda():
    return (lambda a, *b, c=3, **d: (a, b, c, d))(1, 2, c=4, e=5)


def body_recursion():
    def fact(n):
        return 1 if n <= 1 else n * fact(n - 1)

    return fact(20)


def body_mutual_recursion():
    def even(n):
        return True if n == 0 else odd(n - 1)

    def odd(n):
        return False if n == 0 else even(n - 1)

    return even(30), odd(7)


def body_too_deep():
    def f(n):
        return f(n + 1)

    try:
        f(0)
    except RecursionError as e:
        return type(e).__name__


def body_function_attributes():
    def f(a: int, b: str = "x", *, c: float = 1.0) -> bool:
        """doc"""

    f.tag = 1
    return (
        f.__name__, f.__qualname__, f.__defaults__, f.__kwdefaults__, f.__annotations__, f.__doc__, f.tag, f.__module__
    )  # fmt: skip


def body_function_dict():
    def f():
        pass

    f.a, f.b = 1, 2
    del f.a
    return f.__dict__, hasattr(f, "a")


def body_bound_method_attributes():
    class A:
        def m(self):
            return self

    a = A()
    m = a.m
    return m.__self__ is a, m.__func__ is A.m, m.__name__, m == a.m, m() is a


def body_partial():
    f = functools.partial(free, 1, c=2)
    return f(), f(5, 6, c=7, q=8), functools.partial(f, 9, d=0)()


def body_partial_of_method():
    class A:
        def m(self, *a, **k):
            return a, k

    return functools.partial(A().m, 1, x=2)(3, y=4)


def body_partialmethod():
    class A:
        def m(self, a, b):
            return a, b

        one = functools.partialmethod(m, 1)

    return A().one(2)


def body_callable_object():
    class A:
        def __call__(self, *a, **k):
            return a, k

    return A()(1, 2, z=3), callable(A()), callable(3)


def body_callable_through_class_only():
    class A:
        pass

    a = A()
    a.__call__ = lambda: 1
    a()


def body_decorators():
    def twice(f):
        @functools.wraps(f)
        def g(*a):
            return f(f(*a))

        return g

    def add(n):
        return lambda f: lambda x: f(x) + n

    @twice
    @add(10)
    def f(x):
        return x * 2

    return f(1)


def body_wraps_keeps_names():
    def deco(f):
        @functools.wraps(f)
        def inner(*a, **k):
            "inner doc"
            return f(*a, **k)

        return inner

    @deco
    def original(x):
        "original doc"
        return x

    return original.__name__, original.__doc__, original.__wrapped__(3), original(4)


def body_lru_cache():
    calls = []

    @functools.lru_cache(maxsize=None)
    def f(x):
        calls.append(x)
        return x * 2

    return f(1), f(1), f(2), calls, f.cache_info().hits


def body_cached_property():
    class A:
        n = 0

        @functools.cached_property
        def p(self):
            A.n += 1
            return A.n

    a = A()
    return a.p, a.p, A.n, a.__dict__


def body_singledispatch():
    @functools.singledispatch
    def f(x):
        return "object"

    @f.register
    def _(x: int):
        return "int"

    @f.register(list)
    def _(x):
        return "list"

    return f(1), f([]), f("a"), f(True)


def body_reduce():
    return functools.reduce(lambda a, b: a * b, range(1, 6)), functools.reduce(lambda a, b: a + b, [], 7)


def body_total_ordering():
    @functools.total_ordering
    class A:
        def __init__(self, n):
            self.n = n

        def __eq__(self, o):
            return self.n == o.n

        def __lt__(self, o):
            return self.n < o.n

    return A(1) <= A(2), A(3) > A(2), A(1) >= A(2), A(1) != A(1)


def body_method_with_state():
    class Counter:
        def __init__(self):
            self.n = 0

        def add(self, k=1):
            self.n += k
            return self

    return Counter().add().add(5).n


def body_apply_generic():
    def apply(f, *a, **k):
        return f(*a, **k)

    return apply(max, 1, 5, 3), apply(sorted, [3, 1], reverse=True), apply(dict, a=1), apply("x,y".split, ",")


def body_keyword_order():
    def f(**k):
        return list(k)

    return f(z=1, a=2, m=3), f(**{"q": 1}, b=2)


def body_evaluation_order():
    log = []

    def t(x):
        log.append(x)
        return x

    def f(*a, **k):
        return a

    f(t(1), *[t(2)], t(3), k=t(4), **{"z": t(5)})
    {t(6): t(7)}
    t([])[t(0) :] = [t(8)]
    return log


@pytest.mark.parametrize("body", bodies(globals()), ids=lambda body: body.__name__)
def test_agrees_with_cpython(body):
    check(body)
