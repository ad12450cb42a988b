"""Properties, descriptors and methods: the interpreter agrees with CPython."""

from __future__ import annotations

import pytest

from tests.support.interpreter import bodies, check


def body_property():
    class A:
        def __init__(self):
            self._x = 1

        @property
        def x(self):
            "doc of x"
            return self._x

        @x.setter
        def x(self, v):
            self._x = v * 2

        @x.deleter
        def x(self):
            self._x = "gone"

    a = A()
    out = [a.x]
    a.x = 5
    out.append(a.x)
    a.x += 1
    out.append(a.x)
    del a.x
    return out, a.x, A.x.__doc__


def body_property_read_only():
    class A:
        @property
        def x(self):
            return 1

    A().x = 2


def body_property_no_deleter():
    class A:
        @property
        def x(self):
            return 1

    del A().x


def body_property_shadows_instance_dict():
    class A:
        @property
        def x(self):
            return "property"

    a = A()
    a.__dict__["x"] = "instance"
    return a.x


def body_property_raises_attribute_error():
    class A:
        @property
        def x(self):
            raise AttributeError("inner")

        def __getattr__(self, name):
            return "fallback " + name

    return A().x


def body_property_raises_attribute_error_plain():
    class A:
        @property
        def x(self):
            return self.nothing

    A().x


def body_data_descriptor():
    class D:
        def __set_name__(self, owner, name):
            self.name = "_" + name

        def __get__(self, obj, cls=None):
            return self if obj is None else ("got", getattr(obj, self.name, None))

        def __set__(self, obj, value):
            setattr(obj, self.name, value)

        def __delete__(self, obj):
            delattr(obj, self.name)

    class A:
        d = D()

    a = A()
    out = [a.d]
    a.d = 3
    out.append(a.d)
    a.__dict__["d"] = "hidden"
    out.append(a.d)
    del a.d
    return out, a.d, type(A.d).__name__, a.__dict__


def body_non_data_descriptor():
    class D:
        def __get__(self, obj, cls):
            return "descriptor"

    class A:
        d = D()

    a = A()
    first = a.d
    a.d = "own"
    return first, a.d, A.d


def body_descriptor_without_get():
    class D:
        def __set__(self, obj, v):
            obj.__dict__["d"] = v + 1

    class A:
        d = D()

    a = A()
    kind = type(a.d).__name__
    a.d = 1
    return kind, a.d


def body_descriptor_on_instance_is_plain():
    class D:
        def __get__(self, obj, cls):
            return 1

    class A:
        pass

    a = A()
    a.d = D()
    return type(a.d).__name__


def body_classmethod_staticmethod():
    class A:
        @classmethod
        def c(cls, x):
            return cls.__name__, x

        @staticmethod
        def s(x):
            return x

    class B(A):
        pass

    return A.c(1), B().c(2), A.s(3), B().s(4)


def body_set_name():
    class D:
        def __set_name__(self, owner, name):
            self.where = (owner.__name__, name)

    class A:
        d = D()

    return A.__dict__["d"].where


@pytest.mark.parametrize("body", bodies(globals()), ids=lambda body: body.__name__)
def test_agrees_with_cpython(body):
    check(body)
