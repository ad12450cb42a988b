"""Python's functions of numbers that only the graph knows: ``math.gcd(n, 4)``, ``n.bit_length()``, ``pow(n, 2, 7)``.

An operator of the graph calls the function (``ops/number_operators.py``). Its program begins with the values of
tensors, so that the arithmetic in between is Python's as well. Where the function may raise, the graph checks that it
does not.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.recording.runtime_asserts import append, copy_of_item
from sidefx_train.compile.capture.world.symbolic_numbers import number_bounds
from sidefx_train.compile.capture.world.symbolic_numbers.number_bounds import Bounds
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.source_literals import literal
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.graph.number_expressions import render_number
from sidefx_train.compile.ops.number_operators import NUMBER_PROGRAM
from sidefx_train.compile.ops.symbolic_lengths import IS_INSIDE

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.capture_context import CaptureContext

aten = torch.ops.aten

_SIZES = (aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default)
_MOST = 2.0**63
_MOST_LINES = 64
"""Limit of operations between the tensors and the function."""

_Rule = Callable[..., Bounds]


def _within(low: float, high: float) -> _Rule:
    return lambda *_: Bounds(low, high, max(-low, high))


def _largest(*numbers: Bounds) -> float:
    return max((each.largest for each in numbers), default=0.0)


def _divisor(*numbers: Bounds) -> Bounds:
    return _within(0.0, _largest(*numbers))()


def _multiple(*numbers: Bounds) -> Bounds:
    return _within(0.0, math.prod(each.largest for each in numbers))()


def _digits(number: Bounds) -> Bounds:
    return _within(0.0, 64.0 if number.largest <= _MOST else _MOST - 1024.0)()


def _root(number: Bounds) -> Bounds:
    return _within(0.0, math.sqrt(number.largest) + 1)()


def _power_of(base: Bounds, exponent: Bounds, modulus: Bounds) -> Bounds:
    return _within(min(modulus.low, 0.0), max(modulus.high, 0.0))()


def _as_first(number: Bounds, *_: Bounds) -> Bounds:
    return _within(-number.largest, number.largest)()


def _length(*numbers: Bounds) -> Bounds:
    return _within(0.0, 2 * sum(each.largest for each in numbers))()


def _succeeds(*_: Bounds) -> bool:
    return True


def _may_raise(*_: Bounds) -> bool:
    return False


def _not_negative(*numbers: Bounds) -> bool:
    return all(each.low >= 0 for each in numbers)


def _few(*numbers: Bounds) -> bool:
    return _not_negative(*numbers) and numbers[0].high <= 20  # ``math.factorial(20)`` has 62 bits


def _has_power(base: Bounds, exponent: Bounds, modulus: Bounds) -> bool:
    return exponent.low >= 0 and _not_zero(modulus)


def _not_zero(number: Bounds) -> bool:
    return number.low > 0 or number.high < 0


def _divisible(number: Bounds, other: Bounds) -> bool:
    return math.isfinite(number.low) and math.isfinite(number.high) and _not_zero(other)


def _tolerated(number: Bounds, other: Bounds, *tolerances: Bounds) -> bool:
    return _not_negative(*tolerances)


def _scaled(number: Bounds, exponent: Bounds) -> bool:
    return exponent.high + math.log2(max(number.largest, 1.0)) < 1023


class _Function(NamedTuple):
    """What is known of a function of numbers.

    Attributes:
        text: a Python expression of it.
        results: the types of its results; several are a tuple.
        bounds: for each result, its bounds by those of the arguments.
        succeeds: says by these whether no argument makes it raise.
        takes: the types of its arguments.
    """

    text: str
    results: tuple[type, ...]
    bounds: tuple[_Rule, ...] = ()
    succeeds: Callable[..., bool] = _may_raise
    takes: tuple[type, ...] = (int, float)


def _of_integers(name: str, bounds: _Rule, succeeds: Callable[..., bool] = _succeeds) -> dict[Any, _Function]:
    return {getattr(math, name): _Function(f"math.{name}", (int,), (bounds,), succeeds, (int,))}


def _of_floats(names: str, *bounds: _Rule, succeeds: Callable[..., bool] = _succeeds) -> dict[Any, _Function]:
    known = (name for name in names.split() if hasattr(math, name))
    return {getattr(math, name): _Function(f"math.{name}", (float,), bounds, succeeds) for name in known}


_FUNCTIONS: dict[Any, _Function] = {
    **_of_integers("gcd", _divisor),
    **_of_integers("lcm", _multiple),
    **_of_integers("isqrt", _root, _not_negative),
    **_of_integers("comb", _within(0.0, _MOST / 2), _few),
    **_of_integers("perm", _within(0.0, _MOST / 2), _few),
    **_of_integers("factorial", _within(0.0, _MOST / 2), _few),
    int.bit_length: _Function("int.bit_length", (int,), (_digits,), _succeeds, (int,)),
    int.bit_count: _Function("int.bit_count", (int,), (_digits,), _succeeds, (int,)),
    pow: _Function("pow", (int,), (_power_of,), _has_power, (int,)),
    hash: _Function("hash", (int,), (_within(-(2.0**61), 2.0**61),), _succeeds, (int,)),
    **_of_floats("hypot", _length),
    **_of_floats("dist", _length, succeeds=_may_raise),
    **_of_floats("atan2", _within(-4.0, 4.0)),
    **_of_floats("copysign", _as_first),
    **_of_floats("fmod remainder", _as_first, succeeds=_divisible),
    **_of_floats("erfc", _within(0.0, 2.0)),
    **_of_floats("cbrt degrees radians asinh ulp nextafter"),
    **_of_floats("ldexp", succeeds=_scaled),
    **_of_floats("acosh atanh gamma lgamma exp2 fma fsum", succeeds=_may_raise),
    math.isclose: _Function("math.isclose", (bool,), (), _tolerated),
    math.frexp: _Function("math.frexp", (float, int), (_within(-1.0, 1.0), _within(-1100.0, 1100.0)), _succeeds),
    math.modf: _Function("math.modf", (float, float), (_within(-1.0, 1.0), _as_first), _succeeds),
    float.as_integer_ratio: _Function("float.as_integer_ratio", (int, int), takes=(float,)),
    float.is_integer: _Function("float.is_integer", (bool,), succeeds=_succeeds, takes=(float,)),
    operator.floordiv: _Function("operator.floordiv", (float,), (), _divisible),
    operator.mod: _Function("operator.mod", (float,), (), _divisible),
}
"""Functions of which the types of the arguments decide the types of the results."""
_OF_SOME_FLOAT = (operator.floordiv, operator.mod)
_DTYPES = {int: torch.int64, float: torch.float64, bool: torch.bool}
_WIDENED = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def call(world: CaptureContext, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the result of a function of numbers, one of which only the graph knows; else :data:`ABSENT`."""
    if type(fn).__hash__ is None:
        return ABSENT
    known = _FUNCTIONS.get(fn)
    numbers = list(_inside((*args, *kwargs.values())))
    if fn is int.as_integer_ratio and args and _is_of_graph(args[0]):
        return args[0], 1
    if known is None or not any(map(_is_of_graph, numbers)):
        return ABSENT
    kinds = [_type_of(number) for number in numbers]
    if not set(known.takes).issuperset(kinds) or (fn is pow and len(numbers) != 3):
        return ABSENT
    if fn in _OF_SOME_FLOAT and float not in kinds:
        return ABSENT
    if world.branching:
        return ABSENT
    program = _Program(world)
    given = [*map(program.text, args), *(f"{name}={program.text(value)}" for name, value in kwargs.items())]
    if program.fails:
        return ABSENT
    bounds = [number_bounds.of(world.tracer, number) for number in numbers]
    finite = all(each.largest < number_bounds.MOST for each, kind in zip(bounds, kinds, strict=True) if kind is int)
    succeeds = (finite or float not in known.takes) and known.succeeds(*bounds)
    expression, found = f"{known.text}({', '.join(given)})", []
    for place, kind in enumerate(known.results):
        result = known.bounds[place](*bounds) if place < len(known.bounds) else None
        fits = kind is not int or (result is not None and result.largest < _MOST)
        text = expression if len(known.results) == 1 else f"{expression}[{place}]"
        found.append(program.result(text, _DTYPES[kind], result, succeeds and fits))
        if found[-1] is ABSENT:
            return ABSENT
    return tuple(found) if len(found) > 1 else found[0]


