"""Methods of Python's and NumPy's random generators that return a number or an array."""

from __future__ import annotations

import functools
import math
import random
import types
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.kinds.relations import overlaps
from sidefx_train.compile.capture.shadows.containers.lists_and_dicts import ListRecord
from sidefx_train.compile.capture.shadows.deferred_values import RangeOfNumber
from sidefx_train.compile.capture.shadows.objects.numpy_arrays import ArrayRecord
from sidefx_train.compile.capture.shadows.records import TensorRecord
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common import trace_rules
from sidefx_train.compile.common.draws.generator_states import is_generator
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
    random.Random.getrandbits,
    random.Random.seed,
    random.Random.getstate,
    random.Random.setstate,
)
_OF_NUMPY = (
    ("random", "uniform", "normal", "standard_normal", "beta", "gamma", "standard_gamma", "exponential", "binomial")
    + ("chisquare", "dirichlet", "f", "geometric", "gumbel", "hypergeometric", "laplace", "logistic", "lognormal")
    + ("logseries", "multinomial", "negative_binomial", "noncentral_chisquare", "noncentral_f", "pareto", "poisson")
    + ("power", "rayleigh", "standard_cauchy", "standard_exponential", "standard_t", "triangular", "vonmises", "wald")
    + ("weibull", "zipf", "permutation", "choice")
)
_OF_LEGACY_NUMPY = ("rand", "randn", "random_sample", "randint", "seed", "get_state", "set_state")
_OF_NEW_NUMPY = ("integers", "permuted")
_CREATED = (
    random.Random,
    np.random.RandomState,
    np.random.default_rng,
    np.random.Generator,
    np.random.PCG64,
    np.random.PCG64DXSM,
    np.random.MT19937,
    np.random.Philox,
    np.random.SFC64,
)


_MOST_ITEMS = 64
"""Limit of items of an outside list that are all read to draw from them; of a longer one, those drawn are inputs."""

_MOST_PICKED = 64
"""Limit of items that are drawn from such a list before the graph; more are inputs of the next part."""


