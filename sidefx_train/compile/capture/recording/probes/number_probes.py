"""Changing numbers as arguments whose values torch's C++ code reads.

A symbolic float passes through torch's C++ code only where a schema says ``Scalar`` and no derivative computes with
it. ``dropout(x, p)`` takes a ``double``, and the derivative of ``lerp`` computes ``1 - weight``: both would make the
number a constant. Such a call runs with a *probe* instead, a float that occurs nowhere else. A constant of a recorded
operation that is the probe, or a simple function of it (``1 - p``), is replaced by the symbolic number, in the forward
and in any derivative.

That is right if C++ code only passes the number on or computes one of the known functions. Before the call is recorded
it therefore runs twice on other fake tensors, forward and two derivatives, with two probes: operations must be the
same, and every constant that differs must be known. Code that branches on a number compares it with -1, 0, 1, 2,
infinity or another number of the call: the probe lies between the same two of them, which is guarded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from itertools import combinations, pairwise
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.recording.probes.integer_arguments import as_wanted
from sidefx_train.compile.capture.recording.probes.trial_runs import (
    ORDERS,
    Stream,
    constants_in,
    is_explained,
    is_unused,
    reads_unknown,
    specializes,
    stream_of,
    with_single,
    with_values,
)
from sidefx_train.compile.capture.recording.probes.unknown_numbers import Assuming, Trials, Way
from sidefx_train.compile.common import trace_rules
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.graph.derived_numbers import BOUNDS, LARGE, Derived, as_single, derived, derived_of_single
from sidefx_train.compile.graph.number_arguments import replace_constants, takes_double
from sidefx_train.errors import Unsupported

if TYPE_CHECKING:
    from sidefx_train.compile.capture.recording.interfaces import GraphRecorder

aten = torch.ops.aten
Place = tuple[float, float]

_UNBOUNDED = 10.0
"""Probes above the largest finite bound, or below the smallest, are at most this far away."""
_GOLDEN = 0.6180339887498949
_PASSED_ON = (0.0, 1.0)
"""Where the probes lie whose values no code compares."""
_POWERS = frozenset({"pow", "rpow", "float_power"})
_BRANCHING = _POWERS | {
    "cumulative_trapezoid", "dist", "lerp", "linalg_norm", "linalg_vector_norm", "multi_margin_loss", "norm", "renorm",
    "rrelu", "special_xlog1py", "std", "std_mean", "trapezoid", "var", "var_mean", "xlogy",
}  # fmt: skip
"""Functions with a ``Scalar`` whose value C++ code reads, there or in a derivative."""
_OF_FLOATS = _BRANCHING | {"bucketize", "celu", "constant_pad_nd", "searchsorted", "unsafe_masked_index"}
"""Functions with a ``Scalar`` whose value C++ code, or that of Inductor, reads if it is no float."""
_DERIVED_ONLY = frozenset({"pow", "float_power", "lerp", "special_xlog1py", "xlogy"})
"""Those of :data:`_BRANCHING` whose forward keeps the number symbolic."""
_FUNCTIONS = frozenset({"torch.nn.functional", "torch.nn.init", "torch.functional", "torch._tensor"})
"""Modules of Python functions that run natively and pass numbers to C++ code."""
_NORMS, _LEAST_EPS = ("batch_norm", "instance_norm"), 1e-5
"""Functions that choose a kernel by ``eps`` on a GPU, and cuDNN's least."""
_VARIANCES = frozenset({"std", "std_mean", "var", "var_mean"})
"""Functions whose C++ code compares the number with the number of elements alone, and takes integers as floats."""
_SHAPING = ("interpolate", "upsample", "arange", "range", "linspace", "_upsample", "allclose")
"""Functions that compute a size or a truth value with the number."""


_DESCRIBED = (str, bool, type(None), tuple, list, torch.Size, torch.dtype, torch.device)
"""Classes of arguments whose text says what they are."""


