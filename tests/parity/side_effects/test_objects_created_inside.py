"""Objects that a step creates are new ones at every call, with their class, attributes and real tensors."""

from __future__ import annotations

import collections
import copy
import functools
import inspect
import types
import typing
import warnings

import pytest
import torch

import sidefx_train
from tests.fuzz.compare import Pairing


class Named(typing.NamedTuple):
    a: torch.Tensor


class SubNamed(Named):
    pass


class Tuple(tuple):
    pass


class Int(int):
    def __int__(self):
        return 77


class Float(float):
    pass


class Str(str):
    def __str__(self):
        return "shown"


class Slots(str):
    __slots__ = ("c",)


class Bytes(bytes):
    def __bytes__(self):
        return b"other"


class Complex(complex):
    pass


class List(list):
    pass


class Dict(dict):
    pass


class Deque(collections.deque):
    pass


class FrozenSet(frozenset):
    pass


class Error(Exception):
    pass


class Partial(functools.partial):
    pass


class Module(types.ModuleType):
    pass


MAKERS = {
    "namedtuple": lambda x: SubNamed(x), "tuple": lambda x: Tuple((x, 1)), "int": lambda x: Int(3),
    "float": lambda x: Float(3.0), "str": lambda x: Str("s"), "slots": lambda x: Slots("q"),
    "bytes": lambda x: Bytes(b"s"), "complex": lambda x: Complex(complex(-0.0, 1)), "list": lambda x: List([x]),
    "dict": lambda x: Dict(a=x), "deque": lambda x: Deque([x], 3), "frozenset": lambda x: FrozenSet([1, 2]),
    "error": lambda x: Error("m"), "partial": lambda x: functools.partial(torch.add, x),
    "a partial's subclass": lambda x: Partial(torch.add, x, alpha=2), "module": lambda x: types.ModuleType("m", "doc"),
    "a module's subclass": lambda x: Module("m"), "function": lambda x: lambda: x,
    "namespace": lambda x: types.SimpleNamespace(a=x),
}  # fmt: skip


def changed(make, x):
    made = make(x)
    made.c = x + 3
    if not hasattr(made, "__slots__"):
        made.d = "k"
        made.e = made.c.sum()
        del made.d
    return made


def quietly(step, backend):
    step = sidefx_train.compile(step, backend=backend)

    def call(*args):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sidefx_train.errors.SideFXWarning)
            return step(*args)

    return call


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MAKERS)
def test_attributes_and_identity(name, backend):
    kept = ([], [])

    def step(x, log):
        made = changed(MAKERS[name], x)
        log.append(made)
        return made, {"again": made}

    captured = quietly(step, backend)
    pairing = Pairing()
    for i in range(3):
        x = torch.full((2,), float(i))
        want, have = step(x, kept[0]), captured(x, kept[1])
        assert have[0] is have[1]["again"] is kept[1][-1]
        pairing.compare(want, have, f"call {i}")
    assert len({id(made) for made in kept[1]}) == 3


CELLS = {
    "cell": lambda x: types.CellType(x + 1),
    "cell that is set": lambda x: setattr(cell := types.CellType(), "cell_contents", x + 1) or cell,
    "empty cell": lambda x: types.CellType(),
    "property": lambda x: property(lambda self: x + 1, doc="text"),
    "setter": lambda x: property(lambda self: x + 1).setter(lambda self, value: x),
    "static method": lambda x: staticmethod(lambda: x + 1),
    "class method": lambda x: classmethod(lambda cls: x + 1),
    "function from code": lambda x: types.FunctionType((lambda: x).__code__, {}, "n", None, (types.CellType(x + 3),)),
    "bound method": lambda x: types.MethodType(lambda self: self, x + 1),
    "type parameter": lambda x: typing.TypeVar("T"),
}


def inside(value):
    """Returns everything reachable from a created object, as plain values."""
    if isinstance(value, property):
        return [value.fget(None), value.fset and value.fset(None, 1), value.__doc__]
    if isinstance(value, (staticmethod, classmethod)):
        return value.__get__(None, int)()
    if isinstance(value, types.CellType):
        try:
            return value.cell_contents
        except ValueError:
            return "empty"
    return value() if callable(value) else str(value)


@pytest.mark.parametrize("name", CELLS)
def test_what_otherwise_comes_from_outside(name):
    captured = quietly(lambda x: (x.sin(), CELLS[name](x))[1], "eager")
    made = []
    for i in range(3):
        x = torch.full((2,), float(i))
        made.append(captured(x))
        assert type(made[-1]) is type(CELLS[name](x))
        assert str(inside(made[-1])) == str(inside(CELLS[name](x)))
    assert len({id(each) for each in made}) == 3