def _draw(function: Callable[..., Any], world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not args or world.branching:
        return ABSENT
    made = world.random_draws.call(function, args, kwargs)
    return _left_to_python(world, function, args) if made is ABSENT else made


def _left_to_python(world: TraceWorld, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Refuses the call of a method that would break inside, where it draws; else :data:`ABSENT`."""
    if not world.specialization.host_draws and type(function) is types.FunctionType and is_generator(args[0]):
        world.heap.refuse("SFX104", f"{trace_rules.describe(function)} gets a {type(args[0]).__qualname__}")
    return ABSENT


def _items_of_many(
    world: TraceWorld, method: Any, draw: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], count: Any
) -> Any:
    """Draws items of a deque, or of a list from outside that is long or growing, or in which the step has written at
    changing indices, such as a replay buffer: every call finds others. Draws the places of a few, and refuses where the
    items at these places are not found at each call; :data:`ABSENT` for another list."""
    record = world.heap.record_of(args[1])
    if not safe_isinstance(record, ListRecord) or record.filled or not is_generator(args[0]):
        return ABSENT
    if not (record.grows or record.edits or type(record.real) is deque or len(record.real) > _MOST_ITEMS):
        return ABSENT
    if type(count) is int and 0 < count <= _MOST_PICKED and record.picks_any and world.specialization.host_draws:
        length = record.length()
        if length is not None and length >= 1:
            made = world.random_draws.call(draw, (args[0], length, *args[2:]), kwargs, trace_rules.describe(method))
            places = made if type(made) is list else [made]
            items = [record.at_changing(place) if type(place) is torch.SymInt else ABSENT for place in places]
            if not any(item is ABSENT for item in items):
                return items if type(made) is list else items[0]
    what = f"{trace_rules.describe(method)} draws items of {record.base.label}, which differ at every call"
    world.heap.refuse("SFX114", what)


def _refuse_many_orders(
    world: TraceWorld, function: Callable[..., Any], generator: Any, items: Any, results: int
) -> None:
    """Refuses to draw one of many results from tensors in a list that the step has made: each would be captured. The
    code after it is one graph for all if the tensors are alike."""
    if results <= _MOST_RESULTS or not is_generator(generator) or not world.specialization.host_draws:
        return
    tensors = world.heap.record_of(items) is None and all(type(item) is compat.FakeTensor for item in items)
    kinds = {(item.shape, item.stride(), item.dtype, item.device, item.requires_grad) for item in items if tensors}
    if len(kinds) == 1:
        what = f"{trace_rules.describe(function)} draws one of {results} results from a list of tensors"
        world.heap.refuse("SFX103", what)


_MOST_RESULTS = 8
"""Results of a draw from tensors of the step that are captured one by one."""


_METHODS: list[tuple[type, str]] = [(np.random.RandomState, name) for name in (*_OF_NUMPY, *_OF_LEGACY_NUMPY)]
_METHODS += [(np.random.Generator, name) for name in (*_OF_NUMPY, *_OF_NEW_NUMPY)]

for _function in (*_OF_PYTHON, *(vars(cls)[name] for cls, name in _METHODS)):
    registry.intercept(_function)(functools.partial(_draw, _function))


def _create(function: Callable[..., Any], world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return ABSENT if world.branching else world.random_draws.create(function, args, kwargs)


for _function in _CREATED:
    registry.intercept(_function)(functools.partial(_create, _function))


@registry.intercept(np.random.seed)
def _seed(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Seeds the generator behind the functions of ``numpy.random``, as that function does."""
    return _draw(np.random.RandomState.seed, world, (np.random.rand.__self__, *args), kwargs)  # type: ignore[attr-defined]


@registry.intercept(random.Random.shuffle, np.random.RandomState.shuffle, np.random.Generator.shuffle)
def _shuffle(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draws the places of the items: which they are does not matter to the generator."""
    if len(args) != 2 or kwargs or world.branching:
        return ABSENT
    if type(args[1]) is np.ndarray:
        return _shuffle_array(world, *args)
    if type(args[1]) is not list:
        return ABSENT
    length = world.interp.call(len, (args[1],), {})
    if type(length) is not int:
        return ABSENT
    plain = world.interp.call(list, (args[1],), {})
    numbers = _are_numbers(plain)
    if not numbers:
        _refuse_many_orders(world, type(args[0]).shuffle, args[0], args[1], math.factorial(length))
    items = world.random_draws.call(_shuffled, (args[0], plain), {}) if numbers else ABSENT
    if type(items) is not list:
        places = world.random_draws.call(_shuffled, (args[0], list(range(length))), {})
        if type(places) is not list:
            return ABSENT
        items = [world.interp.getitem(plain, place) for place in places]
    world.interp.call(list.__setitem__, (args[1], slice(None), items), {})
    return None


def _shuffle_array(world: TraceWorld, generator: Any, array: Any) -> Any:
    method = type(generator).shuffle
    if not safe_isinstance(generator, (np.random.RandomState, np.random.Generator)):
        return ABSENT  # Python's exchanges rows of several dimensions wrongly
    if world.heap.record_of(array) is None:
        world.random_draws.want_early(array)
    elif world.random_draws.draw_into(method, generator, array) or _rewrites(world, method, generator, array):
        return None
    return ABSENT


def _rewrites(world: TraceWorld, method: Any, generator: Any, array: Any) -> bool:
    """Shuffles an outside array before the graph runs; returns False if something of the step may read it before."""
    record = world.heap.record_of(array)
    if not safe_isinstance(record, ArrayRecord) or world.deferred or record.tensor is not None:
        return False
    real = record.real
    known = not real.dtype.hasobject and real.nbytes <= _MOST_REWRITTEN and real.flags.writeable and record.is_laid_out
    if not known or record.read or record.shown:
        return False
    records = [each for each in world.heap.by_real.values() if each is not record]
    arrays = [each for each in records if safe_isinstance(each, ArrayRecord)]
    tensors = [each for each in records if safe_isinstance(each, TensorRecord)]
    if any(each.read or np.may_share_memory(each.current, real) for each in arrays):
        return False
    if overlaps(real, [each.real for each in tensors]) or not world.random_draws.rewrite(method, generator, record):
        return False
    given = tuple(each.source for each in tensors if each.kind != "static")
    if given:  # the graph may read them as they were before
        world.heap.guard("apart", record.source, given)
    return True


_MOST_REWRITTEN = 1 << 24
"""Bytes of an outside array that a draw writes to: each call keeps what it held before, until its guards hold."""


def _shuffled(generator: Any, items: list[Any]) -> list[Any]:
    items = list(items)
    generator.shuffle(items)
    return items


def _are_numbers(items: Any) -> bool:
    """Returns True for a list or tuple of numbers: one graph serves whichever is drawn."""
    return type(items) in (list, tuple) and all(type(item) in _NUMBERS for item in items)


_NUMBERS = frozenset({int, float, torch.SymInt, torch.SymFloat})


def _sampled(generator: Any, length: int, count: int) -> list[int]:
    return generator.sample(range(length), count)


def _chosen(generator: Any, length: int, *args: Any, **kwargs: Any) -> list[int]:
    return generator.choices(range(length), *args, **kwargs)


def _of_range(
    world: TraceWorld, draw: Callable[..., Any], method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Draws from a range of a number that changes."""
    generator, places, *rest = args
    made = world.random_draws.call(draw, (generator, places.length, *rest), kwargs, trace_rules.describe(method))
    if made is not ABSENT:
        return made
    return world.interp.call(method, (generator, range(int(places.length)), *rest), kwargs)


@registry.intercept(random.Random.choice)
def _choice(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draws the index of the item, which decides what is captured."""
    if len(args) == 2 and type(args[1]) is RangeOfNumber:
        made = world.random_draws.call(random.Random.randrange, (args[0], args[1].length), {})
        if made is ABSENT:
            return world.interp.call(random.Random.choice, (args[0], range(int(args[1].length))), {})
        return made
    if len(args) == 2 and not world.branching:
        made = _items_of_many(world, random.Random.choice, random.Random.randrange, args, kwargs, 1)
        if made is not ABSENT:
            return made
        _left_to_python(world, random.Random.choice, args)
    if len(args) != 2 or kwargs or world.branching or type(args[1]) not in (list, tuple, range, str):
        return ABSENT
    length = world.interp.call(len, (args[1],), {})
    if type(length) is not int or not length:
        return ABSENT
    if _are_numbers(args[1]):
        made = world.random_draws.call(random.Random.choice, args, {})
        if made is not ABSENT:
            return made
    else:
        _refuse_many_orders(world, random.Random.choice, args[0], args[1], length)
    index = world.random_draws.call(random.Random.randrange, (args[0], length), {})
    return ABSENT if index is ABSENT else world.interp.getitem(args[1], index)


@registry.intercept(random.Random.sample)
def _sample(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draws the places of the items: which they are does not matter to the generator."""
    if kwargs.keys() == {"k"}:
        args, kwargs = (*args, kwargs["k"]), {}
    if len(args) > 1 and type(args[1]) is RangeOfNumber:
        return _of_range(world, _sampled, random.Random.sample, args, kwargs)
    if len(args) == 3 and not world.branching:
        made = _items_of_many(world, random.Random.sample, _sampled, args, kwargs, args[2])
        if made is not ABSENT:
            return made
        _left_to_python(world, random.Random.sample, args)
    if len(args) != 3 or kwargs or world.branching or type(args[1]) not in (list, tuple, range):
        return ABSENT
    length = world.interp.call(len, (args[1],), {})
    if type(length) is not int or type(args[2]) is not int or not 0 <= args[2] <= length:
        return ABSENT
    if _are_numbers(args[1]):
        made = world.random_draws.call(random.Random.sample, args, {})
        if made is not ABSENT:
            return made
    else:
        _refuse_many_orders(world, random.Random.sample, args[0], args[1], math.perm(length, args[2]))
    places = world.random_draws.call(random.Random.sample, (args[0], range(length), args[2]), {})
    if type(places) is not list or args[1] == range(length):
        return places
    return [world.interp.getitem(args[1], place) for place in places]


@registry.intercept(random.Random.choices)
def _choices(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draws the places of the items, like :func:`_sample`."""
    if len(args) > 1 and type(args[1]) is RangeOfNumber:
        return _of_range(world, _chosen, random.Random.choices, args, kwargs)
    if len(args) < 2 or world.branching:
        return ABSENT
    made = _items_of_many(world, random.Random.choices, _chosen, args, kwargs, kwargs.get("k", 1))
    if made is not ABSENT:
        return made
    _left_to_python(world, random.Random.choices, args)
    if type(args[1]) not in (list, tuple):
        return ABSENT
    length = world.interp.call(len, (args[1],), {})
    if type(length) is not int or not length:
        return ABSENT
    if _are_numbers(args[1]):
        made = world.random_draws.call(random.Random.choices, args, kwargs)
        if made is not ABSENT:
            return made
    elif type(count := kwargs.get("k", 1)) is int:
        _refuse_many_orders(world, random.Random.choices, args[0], args[1], length ** max(count, 0))
    places = world.random_draws.call(random.Random.choices, (args[0], range(length), *args[2:]), kwargs)
    return [world.interp.getitem(args[1], place) for place in places] if type(places) is list else ABSENT


_READING = (
    ("astype", "reshape", "copy", "mean", "sum", "std", "var", "min", "max", "argmin", "argmax", "argsort", "clip")
    + ("any", "all", "cumsum", "cumprod", "prod", "ravel", "flatten", "round", "squeeze", "transpose", "take")
    + ("repeat", "dot", "nonzero", "item", "tolist", "swapaxes", "ptp")
)
"""Methods of arrays that read them and return new arrays, views or numbers."""

for _function in (vars(np.ndarray).get(name) for name in _READING):
    if _function is not None:
        registry.intercept(_function)(
            lambda world, args, kwargs, method=_function: world.random_draws.derived(method, args, kwargs)
        )


def _with_numbers(method: Any, world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draws into a tensor between bounds that are tensors, which C++ code reads as numbers."""
    bounds = (*args[1:], *kwargs.values())
    if not any(safe_isinstance(value, torch.Tensor) for value in bounds):
        return ABSENT

    def read(value: Any) -> Any:
        return world.interp.call(float, (value,), {}) if safe_isinstance(value, torch.Tensor) else value

    given = (*args[:1], *map(read, args[1:]))
    return world.interp.call(method, given, {name: read(value) for name, value in kwargs.items()})


for _method in ("uniform_", "normal_", "cauchy_", "log_normal_", "exponential_", "geometric_"):
    registry.intercept(getattr(torch.Tensor, _method))(functools.partial(_with_numbers, getattr(torch.Tensor, _method)))
