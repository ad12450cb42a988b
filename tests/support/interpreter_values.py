"""Classes that bodies of the interpreter's tests in several files use."""

from __future__ import annotations

import enum


class Base:
    registry = []

    def __init_subclass__(cls, tag=None, **kw):
        super().__init_subclass__(**kw)
        cls.tag = tag
        Base.registry.append(cls.__name__)

    def who(self):
        return "base"


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


class Color(enum.Enum):
    RED = 1
    GREEN = "g"

    @property
    def label(self):
        return self.name.lower()
