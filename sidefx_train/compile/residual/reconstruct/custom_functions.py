"""Custom autograd functions whose own backward runs outside: what their nodes and contexts need."""

from __future__ import annotations

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.side_effects.custom_functions import FunctionCall
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.residual.native_functions import PlannedFunction
from sidefx_train.compile.residual.reconstruct.reconstruction import Reconstruction


def write_node(rebuilder: Reconstruction, function: FunctionCall) -> None:
    """Makes what a custom function's own node needs outside results, and writes the attributes of its context."""
    world, context = rebuilder.world, function.context
    outputs = [function.outputs[i] for i in world.custom_functions.live_outputs(function)]
    made = [rebuilder.prepared(output) for output in outputs]
    for arg in function.args:
        if safe_isinstance(arg, torch.Tensor) and arg.requires_grad:
            rebuilder.prepared(arg)
    for saved in context.saved:
        if safe_isinstance(saved, torch.Tensor) and saved.requires_grad:
            rebuilder.prepared(saved)
        elif safe_isinstance(saved, torch.Tensor) and world.heap.record_of(saved) is None:
            _output_saved(rebuilder, saved, function)
    name = rebuilder.named(function.node, rebuilder.writer.fresh("context"))
    rebuilder.write(f"{name} = {made[0]}.grad_fn")
    for key, item in vars(function.node).items():
        rebuilder.write(f"{name}.__dict__[{rebuilder.constant(key)}] = {rebuilder.expression(item)}")


def _output_saved(rebuilder: Reconstruction, value: torch.Tensor, function: FunctionCall) -> None:
    """Makes a tensor without history that a custom function saves a result."""
    plain = type(value) is compat.FakeTensor and not value._is_view() and not rebuilder.views.is_outside(value)
    if not plain:
        reason = f"{function.cls.__name__}, whose backward must run natively outside of the step, saves a view"
        rebuilder.refuse("SFX107", reason)
    rebuilder.output(rebuilder.world.tracer.node_of(value))


def planned(rebuilder: Reconstruction) -> tuple[PlannedFunction, ...]:
    """Returns the custom functions whose own backward runs outside."""
    node_of, found = rebuilder.world.tracer.node_of, []
    for function in rebuilder.world.custom_functions.native:
        live = rebuilder.world.custom_functions.live_outputs(function)
        results = tuple((i, rebuilder.index[node_of(function.outputs[i])]) for i in live)
        values = tuple(
            rebuilder.index.get(node_of(saved))
            if safe_isinstance(saved, torch.Tensor) and not saved.requires_grad
            and rebuilder.world.heap.record_of(saved) is None else None
            for saved in function.context.saved
        )  # fmt: skip
        found.append(PlannedFunction(function, results, values))
    return tuple(found)