class Probes:
    """The probes of one capture.

    Attributes:
        symbols: functions that compute the symbolic number, by the constant that stands for it.
        awaited: probes of a running call on ``DTensor`` objects that no operator has been recorded with.
    """

    def __init__(self, tracer: GraphRecorder) -> None:
        self.tracer = tracer
        self.symbols: dict[float, Callable[[], Any]] = {}
        self.awaited: set[float] = set()
        self._chosen: dict[tuple[fx.Node, Place], float] = {}
        self._ways: dict[Any, tuple[bool, Way | None]] = {}
        self._count = 0

    # --- calls

    def given_to(
        self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], single: Callable[[Any], Any], world: Assuming
    ) -> tuple[Any, Any, Any]:
        """Returns a call with probes in place of its symbolic floats; unchanged where that is not needed, or wrong.

        Args:
            fn: the function.
            args: its arguments.
            kwargs: the same, by name.
            single: rounds a symbolic float to float32; ``None`` if it cannot.
            world: assumes what is needed of a number that only the graph knows.
        """
        if any(type(value) is torch.SymInt for value in (*args, *kwargs.values())):
            args, kwargs = as_wanted(fn, args, kwargs, str(getattr(fn, "__name__", "")).strip("_") in _OF_FLOATS)
        if compat.is_packet(fn) and _resamples(f"{fn.__name__}.default"):
            changes = any(type(value) is torch.SymFloat for value in (*args, *kwargs.values()))
            fn = fn.default if changes else fn  # of the other overload, numbers are in a list
        call = fn, args, kwargs
        owner = getattr(fn, "__self__", None)
        if safe_isinstance(owner, torch.Tensor):  # those of other classes get no probe: a trial would write to them
            fn, args = getattr(torch.Tensor, fn.__name__), (owner, *args)
        numbers = _numbers(fn, args, kwargs)
        if not numbers:
            return call
        if any(map(compat.is_unbacked, numbers)):
            if len(numbers) > 1 or compat.inside_transform():
                return call
            return self._probed_unknown(fn, numbers[0], args, kwargs, single, world) or call
        if not compat.inside_transform() and (probed := self._probed(fn, numbers, args, kwargs, single)) is not None:
            return probed
        name = str(fn.__name__).strip("_")
        if name in _VARIANCES or (name in _POWERS and compat.POWERS_HIDE_NUMBER):
            return (fn, *with_values(numbers, [float(number) for number in numbers], (args, kwargs)))
        return call

    def given_to_dtensors(self, args: Any, kwargs: Any) -> tuple[Any, Any, bool]:
        """Returns the arguments of a call on ``DTensor`` objects with probes in place of all symbolic floats.

        The last item is True if there are any.

        Torch's dispatch keeps the arguments of such calls beyond the capture, and compares them. It passes numbers on
        to the operator of the local tensors, which :meth:`check_dtensors` verifies after the call.

        Raises:
            Unsupported: an argument is a symbolic integer or truth value.
        """
        found: set[float] = set()

        def probe(value: Any) -> Any:
            if type(value) in (list, tuple):
                return type(value)(map(probe, value))
            if type(value) is torch.SymFloat:
                key = self.tracer.node_of(value), _PASSED_ON
                chosen = self._chosen.get(key)
                if chosen is None:
                    self._count += 1
                    chosen = self._chosen[key] = 0.05 + 0.9 * math.modf(self._count * _GOLDEN)[0]
                self.symbols.setdefault(chosen, lambda: value)
                found.add(chosen)
                return chosen
            if type(value) in compat.SYMBOLS:
                raise Unsupported("SFX109", "calls an operator of a DTensor with a changing integer", None)
            return value

        given = tuple(map(probe, args)), {name: probe(value) for name, value in kwargs.items()}
        self.awaited |= found
        return *given, bool(found)

    def check_dtensors(self) -> None:
        """Checks that a call on ``DTensor`` objects has passed all of its symbolic floats on.

        Raises:
            Unsupported: it has computed something else with one.
        """
        if self.awaited:
            raise Unsupported("SFX109", "calls an operator of a DTensor that computes with a changing number", None)

    def _probed(
        self, fn: Any, numbers: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any], single: Callable[[Any], Any]
    ) -> Any:
        """Returns a call with probes in place of its symbolic floats; ``None`` where that is not needed, or wrong."""
        of_variance = str(fn.__name__) in _VARIANCES  # whose derivative reads the number
        totals = _reduced(*args[:2], **kwargs) if of_variance else frozenset()
        limits = (
            [-math.inf, *map(float, sorted(totals)), math.inf] if totals else _limits(str(fn.__name__), args, kwargs)
        )
        found = [_between(compat.hint_of(number), limits) for number in numbers]
        between = [place for place in found if place is not None]
        sizes = _sizes((*args, *kwargs.values()))
        if sizes is None or len(between) < len(numbers):
            return None
        if not of_variance and not specializes(fn, numbers, args, kwargs):
            return None
        streams, constants, tried = [], [], []
        for _ in range(2):
            values = self._new(numbers, between)
            try:
                streams.append(stream_of(fn, *with_values(numbers, values, (args, kwargs))))
            except Exception:  # the call raises, or a derivative does: as without a probe
                return None
            tried.append(values)
            constants.append([derived(value, sizes, totals) for value in values])
        rounded: list[Any] = []
        unused = streams[0] == streams[1] and is_unused(str(fn.__name__), args, kwargs)
        if not unused and not is_explained(*streams, *constants):
            constants = [
                [with_single(*each) for each in zip(*pair, strict=True)] for pair in zip(tried, constants, strict=True)
            ]
            if not is_explained(*streams, *constants):
                return None
            rounded = list(map(single, numbers))
            if None in rounded:
                return None
        chosen = self._chosen_for(numbers, between)
        compared = not _resamples(str(fn.__name__))
        if (compared and not _in_order(numbers, chosen)) or (
            rounded and any(as_single(value) == value for value in chosen)
        ):
            return None
        for value, number in zip(chosen, numbers, strict=True):
            self._note(derived(value, sizes, totals), number)
        for value, number in zip(chosen, rounded, strict=False):
            self._note(derived_of_single(value), number)
        _guard(numbers, between, compared)
        return (fn, *with_values(numbers, chosen, (args, kwargs)))

    def _probed_unknown(
        self,
        fn: Any,
        number: torch.SymFloat,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        single: Callable[[Any], Any],
        world: Assuming,
    ) -> Any:
        """Returns a call with a probe in place of a number that only the graph knows; ``None`` in the same cases.

        If no probe is right, and a derivative would read the number, the call does: the capture can stop there.
        """
        sizes = _sizes((*args, *kwargs.values()))
        if sizes is None:
            return None
        reads, way = self._way_of(fn, number, args, kwargs, sizes)
        rounded = single(number) if way is not None and way.rounded else None
        if way is None or (way.rounded and rounded is None) or not way.assume(number, world):
            return (fn, *with_values([number], [float(number)], (args, kwargs))) if reads else None
        [chosen] = self._chosen_for([number], [way.place])
        if rounded is not None:
            self._note(derived_of_single(chosen), rounded)
        self._note(derived(chosen, sizes), number)
        return (fn, *with_values([number], [chosen], (args, kwargs)))

    def _way_of(
        self, fn: Any, number: torch.SymFloat, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: frozenset[int]
    ) -> tuple[bool, Way | None]:
        """Returns whether a call or its derivative reads a number that only the graph knows, and the way that C++ code
        takes if it does, or the second derivative."""
        call = args, kwargs
        key = fn, tuple(kwargs), _described(number, (*args, *kwargs.values()))
        if key not in self._ways:

            def run(value: float) -> Stream | None:
                try:
                    return stream_of(fn, *with_values([number], [value], call))
                except Exception:  # as without a probe
                    return None

            way = None
            if reads_unknown(fn, number, args, kwargs, ORDERS):
                trials = Trials(run, lambda value: derived(value, sizes), self._new_between)
                way = trials.way(_limits(str(fn.__name__), args, kwargs))
            self._ways[key] = way is None and reads_unknown(fn, number, args, kwargs, 1), way
        return self._ways[key]

    def _new_between(self, place: Place) -> float:
        """Returns a new probe."""
        low, high = place
        self._count += 1
        part = 0.05 + 0.9 * math.modf(self._count * _GOLDEN)[0]
        if math.isinf(high):
            return low + _UNBOUNDED * part
        return high - _UNBOUNDED * part if math.isinf(low) else low + (high - low) * part

    def _new(self, numbers: list[torch.SymFloat], between: list[Place]) -> list[float]:
        """Returns new probes, in the order of the numbers."""
        values = list(map(self._new_between, between))
        if len(numbers) == 1:
            return values
        ranks = sorted(range(len(numbers)), key=lambda i: float(compat.hint_of(numbers[i])))
        return [value for _, value in sorted(zip(ranks, sorted(values), strict=True))]

    def _chosen_for(self, numbers: list[torch.SymFloat], between: list[Place]) -> list[float]:
        """Returns the numbers' probes for the whole capture."""
        return [
            self._chosen.setdefault((self.tracer.node_of(number), place), new)
            for number, place, new in zip(numbers, between, self._new(numbers, between), strict=True)
        ]

    def _note(self, table: dict[float, Derived], number: torch.SymFloat) -> None:
        """Remembers what is computed from a number."""
        for constant, (function, _) in table.items():
            self.symbols.setdefault(constant, functools.partial(function, number))

    # --- recorded operations

    def among(self, args: Any, kwargs: Any) -> list[float]:
        """Returns the constants among the arguments that stand for symbolic numbers."""
        if not self.symbols:
            return []
        found = [value for value in constants_in((args, kwargs)) if type(value) is float and value in self.symbols]
        self.awaited.difference_update(found)
        return found

    def nodes_of(self, constants: list[float]) -> dict[float, fx.Node]:
        """Returns the nodes that compute the numbers which constants stand for."""
        return {constant: self.tracer.node_of(self.symbols[constant]()) for constant in constants}

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns arguments with symbolic numbers in place of the constants that stand for them."""

        def symbol(value: Any) -> Any:
            return self.symbols[value]() if type(value) is float and value in self.symbols else value

        return tuple(map(symbol, args)), {name: symbol(value) for name, value in kwargs.items()}

    def replace(self, nodes: dict[float, fx.Node], since: fx.Node) -> None:
        """Replaces constants of the nodes recorded after ``since``."""
        node = self.tracer.last_node()
        while node is not since:
            replace_constants(node, nodes)
            node = node.prev


def _numbers(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.SymFloat]:
    """Returns the symbolic floats of a call, if torch's C++ code would read them."""
    given = (*args, *kwargs.values())
    numbers = {id(value): value for value in given if type(value) is torch.SymFloat}
    name = str(getattr(fn, "__name__", "")).strip("_")
    if type(fn) is FunctionType:
        reads = fn.__module__ in _FUNCTIONS and not name.startswith(_SHAPING)
    else:
        reads = reads_numbers(name)
    if not (trace_rules.is_torch_callable(fn) or any(isinstance(value, torch.Tensor) for value in given)):
        return []  # arithmetic of numbers: ``pow``
    if not numbers or not reads:
        return []
    if name in _DERIVED_ONLY and not (
        torch.is_grad_enabled() and any(isinstance(value, torch.Tensor) and value.requires_grad for value in given)
    ):
        return []
    return list(numbers.values())


