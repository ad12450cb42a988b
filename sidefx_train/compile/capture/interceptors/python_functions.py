"""Functions of Python's standard library: ``math.isfinite``, ``max``, ``min``, frames, loggers, ``pickle.dumps``."""

from __future__ import annotations

import functools
import logging
import math
import pickle
import statistics
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.recording import float_comparisons
from sidefx_train.compile.capture.shadows.deferred_values import DeferredValue
from sidefx_train.compile.capture.shadows.factories import PartialRecord
from sidefx_train.compile.capture.world.native_calls.caller_frames import BEYOND, refuse_callers
from sidefx_train.compile.capture.world.native_calls.contextvars_and_locks import WARNINGS_LOCK
from sidefx_train.compile.capture.world.symbolic_numbers import graph_functions
from sidefx_train.compile.capture.world.symbolic_numbers.computed_numbers import NUMBER_METHODS
from sidefx_train.compile.capture.world.symbolic_numbers.concrete_numbers import concrete_within
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


def _assume_finite(fn: Any, answer: bool | np.bool_, infinite: bool, nan: bool) -> None:
    """Has the usual answer of ``math.isfinite`` or its like assumed for a number that only the graph knows."""

    @registry.intercept(fn)
    def asked(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) != 1 or kwargs or (type(fn) is np.ufunc and type(args[0]) is not torch.SymFloat):
            return ABSENT
        if not world.grant_finite(args[0], infinite=infinite, nan=nan):
            return ABSENT
        return answer


_assume_finite(math.isfinite, True, infinite=True, nan=True)
_assume_finite(math.isinf, False, infinite=True, nan=False)
_assume_finite(math.isnan, False, infinite=False, nan=True)
_assume_finite(np.isfinite, np.True_, infinite=True, nan=True)
_assume_finite(np.isinf, np.False_, infinite=True, nan=False)
_assume_finite(np.isnan, np.False_, infinite=False, nan=True)


