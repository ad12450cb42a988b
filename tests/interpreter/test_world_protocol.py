"""The interpreter follows the World protocol: everything outside frames goes through the world."""

from __future__ import annotations

import functools
import sys
import types

import pytest

from sidefx_train.compile.capture.interpreter.interpreter import Interpreter
from sidefx_train.compile.capture.interpreter.world import DirectWorld
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.errors import Unsupported
from tests.interpreter.all_bodies import BODIES
from tests.support.interpreter import observe

SETTING = {"rate": 1}
TOTAL = 100
GONE = "here"


class Overlay(DirectWorld):
    """Reads the real world, keeps all writes to globals, cells and old instances to itself."""

    def __init__(self):
        self.globals = {}
        self.cells = _ByIdentity()
        self.attributes = {}
        self.kept = []

    def load_global(self, namespace, name):
        known = self.globals.get((id(namespace), name), self)
        return DirectWorld.load_global(self, namespace, name) if known is self else known

    def store_global(self, namespace, name, value):
        self.globals[id(namespace), name] = value

    def delete_global(self, namespace, name):
        found = self.load_global(namespace, name) is not ABSENT
        self.globals[id(namespace), name] = ABSENT
        return found

    def load_cell(self, cell):
        return self.cells[cell] if cell in self.cells else DirectWorld.load_cell(self, cell)

    def store_cell(self, cell, value):
        self.kept.append(cell)
        self.cells[cell] = value

    def instance_attr(self, obj, name):
        key = (id(obj), name)
        return self.attributes[key] if key in self.attributes else DirectWorld.instance_attr(self, obj, name)

    def set_instance_attr(self, obj, name, value):
        self.kept.append(obj)
        self.attributes[id(obj), name] = value

    def del_instance_attr(self, obj, name):
        if self.instance_attr(obj, name) is ABSENT:
            raise AttributeError(name)
        self.attributes[id(obj), name] = ABSENT


class _ByIdentity:
    def __init__(self):
        self.items = {}

    def __contains__(self, cell):
        return id(cell) in self.items

    def __getitem__(self, cell):
        return self.items[id(cell)]

    def __setitem__(self, cell, value):
        self.items[id(cell)] = value


class Thing:
    def __init__(self):
        self.n = 1
        self.gone = True


def test_writes_do_not_reach_the_real_world():
    thing, count = Thing(), 5

    def step():
        global TOTAL, GONE
        nonlocal count
        TOTAL += 1
        del GONE
        count *= 2
        thing.n += 10
        thing.new = count
        del thing.gone
        return TOTAL, count, thing.n, thing.new, hasattr(thing, "gone"), "GONE" in globals()

    world = Overlay()
    assert Interpreter(world).run(step) == (101, 10, 11, 10, False, True)
    assert (TOTAL, count, vars(thing), GONE) == (100, 5, {"n": 1, "gone": True}, "here")
    assert Interpreter(world).run(step.__closure__ and (lambda: (TOTAL, count, thing.n))) == (101, 10, 11)


class Recording(DirectWorld):
    """Records the calls it receives."""

    def __init__(self):
        self.seen = []

    def intercept_call(self, fn, args, kwargs):
        self.seen.append((fn, args, kwargs))
        return ABSENT


def test_intercept_sees_functions_unwrapped_and_builtins_first():
    class A:
        def method(self, x):
            return isinstance(x, int)

    a = A()
    world = Recording()
    assert Interpreter(world).run(lambda: a.method(3)) is True
    assert (A.method, (a, 3), {}) in world.seen
    assert (isinstance, (3, int), {}) in world.seen


def test_intercept_answers_in_place_of_the_call():
    class Answering(DirectWorld):
        def intercept_call(self, fn, args, kwargs):
            return "len!" if fn is len else "made" if fn is Thing else ABSENT

    found = Interpreter(Answering()).run(lambda: (len([]), Thing(), [len(x) for x in "a"]))
    assert found == ("len!", "made", ["len!"])


