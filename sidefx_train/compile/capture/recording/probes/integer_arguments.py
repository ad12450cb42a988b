"""Integers that change where C++ code wants a float: ``x.normal_(0, k)``, ``huber_loss(x, y, delta=k)``, ``x ** k``.

Torch's parsers and kernels would read the value of a symbolic integer there and so make it a constant; some derivatives
refuse it. The float of the integer takes its place, as C++ code would convert the value, and gets a probe as others do.

Nor do the parsers of torch's operators accept a symbolic integer for a list, as they accept an integer.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from types import FunctionType
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.graph.number_arguments import is_double, is_scalar

aten = torch.ops.aten

Place = int | str

_AS_SECOND = frozenset({"rpow"})
"""Methods of tensors whose second argument is the number, without an operator of the name."""


def as_wanted(
    fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], computes: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call with floats, or lists, in place of the symbolic integers where C++ code wants
    such.

    Args:
        fn: the function.
        args: its arguments; without the tensor whose method it is.
        kwargs: the same, by name.
        computes: it also computes with numbers that may be of any class, as floats if the tensor holds such.
    """
    owner = getattr(fn, "__self__", None)
    offset = 1 if isinstance(owner, torch.Tensor) else 0
    floats, scalars = _places_of(fn)
    if scalars and (computes or type(fn) is FunctionType) and _holds_floats((owner, *args, *kwargs.values())):
        floats = floats | scalars
    lists = _lists_of(fn) if isinstance(fn, compat.OPERATORS) else {}
    if not floats and not lists:
        return args, kwargs

    def wanted(place: Place, value: Any) -> Any:
        if type(value) is not torch.SymInt:
            return value
        if place in lists:
            return [value] * lists[place]
        return torch.sym_float(value) if place in floats else value

    return (
        tuple(wanted(position, value) for position, value in enumerate(args, offset)),
        {name: wanted(name, value) for name, value in kwargs.items()},
    )


def _holds_floats(given: Iterable[Any]) -> bool:
    first = next((value for value in given if isinstance(value, torch.Tensor)), None)
    return first is not None and (first.is_floating_point() or first.is_complex())


def _places_of(fn: Any) -> tuple[frozenset[Place], frozenset[Place]]:
    """Returns the arguments of a function, by position and name, that are floats, and those that are numbers of any
    class."""
    if type(fn) is FunctionType:
        return frozenset(), _annotated(fn) if (fn.__module__ or "").startswith("torch.") else frozenset()
    if isinstance(fn, compat.OPERATORS) and hasattr(fn, "_schema"):
        return _of_schemas((fn,))
    return _of_name(str(getattr(fn, "__name__", "")).strip("_"))


@functools.lru_cache(maxsize=512)
def _lists_of(fn: Any) -> dict[Place, int]:
    """Returns the arguments of an operator that are lists which one number may stand for, with their lengths."""
    op = fn if hasattr(fn, "_schema") else getattr(fn, fn.overloads()[0])
    return {
        place: argument.N
        for position, argument in enumerate(op._schema.arguments)
        for place in (position, argument.name)
        if "List" in str(argument.type) and argument.N
    }


@functools.lru_cache(maxsize=512)
def _of_name(name: str) -> tuple[frozenset[Place], frozenset[Place]]:
    if name in _AS_SECOND:
        return frozenset(), frozenset({1})
    packets = (getattr(aten, each, None) for each in (name, f"_{name}", f"{name}_"))
    return _of_schemas(getattr(packet, each) for packet in packets if packet is not None for each in packet.overloads())


def _of_schemas(operators: Iterable[Any]) -> tuple[frozenset[Place], frozenset[Place]]:
    floats: set[Place] = set()
    scalars: set[Place] = set()
    for op in operators:
        if not any("Tensor" in str(each.type) for each in (*op._schema.arguments, *op._schema.returns)):
            continue  # of numbers alone
        for position, argument in enumerate(op._schema.arguments):
            found = floats if is_double(argument) else scalars if is_scalar(argument) else set()
            found |= {argument.name} if argument.kwarg_only else {argument.name, position}
    return frozenset(floats), frozenset(scalars)


@functools.lru_cache(maxsize=256)
def _annotated(fn: FunctionType) -> frozenset[Place]:
    """Returns the arguments of a Python function of torch's whose annotation or default says that they are floats."""
    places: set[Place] = set()
    for position, parameter in enumerate(inspect.signature(fn).parameters.values()):
        wanted = parameter.annotation
        named = {getattr(each, "__name__", None) for each in getattr(wanted, "__args__", (wanted,))}
        if "float" in named or type(parameter.default) is float:
            places |= {position, parameter.name}
    return frozenset(places)
