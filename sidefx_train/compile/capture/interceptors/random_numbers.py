"""Methods of Python's and NumPy's random generators that return a number or an array."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from sidefx_train.compile.capture.shadows.objects.numpy_arrays import ArrayRecord
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld

_OF_PYTHON = (
    random.Random.uniform,
    random.Random.triangular,
    random.Random.normalvariate,
    random.Random.lognormvariate,
    random.Random.expovariate,
    random.Random.vonmisesvariate,
    random.Random.gammavariate,
    random.Random.gauss,
    random.Random.betavariate,
    random.Random.paretovariate,
    random.Random.weibullvariate,
    random.Random.randint,
    random.Random.randrange,
    random.Random.random,
)
_OF_NUMPY = ("random", "uniform", "normal", "standard_normal", "beta", "gamma", "standard_gamma", "exponential")
_OF_LEGACY_NUMPY = ("rand", "randn", "random_sample", "randint", "permutation", "choice")
_OF_NEW_NUMPY = ("integers", "permutation", "choice")


def _draw(function: Callable[..., Any], world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return world.random_draws.call(function, args, kwargs) if args and not world.branching else ABSENT


_METHODS: list[tuple[type, str]] = [(np.random.RandomState, name) for name in (*_OF_NUMPY, *_OF_LEGACY_NUMPY)]
_METHODS += [(np.random.Generator, name) for name in (*_OF_NUMPY, *_OF_NEW_NUMPY)]

for _function in (*_OF_PYTHON, *(vars(cls)[name] for cls, name in _METHODS)):
    registry.intercept(_function)(functools.partial(_draw, _function))


@registry.intercept(random.Random.choice)
def _choice(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draws the index of the item, which decides what is captured."""
    if len(args) != 2 or kwargs or world.branching or type(args[1]) not in (list, tuple, range, str):
        return ABSENT
    length = world.interp.call(len, (args[1],), {})
    if type(length) is not int or not length:
        return ABSENT
    index = world.random_draws.call(random.Random.randrange, (args[0], length), {})
    return ABSENT if index is ABSENT else world.interp.getitem(args[1], index)


@registry.intercept(random.Random.sample)
def _sample(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draws the places of the items: which they are does not matter to the generator."""
    if len(args) != 3 or kwargs or world.branching or type(args[1]) not in (list, tuple, range):
        return ABSENT
    length = world.interp.call(len, (args[1],), {})
    if type(length) is not int or type(args[2]) is not int or not 0 <= args[2] <= length:
        return ABSENT
    places = world.random_draws.call(random.Random.sample, (args[0], range(length), args[2]), {})
    if type(places) is not list or args[1] == range(length):
        return places
    return [world.interp.getitem(args[1], place) for place in places]


def _converted(function: Callable[..., Any], world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Converts or reshapes an array of random numbers before the graph runs, as it is drawn."""
    record = world.heap.record_of(args[0]) if args else None
    if not safe_isinstance(record, ArrayRecord) or not record.drawn or kwargs or world.branching:
        return ABSENT
    if not all(safe_isinstance(each, _CONVERTS) or _is_sizes(each) for each in args[1:]):
        return ABSENT
    return world.random_draws.derive(record, function, args[1:], f"numpy.ndarray.{function.__name__}")


def _is_sizes(value: Any) -> bool:
    return type(value) is tuple and all(type(size) is int for size in value)


_CONVERTS = (int, str, type, np.dtype)

for _function in (np.ndarray.astype, np.ndarray.reshape):
    registry.intercept(_function)(functools.partial(_converted, _function))
