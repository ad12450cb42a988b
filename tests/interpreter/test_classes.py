"""Classes, their instances, inheritance and ``super``: the interpreter agrees with CPython."""

from __future__ import annotations

import pytest

from tests.support.interpreter import bodies, check
from tests.support.interpreter_values import Base


def body_inheritance():
    class A:
        def f(self):
            return "A"

    class B(A):
        def f(self):
            return "B" + super().f()

    class C(A):
        def f(self):
            return "C" + super().f()

    class D(B, C):
        def f(self):
            return "D" + super().f()

    return D().f(), [c.__name__ for c in D.__mro__]


def body_super_with_arguments():
    class A(Base):
        def who(self):
            return super(A, self).who(), super().who()

    Base.registry.clear()
    return A().who()


def body_super_in_classmethod_and_staticmethod():
    class A:
        @classmethod
        def make(cls, x):
            return cls.__name__, x

        @staticmethod
        def plain(x):
            return x

    class B(A):
        @classmethod
        def make(cls, x):
            return super().make(x + 1)

        @staticmethod
        def plain(x):
            return A.plain(x) * 2

    return B.make(1), B().make(2), B.plain(3), B().plain(4)


def body_super_property():
    class A:
        @property
        def p(self):
            return 1

    class B(A):
        @property
        def p(self):
            return super().p + 1

    return B().p


def body_super_missing():
    class A:
        def f(self):
            return super().nothing

    A().f()


def body_super_in_nested_function():
    class A:
        def f(self):
            return 1

    class B(A):
        def f(self):
            def g(me):
                return super(B, me).f()

            return g(self) + (lambda self: super().f())(self)

    return B().f()


def body_super_setattr():
    class A:
        def __setattr__(self, name, value):
            super().__setattr__(name, value * 2)

        def __delattr__(self, name):
            super().__delattr__(name + "x")

    a = A()
    a.k = 4
    a.bx = 1
    del a.b
    return a.__dict__


def body_super_comprehension():
    class A:
        def f(self, i):
            return i

    class B(A):
        def f(self, i):
            method = super().f
            return [method(k) for k in range(i)]

    return B().f(3)


def body_class_attributes():
    class A:
        n = 1
        m = n + 1
        squares = [i * i for i in range(3)]

        def f(self):
            return self.n, A.m

    a = A()
    a.n = 10
    A.m = 20
    return a.f(), A.n, A.squares, A().f()


def body_class_body_scope():
    x = "outer"

    class A:
        y = x
        x = "inner"
        z = x

    return A.x, A.y, A.z


def body_class_cell():
    class A:
        def me(self):
            return __class__

    return A().me() is A


def body_new_and_init():
    class A:
        def __new__(cls, *a, **k):
            self = super().__new__(cls)
            self.made = (a, k)
            return self

        def __init__(self, x, y=2):
            self.x, self.y = x, y

    a = A(1, y=3)
    return a.made, a.x, a.y


def body_new_returns_other():
    class A:
        def __new__(cls):
            return 42

        def __init__(self):
            raise AssertionError("not called")

    return A()


def body_init_returns_value():
    class A:
        def __init__(self):
            return 1

    A()


def body_constructor_arguments_without_init():
    class A:
        pass

    A(1)


def body_constructor_arguments_with_new():
    class A:
        def __new__(cls, x):
            return object.__new__(cls, x)

    A(1)


def body_constructor_missing_argument():
    class A:
        def __init__(self, x):
            self.x = x

    A()


def body_singleton():
    class A:
        one = None

        def __new__(cls):
            if cls.one is None:
                cls.one = super().__new__(cls)
            return cls.one

    return A() is A()


def body_subclass_of_builtins():
    class L(list):
        def total(self):
            return sum(self)

        def append(self, x):
            super().append(x * 2)

    class D(dict):
        def __missing__(self, k):
            return k + "!"

    class S(str):
        def shout(self):
            return self.upper() + "!"

    class N(int):
        def __add__(self, o):
            return N(int(self) * 100 + o)

    class T(tuple):
        def __new__(cls, *items):
            return super().__new__(cls, items)

    x = L([1, 2])
    x.append(3)
    return x, x.total(), D()["a"], S("hi").shout(), N(2) + 3, T(1, 2), type(N(1) + 1).__name__