def test_a_module_made_in_the_step_is_used_inside():
    def step(x):
        module = types.ModuleType("m")
        module.scale = x.sum()
        module.__getattr__ = lambda name: len(name)
        scale = module.scale * module.four
        del module.scale
        return x * scale, hasattr(module, "scale"), sorted(vars(module))

    captured = sidefx_train.compile(step, backend="eager", fullgraph=True)
    for i in range(3):
        x = torch.full((2,), float(i))
        assert str(captured(x)) == str(step(x))


# ---------------------------------------------------------------------- objects of such classes from outside
OUTSIDE = {name: MAKERS[name] for name in ("namedtuple", "tuple", "int", "float", "str", "bytes", "complex", "slots")}
USES = {
    "reads": lambda o, x: getattr(o, "c", "absent"),
    "counts": lambda o, x: (setattr(o, "c", getattr(o, "c", 0) + 1), o.c),
    "writes": lambda o, x: (setattr(o, "c", x + 3), o)[1],
    "deletes": lambda o, x: delattr(o, "c") if hasattr(o, "c") else "none",
    "returns": lambda o, x: o,
    "lists": lambda o, x: sorted(vars(o)) if hasattr(o, "__dict__") else "none",
    "copies": lambda o, x: getattr(copy.copy(o), "c", "absent"),
    "shows": lambda o, x: f"{o!r} {o!s}",
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("how", ["argument", "global"])
@pytest.mark.every(3)
def test_from_outside(how, name, use):
    worlds = [{"o": OUTSIDE[name](torch.ones(2))} for _ in range(2)]
    eager, mine = worlds

    def body(o, x):
        return x.sin(), USES[use](o, x)

    step = quietly(body if how == "argument" else lambda x: body(mine["o"], x), "eager")
    for i in range(5):
        for world in worlds:
            if i == 2:
                world["o"] = OUTSIDE[name](torch.zeros(2))
            if i == 3:
                world["o"].c = 7.5
        x = torch.full((2,), float(i))
        want = body(eager["o"], x)[1]
        have = (step(mine["o"], x) if how == "argument" else step(x))[1]
        assert str(want) == str(have)
        assert (want is eager["o"]) == (have is mine["o"])
        assert str(getattr(eager["o"], "c", "absent")) == str(getattr(mine["o"], "c", "absent"))


def test_methods_that_count_items_do_not_run_where_a_tuple_is_looked_up():
    class Odd(tuple):
        def __getitem__(self, i):
            return "got", super().__getitem__(i)

        def __len__(self):
            return 100

    def step(x, odd):
        return x * tuple.__getitem__(odd, 0), odd[1], len(odd)

    captured = sidefx_train.compile(step, backend="eager")
    for i in range(3):
        odd, x = Odd((torch.full((2,), float(i)), i)), torch.ones(2)
        assert str(captured(x, odd)) == str(step(x, odd))


@pytest.mark.parametrize("base", [torch.Tensor, torch.nn.Parameter, torch.nn.Module, object])
@pytest.mark.filterwarnings("ignore::sidefx_train.SideFXWarning")
def test_a_class_that_leaves_the_step(base):
    """Regression: the class of a tensor was the capture's own, with its list, at every call."""

    def step():
        calls: list[int] = []

        class Made(base):
            def call(self):
                calls.append(1)

        return Made, calls

    captured = sidefx_train.compile(step, backend="eager")
    classes = []
    for _ in range(2):
        cls, calls = captured()
        cls.call(None)
        assert calls == [1]
        classes.append(cls)
    assert classes[0] is not classes[1]


def test_mapping_proxies_and_signatures():
    outside = {"a": 1}

    def called(first, *rest, key=10, **named): ...

    def program(x):
        own = {"x": x + 1}
        bound = inspect.signature(called).bind(1, 2, key=x.dim(), other=3)
        return bound, types.MappingProxyType(own), own, types.MappingProxyType(outside)

    step = sidefx_train.compile(program, backend="eager", fullgraph=True)
    for i in range(2):
        bound, proxy, own, shown = step(torch.ones(3))
        assert bound == program(torch.ones(3))[0]
        own["more"], outside["b"] = i, i
        assert type(proxy) is types.MappingProxyType and dict(proxy) == own and dict(shown) == outside


def test_bytearrays():
    def program(x, n, kept):
        made = bytearray(n)
        kept.append(made)
        made += b"abc"
        return x + 1, made, [made]

    step = sidefx_train.compile(program, backend="eager", fullgraph=True)
    kept, expected = [], []
    for n in (1, 2, 2, 0):
        _, made, (same,) = step(torch.ones(1), n, kept)
        assert made is same is kept[-1] and made == program(torch.ones(1), n, expected)[1]
        made.append(9)
    assert [each[-1] for each in kept] == [9] * 4 and len({*map(id, kept)}) == 4
