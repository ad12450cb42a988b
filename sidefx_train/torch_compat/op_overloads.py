"""Operators of the dispatcher: their classes, arguments, tags, and Python derivatives."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch._higher_order_ops import map as _map
from torch._higher_order_ops import utils as _operator_utils
from torch._higher_order_ops.while_loop import while_loop as while_loop

DEVICE_OF = torch.ops.prim.device.default
"""The operator by which C++ reads a tensor's device."""

_aten = torch.ops.aten
READS = frozenset({_aten._local_scalar_dense.default, _aten.detach.default, _aten.alias.default, DEVICE_OF})
"""Operators that only read a tensor, or hand it on."""

HigherOrderOperator = torch._ops.HigherOrderOperator

CALLS_COND = type(torch.ops.higher_order.cond).__call__
"""Python method by which the operator of ``torch.cond`` is called."""

map_function = getattr(_map, "map", _map)
"""``map`` over the slices of tensors; torch names the module and the function alike."""

run_compiled = _operator_utils._maybe_compile_and_run_fn


def is_random(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def changes_in_place(target: Any) -> bool:
    """Returns True for an operator that writes to one of its arguments."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


BINDING: type = type(torch.autograd._profiler_enabled.__self__)  # type: ignore[attr-defined]
"""Class of the objects to which pybind11 functions of torch are bound."""

OpOverload = torch._ops.OpOverload

OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
"""Classes of the members of ``torch.ops``."""

OPERATOR_NAMESPACES = (type(torch.ops), type(torch.ops.aten))
"""Classes of ``torch.ops`` and of its namespaces, which keep a member from the first time that it is asked for."""

_OWN_OPERATORS = (
    "aten",
    "prim",
    "prims",
    "sidefx",
    "quantized",
    "mkldnn",
    "inductor",
    "_c10d_functional",
    "higher_order",
)


def is_torchs(operator: Any) -> bool:
    """Returns True for an operator of torch or of this library, False for one that another library has defined."""
    return operator.namespace in _OWN_OPERATORS


def python_derivative(operator: Any) -> tuple[Any, Any] | None:
    """Returns an operator's overload and the holder of its Python derivative; ``None`` if it has no such derivative.

    Both are ``None`` if torch wraps the derivative in more Python, for lists of tensors.
    """
    if isinstance(operator, torch._ops.OpOverloadPacket):
        names = operator.overloads()
        if len(names) != 1:
            return None
        operator = getattr(operator, names[0])
    if operator.namespace in _OWN_OPERATORS:
        return None
    name = name_of_derivative(operator)
    made = [cls for cls in torch.autograd.Function.__subclasses__() if cls.__name__ == name]
    if not made:
        return None
    held = [inspect.getclosurevars(cls.backward).nonlocals for cls in made]
    registrations = [names["info"] for names in held if "info" in names]
    return (operator, registrations[-1]) if registrations else (None, None)


def name_of_derivative(overload: Any) -> str:
    """Returns torch's name of the autograd function of an operator with a Python derivative."""
    return f"GeneratedBackwardFor_{overload._namespace}_{overload._opname}_{overload._overloadname}"


def operator_arguments(
    overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns arguments as the dispatcher passes them: positional ones, and keyword-only ones separately."""
    found, named = list(args), dict(kwargs)
    places = [argument for argument in overload._schema.arguments if not argument.kwarg_only][len(args) :]
    while any(argument.name in named for argument in places):
        argument = places.pop(0)
        found.append(named.pop(argument.name, argument.default_value))
    return tuple(found), named


def operator_defaults(
    overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns all arguments of an operator, including default values."""
    return torch._library.utils.fill_defaults(overload._schema, args, kwargs)  # type: ignore[no-any-return]


def has_keyword_arguments(overload: Any) -> bool:
    """Returns True if an operator has keyword-only arguments."""
    return bool(torch._library.utils.has_kwarg_only_args(overload._schema))


def decomposition_of(operator: Any) -> Callable[..., Any]:
    """Returns a decomposition of ``operator``, or ``operator`` itself."""
    from torch._decomp import decomposition_table

    return decomposition_table.get(operator, operator)  # type: ignore[no-any-return]
