"""``map`` and ``scan`` over the slices of tensors: operators of the graph over one captured call of the function.

The function is interpreted for the first slice and moved to a graph of its own. Torch's operator calls that graph for
every slice, and differentiates it by torch's own rule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.interceptors.higher_order.control_flow import (
    Branch,
    in_one_line,
    requires_grad,
    unflatten,
    values_of,
)
from sidefx_train.compile.capture.side_effects.collect import observe
from sidefx_train.compile.capture.side_effects.compare import difference
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.graph.view_chains import memory_of

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


@registry.intercept(compat.CALLS_MAP)
def _map(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _, fn, *given = args
    mapped, others = map(list, map(world.interp.iterate, given))
    body = _Body(world, fn, (), mapped, others, "map")
    return body.results(torch.ops.higher_order.map_impl, (mapped,))


@registry.intercept(compat.CALLS_SCAN)
def _scan(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _, fn, *given = args if not kwargs else (*args, kwargs.get("additional_inputs", ()))
    carried, mapped, others = map(list, map(world.interp.iterate, given))
    body = _Body(world, fn, carried, mapped, others, "scan")
    shape = body.part.shape
    if type(shape) not in (tuple, list) or len(shape) != 2:
        world.heap.refuse("SFX111", "scan with a function that returns no pair")
    return body.results(torch.ops.higher_order.scan, (carried, mapped))


class _Body:
    """One call of the function of a loop, in a graph of its own.

    Attributes:
        part: the call, with its results and side effects.
    """

    def __init__(self, world: TraceWorld, fn: Any, carried: Any, mapped: Any, others: Any, what: str) -> None:
        self.world, self.what = world, what
        if not all(safe_isinstance(item, torch.Tensor) and world.tracer.has_node(item) for item in (*carried, *mapped)):
            world.heap.refuse("SFX111", f"{what} over a value that is not a plain tensor")
        if not all(item.dim() and item.shape[0] == mapped[0].shape[0] for item in mapped) or not mapped[0].shape[0]:
            world.heap.refuse("SFX111", f"{what} over no slices, or over tensors with different numbers of them")
        given = [
            *(world.guarded(torch.clone, (item,), {}) for item in carried),
            *(world.guarded(torch.select, (item, 0, 0), {}) for item in mapped),
        ]
        places = list(map(world.tracer.node_of, given))
        before = observe(world, [carried, mapped, others, given])
        self.part = part = Branch(world, fn, (*given, *others), f"the function of {what}")
        found = difference(before, part.after)
        if found:
            world.heap.refuse("SFX111", f"the function of {what} has side effects: {in_one_line(found)}")
        inside = {*part.region.nodes(), *places}
        uses = [node for node in part.uses if node not in inside]
        nodes = [*dict.fromkeys(map(world.tracer.node_of, (*carried, *mapped))), *uses]
        if len({memory_of(node) for node in nodes}) < len(nodes):
            world.heap.refuse("SFX111", f"the function of {what} uses tensors that share memory")
        self.used = values_of(world, uses, integers=True)
        if torch.is_grad_enabled() and not world.closures_given:
            places_of_others = {world.tracer.node_of(item) for item in others if safe_isinstance(item, torch.Tensor)}
            hidden = (item for node, item in zip(uses, self.used, strict=True) if node not in places_of_others)
            if any(map(requires_grad, hidden)):
                world.heap.refuse("SFX111", f"the operator {what} is called with a function that uses a weight")
        differentiated = any(map(requires_grad, (*carried, *mapped, *self.used)))
        if torch.is_grad_enabled() and differentiated and part.switched:
            world.heap.refuse("SFX111", f"the function of {what} changes grad mode, or has its own backward")
        self.graph = part.take([*places, *uses])

    def results(self, op: Any, operands: tuple[Any, ...]) -> Any:
        """Returns what the operator computes, nested like the results of the function."""
        made = self.world.guarded(op, (self.graph, *operands, tuple(self.used)), {})
        return unflatten(self.part.shape, iter(made))
