"""Objects that a step creates and that refer to each other: each is one object afterwards, as in eager."""

from __future__ import annotations

import functools
import types
from collections import defaultdict, deque, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch

import sidefx_train

PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {}
Pair = namedtuple("Pair", "first second")


def program(fn):
    PROGRAMS[fn.__name__] = fn
    return fn


class Thing:
    pass


class Named:
    def __init__(self, name):
        self.name = name

    def __hash__(self):
        return hash(self.name)

    def __eq__(self, other):
        return self.name == other.name


@program
def function_that_returns_itself(x):
    def f():
        return f

    return x + 1, f


@program
def functions_that_call_each_other(x):
    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n != 0 and even(n - 1)

    return odd, even, x + 1


@program
def wrapped_function(x):
    def decorated(fn):
        @functools.wraps(fn)
        def wrapper(n):
            return wrapper.__wrapped__, fn

        return wrapper

    @decorated
    def inner(n):
        return inner

    return inner, x + 1


@program
def default_of_a_function(x):
    held = [x + 1]

    def f(a=held, *, b=held):
        return a

    held.append(f)
    return f


@program
def tuple_in_its_list(x):
    held = [x + 1]
    both = held, 2
    held.append(both)
    return both


@program
def named_tuple_in_its_list(x):
    held = []
    held.append(Pair(held, x + 1))
    return held[0]


@program
def tuple_in_its_dict(x):
    held = {}
    held["both"] = held, x + 1
    return held["both"]


@program
def tuple_in_its_deque(x):
    held = deque()
    held.append((held, x + 1))
    return held[0]


@program
def factory_of_its_dict(x):
    held = defaultdict(lambda: (held, x))
    return held["a"], x + 1


@program
def partial_in_its_argument(x):
    held = [x + 1]
    held.append(functools.partial(max, held))
    return held[1]


@program
def method_of_its_owner(x):
    thing = Thing()
    thing.x, thing.method = x + 1, types.MethodType(lambda self: self.x, thing)
    return thing.method


@program
def object_in_a_closure(x):
    thing = Thing()
    thing.x = x + 1

    def f():
        return thing

    thing.f = f
    return f


@program
def property_over_its_list(x):
    held = [x + 1]
    held.append(property(lambda self: held))
    return held[1]


@program
def attribute_of_a_tensor(x):
    y = x + 1
    y.both = y, 2
    return y.both


@program
def hashed_while_its_tuple_is_made(x):
    named = Named(3)
    return named, {named}, {named: x + 1}, frozenset([named])


@program
def read_while_its_tuple_is_made(x):
    held, numbers = [1, 2, x], {"a": 1, "b": 2}
    taken, keys = iter(held), iter(numbers)
    next(taken)
    next(keys)
    return held, taken, numbers, keys, zip(held, numbers, strict=False), f"{held[:2]}"


@program
def iterator_in_its_list(x):
    held = [x + 1]
    held.append(iter(held))
    return held[1]


@program
def error_in_its_argument(x):
    held = [x + 1]
    held.append(ValueError(held))
    return held[1]


@program
def generator_in_its_list(x):
    held = [x + 1]

    def values():
        yield held
        yield generator

    generator = values()
    next(generator)
    held.append(generator)
    return generator


IN_EAGER = {"iterator_in_its_list", "error_in_its_argument", "generator_in_its_list"}
"""Eager runs them: what they are made from is read when they are made."""


def parts_of(value: Any) -> Any:
    """Returns what an object refers to, in order."""
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return [value.__name__, cells, value.__defaults__, value.__kwdefaults__, vars(value)]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, property):
        return [value.fget]
    if isinstance(value, BaseException):
        return [value.args]
    if isinstance(value, types.GeneratorType):
        return [dict(value.gi_frame.f_locals)]
    if isinstance(value, dict):
        return [value.get("default_factory"), *value.items()]
    if isinstance(value, (tuple, list, deque, set, frozenset)):
        return list(value)
    if hasattr(type(value), "__next__"):
        return list(value.__reduce__()[1:])
    return list(vars(value).items())


def structure(value: Any, seen: dict[int, tuple[int, Any]]) -> Any:
    """Describes an object and all that it refers to; an object that was met before is its number."""
    if isinstance(value, (str, int, type, types.BuiltinFunctionType, type(None))):
        return value
    if id(value) in seen:
        return "the object", seen[id(value)][0]
    seen[id(value)] = len(seen), value  # kept, since an address could come again
    if isinstance(value, torch.Tensor):
        return value.tolist(), structure(vars(value), seen)
    return type(value), [structure(part, seen) for part in parts_of(value)]


@pytest.mark.filterwarnings("ignore::sidefx_train.SideFXWarning")
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_is_one_object(name):
    step = sidefx_train.compile(PROGRAMS[name], backend="eager")
    for i in range(2):
        x = torch.full((1,), float(i))
        assert structure(step(x), {}) == structure(PROGRAMS[name](x), {})
    assert step.report().replays == (0 if name in IN_EAGER else 2)