_clear: Any = getattr(sys, "_clear_type_descriptors", None)
if _clear is not None:  # from 3.14 on: ``@dataclass(slots=True)`` copies the class that it gets

    @registry.intercept(_clear)
    def _clear_of_new(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs on classes that the step created; others would lose their descriptors in the capture."""
        if len(args) != 1 or kwargs or id(args[0]) not in world.new_classes:
            return ABSENT
        return _clear(args[0])


def _count(fn: Any, change: int) -> None:
    @registry.intercept(fn)
    def counted(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return world.locks.count_of_warnings(change)


for _fn, _change in zip(WARNINGS_LOCK, (1, -1), strict=False):
    _count(_fn, _change)


def _choose_symbolically(fn: Any, symbolic: Callable[[Any, Any], Any]) -> None:
    """Has ``max`` or ``min`` of symbolic numbers computed when the step runs, without a guard on which one it is.

    Those are numbers that the graph computes (``Adafactor`` scales by a norm), and counters and factors (a decay that
    ramps up). Sizes are compared now.
    """

    @registry.intercept(fn)
    def choose(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) == 1:
            return world.random_draws.of_history(fn, args, kwargs)
        if len(args) < 2 or kwargs or not all(safe_isinstance(value, (*compat.SYMBOLS, int, float)) for value in args):
            return ABSENT
        if any(map(compat.numpy_class, args)):  # the result keeps the class of one of them
            return world.computed_numbers.call(fn, args, kwargs)
        if any(type(value) is float and value != value for value in args):  # each comparison with NaN is known
            return ABSENT
        changing = [value for value in args if safe_isinstance(value, compat.SYMBOLS)]
        in_graph = any(map(compat.is_unbacked, changing))
        if not changing or not (in_graph or _of_numbers(world, changing)):
            return ABSENT
        kinds = {world.type_of(value) for value in args}
        if in_graph and kinds == {float, int} and len(args) == 2:
            return _the_float(world, fn, *args)
        if len(kinds) != 1 or bool in kinds:
            return ABSENT
        if in_graph:
            return functools.reduce(symbolic, args)
        if not all(math.isfinite(value) for value in args if type(value) is float):  # sympy has no NaN
            return ABSENT
        floats = [number for number in _inputs(world, changing) if type(number) is torch.SymFloat]
        # Conditions on the result come from algebra, in which the order of the operands does not matter.
        return functools.reduce(compat.CHOICES[fn], args) if float_comparisons.rely_on_finite(floats) else ABSENT


def _the_float(world: TraceWorld, fn: Any, first: Any, second: Any) -> Any:
    """Assumes that ``min(loss.item(), 20)`` is the float: the class of the result depends on which one it is."""
    replaces = second < first if fn is min else second > first
    chosen = world.type_of(second) is float
    return (second if chosen else first) if world.grant(replaces, chosen) else ABSENT


def _of_numbers(world: TraceWorld, values: list[Any]) -> bool:
    """Returns True for numbers computed from Python numbers outside, not from sizes."""
    known = {compat.symbol_of_input(number) for number in _inputs(world, values)}
    return all(compat.symbol_of(value).free_symbols <= known for value in values)


def _inputs(world: TraceWorld, values: list[Any]) -> list[Any]:
    """Returns the outside numbers from which symbolic numbers are computed."""
    symbols = {symbol for value in values for symbol in compat.symbol_of(value).free_symbols}
    return [number for number, _, _ in world.heap.numbers.inputs if compat.symbol_of_input(number) in symbols]


_choose_symbolically(max, torch.sym_max)
_choose_symbolically(min, torch.sym_min)


@registry.intercept(sum)
def _sum(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return world.random_draws.of_history(sum, args, kwargs)


for _function in (statistics.mean, statistics.fmean, statistics.median, statistics.stdev, statistics.pstdev):
    registry.intercept(_function)(
        lambda world, args, kwargs, fn=_function: world.random_draws.of_history(fn, args, kwargs)
    )


@registry.intercept(sys._getframe)
def getframe(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Interpreted frames have frame objects; the frames of callers are read at a graph break."""
    frame, depth = world.interp.current_frame, args[0] if args else 0
    while frame is not None and depth > 0:
        frame, depth = frame.back, depth - 1
    if frame is None or BEYOND in world.specialization.opaque_classes:
        refuse_callers(world)
    return ABSENT


@registry.intercept(torch.Tensor.__dir__)
def _attributes_of_a_tensor(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    world.heap.refuse("SFX104", "lists the attributes of a tensor")


def _change_logger(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuses to change what handles records: it would hold for those that the step made before, and deferred."""
    world.heap.refuse("SFX103", f"changes what a {type(args[0]).__qualname__} does with records")


for _owner, _names in (
    (logging.Logger, ("addHandler", "removeHandler")),
    (logging.Filterer, ("addFilter", "removeFilter")),
):
    for _name in _names:
        registry.intercept(getattr(_owner, _name))(_change_logger)


@registry.AT_END.append
def _check_partials(world: TraceWorld) -> None:
    for record in list(world.heap.by_real.values()):
        if safe_isinstance(record, PartialRecord):
            record.check()


def _named(fn: Any, world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Accesses an attribute whose name is made of a number that changes: the name is guarded."""
    if len(args) < 2 or type(args[1]) is not DeferredValue:
        return ABSENT
    name = world.computed_objects.name_of_attribute(args[0], args[1])
    return ABSENT if name is ABSENT else world.interp.call(fn, (args[0], name, *args[2:]), kwargs)


for _accessor in (getattr, hasattr, setattr, delattr):
    registry.intercept(_accessor)(functools.partial(_named, _accessor))


def _number_method(fn: Any, world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Computes a method of a changing number before the graph; else calls it on the number's value."""
    if not args or not safe_isinstance(args[0], compat.SYMBOLS):
        return ABSENT
    found = world.computed_objects.call(fn, args, kwargs)
    found = world.computed_numbers.call(fn, args, kwargs) if found is ABSENT else found
    found = graph_functions.call(world, fn, args, kwargs) if found is ABSENT else found
    return world.guarded(fn, *concrete_within((args, kwargs))) if found is ABSENT else found


for _method in NUMBER_METHODS:
    registry.intercept(_method)(functools.partial(_number_method, _method))


@registry.intercept(hash)
def _hash_of_number(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Computes the hash of a changing integer; dicts and sets read its value."""
    is_integer = len(args) == 1 and not kwargs and type(args[0]) is torch.SymInt
    return _number_method(hash, world, args, kwargs) if is_integer else ABSENT


@registry.intercept(pickle.dumps)
def _pickled(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pickles plain values (libraries have such keys of their caches): no code of the program runs, and nothing
    changes."""
    if kwargs or len(args) != 1:
        return ABSENT
    world.touch(args[0])
    args = concrete_within(args, (torch.SymBool,))
    found: list[Any] = []
    return world.guarded(pickle.dumps, args, kwargs) if _is_pickled_by_value(args[0], found) else ABSENT


_SHARED = frozenset((str, bytes, tuple, list, dict))
"""Classes of which ``pickle`` writes an object once, and refers to it where it occurs again."""


def _is_pickled_by_value(value: Any, found: list[Any]) -> bool:
    """Returns True for numbers and strings, and containers of them, of which no two could be one object as well.

    Args:
        value: the value.
        found: shared values before it; gets those in it.
    """
    kind = type(value)
    if kind not in _SHARED or (kind is tuple and not value):
        return kind in (int, float, bool, type(None), tuple)
    if kind not in (str, bytes):
        items = (*value.keys(), *value.values()) if kind is dict else value
        if not all(_is_pickled_by_value(item, found) for item in items):
            return False
    if any(kind is type(each) and each == value for each in found):
        return False
    found.append(value)
    return True
