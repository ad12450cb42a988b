"""Records the backward of tensors that leave the step with a live autograd graph, and cuts the joint graph in two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import fx
from torch.autograd.graph import get_gradient_edge

from sidefx_train import _torch_compat as compat
from sidefx_train.compile.artifacts import OWN, GraphInput, TracedGraph
from sidefx_train.compile.capture.tracer import GraphTracer, drop_profiler_nodes, turn_out_of_place
from sidefx_train.compile.capture.vectors import drop_unused_vectors
from sidefx_train.compile.heap.effects import observe
from sidefx_train.compile.heap.records import TensorRecord
from sidefx_train.compile.joint.contributions import Uses, contributions
from sidefx_train.compile.joint.saved import in_eager_order
from sidefx_train.compile.joint.shared import Hidden, shared_values
from sidefx_train.compile.joint.turns import Place, Point, in_turn, times
from sidefx_train.compile.residual.views import LiveView, edge_of, edges_behind, first_of, own_counter, storage_of

if TYPE_CHECKING:
    from sidefx_train.compile.functionalize.metadata import InputFacts
    from sidefx_train.compile.heap.world import TraceWorld
    from sidefx_train.compile.residual.build import Residual

aten = torch.ops.aten
Origin = tuple[Literal["input", "result", "tangent"], int]


@dataclass(frozen=True)
class Stage:
    """The backward of some results: one node in the autograd graph outside.

    Attributes:
        backward: takes what it needs and the tangents; its results are gradients.
        results: what it is the backward of, by position among the results of the forward; one tangent each.
        feeds: where each input of the backward comes from.
        entrances: what gets the gradients, one per result of the backward: inputs, results of earlier stages, views,
            detours.
        depends: for each of them, the tangents that its gradient is made of.
        any_layout: tangents are taken as they come: eager adds up their elements in the order of their memory.
    """

    backward: TracedGraph
    results: tuple[int, ...]
    feeds: tuple[Origin, ...]
    entrances: tuple[Place, ...]
    depends: tuple[frozenset[int], ...]
    any_layout: bool


@dataclass(frozen=True)
class JointGraph:
    """Forward and backward of a capture.

    Where an output that needs autograd was computed from another, the backward is cut there: the gradient between the
    two passes through the engine outside, where hooks and ``retain_grad`` of the one in the middle are.

    Attributes:
        forward: its results are the step's outputs, then what the backward needs besides inputs.
        stages: the backward, in the order of the forward.
        outputs: how many results of the forward are the step's.
        aliases: (result, output) of what shares memory with an output: a detached one, or what the backward needs.
        apart: results behind the outputs with version counters of their own, though their memory is known outside.
        counted: (result, input, is it) of results in memory that the step gives an input, with the version counter of
            that; some are the input itself.
        updates: (result, input) of what is the new value of an input, in its memory.
        views: views that leave and that the backward passes through, made between the stages.
        ready: for each of them, the stage before which it is made.
        detours: (what gets the gradient, made right before which stage or view), in order: nodes that hand gradients on
            which the engine would add too early if they came from their stage.
        turned: (input or result, how often): version counters that the views will move, as ``squeeze_`` does; what the
            backward needs is saved as of after that.
        hidden: shape, type and device of values that do not leave, at which the backward is cut: results behind all
            that the forward returns.
    """

    forward: TracedGraph
    stages: tuple[Stage, ...]
    outputs: int
    aliases: tuple[tuple[int, int], ...]
    apart: tuple[int, ...]
    counted: tuple[tuple[int, int, bool], ...]
    updates: tuple[tuple[int, int], ...]
    views: tuple[LiveView, ...]
    ready: tuple[int, ...]
    detours: tuple[tuple[Place, Point], ...]
    turned: tuple[tuple[Place, int], ...]
    hidden: tuple[tuple[tuple[int, ...], torch.dtype, torch.device], ...]

    @property
    def graphs(self) -> tuple[TracedGraph, ...]:
        """All that has to be compiled, the forward first."""
        return (self.forward, *(stage.backward for stage in self.stages))


@dataclass(frozen=True)
class _RecordedStage:
    """A backward that has been recorded behind the forward.

    Attributes:
        results: what it is the backward of.
        tangents: inputs of the backward, one for each.
        begin: the last node before it.
        end: its last node.
        grads: (what it belongs to, gradient).
    """

    results: tuple[Place, ...]
    tangents: tuple[torch.Tensor, ...]
    begin: fx.Node
    end: fx.Node
    grads: tuple[tuple[Place, torch.Tensor], ...]


@dataclass(frozen=True)
class Recorded:
    """All of the backward, with ``updates``, ``views``, ``ready``, ``detours`` and ``hidden`` of the joint graph to be.

    Operations run one by one where it was recorded ``in_order``.
    """

    stages: tuple[_RecordedStage, ...]
    updates: tuple[tuple[int, int], ...]
    views: tuple[LiveView, ...]
    ready: tuple[int, ...]
    detours: tuple[tuple[Place, Point], ...]
    hidden: tuple[torch.Tensor, ...]
    in_order: bool


def record_backward(world: TraceWorld, residual: Residual, in_order: bool) -> Recorded:
    """Runs the backward of some outputs on the fake tensors.

    Args:
        world: the capture, still recording.
        residual: says which outputs, and which views they were computed from.
        in_order: hand gradients over use by use, so that the engine adds them up in eager's order.

    Raises:
        Unsupported: the graph cannot be given to autograd outside.
    """
    metadata, differentiable = residual.metadata, residual.differentiable
    updates, views = residual.updates, residual.views
    tracer = world.tracer
    fakes: dict[Place, Any] = {("result", i): differentiable[i] for i in metadata.tangents}
    _check_separate(world, [fake for i, fake in differentiable.items() if i not in updates])
    tangents = {place: tracer.add_tangent(fake, i) for i, (place, fake) in enumerate(fakes.items())}
    inputs = _inputs(world, metadata.inputs)
    _check_leaves(world, list(fakes.values()), {edge.node for _, edge in inputs})
    before = observe(world)
    recorded: list[_RecordedStage] = []
    uses: list[dict[Place, Uses]] = []
    fakes |= {("view", i): view.value for i, view in enumerate(views)}
    values = list(fakes.values())
    ends = {(edge.node, edge.output_nr) for _, edge in inputs}
    levels, ready = _levels(fakes, ends)
    hidden: list[torch.Tensor] = []
    if in_order:
        met = shared_values(levels, fakes.__getitem__, ends | {edge_of(fake) for fake in fakes.values()})
        with compat.no_recording(), torch.no_grad():
            empty = [each.empty() for each in met]
        hidden = [like for like in empty if like is not None] if all(like is not None for like in empty) else []
        if hidden:
            fakes |= {("hidden", i): each for i, each in enumerate(met)}
            tangents |= {("hidden", i): tracer.add_tangent(like, len(tangents) + i) for i, like in enumerate(hidden)}
            levels, ready = _levels(fakes, ends)
    for results, earlier in levels:
        entrances: list[tuple[Place, Any]] = [(("input", position), edge) for position, edge in inputs]
        entrances += [(place, _edge(fakes[place])) for place in earlier]
        begin = tracer.last_node()
        roots, given = [fakes[place] for place in results], tuple(tangents[place] for place in results)
        try:
            with (
                torch.enable_grad(),
                compat.autocast_off(),
                _without_hooks(world),
                _without_gradients(values),
                _stopping_at([edge for _, edge in entrances]),
                contributions(roots, [edge for _, edge in entrances]) as parts,
            ):
                edges = [edge for _, edge in entrances]
                asked = [root.edge if isinstance(root, Hidden) else root for root in roots]
                found = torch.autograd.grad(asked, edges, given, retain_graph=True, allow_unused=True) if edges else ()
        except RuntimeError as error:
            first = str(error).splitlines()[0]
            world.heap.refuse("SFX107", f"a tensor leaves the step whose backward cannot be recorded: {first}")
        grads = [(entrance, grad) for (entrance, _), grad in zip(entrances, found, strict=True) if grad is not None]
        if not grads:
            world.heap.refuse("SFX107", "a tensor leaves the step that requires gradients, but of nothing from outside")
        recorded.append(_RecordedStage(results, given, begin, tracer.last_node(), tuple(grads)))
        uses.append({entrance: part for (entrance, _), part in zip(entrances, parts, strict=True)})
    changed = before.diff(observe(world))
    if changed:
        reason = f"a tensor leaves the step, and Python that its backward runs has effects: {changed.splitlines()[0]}"
        world.heap.refuse("SFX107", reason)
    edges_of: dict[Place, tuple[Any, int]] = {
        ("input", position): (edge.node, edge.output_nr) for position, edge in inputs
    }
    edges_of |= {place: edge_of(fake) for place, fake in fakes.items()}
    made = times(views, edges_of, ready, uses)
    detours: tuple[tuple[Place, Point], ...] = ()
    if in_order:
        handed, detours = in_turn([stage.grads for stage in recorded], uses, views, edges_of, made)
        recorded = [replace(stage, grads=grads) for stage, grads in zip(recorded, handed, strict=True)]
    return Recorded(tuple(recorded), tuple(updates.items()), views, made, detours, tuple(hidden), in_order)


def _edge(value: torch.Tensor | Hidden) -> Any:
    return value.edge if isinstance(value, Hidden) else get_gradient_edge(value)


def _unconnected(results: list[tuple[Place, Any]], ends: set[tuple[Any, int]]) -> list[tuple[Place, ...]]:
    """Results by the autograd graphs they have in common, up to ``ends``, in the order in which those were begun."""
    groups: list[tuple[list[Place], set[Any], int]] = []
    for place, fake in results:
        nodes, waiting, last = set[Any](), [fake.grad_fn], -1
        while waiting:
            node = waiting.pop()
            if node is None or node in nodes:
                continue
            nodes.add(node)
            within = [edge for edge in node.next_functions if edge not in ends and not hasattr(edge[0], "variable")]
            if len(within) < len(node.next_functions):
                last = max(last, node._sequence_nr())
            waiting += [following for following, _ in within]
        places = [place]
        for other in [other for other in groups if other[1] & nodes]:
            groups.remove(other)
            places, nodes, last = other[0] + places, other[1] | nodes, max(last, other[2])
        groups.append((places, nodes, last))
    return [tuple(sorted(places)) for places, _, last in sorted(groups, key=lambda group: group[2])]


def _levels(
    fakes: dict[Place, Any], inputs: set[tuple[Any, int]]
) -> tuple[list[tuple[tuple[Place, ...], tuple[Place, ...]]], dict[Place, int]]:
    """Results, level by level, each with what leaves too and they were computed from; and the level of each view."""
    place_of = {edge_of(fake): place for place, fake in fakes.items()}
    behind = {
        place: {place_of[edge] for edge in edges_behind(fake) if edge in place_of} - {place}
        for place, fake in fakes.items()
    }
    levels: list[tuple[tuple[Place, ...], tuple[Place, ...]]] = []
    ready: dict[Place, int] = {}
    waiting = list(fakes)
    while waiting:
        now = tuple(place for place in waiting if not behind[place] & set(waiting))
        views = [place for place in now if place[0] == "view"]
        if views:  # they take no stage of their own
            ready |= dict.fromkeys(views, len(levels))
        else:
            for apart in _unconnected([(place, fakes[place]) for place in now], inputs | set(place_of)):
                levels.append((apart, tuple(sorted(set().union(*(behind[place] for place in apart))))))
        waiting = [place for place in waiting if place not in (views or now)]
    return levels, ready


@contextmanager
def _stopping_at(edges: list[Any]) -> Iterator[None]:
    """Ends what the engine hands on at some tensors: their gradients are asked for, and go no further.

    An input may be a view of another: autograd outside takes its gradient there.
    """

    def stop(number: int) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
        return lambda grads: tuple(None if i == number else grad for i, grad in enumerate(grads))

    inner = {(edge.node, edge.output_nr) for edge in edges if not hasattr(edge.node, "variable")}
    handles = [node.register_prehook(stop(number)) for node, number in inner]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _check_leaves(world: TraceWorld, fakes: list[torch.Tensor], entered: set[Any]) -> None:
    """Refuses gradients of leaves that the step made itself: the captured part is given its leaves."""
    seen, waiting = set(entered), [fake.grad_fn for fake in fakes]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            reason = "a tensor leaves the step whose backward goes to a leaf that was made in it (requires_grad_)"
            world.heap.refuse("SFX107", reason)
        if not hasattr(node, "variable") and all(before is None for before, _ in node.next_functions):
            reason = "a tensor leaves the step whose backward ends at a view that was made of a leaf with autograd off"
            world.heap.refuse("SFX107", reason)
        waiting += [before for before, _ in node.next_functions]


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


@contextmanager
def _without_gradients(fakes: list[torch.Tensor]) -> Iterator[None]:
    """Leaves the gradients that tensors keep as they are: the real ones will be given theirs by the engine."""
    keeping = [(fake, fake.grad) for fake in fakes if fake.retains_grad]
    try:
        yield
    finally:
        for fake, grad in keeping:
            fake.grad = grad


def _check_separate(world: TraceWorld, fakes: list[torch.Tensor]) -> None:
    """Views of each other or of an input, both needing autograd, would not tell it of later in-place changes."""
    outside = {storage_of(r.memory) for r in world.heap.by_real.values() if isinstance(r, TensorRecord)}
    taken = set(outside)
    for fake in fakes:
        node = world.tracer.node_of(fake)
        if storage_of(fake) in outside and own_counter(node) is node:
            continue  # autograd does not know of it in eager either
        if storage_of(fake) in taken:
            world.heap.refuse("SFX107", "a view that needs autograd leaves the step together with what it is a view of")
        taken.add(storage_of(fake))


def _inputs(world: TraceWorld, inputs: tuple[InputFacts, ...]) -> list[tuple[int, Any]]:
    """(input position, what to differentiate by) of every input that requires gradients."""
    records = {id(r.real): r for r in world.heap.by_real.values() if isinstance(r, TensorRecord)}
    found: list[tuple[int, Any]] = []
    for facts in inputs:
        if facts.leaf and facts.changes_requires_grad and not facts.requires_grad:
            world.heap.refuse("SFX107", f"{facts.label} begins to require gradients")
        if not facts.requires_grad:
            continue
        if facts.mutates_metadata:
            world.heap.refuse("SFX107", f"{facts.label}, which requires gradients, changes its shape")
        if facts.leaf and (facts.changes_requires_grad or facts.updates_history):
            world.heap.refuse("SFX107", f"{facts.label} joins the step's autograd graph")
        record = records[id(world.tracer.real_inputs[facts.position])]
        if (record.shadow.shape, record.shadow.dtype) != (record.memory.shape, record.memory.dtype):
            world.heap.refuse("SFX107", f"{facts.label}, which requires gradients, is given another shape or type")
        found.append((facts.position, record.edge if record.edge is not None else get_gradient_edge(record.shadow)))
    return found


def cut(world: TraceWorld, residual: Residual, recorded: Recorded) -> JointGraph:
    """Closes the joint graph as a forward and its backward.

    Args:
        world: the capture.
        residual: says what leaves.
        recorded: the backward.

    Raises:
        Unsupported: the backward needs what cannot be handed over.
    """
    tracer, outputs = world.tracer, list(residual.outputs)
    tracer.check()
    drop_profiler_nodes(tracer.graph)
    turn_out_of_place(tracer.graph)
    drop_unused_vectors(tracer.graph)
    tangents = {tracer.node_of(tangent) for stage in recorded.stages for tangent in stage.tangents}
    given = [n for n in tracer.graph.nodes if n.op == "placeholder" and n not in tangents]
    cutter = _Cutter(tracer, outputs, given, recorded.in_order)
    position = {node: i for i, node in enumerate(tracer.graph.nodes)}

    def between(begin: int, end: int) -> dict[fx.Node, None]:
        return {n: None for n, i in position.items() if begin < i <= end and n.op != "placeholder"}

    before = between(-1, position[recorded.stages[0].begin])
    stages = [
        cutter.stage(stage, before, between(position[stage.begin], position[stage.end])) for stage in recorded.stages
    ]
    returned = len(cutter.results)
    stages = [_placed(stage, each, returned) for stage, each in zip(stages, recorded.stages, strict=True)]
    forward = _graph(tracer, cutter.inputs, list(before), cutter.results)
    storages = [
        storage_of(node.meta["val"]) if isinstance(node.meta.get("val"), torch.Tensor) else None
        for node in cutter.results
    ]
    saved = range(len(outputs), len(cutter.results))
    counted = _counted(world, {i: cutter.results[i] for i in saved}, outputs)
    apart = tuple(i for i in saved if own_counter(cutter.results[i]) is not None and i not in counted)
    if any(own_counter(cutter.results[i]) in residual.counters for i in apart):
        reason = "a tensor's .data leaves the step, of which the backward needs the contents"
        world.heap.refuse("SFX107", reason)
    aliases = [
        (i, storages.index(storages[i]))
        for i in saved
        if i not in apart and i not in counted and storages[i] in storages[: len(outputs)]
    ]
    traced = TracedGraph(forward, tuple(tracer.inputs), tracer.fake_mode, _draws(list(before)))
    return JointGraph(
        traced,
        tuple(stages),
        len(outputs),
        tuple(aliases),
        apart,
        tuple((i, *place) for i, place in counted.items()),
        recorded.updates,
        recorded.views,
        recorded.ready,
        tuple((_place(place, returned), before) for place, before in recorded.detours),
        _turned(world, cutter, len(outputs)),
        tuple((tuple(like.shape), like.dtype, like.device) for like in recorded.hidden),
    )


def _counted(world: TraceWorld, saved: dict[int, fx.Node], outputs: list[fx.Node]) -> dict[int, tuple[int, bool]]:
    """What the backward needs of tensors that were given other memory: by their position, and whether it is they."""
    tracer, found = world.tracer, dict[int, tuple[int, bool]]()
    for i, node in saved.items():
        data = own_counter(node)
        owner = None if data is None else world.heap.memory.owners.get(data)
        if owner is None:
            continue
        record = world.heap.record_of(owner)
        if isinstance(record, TensorRecord):
            position = next(j for j, real in enumerate(tracer.real_inputs) if real is record.real)
            found[i] = position, first_of(node) is first_of(tracer.node_of(owner))
        elif any(own_counter(out) is data for out in outputs):
            reason = "a tensor that was given other memory (.data) leaves the step, and the backward needs its contents"
            world.heap.refuse("SFX107", reason)
    return found


def _placed(stage: Stage, recorded: _RecordedStage, returned: int) -> Stage:
    """The stage with hidden values in their places, behind the ``returned`` results of the forward."""
    results = tuple(_place(place, returned)[1] for place in recorded.results)
    return replace(stage, results=results, entrances=tuple(_place(place, returned) for place in stage.entrances))


def _place(place: Place, returned: int) -> Place:
    kind, i = place
    return ("result", returned + i) if kind == "hidden" else place


def _turned(world: TraceWorld, cutter: _Cutter, outputs: int) -> tuple[tuple[Place, int], ...]:
    """What holds the memory whose version counter the replay of views moves, and by how much."""
    holders: dict[int, Place] = {}
    for kind, nodes in (("result", cutter.results[:outputs]), ("input", cutter.inputs)):
        for i, node in enumerate(nodes):
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and own_counter(node) is None:
                holders.setdefault(storage_of(value), (kind, i))  # type: ignore[arg-type]
    return tuple((holders[storage], count) for storage, count in world.replayed.items() if count and storage in holders)


class _Cutter:
    """Takes backward graphs out of the joint graph.

    Attributes:
        inputs: placeholders of the forward.
        results: what the forward returns: the outputs, then what the backward needs.
    """

    def __init__(self, tracer: GraphTracer, outputs: list[fx.Node], inputs: list[fx.Node], one_by_one: bool) -> None:
        self.tracer = tracer
        self.one_by_one = one_by_one
        self.inputs = inputs
        self.results = list(outputs)
        self.position = {node: i for i, node in enumerate(tracer.graph.nodes)}

    def stage(self, recorded: _RecordedStage, before: dict[fx.Node, None], among: dict[fx.Node, None]) -> Stage:
        """The backward that was recorded as the nodes ``among``; what it is the backward of is not in it yet."""
        tracer = self.tracer
        tangents = [tracer.node_of(tangent) for tangent in recorded.tangents]
        grads = [tracer.node_of(grad) for _, grad in recorded.grads]
        for node, (_, grad) in zip(grads, recorded.grads, strict=True):
            if not grad._is_view():
                node.meta[OWN] = grad._version
        wanted = _needed(grads, among)
        behind_the_cut = {*wanted, *tangents}
        reads: list[tuple[fx.Node, list[fx.Node]]] = []
        for node in wanted:
            used = {_undetached(each, among) for each in node.all_input_nodes if not _detaches(node)} - behind_the_cut
            reads.append((node, sorted(used, key=self.position.__getitem__)))
        needed = in_eager_order(reads, before)
        needed += [_undetached(grad, among) for grad in grads]
        crossing = dict.fromkeys(used for used in needed if used not in behind_the_cut and used.op != "get_attr")
        feeds: list[Origin] = [self._origin(node) for node in crossing]
        feeds += [("tangent", i) for i in range(len(tangents))]
        taken = [self._taken(node) for node in crossing]
        taken += [
            GraphInput(node.name, "tensor", compat.fake_snapshot(fake), node.name)
            for node, fake in zip(tangents, recorded.tangents, strict=True)
        ]
        constants = [node for node in before if node.op == "get_attr"]
        backward = _graph(tracer, [*crossing, *tangents], [*constants, *wanted], grads)
        return Stage(
            TracedGraph(backward, tuple(taken), tracer.fake_mode, _draws(wanted), gradients=True),
            (),
            tuple(feeds),
            tuple(entrance for entrance, _ in recorded.grads),
            _dependence(wanted, tangents, grads),
            self.one_by_one and not any(map(_goes_by_memory, wanted)),
        )

    def _origin(self, node: fx.Node) -> Origin:
        if node in self.inputs:
            return "input", self.inputs.index(node)
        if node not in self.results:
            self.results.append(node)
        return "result", self.results.index(node)

    def _taken(self, node: fx.Node) -> GraphInput:
        given = node in self.inputs
        value = self.tracer.inputs[self.inputs.index(node)].example if given else node.meta["val"]
        if isinstance(value, torch.Tensor):
            return GraphInput(node.name, "tensor", compat.fake_snapshot(value), node.name)
        return GraphInput(node.name, "scalar", value, node.name, hint=compat.hint_of(value))


_BY_MEMORY = (aten.as_strided, aten.view_as_real, aten.view_as_complex, aten._reshape_alias)
_FRESH = (aten.new_zeros, aten.zeros, aten.new_empty_strided, aten.new_empty, aten.empty, aten.empty_strided)


def _goes_by_memory(node: fx.Node) -> bool:
    """True for a view by places in memory, of something that has the layout of a tangent, perhaps."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet not in _BY_MEMORY and node.target is not aten.view.dtype:
        return False
    while node.all_input_nodes and packet not in _FRESH:
        node = node.all_input_nodes[0]
        packet = getattr(node.target, "overloadpacket", None)
    return packet not in _FRESH


def _detaches(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.detach.default


def _undetached(node: fx.Node, among: dict[fx.Node, None]) -> fx.Node:
    """What a node of the backward is the detached value of."""
    while node in among and _detaches(node):
        (node,) = node.all_input_nodes
    return node


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
