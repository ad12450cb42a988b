"""Language features over objects that exist before the step, run in three ways.

Each case is compared after every one of several calls: CPython, the interpreter, and a captured step.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import gc
import io
import itertools
import math
import operator
import re
import types
import warnings
from typing import NamedTuple

import pytest

from sidefx_train.errors import GraphBreakError
from tests.support.interpreter_compiled import cases, check_case, check_refused, compiled

# --- special methods called by C code ---------------------------------------------------------------------------


class Noisy:
    """Its special methods append to a list that exists outside."""

    def __init__(self, value, log):
        self.value = value
        self.log = log

    def twice(self):
        return self.value * 2

    def __hash__(self):
        self.log.append(("hash", self.value))
        return hash(self.value)

    def __eq__(self, other):
        self.log.append(("eq", self.value))
        return isinstance(other, Noisy) and self.value == other.value

    def __lt__(self, other):
        self.log.append(("lt", self.value))
        return self.value < other.value

    def __repr__(self):
        self.log.append(("repr", self.value))
        return f"Noisy({self.value})"


def case_hash_and_eq_of_new_keys():
    log = []

    def body():
        table = {Noisy(1, log): "a", Noisy(2, log): "b"}
        return table[Noisy(2, log)], Noisy(3, log) in table, table.get(Noisy(1, log))

    return body, log


def refused_hash_and_eq_of_old_keys():
    log = []
    keys = [Noisy(1, log), Noisy(2, log)]
    table = {key: key.value for key in keys}
    log.clear()

    def body():
        return table[keys[0]], table.get(keys[1]), keys[0] in table

    return body, (log, keys)


def case_hash_in_sets():
    log = []

    def body():
        some = {Noisy(1, log), Noisy(1, log), Noisy(2, log)}
        some.add(Noisy(2, log))
        some.discard(Noisy(7, log))
        return len(some), len(frozenset([Noisy(5, log), Noisy(5, log)]))

    return body, log


def case_hash_in_set_operators():
    log = []

    def body():
        left, right = {Noisy(1, log), Noisy(2, log)}, {Noisy(2, log), Noisy(3, log)}
        return sorted(n.value for n in left | right), [n.value for n in left & right], [n.value for n in left - right]

    return body, log


def case_lt_in_sorting():
    log = []
    items = [Noisy(n, log) for n in (3, 1, 2)]

    def body():
        items.sort()
        return [n.value for n in sorted(items, reverse=True)], min(items).value, max(items).value

    return body, (log, items)


def case_callbacks_see_the_objects_own_classes():
    log = []
    items = [Noisy(n, log) for n in (3, 1, 2)]

    def larger(a, b):
        log.append((type(a) is Noisy, isinstance(b, Noisy), a.twice()))
        return a if b < a else b

    def body():
        found = functools.reduce(larger, items)
        return found.value, found is items[0], type(found).__name__, list(itertools.accumulate(items, larger))[-1].value

    return body, (log, items)


def case_repr_in_containers():
    log = []
    items = [Noisy(1, log), Noisy(2, log)]

    def body():
        return repr(items), str({"k": items[0]}), f"{items!r} {(items[1],)}", "%r" % (items,), "{}".format(items)

    return body, (log, items)


def case_eq_in_containers():
    log = []
    items = [Noisy(1, log), Noisy(2, log)]

    def body():
        return (
            Noisy(2, log) in items,
            items.index(Noisy(2, log)),
            items.count(Noisy(1, log)),
            items == [Noisy(1, log), Noisy(2, log)],
            (Noisy(1, log),) == (Noisy(1, log),),
            {"k": Noisy(1, log)} == {"k": Noisy(1, log)},
            [Noisy(1, log)] < [Noisy(2, log)],
        )

    return body, (log, items)


def case_list_remove_with_eq():
    log = []
    items = [Noisy(1, log), Noisy(2, log), Noisy(1, log)]

    def body():
        items.append(Noisy(9, log))
        items.remove(Noisy(9, log))
        return len(items)

    return body, (log, items)


def case_missing_of_dict_subclass():
    class Table(dict):
        def __missing__(self, key):
            self[key] = len(self)
            return self[key]

    table = Table(a=7)

    def body():
        return table["a"], table["b"], table[len(table)], "zz" in table

    return body, table


def case_index_bool_len_float():
    log = []

    class Number:
        def __index__(self):
            log.append("index")
            return 1

        def __bool__(self):
            log.append("bool")
            return False

        def __len__(self):
            log.append("len")
            return 3

        def __float__(self):
            log.append("float")
            return 1.5

    number = Number()

    def body():
        return [5, 6][number], not number, len(number), float(number), range(3)[number], hex(number), "ab" * number

    return body, log


def case_iter_protocol():
    log = []

    class Count:
        def __init__(self, n):
            self.n = n

        def __iter__(self):
            log.append("iter")
            return self

        def __next__(self):
            log.append("next")
            self.n -= 1
            if self.n < 0:
                raise StopIteration
            return self.n

        def __length_hint__(self):
            log.append("hint")
            return self.n

    def body():
        first, *rest = Count(3)
        return first, rest, dict.fromkeys(Count(2)), sum(Count(3)), max(Count(2)), list(zip(Count(2), "ab"))

    return body, log


def case_getitem_iteration():
    log = []

    class Row:
        def __getitem__(self, index):
            log.append(index)
            return ["a", "b"][index]

    row = Row()

    def body():
        return list(row), "b" in row, [*row]

    return body, log


# --- attributes -------------------------------------------------------------------------------------------------


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


def case_slots_beside_dict():
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


# --- classes ----------------------------------------------------------------------------------------------------


def case_super_both_ways():
    class A:
        def __init__(self):
            self.log = []

        def f(self, x):
            self.log.append(("A", x))
            return [x]

        @classmethod
        def make(cls):
            return cls()

    class B(A):
        def f(self, x):
            return [*super().f(x + 1), *super(B, self).f(x + 2)]

        @classmethod
        def make(cls):
            made = super().make()
            made.log.append("made")
            return made

    b = B()

    def body():
        return b.f(1), B.make().log

    return body, b


def case_metaclass_call_and_attributes():
    class Meta(type):
        made = []

        def __call__(cls, *args):
            obj = super().__call__(*args)
            cls.made.append(cls.__name__)
            return obj

        @property
        def size(cls):
            return len(cls.made)

        def __getitem__(cls, key):
            return (cls.__name__, key)

        def __len__(cls):
            return 4

        def __contains__(cls, item):
            return item == 1

        def __iter__(cls):
            return iter("xyz")

    class Thing(metaclass=Meta):
        def __init__(self, x):
            self.x = x

    def body():
        thing = Thing(3)
        return thing.x, Thing.size, Thing["k"], len(Thing), 1 in Thing, list(Thing)

    return body, Meta.made


def case_class_made_in_the_step():
    registry = []

    def body():
        class Base:
            kinds = []

            def __init_subclass__(cls, tag="none", **kwargs):
                super().__init_subclass__(**kwargs)
                cls.kinds.append((cls.__name__, tag))

        class Name:
            def __set_name__(self, owner, name):
                registry.append((owner.__name__, name))

        class Child(Base, tag="child"):
            field = Name()

            def __init__(self):
                self.x = len(self.kinds)

        Child.extra = 5
        made = Child()
        del Child.extra
        return made.x, Base.kinds, hasattr(Child, "extra"), Child.__mro__[1].__name__, __class__ if False else None

    return body, registry


def case_init_subclass_of_an_outside_base():
    class Plugin:
        known = []

        def __init_subclass__(cls):
            cls.known.append(cls.__name__)

    def body():
        class Local(Plugin):
            pass

        return len(Plugin.known)

    return body, Plugin.known


def case_dataclasses_in_and_out():
    @dataclasses.dataclass
    class Config:
        rate: float
        tags: list = dataclasses.field(default_factory=list)

    @dataclasses.dataclass(frozen=True, order=True)
    class Key:
        a: int
        b: str = "x"

    @dataclasses.dataclass(slots=True)
    class Slim:
        n: int = 0

    config, slim, table = Config(0.5), Slim(), {}

    def body():
        config.tags.append(len(config.tags))
        slim.n += 1
        table[Key(slim.n)] = slim.n
        try:
            Key(1).a = 2
        except dataclasses.FrozenInstanceError as error:
            refused = str(error)
        changed = dataclasses.replace(config, rate=1.0)
        names = [field.name for field in dataclasses.fields(config)]
        return (
            config == Config(0.5, list(config.tags)), changed.rate, names, refused, Key(1) < Key(2),
            dataclasses.asdict(config), dataclasses.astuple(slim), repr(Key(3)), hash(Key(1)) == hash(Key(1)),
        )  # fmt: skip

    return body, (config, slim, table)


def case_dataclass_made_in_the_step():
    def body():
        @dataclasses.dataclass(order=True)
        class Pair:
            a: int
            b: int = 2

        @dataclasses.dataclass(frozen=True, slots=True)
        class Frozen:
            x: int

        return repr(Pair(1)), Pair(1) < Pair(2), Pair(1) == Pair(1, 2), Frozen(3).x, hash(Frozen(3)) == hash((3,))

    return body, None


class Color(enum.Enum):
    RED = 1
    GREEN = "g"

    @property
    def label(self):
        return self.name.lower()


class Bits(enum.Flag):
    A = 1
    B = 2
    C = A | B


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


def case_enums():
    counts = collections.Counter()
    seen = {}

    def body():
        for color in Color:
            counts[color] += 1
            seen[color.label] = color
        return (
            Color(1) is Color.RED, Color["GREEN"].label, Bits.A | Bits.B is Bits.C, Bits.A in Bits.C, Level.HIGH > 1,
            Level(2).name, [c.value for c in Color], repr(Color.RED), f"{Level.LOW}", Color.RED in seen.values(),
            isinstance(Color.RED, Color), list(Bits.C),
        )  # fmt: skip

    return body, (counts, seen)


class Pair(NamedTuple):
    a: int
    b: list

    def total(self):
        return self.a + len(self.b)


def case_namedtuples():
    Point = collections.namedtuple("Point", "x y", defaults=[0])
    pair = Pair(1, [])

    def body():
        pair.b.append(pair.total())
        a, b = pair
        point = Point(2)._replace(y=5)
        return a, b, pair.total(), tuple(point), point.x, point._asdict(), Pair._fields, repr(point), pair[1] is pair.b

    return body, pair


def case_singledispatch():
    log = []

    @functools.singledispatch
    def show(value):
        log.append("any")
        return "any"

    @show.register
    def _(value: int):
        log.append("int")
        return "int"

    @show.register(list)
    def _(value):
        log.append("list")
        return "list"

    class Shower:
        @functools.singledispatchmethod
        def show(self, value):
            return "any"

        @show.register
        def _(self, value: str):
            return "str"

    shower = Shower()

    def body():
        return show(1), show([]), show("s"), show(True), shower.show("s"), shower.show(1)

    return body, log


def case_total_ordering():
    @functools.total_ordering
    class Version:
        def __init__(self, n):
            self.n = n

        def __eq__(self, other):
            return self.n == other.n

        def __lt__(self, other):
            return self.n < other.n

    one, two = Version(1), Version(2)

    def body():
        return one <= two, one >= two, one > two, sorted([two, one])[0] is one, max(one, two) is two

    return body, None


def case_abstract_and_runtime_protocols():
    import abc
    from collections.abc import Iterable, Mapping, Sized

    class Shape(abc.ABC):
        @abc.abstractmethod
        def area(self): ...

        @classmethod
        def __subclasshook__(cls, other):
            return NotImplemented

    class Square(Shape):
        def area(self):
            return 4

    Shape.register(int)
    square = Square()

    class Sizes:
        def __len__(self):
            return 2

    def body():
        try:
            Shape()
        except TypeError as error:
            refused = str(error)
        return (
            square.area(), isinstance(square, Shape), isinstance(3, Shape), issubclass(Square, Shape),
            isinstance(Sizes(), Sized), isinstance({}, Mapping), isinstance(3, Iterable), refused,
        )  # fmt: skip

    return body, None


# --- functions, closures, scopes --------------------------------------------------------------------------------

TOTAL = 0
HISTORY = []


def case_globals_written():
    global TOTAL
    TOTAL = 0
    HISTORY.clear()

    def body():
        global TOTAL
        TOTAL += 2
        HISTORY.append(TOTAL)
        return TOTAL

    return body, HISTORY


def case_nonlocals_written():
    count, log = 0, []

    def bump(by=1):
        nonlocal count
        count += by
        log.append(count)
        return count

    def body():
        bump()
        bump(by=3)
        return count

    return body, log


def case_mutable_default_argument():
    def collect(item, into=[], *, also={}):  # noqa: B006
        into.append(item)
        also[item] = len(into)
        return len(into), dict(also)

    def body():
        return collect(1), collect(2, []), collect(3)

    return body, (collect.__defaults__, collect.__kwdefaults__)


def case_lru_cache_made_in_the_step():
    log = []

    def body():
        @functools.lru_cache(maxsize=None)
        def square(x):
            log.append(x)
            return [x * x]

        same = square(2) is square(2)
        square(3)
        info = square.cache_info()
        square.cache_clear()
        return same, info.hits, info.misses, square(2)

    return body, log


def case_lru_cache_outside():
    @functools.lru_cache
    def table(n):
        return tuple(range(n))

    def body():
        return table(3), table(3) is table(3), table(2)

    return body, None


def case_partial_objects():
    log = []

    def note(*args, **kwargs):
        log.append((args, tuple(kwargs.items())))
        return args

    bound = functools.partial(note, 1, key="a")

    def body():
        twice = functools.partial(bound, 2, other="b")
        return bound(5), twice(6, key="c"), list(map(functools.partial(note, 0), [1, 2])), bound.args, bound.keywords

    return body, log


def case_partialmethod_and_wraps():
    class Cell:
        def __init__(self):
            self.alive = False

        def set_state(self, state):
            self.alive = state
            return state

        on = functools.partialmethod(set_state, True)

    def traced(fn):
        @functools.wraps(fn)
        def inner(*args):
            inner.calls.append(args)
            return fn(*args)

        inner.calls = []
        return inner

    @traced
    def add(a, b):
        """Adds."""
        return a + b

    cell = Cell()

    def body():
        return cell.on(), add(1, 2), add.__name__, add.__doc__, add.__wrapped__(3, 4), len(add.calls)

    return body, (cell, add.calls)


def case_callbacks_of_c_functions():
    log = []

    def key(x):
        log.append(x)
        return -x

    data = [3, 1, 2]

    def body():
        data.sort(key=key)
        return (
            sorted(data, key=key), list(map(key, data)), list(filter(key, [0, 1])), max(data, key=key),
            re.sub(r"\d", lambda m: str(key(int(m.group()))), "a1b2"), functools.reduce(lambda a, b: a + key(b), data),
            [list(g) for _, g in itertools.groupby(data, key)], list(itertools.accumulate(data, lambda a, b: key(a))),
            list(itertools.takewhile(key, [1, 0])), sum(map(key, data)), any(map(key, data)),
            list(itertools.starmap(pow, [(2, 3)])), collections.defaultdict(lambda: key(1))["k"],
        )  # fmt: skip

    return body, (log, data)


def case_exec_and_eval():
    space = {"x": 3}

    def body():
        exec("y = x + 1\ndef double(v):\n    return v * 2\n", space)
        made = {}
        exec("z = [i * k for i in range(3)]", {"k": 2}, made)
        return space["y"], space["double"](5), made["z"], eval("x * y", space), eval("1 + 1")

    def watched():
        return None

    return body, watched


def case_imports_inside():
    def body():
        import math
        import os.path as p
        from collections import OrderedDict as Ordered
        from math import sqrt as root

        return math.floor(2.5), p.join("a", "b"), root(9.0), list(Ordered(a=1))

    return body, None


def case_comprehensions_and_scopes():
    log = []

    def body():
        squares = [log.append(i) or i * i for i in range(3)]
        pairs = {k: v for k, v in zip("ab", squares)}
        nested = [[j for j in range(i)] for i in range(3)]
        total = sum(last := n for n in squares)
        lazy = (log.append("lazy") or n for n in squares)
        next(lazy)
        return squares, pairs, nested, total, last, {n % 2 for n in squares}, list(lazy)

    return body, log


def case_argument_kinds():
    def f(a, b=2, /, c=3, *args, d, e=5, **kwargs):
        return a, b, c, args, d, e, kwargs

    options = {"d": 1, "z": 9}
    more = [7, 8]

    def body():
        found = [f(1, d=0), f(1, *more, **options), f(*more, c=1, d=2), f(1, 2, 3, 4, 5, d=6, e=7, y=8)]
        for bad in (lambda: f(), lambda: f(1), lambda: f(1, d=1, a=2, **{"d": 3}), lambda: f(**options)):
            try:
                found.append(bad())
            except TypeError as error:
                found.append(str(error))
        return found

    return body, (options, more)


# --- generators and context managers ----------------------------------------------------------------------------


def case_generator_protocol():
    log = []

    def echo():
        try:
            received = yield "first"
            while True:
                try:
                    received = yield received * 2
                except ValueError as error:
                    log.append(str(error))
                    received = -1
        finally:
            log.append("closed")

    def outer():
        result = yield from inner()
        yield ("result", result)

    def inner():
        yield 1
        return "done"

    def body():
        gen = echo()
        found = [next(gen), gen.send(3), gen.throw(ValueError("bad")), gen.send(5)]
        gen.close()
        return found, list(outer()), next(gen, "end")

    return body, log


def case_generator_over_outside_state():
    queue = collections.deque([1, 2, 3])

    def drain():
        while queue:
            yield queue.popleft()
        queue.extend([4, 5])

    def body():
        return sum(drain()), len(queue)

    return body, queue


def case_context_managers():
    log = []

    @contextlib.contextmanager
    def section(name):
        log.append(("enter", name))
        try:
            yield name.upper()
        except KeyError as error:
            log.append(("caught", repr(error)))
        finally:
            log.append(("exit", name))

    class Guard:
        depth = 0

        def __enter__(self):
            self.depth += 1
            return self

        def __exit__(self, kind, value, trace):
            log.append((kind and kind.__name__, str(value)))
            self.depth -= 1
            return kind is ValueError

    guard = Guard()

    def body():
        with section("a") as a, guard as g:
            found = [a, g.depth]
        with section("b"):
            raise KeyError("k")
        with guard:
            raise ValueError("v")
        with contextlib.suppress(ZeroDivisionError):
            1 / 0
        with contextlib.nullcontext(5) as five:
            found.append(five)
        with contextlib.ExitStack() as stack:
            stack.enter_context(section("c"))
            stack.callback(log.append, "callback")
            stack.push(guard)
            found.append(guard.depth)
        return found, guard.depth

    return body, (log, guard)


def case_exceptions_and_chaining():
    log = []

    class Problem(Exception):
        def __init__(self, code, *args):
            super().__init__(code, *args)
            self.code = code

    def risky(n):
        try:
            if n == 0:
                raise Problem(3, "text")
            return 10 // (n - 1)
        except ZeroDivisionError as error:
            raise Problem(4) from error
        else:
            log.append("else")
        finally:
            log.append(("finally", n))

    def body():
        found = []
        for n in range(3):
            try:
                found.append(risky(n))
            except Problem as problem:
                found.append((problem.code, problem.args, repr(problem.__cause__), problem.__suppress_context__))
        try:
            raise ExceptionGroup("many", [ValueError(1), TypeError(2), KeyError(3)])
        except* ValueError as group:
            found.append([repr(e) for e in group.exceptions])
        except* (TypeError, KeyError) as group:
            found.append(len(group.exceptions))
        return found

    return body, log


def case_escaping_error_inside_helpers():
    log = []

    def deep(n):
        if n == 0:
            return {}["missing"]
        try:
            return deep(n - 1)
        finally:
            log.append(n)

    def body():
        return deep(2)

    return body, log


def case_match_statement():
    class Point:
        __match_args__ = ("x", "y")

        def __init__(self, x, y):
            self.x, self.y = x, y

    log = []

    def kind(value):
        match value:
            case 0 | 1:
                return "small"
            case int(n) if n > 100:
                return f"big {n}"
            case [first, *rest]:
                return first, rest
            case {"op": op, **others}:
                log.append(op)
                return op, others
            case Point(0, y=y):
                return "axis", y
            case Point(x, y):
                return x + y
            case Color.RED:
                return "red"
            case str() as text:
                return text.upper()
            case None:
                return "none"
            case _:
                return "other"

    values = [1, 500, [1, 2, 3], {"op": "add", "n": 1}, Point(0, 4), Point(1, 2), Color.RED, "abc", None, 7.5]

    def body():
        return [kind(value) for value in values]

    return body, log


def case_warnings_ignored():
    def noisy():
        warnings.warn("careful", UserWarning, stacklevel=2)
        return 1

    def body():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return noisy()

    return body, None


def case_warnings_recorded():
    def noisy():
        warnings.warn("careful", UserWarning, stacklevel=2)
        return 1

    def body():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            noisy()
        return [(str(w.message), w.category.__name__, w.lineno > 0) for w in caught]

    return body, None


def case_warnings_as_errors():
    def body():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                warnings.warn("careful", RuntimeWarning, stacklevel=1)
            except RuntimeWarning as error:
                return str(error)

    return body, None


# --- containers -------------------------------------------------------------------------------------------------


def case_unpacking_and_slices():
    items = [1, 2, 3, 4]
    table = {"a": 1}

    def body():
        first, *middle, last = items
        items[1:3] = [first + last]
        items[::2] = [0] * len(items[::2])
        table.update({**table, "b": len(items)}, c=3)
        (x, (y, *z)), w = (1, (2, 3, 4)), {*middle, 5}
        del items[-1]
        items.extend([8, 9])
        return first, middle, last, x, y, z, w, items[::-1], [*items, *table], {**table, "d": 1}

    return body, (items, table)


def case_collections_module():
    counter, ordered = collections.Counter("aab"), collections.OrderedDict(a=1, b=2)
    chain = collections.ChainMap({"x": 1}, {"x": 2, "y": 3})
    queue = collections.deque([1, 2, 3], maxlen=3)
    groups = collections.defaultdict(list)

    def body():
        counter.update("bc")
        ordered.move_to_end("a")
        queue.append(len(queue))
        queue.rotate(1)
        groups[len(groups) % 2].append(counter["a"])
        chain["z"] = chain["x"] + chain["y"]
        return counter.most_common(1), list(ordered), list(queue), dict(groups), dict(chain), counter + counter

    return body, (counter, ordered, queue, groups, chain.maps)


def case_user_containers():
    class Bag(collections.UserDict):
        def __setitem__(self, key, value):
            super().__setitem__(key, value * 2)

    class Stack(list):
        def push(self, item):
            self.append(item)
            return len(self)

    class Names(set):
        def add(self, item):
            super().add(item.lower())

    bag, stack, names = Bag(a=1), Stack([0]), Names(["x"])

    def body():
        bag["n"] = len(stack)
        names.add("ABC")
        return stack.push(5), dict(bag), sorted(names), stack[-1], "n" in bag

    return body, (bag, stack, names)


def case_copies():
    class Node:
        def __init__(self, value, parts):
            self.value, self.parts = value, parts

        def __copy__(self):
            return Node(self.value, self.parts)

    node = Node(1, [Node(2, [])])
    table = {"a": [1]}

    def body():
        shallow, deep, plain = copy.copy(node), copy.deepcopy(table), copy.copy(table)
        deep["a"].append(2)
        shallow.parts.append(3)
        return len(node.parts), table, plain["a"] is table["a"], deep

    return body, (node, table)


def case_operators_with_reflected_forms():
    log = []

    class Left:
        def __add__(self, other):
            log.append("add")
            return NotImplemented

        def __iadd__(self, other):
            log.append("iadd")
            return self

        def __matmul__(self, other):
            return "matmul"

        def __eq__(self, other):
            log.append("eq")
            return NotImplemented

        __hash__ = None

    class Right:
        def __radd__(self, other):
            log.append("radd")
            return "sum"

        def __rpow__(self, other):
            return "rpow"

        def __lt__(self, other):
            log.append("lt")
            return True

    left, right = Left(), Right()

    def body():
        value = left
        value += 1
        found = [left + right, value is left, left @ 1, left == right, 2**right, left > right, divmod(7, 2)]
        try:
            left - 1
        except TypeError as error:
            found.append(str(error))
        try:
            {left: 1}
        except TypeError as error:
            found.append(str(error))
        return found

    return body, log


def case_formatting():
    log = []

    class Money:
        def __format__(self, spec):
            log.append(spec)
            return f"<{spec}>"

        def __str__(self):
            return "money"

    money, width = Money(), 6

    def body():
        return (
            f"{money:>{width}} {money!s:>8} {3.14159:.2f} {width=} {1_000_000:,} {'q'!r}",
            "{:x} {0.real} {k[a]}".format if False else "{:x} {k[a]}".format(255, k={"a": 1}), format(money, "z"),
            "%s %5d|%-4s|%r" % (money, 3, "ab", "c"), str(money), "{0!s}{0:y}".format(money),
        )  # fmt: skip

    return body, log


def case_printing_elsewhere():
    class Log:
        def __init__(self):
            self.parts = []

        def write(self, text):
            self.parts.append(text)

    log = Log()

    def body():
        print("a", 1, log.parts[:1], sep="|", file=log)
        memory = io.StringIO()
        with contextlib.redirect_stdout(memory):
            print("redirected")
        print("direct", file=memory, end="")
        return log.parts[-3:], memory.getvalue()

    return body, log


def case_operator_objects():
    log = []

    class Point:
        def __init__(self, x):
            self.x = x

        @property
        def y(self):
            log.append("y")
            return -self.x

        def plus(self, n, by=1):
            return self.x + n * by

    points = [Point(3), Point(1)]

    def body():
        return (
            [p.x for p in sorted(points, key=operator.attrgetter("y"))],
            list(map(operator.methodcaller("plus", 2), points)), operator.methodcaller("plus", 2, by=3)(points[0]),
            list(map(operator.attrgetter("x", "y"), points)),
            operator.itemgetter(1, 0)("ab"), operator.attrgetter("x.real")(points[1]),
        )  # fmt: skip

    return body, log


def case_globals_as_a_dict():
    space = globals()
    space["TEMPORARY"] = 0

    def body():
        globals()["TEMPORARY"] += 1
        found = [globals()["TEMPORARY"], TEMPORARY, "TEMPORARY" in globals(), globals().get("nothing", 5)]  # noqa: F821
        globals()["OTHER"] = found[0]
        del globals()["OTHER"]
        return found, vars(math)["pi"]

    return body, None


def refused_globals_as_a_whole():
    def body():
        return len(globals()) > 0

    return body, None


def case_printing():
    class Shown:
        def __init__(self):
            self.times = 0

        def __str__(self):
            self.times += 1
            return f"shown {self.times}"

    shown = Shown()

    def body():
        print(shown, 1, [2], sep="|", end="!\n")
        return shown.times

    return body, shown


def case_assert_and_del():
    values = {"n": 1}

    def body():
        x = values["n"]
        assert x, "never"
        del x
        try:
            return x
        except UnboundLocalError as error:
            text = str(error)
        try:
            assert not values, f"values {values}"
        except AssertionError as error:
            return text, str(error)

    return body, values


# --- values that leave the step -----------------------------------------------------------------------------------


class Slotted:
    __slots__ = ("n", "items")

    def __init__(self, n):
        self.n = n
        self.items = [n]


class Named(Slotted):
    def __init__(self, n):
        super().__init__(n)
        self.name = f"named {n}"


class Words(set):
    pass


class Text(str):
    pass


class Recent(collections.deque):
    pass


class Problem(ValueError):
    def __init__(self, code):
        super().__init__(code, "problem")
        self.code = code


def case_objects_made_in_the_step_leave_it():
    kept = []

    def body():
        words = Words("ab")
        words.note = len(kept)
        made = [Slotted(1), Named(2), words, Text("abc"), types.SimpleNamespace(a=[1]), Recent([1, 2], maxlen=2)]
        kept.append(made)
        return made

    return body, kept


def case_exceptions_leave_the_step():
    kept = []

    def body():
        for make in (lambda: Problem(3), lambda: {}["k"], lambda: None.x, lambda: [].pop(), lambda: int("z")):
            try:
                error = make()
                if error is not None:
                    raise error from KeyError("cause")
            except Exception as error:
                kept.append((error, error.args, repr(error.__cause__), getattr(error, "name", None), vars(error)))
        return len(kept)

    return body, kept


def case_functions_leave_the_step():
    kept = []

    def body():
        start = len(kept)

        def add(a, *, by: int = start) -> int:
            """Adds."""
            return a + by

        @functools.wraps(add)
        def wrapped(a):
            return add(a) + 100

        wrapped.extra = [start]
        kept.append(wrapped)
        return wrapped

    def watched():
        return [
            (f(1), f.__name__, f.__doc__, f.__qualname__, f.__annotations__, f.extra, f.__wrapped__(1)) for f in kept
        ]

    return lambda: (body(), watched())[1], None


def refused_instance_of_a_class_made_in_the_step():
    def body():
        class Local:
            pass

        return Local()

    return body, None


def case_errors_of_exec():
    def body():
        found = []
        for source in ("1 +", "x = undefined_name", "raise KeyError('k')"):
            try:
                exec(source, {})
            except Exception as error:
                found.append((type(error).__name__, str(error)))
        return found

    return body, None


def test_finalizers_run_for_real_objects_only():
    log = []

    class Owner:
        def __init__(self):
            self.n = 0

        def __del__(self):
            log.append("deleted")

    class Slim(Owner):
        __slots__ = ("m",)

    owner, slim = Owner(), Slim()

    def body():
        owner.n += 1
        slim.m = owner.n
        return owner.n

    step = compiled(body)
    assert [step(), step()] == [1, 2]
    gc.collect()
    assert log == [], "a shadow ran __del__"
    del owner, slim, body, step
    gc.collect()
    assert log == ["deleted", "deleted"]


def test_finalizer_of_a_new_object_is_refused():
    """A replay creates no such object, so nothing would be deleted."""

    class Owner:
        def __del__(self):
            pass

    with pytest.raises(GraphBreakError, match="__del__"):
        compiled(lambda: Owner().__class__.__name__)()


def test_class_changed_between_calls():
    """An object's class is guarded in addition to its identity."""

    class A:
        def name(self):
            return "A"

    class B(A):
        def name(self):
            return "B"

    obj = A()
    step = compiled(lambda: obj.name())
    assert step() == "A"
    obj.__class__ = B
    assert step() == "B"


@pytest.mark.parametrize("case", cases(globals(), "refused_"), ids=lambda case: case.__name__.removeprefix("refused_"))
def test_refused(case):
    """Code that is not captured gives a reason, and runs as before."""
    check_refused(case, "SFX111")


@pytest.mark.parametrize("case", cases(globals()), ids=lambda case: case.__name__.removeprefix("case_"))
def test_three_ways(case):
    check_case(case)