@functools.lru_cache(maxsize=512)
def reads_numbers(name: str) -> bool:
    """Returns True if torch's C++ code reads the value of a number argument of the function ``name``."""
    if name.startswith(_SHAPING) and not _resamples(name):
        return False
    if name in _BRANCHING:
        return True
    operator = name.removesuffix(".default")
    packets = (getattr(aten, each, None) for each in (operator, f"_{operator}", f"{operator}_", f"{operator}_loss"))
    operators = (getattr(packet, each) for packet in packets if packet is not None for each in packet.overloads())
    return any(takes_double(op) for op in operators)


def _resamples(name: str) -> bool:
    """Returns True for operators that are given the size beside the number, which they compare with zero."""
    return name.strip("_").startswith("upsample") and name.endswith(".default")


def _reduced(x: Any, dim: Any = None, **_: Any) -> frozenset[int]:
    """Returns the number of elements that a variance is computed of, if it is known."""
    if not isinstance(x, torch.Tensor):
        return frozenset()
    dims = range(x.dim()) if dim is None or dim == () else (dim,) if type(dim) is int else dim
    if not all(type(each) is int and -x.dim() <= each < x.dim() for each in dims):
        return frozenset()
    sizes = [x.shape[each] for each in dims]
    return frozenset({math.prod(sizes)}) if all(type(size) is int for size in sizes) else frozenset()