def body_exception_subclass():
    class E(Exception):
        def __init__(self, code):
            super().__init__(f"code {code}")
            self.code = code

        def __str__(self):
            return "E:" + super().__str__()

    try:
        raise E(3)
    except E as e:
        return e.code, str(e), e.args


def body_init_subclass():
    Base.registry.clear()

    class A(Base, tag="a"):
        pass

    class B(A):
        pass

    return Base.registry, A.tag, B.tag


def body_private_names():
    class A:
        def __init__(self):
            self.__x = 1

        def get(self):
            return self.__x

    return A().get(), A().__dict__


def body_nested_classes():
    class A:
        class B:
            value = 3

            class C:
                value = 4

        def make(self):
            return self.B.C.value + A.B.value

    return A().make(), A.B.C.__qualname__


def body_class_decorator():
    def add(cls):
        cls.extra = cls.__name__ * 2
        return cls

    @add
    class A:
        pass

    return A.extra


def body_monkeypatch_class():
    class A:
        def f(self):
            return 1

    a = A()
    first = a.f()
    A.f = lambda self: 2
    second = a.f()
    a.f = lambda: 3
    return first, second, a.f()


def body_change_class():
    class A:
        def f(self):
            return "A"

    class B:
        def f(self):
            return "B"

    a = A()
    a.__class__ = B
    return a.f(), type(a).__name__


def body_multiple_inheritance_init():
    log = []

    class A:
        def __init__(self, **k):
            log.append("A")
            super().__init__(**k)

    class B:
        def __init__(self, b=None, **k):
            log.append(("B", b))
            super().__init__(**k)

    class C(A, B):
        def __init__(self, **k):
            log.append("C")
            super().__init__(**k)

    C(b=3)
    return log


def body_weakref():
    import weakref

    class A:
        pass

    a = A()
    r = weakref.ref(a)
    alive = r() is a
    del a
    return alive, r() is None


def body_del_method():
    log = []

    class A:
        def __del__(self):
            log.append("deleted")

    a = A()
    del a
    return log


def body_call_dunder_explicitly():
    class A:
        def m(self, x):
            return self.k + x

        k = 1

    a = A()
    f = A.m
    return f.__call__(a, 1), a.m.__call__(2), f.__get__(a)(3), f.__get__(a).__func__ is f, A.__dict__["m"] is f


def body_exception_with_property():
    class E(Exception):
        @property
        def code(self):
            return self._code

        @code.setter
        def code(self, v):
            self._code = v + 1

    e = E("x")
    e.code = 4
    e.extra = 1
    del e.extra
    return e.code, hasattr(e, "extra"), e.args, vars(e)


def body_container_subclass_with_attributes():
    class D(dict):
        @property
        def size(self):
            return len(self)

        def __init__(self, *a, **k):
            super().__init__(*a, **k)
            self.name = "d"

        def __getattr__(self, name):
            return ("missing", name)

    d = D(a=1)
    d.other = 2
    return d.size, d.name, d.other, d.nope, d, d.get("a"), vars(d)


def body_partial_subclass():
    import functools

    class P(functools.partial):
        def describe(self):
            return (self.func.__name__, self.args, self.tag)

    def f(a, b):
        return a + b

    p = P(f, 1)
    p.tag = "t"
    return p(2), p.describe(), p.func is f


def body_partial_subclass_with_parts_of_its_own():
    import functools

    class P(functools.partial):
        __slots__ = ("func",)

        def __init__(self, func):
            self.func = func

    def f(a, b, c=0):
        return a, b, c

    return P(functools.partial(f, 1))(2), P(functools.partial(f, 1, c=5))(2, c=3), P(f).func is f


def body_callable_that_answers_for_all_names():
    asked = []

    class C:
        def __getattr__(self, name):
            asked.append(name)
            raise AttributeError(name)

        def __call__(self, x):
            return x * 2

    return C()(3), list(map(C(), [1, 2])), sorted([2, 1], key=C()), asked


@pytest.mark.parametrize("body", bodies(globals()), ids=lambda body: body.__name__)
def test_agrees_with_cpython(body):
    check(body)