def test_overrides_come_first():
    class Overriding(DirectWorld):
        def override_getattr(self, obj, name):
            return 42 if name == "magic" else ABSENT

        def override_setattr(self, obj, name, value):
            return name == "ignored"

        def override_delattr(self, obj, name):
            return name == "ignored"

        def override_operator(self, name, args):
            if args[:1] == (thing,) or args[1:] == (thing,):
                return name
            return ABSENT

    thing = Thing()

    def step():
        thing.ignored = 1
        del thing.ignored
        return (
            thing.magic, getattr(thing, "magic"), thing + 1, 1 + thing, -thing, thing[0], thing < 2, thing is None,
            thing in [], 1 in thing, f"{thing}", str(thing), repr(thing), f"{thing!r}", hasattr(thing, "ignored"),
        )  # fmt: skip

    assert Interpreter(Overriding()).run(step) == (
        42, 42, "add", "add", "neg", "getitem", "lt", "is_", "contains", "contains", "format", "str", "repr", "repr",
        False,
    )  # fmt: skip


def test_override_of_inplace_item_and_iteration():
    log = []

    class Overriding(DirectWorld):
        def override_operator(self, name, args):
            if not isinstance(args[0], Thing):
                return ABSENT
            log.append(name)
            return iter([1, 2]) if name == "iter" else args[0]

    thing = Thing()

    def step():
        x = thing
        x += 1
        x[0] = 1
        del x[0]
        for _ in x:
            pass
        x | 2
        return [*x]

    assert Interpreter(Overriding()).run(step) == [1, 2]
    assert log == ["iadd", "setitem", "delitem", "iter", "or_", "iter"]


def test_the_class_is_what_the_world_says():
    class Pretended:
        extra = "class attribute"

        def hello(self):
            return "hello"

        def __add__(self, other):
            return "added"

        def __len__(self):
            return 3

    class Pretending(DirectWorld):
        def type_of(self, obj):
            return Pretended if type(obj) is Thing else type(obj)

    thing = Thing()

    def step():
        return (
            type(thing) is Pretended, isinstance(thing, Pretended), isinstance(thing, (str, Thing)), thing.extra,
            thing.hello(), thing + 1, thing.__class__ is Pretended, len(thing), callable(thing), thing.n,
        )  # fmt: skip

    expected = (True, True, False, "class attribute", "hello", "added", True, 3, False, 1)
    assert Interpreter(Pretending()).run(step) == expected


def test_truth_asks_the_world():
    class Truthful(DirectWorld):
        def truth(self, value):
            return value is thing

    thing = Thing()
    assert Interpreter(Truthful()).run(lambda: (not thing, bool(thing), "x" if [1] else "y", bool("text"))) == (
        False, True, "y", False,
    )  # fmt: skip


def test_callbacks_go_through_the_world_and_reenter():
    class Handing(DirectWorld):
        def __init__(self):
            self.handed = []
            self.frames = []

        def callback(self, fn, reenter):
            self.handed.append(fn)
            return reenter

        def intercept_call(self, fn, args, kwargs):
            self.frames.append(fn)
            return ABSENT

    def double(x):
        return x * 2

    world = Handing()
    partial = functools.partial(double)
    method = Thing.__init__
    found = Interpreter(world).run(lambda: [*map(double, [1, 2]), *map(partial, [3]), *map(str, [4])])
    assert found == [2, 4, 6, "4"]
    assert world.handed == [double, partial, str], "str as well: the numbers of a world may not be Python's own"
    assert world.frames.count(double) == 3
    world.handed.clear()
    Interpreter(world).run(lambda: [[].append(double), {}.get(double), repr(method), id(double), {"a": double}.items()])
    assert world.handed == [], "storing and looking do not call"


def test_unsupported_runs_no_user_code():
    log = []

    class Refusing(DirectWorld):
        def intercept_call(self, fn, args, kwargs):
            if fn is sys.getsizeof:
                raise Unsupported("SFX103", "refused")
            return ABSENT

    class Manager:
        def __enter__(self):
            return self

        def __exit__(self, *a):
            log.append("exit")

    def gen():
        try:
            yield sys.getsizeof(1)
        finally:
            log.append("gen finally")

    def inner():
        with Manager():
            try:
                return [x for x in map(lambda g: list(g), [gen()])]
            except BaseException:  # noqa: B036
                log.append("except")
            finally:
                log.append("finally")

    interp = Interpreter(Refusing())
    with pytest.raises(Unsupported) as caught:
        interp.run(inner)
    assert log == []
    assert caught.value.location.file == __file__
    assert caught.value.location.function.endswith("gen")
    assert caught.value.location.line == gen.__code__.co_firstlineno + 2
    assert interp.current_frame is None and interp.depth == 0
    assert interp.run(lambda: 1) == 1, "usable again"


