"""Attributes read, set, deleted and missing, hooks and slots: the interpreter agrees with CPython."""

from __future__ import annotations

import threading
import types

import pytest

from tests.support.interpreter import bodies, check


class Point:
    __slots__ = ("x", "y")

    def __init__(self, x, y):
        self.x, self.y = x, y


def body_getattr_hook():
    class A:
        x = 1

        def __getattr__(self, name):
            if name.startswith("a"):
                return name.upper()
            raise AttributeError(name)

    a = A()
    return a.x, a.abc, hasattr(a, "b"), getattr(a, "zz", "default")


def body_getattr_hook_raises():
    class A:
        def __getattr__(self, name):
            raise AttributeError(f"no {name}")

    A().thing


def body_getattribute_hook():
    class A:
        x = 1

        def __getattribute__(self, name):
            if name == "x":
                return "intercepted"
            return super().__getattribute__(name)

        def __getattr__(self, name):
            return "missing " + name

    a = A()
    a.y = 2
    return a.x, a.y, a.z


def body_getattribute_object():
    class A:
        def __getattribute__(self, name):
            return object.__getattribute__(self, name)

        @property
        def p(self):
            return 5

    a = A()
    a.q = 1
    return a.p, a.q, hasattr(a, "r")


def body_setattr_hook():
    class A:
        def __setattr__(self, name, value):
            if name == "bad":
                raise AttributeError("refused")
            object.__setattr__(self, name, ("set", value))

    a = A()
    a.x = 1
    try:
        a.bad = 2
    except AttributeError as e:
        return a.x, str(e)


def body_missing_attribute():
    class A:
        pass

    A().nope


def body_missing_class_attribute():
    class A:
        pass

    A.nope


def body_missing_attribute_of_none():
    None.nope


def body_delete_missing_attribute():
    class A:
        pass

    del A().x


def body_delete_attribute():
    class A:
        x = 1

    a = A()
    a.x = 2
    del a.x
    return a.x


def body_slots():
    p = Point(1, 2)
    p.x += 5
    return p.x, p.y, hasattr(p, "__dict__")


def body_slots_refuse():
    Point(1, 2).z = 3


def body_slots_unset():
    p = Point(1, 2)
    del p.x
    p.x


def body_dict_of_instance():
    class A:
        pass

    a = A()
    a.__dict__["k"] = 1
    a.__dict__.update(z=2)
    return a.k, a.z, sorted(vars(a))


def body_dir():
    class A:
        def __dir__(self):
            return ["b", "a"]

    class B:
        x = 1

    return dir(A()), [n for n in dir(B()) if not n.startswith("_")]


def body_module_getattr():
    import types

    m = types.ModuleType("m")
    m.x = 1
    m.__getattr__ = lambda name: name * 2
    return m.x, m.ab


def body_module_missing():
    import math

    math.nope


def body_setattr_on_class():
    class A:
        pass

    A.x = 1
    setattr(A, "y", 2)
    del A.x
    return hasattr(A, "x"), A.y


def body_setattr_builtin():
    class A:
        pass

    a = A()
    for i in range(3):
        setattr(a, f"f{i}", i)
    delattr(a, "f1")
    return vars(a), getattr(a, "f2"), getattr(a, "f9", None)


def body_set_attribute_of_int():
    (1).x = 2


class Local(threading.local):
    kind = "mine"

    def __init__(self, value=1):
        self.value = value

    @property
    def twice(self):
        return self.value * 2


HELD = (types.SimpleNamespace(), threading.local(), Local(2))


def body_attributes_that_are_not_there():
    found = []
    for held in HELD:
        vars(held).pop("twice", None)
        held.set = [1]
        held.set += [2]
        found.append((held.set, sorted(vars(held)), getattr(held, "kind", None), getattr(held, "twice", None)))
        for change in (lambda: held.absent, lambda: delattr(held, "absent"), lambda: setattr(held, "twice", 1)):  # noqa: B023
            try:
                change()
            except AttributeError as error:
                found.append(str(error))
        del held.set
        found.append(hasattr(held, "set"))
    return found


@pytest.mark.parametrize("body", bodies(globals()), ids=lambda body: body.__name__)
def test_agrees_with_cpython(body):
    check(body)
