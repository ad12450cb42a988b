"""Records the backward of tensors that leave the step with a live autograd graph, and cuts the joint graph in two."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import fx

from sidefx_train import _torch_compat as compat
from sidefx_train.compile.artifacts import OWN, GraphInput, TracedGraph
from sidefx_train.compile.capture.tracer import drop_profiler_nodes
from sidefx_train.compile.capture.vectors import drop_unused_vectors
from sidefx_train.compile.heap.effects import observe
from sidefx_train.compile.heap.records import TensorRecord
from sidefx_train.compile.residual.views import storage_of

if TYPE_CHECKING:
    from sidefx_train.compile.heap.world import TraceWorld

Origin = tuple[Literal["input", "result", "tangent"], int]


@dataclass(frozen=True)
class JointGraph:
    """Forward and backward of a capture.

    Attributes:
        forward: its results are the step's outputs, then what the backward needs besides inputs.
        backward: takes what it needs and the tangents; its results are gradients.
        outputs: how many results of the forward are the step's.
        differentiable: which of those need autograd outside.
        aliases: (result, output) of what shares memory with an output: a detached one, or what the backward needs.
        feeds: where each input of the backward comes from.
        leaves: positions of the inputs that get gradients, one per result of the backward.
        depends: for each of them, the tangents that its gradient is made of.
        passed: those of the differentiable outputs, by their order, that others of them are computed from.
    """

    forward: TracedGraph
    backward: TracedGraph
    outputs: int
    differentiable: tuple[int, ...]
    aliases: tuple[tuple[int, int], ...]
    feeds: tuple[Origin, ...]
    leaves: tuple[int, ...]
    depends: tuple[frozenset[int], ...]
    passed: tuple[int, ...]


@dataclass(frozen=True)
class Recorded:
    """A backward that has been recorded behind the forward.

    Attributes:
        positions: outputs that need autograd.
        fakes: those outputs.
        tangents: inputs of the backward, one for each.
        boundary: the last node of the forward.
        grads: (input position, gradient).
        passed: those of ``fakes``, by their order, that others of them are computed from.
    """

    positions: tuple[int, ...]
    fakes: tuple[torch.Tensor, ...]
    tangents: tuple[torch.Tensor, ...]
    boundary: fx.Node
    grads: tuple[tuple[int, torch.Tensor], ...]
    passed: tuple[int, ...]


def record_backward(world: TraceWorld, outputs: list[fx.Node], differentiable: dict[int, torch.Tensor]) -> Recorded:
    """Runs the backward of some outputs on the fake tensors.

    Args:
        world: the capture, still recording.
        outputs: nodes of the step's outputs.
        differentiable: the outputs that need autograd, by position.

    Raises:
        Unsupported: the graph cannot be given to autograd outside.
    """
    tracer = world.tracer
    positions = sorted(differentiable)
    fakes = [differentiable[i] for i in positions]
    _check_separate(world, fakes)
    entries = _entries(world)
    before = observe(world)
    tangents = [tracer.add_tangent(fake, i) for i, fake in enumerate(fakes)]
    boundary = tracer.last_node()
    edges = [edge for _, edge in entries]
    try:
        with torch.enable_grad(), _without_hooks(world):
            found = torch.autograd.grad(fakes, edges, tangents, allow_unused=True) if edges else ()
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        world.heap.refuse("SFX107", f"a tensor leaves the step whose backward cannot be recorded: {first}")
    changed = before.diff(observe(world))
    if changed:
        reason = f"a tensor leaves the step, and Python that its backward runs has effects: {changed.splitlines()[0]}"
        world.heap.refuse("SFX107", reason)
    grads = [(position, grad) for (position, _), grad in zip(entries, found, strict=True) if grad is not None]
    return Recorded(tuple(positions), tuple(fakes), tuple(tangents), boundary, tuple(grads), _passed(fakes))


def _passed(fakes: list[torch.Tensor]) -> tuple[int, ...]:
    """Those that the autograd graphs of others lead through."""
    position = {fake.grad_fn: i for i, fake in enumerate(fakes)}
    found: set[int] = set()
    for fake in fakes:
        seen: set[Any] = set()
        waiting = [node for node, _ in fake.grad_fn.next_functions] if fake.grad_fn is not None else []
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in position:
                found.add(position[node])
            waiting += [before for before, _ in node.next_functions]
    return tuple(sorted(found))


@contextmanager
def _without_hooks(world: TraceWorld) -> Iterator[None]:
    """Takes the hooks of leaves away: those from outside are run by the engine, which calls the backward."""
    records = [r for r in world.heap.by_real.values() if isinstance(r, TensorRecord) and r.hooks is not None]
    before = [(record.shadow, compat.tensor_hooks(record.shadow)) for record in records]
    for shadow, _ in before:
        compat.set_tensor_hooks(shadow, {})
    try:
        yield
    finally:
        for shadow, hooks in before:
            compat.set_tensor_hooks(shadow, hooks)


def _check_separate(world: TraceWorld, fakes: list[torch.Tensor]) -> None:
    """Views of each other or of an input, both needing autograd, would not tell it of later in-place changes."""
    taken = {storage_of(r.shadow) for r in world.heap.by_real.values() if isinstance(r, TensorRecord)}
    for fake in fakes:
        if storage_of(fake) in taken:
            world.heap.refuse("SFX107", "a view that needs autograd leaves the step together with what it is a view of")
        taken.add(storage_of(fake))


def _entries(world: TraceWorld) -> list[tuple[int, Any]]:
    """(input position, what to differentiate by) of every input that requires gradients."""
    position_of = {id(real): i for i, real in enumerate(world.tracer.real_inputs)}
    found: list[tuple[int, Any]] = []
    for record in world.heap.by_real.values():
        if not isinstance(record, TensorRecord):
            continue
        if record.shadow.requires_grad and not record.requires_grad and record.shadow.is_leaf:
            world.heap.refuse("SFX107", f"{record.source.label} begins to require gradients")
        if not record.requires_grad:
            continue
        if record.shadow.shape != world.tracer.inputs[position_of[id(record.real)]].example.shape:
            world.heap.refuse("SFX107", f"{record.source.label}, which requires gradients, changes its shape")
        if record.edge is not None and record.shadow._version != record.entry_version:
            world.heap.refuse("SFX107", f"{record.source.label}, made outside the step, is changed in place in it")
        if record.edge is None and not (record.shadow.is_leaf and record.shadow.requires_grad):
            world.heap.refuse("SFX107", f"{record.source.label} joins the step's autograd graph")
        edge = record.edge if record.edge is not None else torch.autograd.graph.get_gradient_edge(record.shadow)
        found.append((position_of[id(record.real)], edge))
    return sorted(found, key=lambda pair: pair[0])


def cut(world: TraceWorld, outputs: list[fx.Node], recorded: Recorded) -> JointGraph:
    """Closes the joint graph as two.

    Raises:
        Unsupported: the backward needs what cannot be handed over.
    """
    tracer = world.tracer
    positions, tangents = recorded.positions, recorded.tangents
    boundary, grads = recorded.boundary, recorded.grads
    tracer.check()
    drop_profiler_nodes(tracer.graph)
    drop_unused_vectors(tracer.graph)
    tangent_nodes = [tracer.node_of(tangent) for tangent in tangents]
    grad_nodes = [tracer.node_of(grad) for _, grad in grads]
    for node, (_, grad) in zip(grad_nodes, grads, strict=True):
        if not grad._is_view():
            node.meta[OWN] = grad._version
    input_nodes = [node for node in tracer.graph.nodes if node.op == "placeholder" and node not in tangent_nodes]
    before: dict[fx.Node, None] = {}
    after: dict[fx.Node, None] = {}
    behind = False
    for node in tracer.graph.nodes:
        if node.op != "placeholder":
            (after if behind else before)[node] = None
        behind = behind or node is boundary
    wanted = _needed(grad_nodes, after)
    behind_the_cut = {*wanted, *tangent_nodes}
    needed = [used for node in wanted for used in node.all_input_nodes] + grad_nodes
    crossing = dict.fromkeys(used for used in needed if used not in behind_the_cut and used.op != "get_attr")
    results = list(outputs)
    feeds: list[Origin] = []
    inputs: list[GraphInput] = []
    for node in crossing:
        value = node.meta["val"] if node.op != "placeholder" else tracer.inputs[input_nodes.index(node)].example
        if node in input_nodes:
            feeds.append(("input", input_nodes.index(node)))
        else:
            if node not in results:
                results.append(node)
            feeds.append(("result", results.index(node)))
        if isinstance(value, torch.Tensor):
            inputs.append(GraphInput(node.name, "tensor", compat.fake_snapshot(value), node.name))
        else:
            inputs.append(GraphInput(node.name, "scalar", value, node.name, hint=compat.hint_of(value)))
    for i, (node, fake) in enumerate(zip(tangent_nodes, tangents, strict=True)):
        feeds.append(("tangent", i))
        inputs.append(GraphInput(node.name, "tensor", compat.fake_snapshot(fake), node.name))
    forward = _graph(tracer, input_nodes, list(before), results)
    taken = [*crossing, *tangent_nodes]
    constants = [node for node in before if node.op == "get_attr"]
    backward = _graph(tracer, taken, [*constants, *wanted], grad_nodes)
    storages = [storage_of(n.meta["val"]) if isinstance(n.meta.get("val"), torch.Tensor) else None for n in results]
    aliases = [
        (i, storages.index(storages[i]))
        for i in range(len(outputs), len(results))
        if storages[i] in storages[: len(outputs)]
    ]
    return JointGraph(
        TracedGraph(forward, tuple(tracer.inputs), tracer.fake_mode, _draws(list(before))),
        TracedGraph(backward, tuple(inputs), tracer.fake_mode, _draws(wanted), gradients=True),
        len(outputs),
        positions,
        tuple(aliases),
        tuple(feeds),
        tuple(position for position, _ in grads),
        _dependence(wanted, tangent_nodes, grad_nodes),
        recorded.passed,
    )


def _dependence(nodes: list[fx.Node], tangents: list[fx.Node], grads: list[fx.Node]) -> tuple[frozenset[int], ...]:
    """For each gradient, which tangents it is made of; all of them for one that is a constant."""
    made_of: dict[fx.Node, frozenset[int]] = {node: frozenset({i}) for i, node in enumerate(tangents)}
    for node in nodes:
        made_of[node] = frozenset().union(*(made_of.get(used, frozenset()) for used in node.all_input_nodes))
    anything = frozenset(range(len(tangents)))
    return tuple(made_of.get(grad) or anything for grad in grads)


def _draws(nodes: list[fx.Node]) -> bool:
    return any(compat.is_random(node.target) for node in nodes if node.op == "call_function")


def _needed(roots: list[fx.Node], among: dict[fx.Node, None]) -> list[fx.Node]:
    """Nodes of ``among`` that the roots depend on, and those that change something in place, in their order."""
    needed: set[fx.Node] = set()
    todo = [root for root in roots if root in among]
    todo += [node for node in among if node.op == "call_function" and compat.changes_in_place(node.target)]
    while todo:
        node = todo.pop()
        if node not in needed:
            needed.add(node)
            todo += [used for used in node.all_input_nodes if used in among]
    return [node for node in among if node in needed]


def _graph(tracer: Any, inputs: list[fx.Node], nodes: list[fx.Node], results: list[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta.update(node.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda used: copies[used])
    graph.output(tuple(copies[node] for node in results))
    for node in list(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    return fx.GraphModule(tracer.tracer.root, graph)
