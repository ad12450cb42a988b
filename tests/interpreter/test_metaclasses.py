"""Metaclasses, abstract and generic classes, ``isinstance``: the interpreter agrees with CPython."""

from __future__ import annotations

import abc
import collections
import typing

import pytest

from tests.support.interpreter import bodies, check
from tests.support.interpreter_values import Base


def body_metaclass():
    class Meta(type):
        def __new__(m, name, bases, ns, **kw):
            ns["made_by"] = m.__name__
            return super().__new__(m, name, bases, ns)

        def __init__(cls, name, bases, ns, **kw):
            super().__init__(name, bases, ns)
            cls.options = kw

        def __call__(cls, *a, **k):
            obj = super().__call__(*a, **k)
            obj.called = True
            return obj

        def __getattr__(cls, name):
            return f"meta {name}"

        def __len__(cls):
            return 7

        def __iter__(cls):
            return iter([1, 2])

        def __contains__(cls, x):
            return x == 3

        def __getitem__(cls, k):
            return k * 2

        @property
        def prop(cls):
            return cls.__name__ + " prop"

    class A(metaclass=Meta, opt=1):
        def __init__(self, x):
            self.x = x

    a = A(5)
    return a.x, a.called, A.made_by, A.options, A.zzz, len(A), list(A), 3 in A, A[4], A.prop, isinstance(A, Meta)


def body_metaclass_prepare():
    class Meta(type):
        @classmethod
        def __prepare__(m, name, bases, **kw):
            return {"prepared": kw}

        def __new__(m, name, bases, ns, **kw):
            return super().__new__(m, name, bases, dict(ns))

    class A(metaclass=Meta, z=1):
        own = prepared  # noqa: F821

    return A.own, A.prepared


def body_metaclass_conflict():
    class M1(type):
        pass

    class M2(type):
        pass

    class A(metaclass=M1):
        pass

    class B(metaclass=M2):
        pass

    class C(A, B):
        pass


def body_metaclass_instancecheck():
    class Meta(type):
        def __instancecheck__(cls, obj):
            return obj == 5

        def __subclasscheck__(cls, other):
            return other is int

    class A(metaclass=Meta):
        pass

    return isinstance(5, A), isinstance(6, A), issubclass(int, A), issubclass(str, A), isinstance(5, (str, A))


def body_class_getitem():
    class A:
        def __class_getitem__(cls, k):
            return cls.__name__, k

    return A[int], A["x", 1]


def body_generic():
    T = typing.TypeVar("T")

    class Box(typing.Generic[T]):
        def __init__(self, x: T):
            self.x = x

    class IntBox(Box[int]):
        pass

    return Box[int](3).x, IntBox(4).x, [c.__name__ for c in IntBox.__mro__], list[int], isinstance(IntBox(1), Box)


def body_abstract():
    class A(abc.ABC):
        @abc.abstractmethod
        def f(self): ...

        @property
        @abc.abstractmethod
        def p(self): ...

    class B(A):
        def f(self):
            return 1

        @property
        def p(self):
            return 2

    b = B()
    return b.f(), b.p, isinstance(b, A), issubclass(B, A), sorted(A.__abstractmethods__)


def body_abstract_refuses():
    class A(abc.ABC):
        @abc.abstractmethod
        def f(self): ...

    A()


def body_abc_register():
    class A(abc.ABC):
        pass

    @A.register
    class B:
        pass

    return isinstance(B(), A), issubclass(B, A)


def body_subclasshook():
    class HasLen(abc.ABC):
        @classmethod
        def __subclasshook__(cls, other):
            return any("quack" in c.__dict__ for c in other.__mro__) or NotImplemented

    class A:
        def quack(self): ...

    return isinstance(A(), HasLen), isinstance(3, HasLen)


def body_isinstance_forms():
    return (
        isinstance(1, int), isinstance(True, int), isinstance("a", (int, str)), isinstance(1, int | str),
        isinstance(None, int | None), issubclass(bool, int), isinstance([], collections.abc.Sequence),
        isinstance({}, typing.Mapping),
    )  # fmt: skip


def body_isinstance_wrong():
    isinstance(1, 3)


def body_isinstance_class_property():
    class Fake:
        @property
        def __class__(self):
            return int

    return isinstance(Fake(), int), isinstance(Fake(), Fake), type(Fake()).__name__


def body_type_with_three_arguments():
    A = type("A", (Base,), {"x": 1, "f": lambda self: self.x}, tag="t")
    return A().f(), A.__name__, A.tag, type(A()).__name__


def body_mro_entries():
    class Proxy:
        def __mro_entries__(self, bases):
            return (Base,)

    class A(Proxy()):
        pass

    return A.__bases__ == (Base,), len(A.__orig_bases__)


def body_runtime_protocol():
    @typing.runtime_checkable
    class HasX(typing.Protocol):
        x: int

    @typing.runtime_checkable
    class CanRun(typing.Protocol):
        def run(self): ...

    class A:
        x = 1

    class B:
        def run(self): ...

    return (
        isinstance(A(), HasX),
        isinstance(B(), HasX),
        isinstance(A(), CanRun),
        isinstance(B(), CanRun),
        issubclass(B, CanRun),
    )


@pytest.mark.parametrize("body", bodies(globals()), ids=lambda body: body.__name__)
def test_agrees_with_cpython(body):
    check(body)