def test_unsupported_through_code_that_swallows():
    class Refusing(DirectWorld):
        def intercept_call(self, fn, args, kwargs):
            if fn is sys.getsizeof:
                raise Unsupported("SFX103", "refused")
            return ABSENT

    def swallow(f):
        try:
            f()
        except BaseException as error:  # noqa: B036
            raise ValueError("from native code") from error

    class Policy:
        def inline(self, fn):
            return fn is not swallow

    with pytest.raises(Unsupported):
        Interpreter(Refusing(), Policy()).run(lambda: swallow(lambda: sys.getsizeof(1)))


def test_policy_decides_what_is_interpreted():
    class Policy:
        def inline(self, fn):
            return fn.__name__ != "native"

    class Seeing(DirectWorld):
        def __init__(self):
            self.natives = []

        def native_call(self, fn, args, kwargs):
            self.natives.append(fn)
            return fn(*args, **kwargs)

    def native(x):
        return x + 1

    def inlined(x):
        return native(x) * 2

    world = Seeing()
    assert Interpreter(world, Policy()).run(inlined, (1,)) == 4
    assert world.natives == [native]


def test_async_is_unsupported():
    async def coroutine():
        return 1

    with pytest.raises(Unsupported) as caught:
        Interpreter(DirectWorld()).run(lambda: coroutine())
    assert caught.value.code == "SFX111"


def test_location_is_the_users_line():
    class Looking(DirectWorld):
        def native_call(self, fn, args, kwargs):
            if fn is sys.getsizeof:
                places.append(interp.location())
                written.append(interp.written_names(interp.current_frame))
            return fn(*args, **kwargs)

    places, written = [], []
    thing = Thing()

    def step():
        thing.n = functools.reduce(lambda a, b: sys.getsizeof(a), [1, 2, 3])
        return (
            1,
            functools.cached_property.__get__(functools.cached_property(sys.getsizeof), None) and sys.getsizeof(1),
        )

    interp = Interpreter(Looking())
    interp.run(step)
    first = step.__code__.co_firstlineno
    assert [p.line for p in places] == [first + 1, first + 1, first + 4]
    assert all(p.file == __file__ for p in places)
    assert written[0] == frozenset() and written[2] == {"n"}


def test_new_cells_are_announced():
    class Telling(DirectWorld):
        def __init__(self):
            self.cells = []

        def new_cell(self, cell):
            self.cells.append(cell)

    def step(x):
        y = x

        def f():
            return x, y

        return f

    world = Telling()
    f = Interpreter(world).run(step, (3,))
    assert isinstance(f, types.FunctionType) and f() == (3, 3)
    assert {id(c) for c in f.__closure__} == {id(c) for c in world.cells}


def test_defaults_are_read_through_the_world():
    class Replacing(DirectWorld):
        def native_getattr(self, obj, name):
            if name == "__defaults__":
                return ("shadow",)
            if name == "__kwdefaults__":
                return {"k": "shadow k"}
            return getattr(obj, name)

    def f(x=[], *, k=[]):
        return x, k

    assert Interpreter(Replacing()).run(lambda: f()) == ("shadow", "shadow k")


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_bodies_leave_real_globals_alone(body):
    """In a world that keeps writes to globals and cells to itself, bodies give the same results as in the real one."""

    class Kept(Overlay):
        set_instance_attr = DirectWorld.set_instance_attr
        del_instance_attr = DirectWorld.del_instance_attr
        instance_attr = DirectWorld.instance_attr

        def new_cell(self, cell):
            self.own.add(id(cell))
            self.kept.append(cell)

        def load_cell(self, cell):
            return DirectWorld.load_cell(self, cell) if id(cell) in self.own else Overlay.load_cell(self, cell)

        def store_cell(self, cell, value):
            (DirectWorld if id(cell) in self.own else Overlay).store_cell(self, cell, value)

    before = dict(body.__globals__)
    world = Kept()
    world.own = set()
    file = body.__code__.co_filename
    found = observe(lambda: Interpreter(world).run(body), file)
    assert body.__globals__ == before
    assert found == observe(lambda: body(), file)
