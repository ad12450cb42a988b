"""``torch.cond``, ``while_loop`` and ``map`` in a step: operators of the graph over captured branches.

Each branch is interpreted from the same side effects. Its tensor operations are moved from the step's graph to a graph
of their own, whose inputs are all tensors that the branch uses. The branches must leave the same Python side effects,
since only the graph decides which of them runs. Autograd differentiates ``torch.cond`` by torch's own rule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.recording.subgraphs import Region
from sidefx_train.compile.capture.side_effects.collect import observe
from sidefx_train.compile.capture.side_effects.compare import difference
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.graph.view_chains import memory_of

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


_MOST_SLICES = 64
"""Slices up to which ``map`` is captured, as that many calls of its function."""


class Branch:
    """One function run on shadows, with its operations in a separate graph.

    Attributes:
        leaves: flat list of returned tensors.
        shape: their nesting.
        after: side effects after it.
    """

    def __init__(self, world: TraceWorld, fn: Any, operands: tuple[Any, ...], what: str) -> None:
        self.world = world
        self.region = Region(world.tracer, what)
        world.tracer.proxy_mode.grad_switched = False
        outer, world.branching = world.branching, True
        returned = world.interp.call(fn, operands, {})
        world.branching = outer
        self.switched = world.tracer.proxy_mode.grad_switched
        self.leaves: list[torch.Tensor] = []
        self.shape = self._flatten(returned, what)
        self.after = observe(world, [returned])
        self.outputs = [world.tracer.node_of(leaf) for leaf in self.leaves]
        self.uses = dict.fromkeys(self.region.uses())
        inside = set(self.region.nodes())
        self.uses.update(dict.fromkeys(node for node in self.outputs if node not in inside))
        self.requires_grad = any(leaf.requires_grad for leaf in self.leaves)

    def _flatten(self, value: Any, what: str) -> Any:
        if safe_isinstance(value, torch.Tensor) and self.world.tracer.has_node(value):
            self.leaves.append(value)
            return torch.Tensor
        if type(value) in (tuple, list):
            return type(value)(self._flatten(item, what) for item in value)
        if type(value) is dict:
            return {key: self._flatten(item, what) for key, item in value.items()}
        self.world.heap.refuse("SFX111", f"{what} returns a {type(value).__qualname__}, not tensors")

    def take(self, inputs: list[fx.Node]) -> fx.GraphModule:
        return self.region.take(self.outputs, inputs)


def _unflatten(shape: Any, leaves: Any) -> Any:
    if shape is torch.Tensor:
        return next(leaves)
    if safe_isinstance(shape, dict):
        return {key: _unflatten(item, leaves) for key, item in shape.items()}
    return type(shape)(_unflatten(item, leaves) for item in shape)


def _values(world: TraceWorld, nodes: list[fx.Node]) -> list[torch.Tensor]:
    """Returns the fake tensors that nodes compute."""
    known = compat.tracked_tensors(world.tracer.tracer)
    if any(node not in known for node in nodes):
        world.heap.refuse("SFX111", "a branch uses a number, or a tensor that nothing else refers to")
    return [known[node] for node in nodes]


@registry.intercept(torch.cond)
def _cond(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    pred, on_true, on_false, operands = _arguments(args, kwargs, ("pred", "true_fn", "false_fn", "operands"), ())
    if not safe_isinstance(pred, torch.Tensor):
        return ABSENT
    first, second, inputs = _branches(world, pred, on_true, on_false, operands)
    return _chosen(world, pred, first, second, inputs)


def _branches(
    world: TraceWorld, pred: Any, on_true: Any, on_false: Any, operands: Any
) -> tuple[Branch, Branch, list[fx.Node]]:
    """Runs both functions of a ``torch.cond``; returns the branches, and all nodes from outside that they use."""
    operands = tuple(world.interp.iterate(operands))
    before = observe(world, [operands, pred])
    first = Branch(world, on_true, operands, "the true branch of torch.cond")
    before.rollback()
    second = Branch(world, on_false, operands, "the false branch of torch.cond")
    found = difference(first.after, second.after)
    if found:
        world.heap.refuse("SFX111", f"the branches of torch.cond leave different side effects: {_line(found)}")
    if first.shape != second.shape:
        world.heap.refuse("SFX111", "the branches of torch.cond return differently nested tensors")
    inside = set(first.region.nodes())
    inputs = list({**first.uses, **dict.fromkeys(node for node in second.uses if node not in inside)})
    return first, second, inputs


def _chosen(world: TraceWorld, pred: Any, first: Branch, second: Branch, inputs: list[fx.Node]) -> Any:
    """Moves both branches to graphs of their own, and returns the results of the operator over them."""
    tensors = _values(world, inputs)
    if (first.requires_grad or second.requires_grad) and (first.switched or second.switched):
        world.heap.refuse("SFX111", "a branch of torch.cond changes grad mode, or has its own backward")
    graphs = [branch.take(inputs) for branch in (second, first)][::-1]
    results = world.guarded(torch.ops.higher_order.cond, (pred, *graphs, tuple(tensors)), {})
    return _unflatten(first.shape, iter(results))


@registry.intercept(compat.CALLS_COND)
def _cond_operator(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operator of ``torch.cond``, called with functions: it differentiates operands only, and hands on aliases."""
    pred, on_true, on_false, operands = _arguments(args[1:], kwargs, ("pred", "true_fn", "false_fn", "operands"), ())
    if not safe_isinstance(pred, torch.Tensor) or type(operands) not in (tuple, list):
        return ABSENT
    operands = tuple(world.interp.iterate(operands))
    first, second, inputs = _branches(world, pred, on_true, on_false, operands)
    for branch in (first, second):
        memory = [memory_of(node) for node in (*inputs, *branch.outputs)]
        if len(set(memory[len(inputs) :])) < len(branch.outputs) or not set(memory[: len(inputs)]).isdisjoint(
            memory[len(inputs) :]
        ):
            world.heap.refuse("SFX111", "a branch of the cond operator returns an alias")
    used = _values(world, inputs)
    differentiated = [item for item in (*operands, *used, pred) if safe_isinstance(item, torch.Tensor)]
    if torch.is_grad_enabled() and any(item.requires_grad for item in differentiated):
        places = {world.tracer.node_of(item) for item in operands if safe_isinstance(item, torch.Tensor)}
        nested = type(first.shape) is not tuple or any(each is not torch.Tensor for each in first.shape)
        if len(places) < len(operands) or places != set(inputs) or nested:
            why = "differentiates results that are no tuple, a tensor of a closure, or not every operand"
            world.heap.refuse("SFX111", f"the cond operator {why}")
    return _chosen(world, pred, first, second, inputs)


