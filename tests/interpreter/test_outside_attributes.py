"""Attributes of objects that exist before the step, run in three ways."""

from __future__ import annotations

import functools
import types

import pytest

from tests.support.interpreter_compiled import cases, check_case, check_refused


def case_counter_attribute():
    state = types.SimpleNamespace(calls=0, log=[])

    def body():
        state.calls += 1
        state.log.append(len(state.log))
        return state.calls

    return body, state


def case_getattr_hook():
    class Lazy:
        def __init__(self):
            self.made = []

        def __getattr__(self, name):
            if name.startswith("no"):
                raise AttributeError(name)
            self.made.append(name)
            setattr(self, name, len(self.made))
            return getattr(self, name)

    lazy = Lazy()

    def body():
        return lazy.one, lazy.two, getattr(lazy, "nope", "default"), hasattr(lazy, "nothing"), lazy.one

    return body, lazy


def case_getattribute_hook():
    class Watched:
        def __init__(self):
            object.__setattr__(self, "seen", [])
            object.__setattr__(self, "x", 1)

        def __getattribute__(self, name):
            if name != "seen":
                self.seen.append(name)
            return object.__getattribute__(self, name)

    watched = Watched()

    def body():
        return watched.x + watched.x

    return body, watched


def case_setattr_hook():
    class Recorder:
        def __init__(self):
            object.__setattr__(self, "log", [])

        def __setattr__(self, name, value):
            self.log.append((name, value))
            super().__setattr__(name, value)

        def __delattr__(self, name):
            self.log.append(("del", name))
            super().__delattr__(name)

    recorder = Recorder()

    def body():
        recorder.a = 1
        recorder.b = [2]
        del recorder.a
        return recorder.b

    return body, recorder


def case_property_with_setter():
    class Box:
        def __init__(self):
            self._x = 1
            self.log = []

        @property
        def x(self):
            self.log.append("get")
            return self._x

        @x.setter
        def x(self, value):
            self.log.append("set")
            self._x = value

        @x.deleter
        def x(self):
            self.log.append("del")
            self._x = 0

    box = Box()

    def body():
        box.x += 5
        value = box.x
        del box.x
        return value, box.x

    return body, box


def case_descriptor_objects():
    class Typed:
        def __set_name__(self, owner, name):
            self.name = "_" + name

        def __get__(self, obj, owner=None):
            return self if obj is None else obj.__dict__.get(self.name, 0)

        def __set__(self, obj, value):
            obj.__dict__[self.name] = value * 2

        def __delete__(self, obj):
            del obj.__dict__[self.name]

    class Point:
        x = Typed()

    point = Point()

    def body():
        before = point.x
        point.x = 4
        after = point.x
        del point.x
        point.x = before + 1
        return before, after, point.x

    return body, point


def case_slots():
    class Slotted:
        __slots__ = ("gone", "x", "y")

        def __init__(self):
            self.x = 1
            self.gone = True

    obj = Slotted()

    def body():
        obj.x += 1
        obj.y = [obj.x]
        if hasattr(obj, "gone"):
            del obj.gone
        return obj.x, obj.y, hasattr(obj, "gone")

    return body, obj


def case_slots_and_dict():
    class Base:
        __slots__ = ("a",)

    class Both(Base):
        pass

    obj = Both()
    obj.a, obj.b = 1, 2

    def body():
        obj.a += 1
        obj.b += obj.a
        return obj.a, obj.b, sorted(vars(obj))

    return body, obj


def case_class_attribute_written():
    class Counter:
        total = 0
        names = []

        def __init__(self):
            type(self).total += 1
            self.names.append(self.total)

    def body():
        Counter()
        Counter()
        return Counter.total, list(Counter.names)

    return body, (Counter.names,)


def case_class_attribute_shadowed_by_instance():
    class Setting:
        rate = 3

    setting = Setting()

    def body():
        before = setting.rate
        setting.rate = before + 1
        return before, setting.rate, Setting.rate

    return body, setting


def case_function_attributes():
    def helper():
        helper.calls += 1
        return helper.calls

    helper.calls = 0
    helper.names = []

    def body():
        helper.names.append(helper.calls)
        helper.last = helper()
        return helper.last, list(helper.names), getattr(helper, "missing", None)

    return body, (helper.names,)


def case_cached_property():
    class Model:
        def __init__(self):
            self.made = 0

        @functools.cached_property
        def table(self):
            self.made += 1
            return {"made": self.made}

    model = Model()

    def body():
        model.table["used"] = model.table.get("used", 0) + 1
        return model.table["used"], model.made

    return body, model


def case_instance_dict():
    obj = types.SimpleNamespace(a=1)

    class Plain:
        pass

    plain = Plain()
    plain.x = 1

    def body():
        vars(plain)["y"] = vars(plain)["x"] + 1
        plain.__dict__.update(z=3)
        return sorted(vars(plain).items()), plain.y, vars(obj)["a"]

    return body, (plain, obj)


def refused_class_changed():
    class A:
        def name(self):
            return "A"

    class B(A):
        def name(self):
            return "B"

    obj = A()

    def body():
        before = obj.name()
        obj.__class__ = B if type(obj) is A else A
        return before, obj.name(), type(obj).__name__

    return body, obj


def case_del_attributes():
    class Plain:
        pass

    obj = Plain()
    obj.keep = 1

    def body():
        obj.temporary = 5
        value = obj.temporary
        del obj.temporary
        try:
            obj.temporary
        except AttributeError as error:
            return value, str(error)

    return body, obj


@pytest.mark.parametrize("case", cases(globals(), "refused_"), ids=lambda case: case.__name__.removeprefix("refused_"))
def test_refused(case):
    """Code that is not captured gives a reason, and runs as before."""
    check_refused(case, "SFX111")


@pytest.mark.parametrize("case", cases(globals()), ids=lambda case: case.__name__.removeprefix("case_"))
def test_three_ways(case):
    check_case(case)