def _limits(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float]:
    """Returns what C++ code may compare the numbers of a call with: its other numbers too."""
    if _resamples(name):
        return [-math.inf, 0.0, math.inf]
    given = {float(value) for value in (*args, *kwargs.values()) if type(value) is float and value == value}
    of_kernels = {_LEAST_EPS} if name.strip("_").endswith(_NORMS) and _is_on_gpu((*args, *kwargs.values())) else set()
    return sorted({*BOUNDS, *given, *of_kernels})


def _described(number: torch.SymFloat, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns what a trial run with arguments depends on."""
    first: dict[int, int] = {}

    def described(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            layout = tuple(map(str, (value.shape, value.stride(), value.dtype, value.device)))
            return *layout, value.requires_grad, first.setdefault(id(value), len(first))
        if value is number:
            return "number"
        return type(value), repr(value) if type(value) in (*compat.NUMBERS, *_DESCRIBED) else id(value)

    return torch.is_grad_enabled(), *map(described, given)


def _is_on_gpu(given: tuple[Any, ...]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in given)


def _between(value: float, limits: list[float]) -> Place | None:
    """Returns the neighbors of a number among ``limits``; ``None`` for one of them and for NaN."""
    return next(((a, b) for a, b in pairwise(limits) if a < value < b), None)


def _sizes(given: tuple[Any, ...]) -> frozenset[int] | None:
    """Returns the sizes of the tensors; ``None`` if there are tensors of other classes, or numbers in lists."""
    found = set()
    for value in given:
        if isinstance(value, torch.Tensor):
            if type(value) is not compat.FakeTensor or value.layout is not torch.strided:
                return None
            found |= {size for size in value.shape if type(size) is int and size > 0}
        elif isinstance(value, (list, tuple, dict)) and any(type(item) not in (int, torch.SymInt) for item in value):
            return None
    return frozenset(found)


# --- order and guards


def _in_order(numbers: list[torch.SymFloat], values: list[float]) -> bool:
    """Returns True if probes are in the order of their numbers."""
    real = [float(compat.hint_of(number)) for number in numbers]
    return all(
        (real[i] < real[j], real[i] > real[j]) == (values[i] < values[j], values[i] > values[j])
        for i, j in combinations(range(len(numbers)), 2)
    )


def _guard(numbers: list[torch.SymFloat], between: list[Place], compared: bool) -> None:
    """Guards that the numbers stay between their limits, and in their order if they are compared with each other.

    Infinity is a limit, too: the derivative of a norm is another one there.
    """
    for number, (low, high) in zip(numbers, between, strict=True):
        bool(number >= -LARGE if math.isinf(low) else number > low)
        bool(number <= LARGE if math.isinf(high) else number < high)
    for a, b in combinations(numbers, 2) if compared else ():
        bool(a < b)
        bool(a > b)
