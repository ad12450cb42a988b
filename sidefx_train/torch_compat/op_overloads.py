"""Operators of the dispatcher: their classes, arguments, tags, and Python derivatives."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._higher_order_ops import map as _map
from torch._higher_order_ops import utils as _operator_utils
from torch._higher_order_ops.while_loop import while_loop as while_loop
from torch.fx.experimental.proxy_tensor import make_fx as make_fx
from torch.utils._pytree import tree_map_only

from sidefx_train.torch_compat.state.python_kernels import (
    BEFORE_RECORDING,
    COMPUTING,
    FOR_OTHERS,
    IMPLICIT,
    place_of,
)

DEVICE_OF = torch.ops.prim.device.default
"""The operator by which C++ reads a tensor's device."""

_aten = torch.ops.aten
READS = frozenset({_aten._local_scalar_dense.default, _aten.detach.default, _aten.alias.default, DEVICE_OF})
"""Operators that only read a tensor, or hand it on."""

HigherOrderOperator = torch._ops.HigherOrderOperator


def kernel_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the Python kernel that eager calls for an operator that calls functions, and its arguments.

    Fake tensors stand for tensors of their device. Returns ``None`` if torch has no kernel.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return _transforming_kernel(op, args, kwargs)
    keys = torch._C._dispatch_tls_local_include_set()
    for value in torch._ops._to_flat_tuple(args, kwargs):
        if isinstance(value, torch.Tensor):
            keys = keys | torch._C._dispatch_keys(value)
    keys = (keys - torch._C._dispatch_tls_local_exclude_set()) & op.non_fallthrough_keys
    for key in _OF_FAKES:
        keys = keys.remove(key)
    try:
        found = torch._ops.resolve_key(op, keys.highestPriorityTypeId())
    except NotImplementedError:
        return None
    kernel = op.py_kernels.get(found)
    return (kernel, args, kwargs) if callable(kernel) else None


def _transforming_kernel(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the kernel for the innermost transform of ``torch.func``, with its first argument: the transform."""
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

    transform = retrieve_current_functorch_interpreter()
    kernel = op.functorch_table.get(transform.key())
    if kernel is None:
        return None
    args, kwargs = tree_map_only(torch.Tensor, torch._C._functorch.unwrap_if_dead, (args, kwargs))
    if hasattr(transform, "lift"):
        args, kwargs = transform.lift(args, kwargs)
    return kernel, (transform, *args), kwargs


_OF_FAKES = (torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot)


def is_operator_of_functions(cls: type) -> bool:
    """Returns True for torch's own classes of operators that call functions."""
    return issubclass(cls, HigherOrderOperator) and cls.__module__.startswith(("torch.", "functorch."))


CALLS_COND = type(torch.ops.higher_order.cond).__call__
"""Python method by which the operator of ``torch.cond`` is called."""

map_function = getattr(_map, "map", _map)
"""``map`` over the slices of tensors; torch names the module and the function alike."""

CALLS_MAP = type(torch.ops.higher_order.map_impl).__call__
CALLS_SCAN = type(torch.ops.higher_order.scan).__call__
CALLS_WHILE = type(torch.ops.higher_order.while_loop).__call__
"""Python methods by which the operators of ``map``, ``scan`` and ``while_loop`` are called."""

differentiates_flex_attention = torch.ops.higher_order.flex_attention.py_kernels[torch._C.DispatchKey.Autograd]
"""Kernel of ``flex_attention`` that differentiates it."""

run_compiled = _operator_utils._maybe_compile_and_run_fn
call_compiled = getattr(_operator_utils, "_hop_compile_and_call", None)
compiling_operator = getattr(_operator_utils, "setup_compilation_env", None)
"""How operators that call functions have these captured by torch's own compiler; ``None`` if this torch lacks it."""


def is_random(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def viewed_by(node: torch.fx.Node) -> torch.fx.Node | None:
    """Returns the operand in whose memory a value of a functional graph lies when Inductor has lowered it.

    ``_unsafe_view`` becomes a view, and ``copy`` its second argument. A value with memory of its own has none.
    """
    if node.target is operator.getitem:
        whole: Any = node.args[0]
        return whole if _is_view(whole) else None
    if _is_view(node) or node.target is _aten._unsafe_view.default:
        return node.all_input_nodes[0] if node.all_input_nodes else None
    return node.args[1] if node.target is _aten.copy.default else None  # type: ignore[return-value]


def holder_of(node: Any) -> torch.fx.Node:
    """Returns the node that makes the memory in which a value lies when Inductor has lowered it."""
    while (viewed := viewed_by(node)) is not None:
        node = viewed
    return node  # type: ignore[no-any-return]


def _is_view(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def changes_in_place(target: Any) -> bool:
    """Returns True for an operator that writes to one of its arguments."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


BINDING: type = type(torch.autograd._profiler_enabled.__self__)  # type: ignore[attr-defined]
"""Class of the objects to which pybind11 functions of torch are bound."""

OpOverload = torch._ops.OpOverload

OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
"""Classes of the members of ``torch.ops``."""

SHAPE_AS_TENSOR = torch._shape_as_tensor
"""Function of torch, also ``torch.onnx.operators.shape_as_tensor``, that returns the sizes of a tensor as a tensor."""

OPERATOR_NAMESPACES = (type(torch.ops), type(torch.ops.aten))
"""Classes of ``torch.ops`` and of its namespaces, which keep a member from the first time that it is asked for."""

_OF_TRANSFORMS = "FuncTorchBatched"
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


def is_packet(function: Any) -> bool:
    """Returns True for ``torch.ops.aten.add``, which chooses an overload by its arguments."""
    return isinstance(function, torch._ops.OpOverloadPacket)


def is_torchs(operator: Any) -> bool:
    """Returns True for an operator of torch or of this library, False for one that another library has defined."""
    if isinstance(operator, torch._ops.OpOverloadPacket):
        operator = getattr(operator, operator.overloads()[0])
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


def kernel_before_recording(operator: Any, inside_transform: bool) -> str:
    """Returns which Python code the dispatcher would run natively during a capture; empty if there is none.

    Args:
        operator: an operator, or a packet of overloads, of another library.
        inside_transform: it is called inside a transform of ``torch.func``.
    """
    if is_torchs(operator):
        return ""
    packet = isinstance(operator, torch._ops.OpOverloadPacket)
    overloads = [getattr(operator, name) for name in operator.overloads()] if packet else [operator]
    for overload in overloads:
        namespace, _, name = overload.name().partition("::")
        if inside_transform and f"{namespace}/{name}/{_OF_TRANSFORMS}" in torch.library._impls:
            return "its vmap rule"
        for key in BEFORE_RECORDING:
            place = place_of(namespace, name, key) if f"{namespace}/{name}/{key}" in torch.library._impls else ""
            derivative = key == "Autograd" and python_derivative(overload) is not None
            casts = key.startswith("Autocast") and FOR_OTHERS in place  # torch.library.register_autocast
            if place and not derivative and not casts:
                return f"its kernel for {key or IMPLICIT}, {place},"
    return ""


def runs_python(operator: Any) -> bool:
    """Returns True for an operator whose kernel another library has defined in Python."""
    if not isinstance(operator, torch._ops.OpOverload) or is_torchs(operator):
        return False
    namespace, _, name = operator.name().partition("::")
    if f"{namespace}::{name}" in torch._library.custom_ops.OPDEFS:
        return True
    return any(
        f"{namespace}/{name}/{key}" in torch.library._impls and bool(place_of(namespace, name, key))
        for key in COMPUTING
    )
