"""Operators of torch that call functions, such as ``flex_attention``: their Python kernels are interpreted.

Torch's dispatcher finds one of an operator's kernels by the arguments, the transforms of ``torch.func`` and autograd.
A capture calls the kernel that eager would call, for the device that the tensors stand for, so the functions which
the kernel is given are interpreted, too. Eager has its own compiler capture some of these functions first; a capture
leaves that out.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.recording.subgraphs import Region
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


@registry.intercept(compat.HigherOrderOperator.__call__)
def _call(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    op, *operands = args
    answer = world.functions.asked(op, tuple(operands), kwargs)
    if answer is not ABSENT:
        return answer
    found = compat.kernel_of(op, tuple(operands), kwargs)
    if found is None:
        world.heap.refuse("SFX111", f"calls {op.name()}, an operator that calls functions, and has no rule for it here")
    kernel, given, named = found
    if kernel is not compat.differentiates_flex_attention:
        return world.interp.call(kernel, given, named)
    if operands[0].device.type != "cpu":
        world.heap.refuse("SFX111", "calls flex_attention on a GPU, where its kernel in Python needs much memory")
    if not torch.is_grad_enabled():
        return world.interp.call(kernel, given, named)
    return _without_derivative(world, op, kernel, given, named)


def _without_derivative(world: TraceWorld, op: Any, kernel: Any, given: Any, named: Any) -> Any:
    """Interprets a kernel whose derivative torch would lose: the functions use tensors that the operator is not given.

    Raises:
        Unsupported: something that it uses requires gradients.
    """
    region = Region(world.tracer, op.name())
    made = world.interp.call(kernel, given, named)
    inside = set(region.nodes())
    used = {item for node in inside for item in node.all_input_nodes if item not in inside}
    if any(tensor.requires_grad for node, tensor in compat.tracked_pairs(world.tracer.tracer) if node in used):
        world.heap.refuse("SFX111", f"differentiates {op.name()}")
    return made


@registry.intercept(compat.run_compiled)
def _run_compiled(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    fn, *operands = args
    return _as_if_compiled(world, fn, tuple(operands), kwargs)


@registry.intercept(compat.call_compiled)
def _call_compiled(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    fn, operands, *named = args
    return _as_if_compiled(world, fn, tuple(operands), (named[0] if named else kwargs.get("kwargs")) or {})


def _as_if_compiled(world: TraceWorld, fn: Any, operands: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Calls a function of an operator, which gets tensors of closures as operands from torch's own compiler."""
    outer, world.closures_given = world.closures_given, True
    try:
        return world.interp.call(fn, operands, named)
    finally:
        world.closures_given = outer


def _as_given(graph: Any, inputs: Any) -> Any:
    """The backend for which a function is not compiled."""
    return graph


@registry.intercept(compat.compiling_operator)
def _compiling_operator(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return nullcontext(_as_given)


@registry.intercept(torch.compile)
def _compile(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) == 1 and kwargs.get("backend") is _as_given:
        return args[0]
    world.heap.refuse("SFX103", "makes a function for torch.compile")


@registry.intercept(compat.make_fx)
def _trace(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    world.heap.refuse("SFX111", "traces a function by torch's own tracer")