def _while_loop(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    test, body, carried = _arguments(args, kwargs, ("cond_fn", "body_fn", "carried_inputs"), None)
    carried = tuple(world.interp.iterate(carried))
    if not all(safe_isinstance(item, torch.Tensor) for item in carried):
        world.heap.refuse("SFX111", "while_loop carries a value that is not a tensor")
    with torch.no_grad():
        inner = tuple(item.clone() for item in carried)
    places = [world.tracer.node_of(item) for item in inner]
    before = observe(world, [carried, inner])
    parts = []
    for fn, what in ((test, "the condition of while_loop"), (body, "the body of while_loop")):
        part = Branch(world, fn, inner, what)
        found = difference(before, part.after)
        if found:
            world.heap.refuse("SFX111", f"{what} has side effects, for an unknown number of iterations: {_line(found)}")
        parts.append(part)
    inside = {node for part in parts for node in part.region.nodes()}
    uses = dict.fromkeys(node for part in parts for node in part.uses if node not in places and node not in inside)
    tensors = _values(world, list(uses))
    if torch.is_grad_enabled() and any(item.requires_grad for item in (*carried, *tensors)):
        world.heap.refuse("SFX111", "autograd through while_loop; put it under torch.no_grad()")
    graphs = [part.take([*places, *uses]) for part in parts[::-1]][::-1]
    results = world.guarded(torch.ops.higher_order.while_loop, (*map(_single, graphs), inner, tuple(tensors)), {})
    return _unflatten(parts[1].shape, iter(results))


def _single(graph: fx.GraphModule) -> fx.GraphModule:
    """Makes a graph that returns one bool return it without a tuple."""
    output = next(iter(reversed(graph.graph.nodes)))
    held = output.args[0]
    if safe_isinstance(held, tuple) and len(held) == 1 and held[0].meta["val"].dtype is torch.bool:
        output.args = (held[0],)
        graph.recompile()
    return graph


registry.intercept(compat.while_loop)(_while_loop)


@registry.intercept(compat.map_function)
def _map(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the function of ``map`` with one slice after another, as torch's kernel does."""
    if not args or kwargs:
        world.heap.refuse("SFX111", "map with named arguments")
    fn, mapped, *others = args
    parts: list[Branch] = []
    tensors: list[torch.Tensor] = []
    spec = _nesting(world, mapped, tensors)
    if any(item.dim() == 0 or type(item.shape[0]) is not int for item in tensors):
        world.heap.refuse("SFX111", "map over a changing number of slices")
    lengths = {item.shape[0] for item in tensors}
    if len(lengths) != 1 or not 0 < min(lengths) <= _MOST_SLICES:
        world.heap.refuse("SFX111", f"map over no slices, or more than {_MOST_SLICES}")
    slices = [world.guarded(torch.unbind, (item,), {}) for item in tensors]
    before = observe(world, [mapped, others, slices])
    for given in zip(*slices, strict=True):
        part = Branch(world, fn, (_unflatten(spec, iter(given)), *others), "the function of map")
        found = difference(before, part.after)
        if found:
            world.heap.refuse("SFX111", f"the function of map has side effects: {_line(found)}")
        parts.append(part)
    outside = _from_outside(world, parts, slices)
    nodes = [*dict.fromkeys(map(world.tracer.node_of, tensors)), *outside]
    if len({memory_of(node) for node in nodes}) < len(nodes):
        world.heap.refuse("SFX111", "the function of map uses tensors that share memory")
    if any(part.shape != parts[0].shape for part in parts):
        world.heap.refuse("SFX111", "the function of map returns differently nested tensors")
    if torch.is_grad_enabled():
        _check_derivative(world, parts, tensors, outside)
    results = [
        world.guarded(torch.stack, (list(leaves),), {}) for leaves in zip(*(p.leaves for p in parts), strict=True)
    ]
    return _unflatten(parts[0].shape, iter(results))


def _from_outside(world: TraceWorld, parts: list[Branch], slices: list[Any]) -> list[fx.Node]:
    """Returns the nodes that the calls use, except those of the slices."""
    inside = {node for part in parts for node in part.region.nodes()}
    inside |= {world.tracer.node_of(each) for group in slices for each in group}
    return [node for node in dict.fromkeys(node for part in parts for node in part.uses) if node not in inside]


def _check_derivative(world: TraceWorld, parts: list[Branch], mapped: list[Any], outside: list[fx.Node]) -> None:
    """Refuses a ``map`` whose derivative would be another than that of torch, which adds gradients of all slices."""
    if any(part.requires_grad for part in parts) and (
        len(parts[0].leaves) != 1 or any(value.requires_grad for value in _values(world, outside))
    ):
        world.heap.refuse("SFX111", "map with several differentiated results, or with a derivative for other tensors")
    if not all(part.requires_grad for part in parts) and any(item.requires_grad for item in mapped):
        world.heap.refuse("SFX111", "map whose result does not depend differentiably on its slices")


def _nesting(world: TraceWorld, value: Any, leaves: list[torch.Tensor]) -> Any:
    """Adds the tensors of a nested value to ``leaves``, and returns the nesting."""
    if safe_isinstance(value, torch.Tensor) and world.tracer.has_node(value):
        leaves.append(value)
        return torch.Tensor
    if type(value) in (tuple, list):
        return type(value)(_nesting(world, item, leaves) for item in world.interp.iterate(value))
    world.heap.refuse("SFX111", f"map over a {type(value).__qualname__}")


@registry.intercept(compat.run_compiled)
def _run_compiled(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuses other higher-order operators (``scan``), which call ``torch.compile`` on themselves eagerly."""
    world.heap.refuse("SFX103", "a higher-order operator that calls torch.compile; it runs natively")


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...], default: Any) -> list[Any]:
    given = dict(zip(names, args, strict=False)) | kwargs
    return [given.get(name, default) for name in names]


def _line(difference: str) -> str:
    return "; ".join(part.strip() for part in difference.splitlines() if part.strip())
