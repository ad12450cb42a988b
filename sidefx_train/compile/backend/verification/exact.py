"""Runs a captured graph op by op in float64: its results almost without rounding.

It decides if eager's own arithmetic is inaccurate: a kernel that overflows in an intermediate, or whose sums are less
exact than the compiled graph's. Random numbers are drawn in the program's dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.recording.dispatch_mode import is_draw
from sidefx_train.compile.ops.runtime_assert import RUNTIME_ASSERT

_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
_NAMESPACES = ("aten", "prims")
_BITS = (torch.ops.aten.view.dtype,)


class CannotRunExactly(Exception):
    """The graph contains operations without a meaning in other dtypes."""


class Exact(fx.Interpreter):
    """Runs a graph in float64.

    Args:
        module: the graph.
        functions: replacements of some of its operators.
    """

    def __init__(self, module: fx.GraphModule, functions: Mapping[Any, Callable[..., Any]] | None = None) -> None:
        super().__init__(module)
        self._functions = functions or {}

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        found = super().get_attr(target, args, kwargs)
        return widened([found])[0] if isinstance(found, torch.Tensor) else found

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        target: Any = n.target
        if target in self._functions:
            return map_aggregate(self._functions[target](*args, **kwargs), _wide)
        if not isinstance(target, compat.OpOverload):
            if getattr(target, "__module__", "") not in ("_operator", "math"):
                raise CannotRunExactly(str(target))
            return target(*args, **kwargs)
        if target is RUNTIME_ASSERT:
            return None
        if target.namespace not in _NAMESPACES or target in _BITS:
            raise CannotRunExactly(str(target))
        if is_draw(target, args, kwargs):
            return _drawn(n, args, kwargs)
        return target(*map_aggregate(args, _wide_type), **map_aggregate(kwargs, _wide_type))


def widened(args: list[Any]) -> list[Any]:
    """Returns copies of a graph's inputs in float64, with the same strides and storage sharing.

    Raises:
        CannotRunExactly: inputs of several dtypes share storage, or one is not strided.
    """
    memory: dict[int, tuple[torch.dtype, torch.Tensor]] = {}

    def wide(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        value = value.detach()
        if value.layout != torch.strided or value.is_conj() or value.is_neg() or value.is_quantized:
            raise CannotRunExactly("an input that is not plain")
        if not compat.has_memory(value):
            raise CannotRunExactly("an input without memory")
        storage = value.untyped_storage()
        dtype, copied = memory.get(storage.data_ptr(), (value.dtype, None))
        if copied is None:
            elements = storage.nbytes() // value.itemsize
            whole = torch.empty(0, dtype=dtype, device=value.device).set_(storage, 0, (elements,))  # type: ignore[call-overload]
            copied = whole.to(_WIDE.get(dtype, dtype), copy=True)
            memory[storage.data_ptr()] = dtype, copied
        if dtype != value.dtype:
            raise CannotRunExactly("inputs of several types in one memory")
        return copied.as_strided(value.shape, value.stride(), value.storage_offset())

    return [wide(value) for value in args]


def _drawn(n: fx.Node, args: Any, kwargs: Any) -> Any:
    """Draws in the dtypes of the captured graph, and widens the results."""
    target: Any = n.target
    narrow = [_narrow(value, node) for value, node in zip(args, n.args, strict=True)]
    made = target(*narrow, **kwargs)
    for argument, value, low in zip(target._schema.arguments, args, narrow, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write and low is not value:
            value.copy_(low)
            made = value if made is low else made
    return map_aggregate(made, _wide)


def _wide(value: Any) -> Any:
    return value.to(_WIDE.get(value.dtype, value.dtype)) if isinstance(value, torch.Tensor) else value


def _wide_type(value: Any) -> Any:
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def _narrow(value: Any, node: Any) -> Any:
    """Returns a value in its dtype in the captured graph."""
    known = node.meta.get("val") if isinstance(node, fx.Node) else None
    if isinstance(value, torch.Tensor) and isinstance(known, torch.Tensor):
        return value.to(known.dtype)
    return value
