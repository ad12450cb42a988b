"""Small programs on tensors from outside that the prologue of a step runs to know numbers before the graph runs.

A step that uses the values of its inputs as sizes, or decides on them (``torch.split(y, lengths.tolist())``, ``if
mask.any()``), needs them before its graph runs. They depend on little: the prologue repeats the operations that compute
them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import torch

OF_NUMPY = (
    np.float64, np.float32, np.float16, np.int64, np.int32, np.int16, np.int8, np.uint32, np.uint16, np.uint8,
)  # fmt: skip
"""NumPy's numbers that are inputs of a graph; NumPy itself computes with them."""

OBJECTS = (str, bytes, complex, Decimal, timedelta)
"""Immutable objects of C code that a program may make of numbers."""

_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_PLAIN = frozenset((*_TENSORS, int, float, *OF_NUMPY))


class Slot(NamedTuple):
    """The value at this position, among the arguments of a step of the program.

    Attributes:
        position: of an operand, or of the result of an earlier step, counted behind the operands.
    """

    position: int


class Step(NamedTuple):
    """One operation.

    Attributes:
        function: an operator, or a function of Python numbers.
        args: plain values, slots, and lists of these.
        kwargs: the same, by name.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class HostProgram:
    """Computes numbers from outside values.

    Args:
        operands: sources of its arguments.
        steps: the operations; the result of the last one, or the only operand, is a tensor or a number.
    """

    __slots__ = ("_given", "_only", "_result", "_steps", "operands")

    def __init__(self, operands: tuple[Any, ...], steps: tuple[Step, ...]) -> None:
        self.operands = operands
        self._steps = steps
        self._only = _only_call(steps)
        self._given: tuple[Any, ...] = ()
        self._result: list[Any] = []

    def __call__(self, *values: Any) -> list[Any]:
        """Returns the elements of the result; an empty list where it cannot be computed from these values."""
        given = self._given
        if given and len(given) == len(values) and all(map(operator.is_, given, values)):
            return self._result  # guards of the backend ask for the same numbers as those of the capture
        kinds = set(map(type, values))
        if not kinds <= _PLAIN:
            return []
        if self._only is not None:
            result = _called(*self._only, values)
        else:
            result = self._computed(list(values))
        self._given, self._result = (values, result) if kinds.isdisjoint(_TENSORS) else ((), [])
        return result

    def _computed(self, known: list[Any]) -> list[Any]:
        try:
            with torch.no_grad():
                for function, args, kwargs in self._steps:
                    known.append(function(*_filled(args, known), **_filled(kwargs, known)))
                result = known[-1]
                return result.reshape(-1).tolist() if isinstance(result, torch.Tensor) else [result]
        except (RuntimeError, ValueError, TypeError, IndexError, ArithmeticError):
            return []  # the values are not as the capture saw them: a guard says so


def _only_call(steps: tuple[Step, ...]) -> tuple[PythonCall, tuple[int, ...]] | None:
    """Returns the program's only function and the places of its operands, if it is Python code on operands alone."""
    only = steps[0] if len(steps) == 1 else None
    if only is None or type(only.function) is not PythonCall or only.kwargs:
        return None
    places = tuple(each.position for each in only.args if type(each) is Slot)
    return (only.function, places) if len(places) == len(only.args) else None


def _called(function: PythonCall, places: tuple[int, ...], values: tuple[Any, ...]) -> list[Any]:
    try:
        return [function(*[values[place] for place in places])]
    except ArithmeticError:
        return []  # as above


class ArrayCall:
    """A call of a pure function of NumPy on arrays, which raises what NumPy would warn of.

    Args:
        function: such as ``np.clip``, ``operator.mul``.
    """

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with np.errstate(divide="raise", over="raise", invalid="raise"):
            if np.geterr()["under"] != "ignore":
                np.seterr(under="raise")
            return self._function(*args, **kwargs)


class NumberCall:
    """A call of a pure function of C code on numbers, which returns numbers.

    Args:
        function: such as ``math.erf``, ``np.cos``, ``operator.add``.
    """

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the result.

        Raises:
            ArithmeticError: it is no number, none that a graph takes as an input, or NumPy would warn of it.
        """
        with np.errstate(divide="raise", over="raise", invalid="raise"):
            if np.geterr()["under"] != "ignore":
                np.seterr(under="raise")
            result = self._function(*args, **kwargs)
        return _checked(result)

    def __repr__(self) -> str:
        return f"NumberCall({id(self._function)})"


class PythonCall(NumberCall):
    """A call of Python code that only computes numbers from numbers.

    Args:
        function: such as the step of a scheduler on a copy of its state.
        name: the program's name for it.
        warns: it calls functions of NumPy, which may warn.
    """

    __slots__ = ("_warns", "name")

    def __init__(self, function: Callable[..., Any], name: str, warns: bool) -> None:
        super().__init__(function)
        self.name = name
        self._warns = warns

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the result.

        Raises:
            ArithmeticError: as of :class:`NumberCall`, or the code raises: the step raises the same where it is
                captured again.
        """
        try:
            return super().__call__(*args, **kwargs) if self._warns else _checked(self._function(*args, **kwargs))
        except Exception as error:
            raise ArithmeticError(f"{type(error).__name__} from the program's code") from error

    def __repr__(self) -> str:
        return f"PythonCall({id(self._function)})"


class ObjectCall:
    """A call of a pure function of C code, which returns an immutable object or numbers.

    Args:
        function: such as ``len``, ``str.upper``, ``operator.getitem``.
    """

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the result.

        Raises:
            ArithmeticError: it is neither such an object nor a number that a graph takes as an input.
        """
        result = self._function(*args, **kwargs)
        return result if type(result) in OBJECTS else _checked(result)


COMPUTED = (int, float, bool, np.bool_, *OF_NUMPY)
"""Types of numbers that the prologue computes by functions of C code."""

_LARGEST = 2.0**62
"""Integers of a graph have 64 bits."""


def _checked(result: Any) -> Any:
    """Returns a number or a tuple of numbers.

    Raises:
        ArithmeticError: it is none that a graph takes as an input.
    """
    for number in result if type(result) is tuple else (result,):
        if type(number) not in COMPUTED or not -_LARGEST < float(number) < _LARGEST:
            raise ArithmeticError(f"{number!r} is no input of a graph")
    return result


def _filled(value: Any, known: list[Any]) -> Any:
    kind = type(value)
    if kind is Slot:
        return known[value.position]
    if isinstance(value, (tuple, list)):  # the graph's own classes of lists among them
        return [_filled(item, known) for item in value]
    return {name: _filled(item, known) for name, item in value.items()} if kind is dict else value
