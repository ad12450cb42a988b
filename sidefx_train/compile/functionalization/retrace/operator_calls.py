"""Runs one operation of the captured graph on the values of the retrace.

Takes the node with its arguments as values, and returns the node's value. An operation that functionalization or a
compiler does not support is replaced, and one that depends on memory layouts gets those of the capture.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.functionalization import memory_format as layouts
from sidefx_train.compile.functionalization.expanded_views import keeps_elements, unexpanded
from sidefx_train.compile.functionalization.fused_optimizers import fused_update, fused_update_op
from sidefx_train.compile.functionalization.number_arithmetic import call_number, inexact, number_in
from sidefx_train.compile.functionalization.number_inputs import NumberInputs
from sidefx_train.compile.functionalization.op_rewrites import (
    CHANNELS_LAST,
    REWRITES,
    batch_norm_with_changing_numbers,
    slice_of_unknown_length,
)
from sidefx_train.compile.functionalization.optimizer_tail import is_fused_update
from sidefx_train.compile.functionalization.retrace.options import RetraceOptions
from sidefx_train.compile.functionalization.tensor_scalar_ops import (
    TensorScalar,
    call_foreach,
    call_with_scalars,
    has_tensor_scalar,
)
from sidefx_train.compile.graph.number_arguments import replace_constants, takes_double
from sidefx_train.errors import BackendError

aten = torch.ops.aten
_PROBE_DISTANCE = 1e-7
"""Distance of a probe from the number in whose place an operator gets it; relative, if that is not 0."""
_NO_ARITHMETIC = frozenset({operator.getitem, aten.copy.default})
"""What takes the results of a call, or stores them, and computes nothing; views of arguments and what is computed with
sizes are no arithmetic, either."""


class OperatorCalls:
    """Runs the operations of one retrace.

    Args:
        options: options of the retrace.
        numbers: the numbers of the host that the graph reads.
        tracer: records the new graph.
        flags: gets the conditions that the new graph reports.
    """

    def __init__(self, options: RetraceOptions, numbers: NumberInputs, tracer: Any, flags: list[torch.Tensor]) -> None:
        self.options = options
        self.numbers = numbers
        self.tracer = tracer
        self.flags = flags

    def run(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the value of a node whose arguments have the values ``args`` and ``kwargs``."""
        if node in self.numbers.on_accelerator and "device" in kwargs:
            kwargs = {**kwargs, "device": self.numbers.accelerator, "pin_memory": False}
        made = self._call(node, node.target, args, kwargs)
        return self._as_laid_out(node, made) if node.target in compat.LAYOUTS else made

    def _call(self, node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_fused_update(node):
            update = fused_update if self.options.tensor_scalars else fused_update_op
            return update(node.target, args, kwargs)
        if isinstance(target, compat.OpOverload) and takes_double(target) and _has_float((*args, *kwargs.values())):
            return self._call_with_probes(node, target, args, kwargs)
        rule = self.options.instead.get(node) or REWRITES.get(target)
        rule = rule or (CHANNELS_LAST.get(target) if self.options.channels_last else None)
        if target is aten.lift_fresh_copy.default and self._is_own_constant(node.args[0]):
            return args[0]
        if target is aten.native_batch_norm.default and has_tensor_scalar(args):
            return batch_norm_with_changing_numbers(*args)
        if rule is not None:
            return rule(*args, **kwargs)
        if target is aten.expand.default and self._is_written(node) and keeps_elements(args[0], args[1]):
            return unexpanded(args[0], args[1])
        if target is aten.unbind.int and self._is_written(node):
            # Functionalization asks for plain sizes at a write through one of its views.
            dim = args[1] if len(args) > 1 else 0
            return [aten.select.int(args[0], dim, place) for place in range(len(node.meta["val"]))]
        if compat.is_random(target) and args and isinstance(args[0], torch.Tensor):
            return self._draw(node, target, args, kwargs)
        if self.options.tensor_scalars and not self._is_written(node):
            made = slice_of_unknown_length(node, args)
            if made is not None:
                return made
        if target is aten.view.default and self.options.channels_last:
            args = (self._laid_out(node, args[0]), *args[1:])
        if target is operator.getitem and type(args[1]) is int:
            return args[0][args[1]]  # of a list with many items
        return self._run(node, target, args, kwargs)

    def _call_with_probes(self, node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls an operator that takes C++ doubles with constants, and replaces these by the symbolic numbers."""
        instead: dict[float, fx.Node] = {}

        def probe(value: Any) -> Any:
            if not isinstance(value, torch.SymFloat):
                return value
            hint = float(compat.hint_of(value))
            number = hint + (hint or 1.0) * _PROBE_DISTANCE * (len(instead) + 1)
            instead[number] = self.tracer.unwrap_proxy(value).node
            return number

        args, kwargs = tuple(map(probe, args)), {name: probe(value) for name, value in kwargs.items()}
        known = len(self.tracer.graph.nodes)
        made = self._call(node, target, args, kwargs)
        calls = [each for each in list(self.tracer.graph.nodes)[known:] if not _is_no_arithmetic(each)]
        # One call gets the numbers as they are; several may compute with them, in constants that nothing replaces.
        if len(calls) != 1 or replace_constants(calls[0], instead) != instead.keys():
            raise BackendError("SFX201", f"a number that changes from call to call is an argument of {target}")
        return made

    def _draw(self, node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a random operation on tensors of the captured layouts, which decide which element gets which number."""
        in_place = target._schema.name.endswith("_")
        values = list(args)
        for i, source in enumerate(node.args):
            if isinstance(values[i], torch.Tensor) and isinstance(source, fx.Node) and not (in_place and i == 0):
                values[i] = layouts.in_captured_layout(values[i], source.meta["val"])
        if not in_place:
            return self._run(node, target, tuple(values), kwargs)
        captured: Any = node.args[0].meta["val"]  # type: ignore[union-attr]
        return layouts.drawn(
            target, args[0], captured, lambda held: self._run(node, target, (held, *values[1:]), kwargs)
        )

    def _run(self, node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(target, compat.OpOverload):
            if has_tensor_scalar(args):
                return self._computed(node, target, args)
            return compat.symbolic_function(target)(*args, **kwargs) if _symbolic(args) else target(*args, **kwargs)
        if self.options.tensor_scalars:
            if target is aten._local_scalar_dense.default and not self.numbers.becomes_size(node):
                return number_in(args[0])
            out = call_foreach(target, args, kwargs)
            if out is not NotImplemented:
                return out
            if has_tensor_scalar((args, kwargs)):
                val = node.meta.get("val")
                return call_with_scalars(target, args, kwargs, val.dtype if isinstance(val, torch.Tensor) else None)
        elif not layouts.keeps_layout(target) and not compat.from_functional(args[0]).is_contiguous():
            return args[0].copy_(target(args[0].clone(), *args[1:], **kwargs))
        return target(*args, **kwargs)

    def _computed(self, node: fx.Node, function: Any, args: tuple[Any, ...]) -> TensorScalar:
        """Runs arithmetic on numbers, and reports integers that do not fit."""
        if node in self.options.wide:
            failed = inexact(function, args)
            if failed is not None:
                self.flags.append(failed)
        return call_number(function, args)

    def _is_own_constant(self, source: Any) -> bool:
        """Returns True for a 0-dim constant on the host that one operation copies: in a graph of an accelerator, the
        copy would be a kernel of the host."""
        is_constant = self.numbers.accelerator is not None and source.op == "get_attr" and len(source.users) == 1
        return is_constant and self.options.tensor_scalars and source.meta["val"].dim() == 0

    def _is_written(self, node: fx.Node) -> bool:
        """Returns True for a value in a storage that the step writes to."""
        return not self.options.written.isdisjoint(self.options.roots[node])

    def _laid_out(self, node: fx.Node, value: Any) -> Any:
        """Returns the input of a view in its captured layout, unless a write to that storage must be visible
        elsewhere."""
        viewed, stride = node.args[0], tuple(compat.from_functional(value).stride())
        captured = viewed.meta.get("val") if isinstance(viewed, fx.Node) else None
        if not isinstance(captured, torch.Tensor) or compat.has_unbacked_sizes(captured):
            return value  # nothing is known of its sizes
        with compat.no_recording():  # of the comparison
            if stride == tuple(captured.stride()):
                return value
        return value if self._is_written(node) else layouts.like_captured(value, stride, captured)

    def _as_laid_out(self, node: fx.Node, made: Any) -> Any:
        """Gives a result the layout that it has in the captured graph; a decomposition may have another."""
        if isinstance(made, (list, tuple)):
            return tuple(map(self._in_layout_of, made, node.meta["val"]))
        return self._in_layout_of(made, node.meta["val"])

    def _in_layout_of(self, made: Any, captured: Any) -> Any:
        if not isinstance(made, torch.Tensor) or not isinstance(captured, torch.Tensor):
            return made
        if self.options.channels_last and captured.dim() in (4, 5):
            return made
        return layouts.like_captured(made, tuple(compat.from_functional(made).stride()), captured)


def _has_float(args: tuple[Any, ...]) -> bool:
    return any(isinstance(a, torch.SymFloat) for a in args)


def _is_no_arithmetic(node: fx.Node) -> bool:
    target = node.target
    of_sizes = isinstance(node.meta.get("val"), (int, torch.SymInt, torch.SymBool))
    return of_sizes or target in _NO_ARITHMETIC or (isinstance(target, compat.OpOverload) and target.is_view)


def _symbolic(args: tuple[Any, ...]) -> bool:
    return any(isinstance(a, compat.SYMBOLS) for a in args)