def slice_place(world: CaptureContext, part: slice, size: Any) -> tuple[Any, Any] | None:
    """Returns the bounds of a slice, neither outside of the dimension; ``None`` if the graph cannot compute them."""
    bounds = (part.start, part.stop)
    if world.branching or not all(each is None or type(each) in (int, torch.SymInt) for each in bounds):
        return None
    inside = _within(0.0, float(size) if type(size) is int else 2.0**53)()

    def computed(expression: str) -> Any:
        program = _Program(world)
        start, stop, length = (program.text(each) for each in (*bounds, size))
        indices = f"slice({start}, {stop}).indices({length})"
        return None if program.fails else program.result(expression.format(indices), torch.int64, inside, True)

    from_first = part.start is None or (type(part.start) is int and part.start == 0)
    start = 0 if from_first else computed("{}[0]")
    length = None if start is None else computed("len(range(*{}))")
    if length is None:
        return None
    end = start + length
    world.tracer.node_of(end).meta[IS_INSIDE] = True
    return start, end


def _inside(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if type(value) in (list, tuple):
            yield from _inside(value)
        else:
            yield value


def _is_of_graph(number: Any) -> bool:
    return type(number) in (torch.SymInt, torch.SymFloat) and compat.is_unbacked(number)


def _type_of(number: Any) -> type | None:
    if compat.numpy_class(number) is not None:
        return None
    return {int: int, bool: int, torch.SymInt: int, float: float, torch.SymFloat: float}.get(type(number))


class _Program:
    """Writes the body of a Python function that computes a number from tensors of the graph.

    Attributes:
        fails: a number is computed by an operation that Python does not have.
    """

    def __init__(self, world: CaptureContext) -> None:
        self._world = world
        self._tracer = world.tracer
        self._lines: list[str] = []
        self._names: dict[fx.Node, str] = {}
        self._tensors: list[fx.Node] = []
        self.fails = False

    def text(self, value: Any) -> str:
        """Returns an expression of an argument."""
        if type(value) in (list, tuple):
            return f"[{', '.join(map(self.text, value))}]"
        if type(value) not in (torch.SymInt, torch.SymFloat):
            return str(literal(value))
        if not self._tracer.has_node(value):
            self.fails = True
            return ""
        with compat.no_recording():
            return self._variable(self._tracer.node_of(value))

    def _variable(self, node: fx.Node) -> str:
        if node not in self._names and not self.fails:
            tensor = self._tensor(node)
            if tensor is not None:
                self._names[node] = f"a{len(self._tensors)}"
                self._tensors.append(tensor)
                return self._names[node]
            self.fails = node.op != "call_function" or len(self._lines) >= _MOST_LINES
            for each in node.all_input_nodes:
                self._variable(each)
            expression = None if self.fails else render_number(node, self._names, compat.host_functions())
            self.fails |= expression is None
            self._names[node] = f"v{len(self._lines)}"
            self._lines.append(f"{self._names[node]} = {expression}")
        return self._names.get(node, "")

    def _tensor(self, node: fx.Node) -> fx.Node | None:
        """Returns a 0-dim tensor on the host that holds a number; ``None`` if numbers compute it."""
        value = node.meta.get("val")
        if node.target is aten._local_scalar_dense.default:
            held: Any = node.args[0]
            dtype = held.meta["val"].dtype
            if held.target is operator.getitem and held.args[0].target is NUMBER_PROGRAM:
                return held  # type: ignore[no-any-return]
            if not dtype.is_floating_point and dtype not in _WIDENED:
                return None
            kind = torch.float64 if dtype.is_floating_point else torch.int64
            return copy_of_item(self._tracer, node, kind)
        if (node.op != "placeholder" and node.target not in _SIZES) or type(value) is torch.SymBool:
            return None
        kind = torch.int64 if safe_isinstance(value, (int, torch.SymInt)) else torch.float64
        return append(self._tracer, aten.scalar_tensor.default, node, dtype=kind, device=torch.device("cpu"))

    def result(self, expression: str, dtype: torch.dtype, bounds: Bounds | None, succeeds: bool) -> Any:
        """Returns the number that an expression gives; :data:`ABSENT` if it may raise and the graph may not check it.

        Args:
            expression: the expression.
            dtype: the dtype of the result.
            bounds: where the result is known to lie.
            succeeds: the expression never raises, and the dtype holds each result.
        """
        tracer, code = self._tracer, "\n".join([*self._lines, f"return {expression}"])
        with compat.no_recording():
            called = append(tracer, NUMBER_PROGRAM, code, list(self._tensors), dtype)
            nodes = [append(tracer, operator.getitem, called, place) for place in range(2)]
        value, failed = (node.meta["val"] for node in nodes)
        for node, fake in zip(nodes, (value, failed), strict=True):
            compat.track(fake, fx.Proxy(node, tracer.tracer), tracer.tracer)
        if bounds is not None:
            nodes[0].meta[number_bounds.BOUNDS] = bounds
        if not succeeds and not self._world.grant(failed, False):
            return ABSENT
        return self._world.guarded(torch.Tensor.item, (value,), {})
