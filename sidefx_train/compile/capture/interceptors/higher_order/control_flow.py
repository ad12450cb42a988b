"""``torch.cond`` and ``while_loop`` in a step: operators of the graph over captured branches.

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
        if torch.is_autocast_cache_enabled() and any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            self._check_casts(what)

    def _check_casts(self, what: str) -> None:
        """Refuses casts that an autocast region remembers: they would be used outside of the graph of the branch."""
        cast = {node.args[0] for node in self.region.nodes() if node.target is torch.ops.aten._to_copy.default}
        for node, tensor in compat.tracked_pairs(self.world.tracer.tracer):
            if node in cast and tensor.requires_grad and tensor.is_leaf:
                self.world.heap.refuse("SFX111", f"{what} casts a weight, in an autocast region")

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


def unflatten(shape: Any, leaves: Any) -> Any:
    if shape is torch.Tensor:
        return next(leaves)
    if safe_isinstance(shape, dict):
        return {key: unflatten(item, leaves) for key, item in shape.items()}
    return type(shape)(unflatten(item, leaves) for item in shape)


def values_of(world: TraceWorld, nodes: list[fx.Node], integers: bool = False) -> list[Any]:
    """Returns the fake tensors that nodes compute, and the symbolic integers if the operator takes them."""
    known: dict[fx.Node, Any] = dict(compat.tracked_tensors(world.tracer.tracer))
    if integers:
        numbers = {node: node.meta.get("val") for node in nodes if node not in known}
        known |= {node: value for node, value in numbers.items() if safe_isinstance(value, torch.SymInt)}
    if any(node not in known for node in nodes):
        world.heap.refuse("SFX111", "a branch uses a number, or a tensor that nothing else refers to")
    return [known[node] for node in nodes]


def requires_grad(operand: Any) -> bool:
    return safe_isinstance(operand, torch.Tensor) and operand.requires_grad


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
    found = difference(first.after, second.after, _is_same)
    if found:
        world.heap.refuse("SFX111", f"the branches of torch.cond leave different side effects: {in_one_line(found)}")
    if first.shape != second.shape:
        world.heap.refuse("SFX111", "the branches of torch.cond return differently nested tensors")
    inside = set(first.region.nodes())
    inputs = list({**first.uses, **dict.fromkeys(node for node in second.uses if node not in inside)})
    return first, second, inputs


def _is_same(a: Any, b: Any) -> bool:
    """Returns True for one tensor, and for two numbers that both branches compute alike from numbers outside."""
    if a is b:
        return True
    if not safe_isinstance(a, compat.SYMBOLS) or type(a) is not type(b):
        return False
    return bool(compat.symbol_of(a) == compat.symbol_of(b))


def _chosen(world: TraceWorld, pred: Any, first: Branch, second: Branch, inputs: list[fx.Node]) -> Any:
    """Moves both branches to graphs of their own, and returns the results of the operator over them."""
    tensors = values_of(world, inputs, integers=True)
    if (first.requires_grad or second.requires_grad) and (first.switched or second.switched):
        world.heap.refuse("SFX111", "a branch of torch.cond changes grad mode, or has its own backward")
    graphs = [branch.take(inputs) for branch in (second, first)][::-1]
    results = world.guarded(torch.ops.higher_order.cond, (pred, *graphs, tuple(tensors)), {})
    return unflatten(first.shape, iter(results))


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
    used = values_of(world, inputs)
    differentiated = [item for item in (*operands, *used, pred) if safe_isinstance(item, torch.Tensor)]
    if torch.is_grad_enabled() and any(item.requires_grad for item in differentiated):
        places = {world.tracer.node_of(item) for item in operands if safe_isinstance(item, torch.Tensor)}
        nested = type(first.shape) is not tuple or any(each is not torch.Tensor for each in first.shape)
        if len(places) < len(operands) or places != set(inputs) or nested:
            why = "differentiates results that are no tuple, a tensor of a closure, or not every operand"
            world.heap.refuse("SFX111", f"the cond operator {why}")
    return _chosen(world, pred, first, second, inputs)


@registry.intercept(compat.CALLS_WHILE)
def _while_loop(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _, test, body, *given = args
    carried, others = map(tuple, map(world.interp.iterate, given))
    if not all(safe_isinstance(item, torch.Tensor) for item in carried):
        world.heap.refuse("SFX111", "while_loop carries a value that is not a tensor")
    with torch.no_grad():
        inner = tuple(item.clone() for item in carried)
    places = [world.tracer.node_of(item) for item in inner]
    before = observe(world, [carried, inner])
    parts = []
    for fn, what in ((test, "the condition of while_loop"), (body, "the body of while_loop")):
        part = Branch(world, fn, (*inner, *others), what)
        found = difference(before, part.after)
        if found:
            world.heap.refuse(
                "SFX111", f"{what} has side effects, for an unknown number of iterations: {in_one_line(found)}"
            )
        parts.append(part)
    inside = {node for part in parts for node in part.region.nodes()}
    uses = dict.fromkeys(node for part in parts for node in part.uses if node not in places and node not in inside)
    tensors = values_of(world, list(uses), integers=True)
    if torch.is_grad_enabled() and any(map(requires_grad, (*carried, *tensors))):
        world.heap.refuse("SFX111", "autograd through while_loop; put it under torch.no_grad()")
    graphs = [part.take([*places, *uses]) for part in parts[::-1]][::-1]
    results = world.guarded(torch.ops.higher_order.while_loop, (*map(_single, graphs), inner, tuple(tensors)), {})
    return unflatten(parts[1].shape, iter(results))


def _single(graph: fx.GraphModule) -> fx.GraphModule:
    """Makes a graph that returns one bool return it without a tuple."""
    output = next(iter(reversed(graph.graph.nodes)))
    held = output.args[0]
    if safe_isinstance(held, tuple) and len(held) == 1 and held[0].meta["val"].dtype is torch.bool:
        output.args = (held[0],)
        graph.recompile()
    return graph


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...], default: Any) -> list[Any]:
    given = dict(zip(names, args, strict=False)) | kwargs
    return [given.get(name, default) for name in names]


def in_one_line(difference: str) -> str:
    return "; ".join(part.strip() for part in difference.splitlines() if part.strip())
