"""Classes, descriptors, super, metaclasses, attribute hooks: the interpreter agrees with CPython."""

from __future__ import annotations

import abc
import collections
import dataclasses
import enum
import threading
import types
import typing

import pytest

from tests.support.interpreter import bodies, check


class Base:
    registry = []

    def __init_subclass__(cls, tag=None, **kw):
        super().__init_subclass__(**kw)
        cls.tag = tag
        Base.registry.append(cls.__name__)

    def who(self):
        return "base"


class Point:
    __slots__ = ("x", "y")

    def __init__(self, x, y):
        self.x, self.y = x, y


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


def body_init_subclass():
    Base.registry.clear()

    class A(Base, tag="a"):
        pass

    class B(A):
        pass

    return Base.registry, A.tag, B.tag


def body_set_name():
    class D:
        def __set_name__(self, owner, name):
            self.where = (owner.__name__, name)

    class A:
        d = D()

    return A.__dict__["d"].where


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


def body_dataclass():
    @dataclasses.dataclass(order=True)
    class P:
        x: int
        y: int = 0
        tags: list = dataclasses.field(default_factory=list, compare=False)

        def __post_init__(self):
            self.total = self.x + self.y

    a, b = P(1, 2), P(1)
    a.tags.append(1)
    return (
        str(a),
        a > b,
        a == P(1, 2),
        a.total,
        dataclasses.asdict(a),
        dataclasses.replace(a, y=5).total,
        repr(b),
        b.tags,
    )


def body_dataclass_frozen():
    @dataclasses.dataclass(frozen=True)
    class P:
        x: int

    p = P(1)
    assert hash(p) == hash(P(1))
    p.x = 2


def body_dataclass_inheritance():
    @dataclasses.dataclass
    class A:
        x: int = 1

    @dataclasses.dataclass(kw_only=True)
    class B(A):
        y: str = "b"

        def both(self):
            return f"{self.x}{self.y}"

    return B().both(), str(B(5, y="q")), [f.name for f in dataclasses.fields(B)]


def body_enum():
    class Color(enum.Enum):
        RED = 1
        GREEN = "g"

        def low(self):
            return self.name.lower()

        @property
        def twice(self):
            return self.value * 2

    return (
        Color.RED.name, Color("g").low(), Color["RED"].twice, [c.name for c in Color], Color.RED is Color(1),
        Color.RED == 1, Color.GREEN in Color, len(Color), repr(Color.RED), str(Color.GREEN),
    )  # fmt: skip


def body_enum_kinds():
    class F(enum.Flag):
        A = enum.auto()
        B = enum.auto()
        AB = A | B

    class N(enum.IntEnum):
        ONE = 1
        TWO = 2

    class S(str, enum.Enum):
        X = "x"

    return F.A | F.B is F.AB, (F.AB & F.B).name, N.ONE + N.TWO, N(2) > 1, S.X == "x", f"{N.TWO}", F.A in F.AB


def body_enum_unknown():
    class Color(enum.Enum):
        RED = 1

    Color(9)


def body_namedtuple():
    P = collections.namedtuple("P", "x y", defaults=[7])
    p = P(1)

    class Q(typing.NamedTuple):
        a: int
        b: str = "z"

        def hello(self):
            return f"{self.a}{self.b}"

    return p, p.y, p._replace(x=5), p._asdict(), Q(3).hello(), Q(1, "b").b, P._make([8, 9]), P._fields


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


def body_mro_entries():
    class Proxy:
        def __mro_entries__(self, bases):
            return (Base,)

    class A(Proxy()):
        pass

    return A.__bases__ == (Base,), len(A.__orig_bases__)


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
