"""Splits a joint graph into a forward that returns what its backward needs, and the backward, stage by stage."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.autograd.joint_graph import JointGraph, Origin, Stage
from sidefx_train.compile.autograd.native_stages import RecordedNative
from sidefx_train.compile.autograd.node_tape import Tape
from sidefx_train.compile.autograd.saved_tensor_errors import (
    Saved,
    described,
    in_eager_order,
    saved_as_results,
    saved_checks,
)
from sidefx_train.compile.autograd.symbol_inputs import symbol_nodes
from sidefx_train.compile.autograd.trace_backward import Recorded, RecordedStage
from sidefx_train.compile.capture.recording.eager_parity.linalg_values_only import drop_unused_vectors
from sidefx_train.compile.capture.recording.tracer import GraphTracer, drop_profiler_nodes, replace_inplace_views
from sidefx_train.compile.capture.shadows.records import TensorRecord
from sidefx_train.compile.graph.artifacts import ORIGIN, OWN, SAME, GraphInput, TracedGraph
from sidefx_train.compile.graph.view_chains import first_of, own_counter
from sidefx_train.compile.residual.generate import outside_wrappers
from sidefx_train.compile.residual.native_functions import NativeFunction, Place
from sidefx_train.compile.residual.saved_tensor_refs import Shown
from sidefx_train.compile.residual.wrapper_outputs import WrapperLayout, plain_tensors

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld
    from sidefx_train.compile.residual.generate import Residual

aten = torch.ops.aten


def extract_graphs(world: TraceWorld, residual: Residual, recorded: Recorded) -> JointGraph:
    """Extracts forward and backward from the joint graph.

    Args:
        world: the capture.
        residual: the differentiable outputs.
        recorded: the recorded backward.

    Raises:
        Unsupported: the backward needs a value that the forward cannot return.
    """
    tracer, outputs = world.tracer, list(residual.outputs)
    tracer.check()
    drop_profiler_nodes(tracer.graph)
    replace_inplace_views(tracer.graph)
    drop_unused_vectors(tracer.graph)
    given_grads = [tangent for stage in recorded.stages for tangent in stage.tangents]
    tangents = {tracer.node_of(each) for tangent in given_grads for each in plain_tensors(tangent)}
    given = [n for n in tracer.graph.nodes if n.op == "placeholder" and n not in tangents]
    extractor = _Extractor(tracer, outputs, given, recorded.in_order)
    position = {node: i for i, node in enumerate(tracer.graph.nodes)}

    def between(begin: int, end: int) -> dict[fx.Node, None]:
        return {n: None for n, i in position.items() if begin < i <= end and n.op != "placeholder"}

    before = between(-1, position[recorded.forward_end])
    made: dict[fx.Node, Shown] = {
        tracer.node_of(view.value): ("view", i) if view.position is None else ("input", view.position)
        for i, view in enumerate(recorded.views)
    }
    extractor.shown = {**{node: ("made", i) for node, i in residual.shown.items()}, **made}
    extractor.ordering_nodes = [place for place, _ in recorded.ordering_nodes]
    gets_new_grad_fn = {entry for _, entry in recorded.updates}
    gets_new_grad_fn |= {view.position for view in recorded.views if view.position is not None}
    changed = (facts for facts in residual.metadata.inputs if facts.mutates_metadata or facts.changes_requires_grad)
    gets_new_grad_fn |= {facts.position for facts in changed if facts.requires_grad or facts.mutates_metadata}
    extractor.gets_new_grad_fn = gets_new_grad_fn
    outside = enumerate(outside_wrappers(world))
    extractor.wrappers = [(("wrapper", i), each.shadow, each.shadow._version - each.version) for i, each in outside]
    extractor.wrappers += [(("shell", i), each, each._version) for i, each in enumerate(residual.shells.values)]
    stages: list[Stage | NativeFunction] = [
        stage.function
        if isinstance(stage, RecordedNative)
        else extractor.stage(stage, before, between(position[stage.begin], position[stage.end]))
        for stage in recorded.stages
    ]
    returned = len(extractor.results)
    shells = returned, returned + len(recorded.hidden)
    stages = [_placed(stage, each, shells) for stage, each in zip(stages, recorded.stages, strict=True)]
    forward = _graph(tracer, extractor.inputs, list(before), extractor.results)
    storages = [
        compat.storage_id(node.meta["val"]) if isinstance(node.meta.get("val"), torch.Tensor) else None
        for node in extractor.results
    ]
    for i in residual.customs:  # they have the version counters of inputs
        storages[i] = None
    saved = range(len(outputs), len(extractor.results))
    counted = _counted(world, {i: extractor.results[i] for i in saved}, outputs)
    own_counters = tuple(i for i in saved if own_counter(extractor.results[i]) is not None and i not in counted)
    if any(own_counter(extractor.results[i]) in residual.counters for i in own_counters):
        reason = "cannot return the .data of a tensor whose contents the backward needs"
        world.heap.refuse("SFX107", reason)
    aliases: list[tuple[int, int]] = []
    for i in saved:
        if storages[i] is None or i in own_counters or i in counted:  # not a tensor, or handled before
            continue
        if storages[i] in storages[: len(outputs)]:
            sharing = [j for j in range(len(outputs)) if storages[j] == storages[i]]
            output = next((j for j in sharing if own_counter(outputs[j]) is None), None)
            if output is not None and _bits(outputs[output]) != _bits(extractor.results[i]):
                reason = "the backward needs a lazy negative or conjugate of an output"
                world.heap.refuse("SFX107", reason)
            if output is None:
                own_counters = (*own_counters, i)
            else:
                aliases.append((i, output))
    begins = (each for each in residual.metadata.inputs if each.changes_requires_grad and not each.requires_grad)
    traced = TracedGraph(forward, tuple(tracer.inputs), tracer.fake_mode, _draws(list(before)))
    return JointGraph(
        traced,
        tuple(stages),
        len(outputs),
        tuple(aliases),
        own_counters,
        tuple((i, *place) for i, place in counted.items()),
        tuple(each.position for each in begins),
        recorded.updates,
        tuple(sorted(gets_new_grad_fn)),
        tuple(residual.customs.items()),
        recorded.views,
        recorded.ready,
        tuple((_place(place, shells), before) for place, before in recorded.ordering_nodes),
        _metadata_mutated(world, extractor, len(outputs)),
        tuple((tuple(like.shape), like.dtype, like.device) for like in recorded.hidden),
        recorded.own_nodes,
        (residual.shells, tuple(filter(None, map(WrapperLayout.of, residual.shells.values)))),
        residual.seen,
    )


def _bits(node: fx.Node) -> tuple[bool, bool]:
    return node.meta["val"].is_conj(), node.meta["val"].is_neg()


def _counted(world: TraceWorld, saved: dict[int, fx.Node], outputs: list[fx.Node]) -> dict[int, tuple[int, bool]]:
    """Returns (input position, is the input itself) for saved tensors whose storage was replaced, by position."""
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
            reason = "the backward needs the contents of an output whose storage was replaced (.data)"
            world.heap.refuse("SFX107", reason)
    return found


def _placed(
    stage: Stage | NativeFunction, recorded: RecordedStage | RecordedNative, returned: tuple[int, int]
) -> Stage | NativeFunction:
    """Adds the locations of hidden values and shells to a stage, after the results of the forward."""
    if isinstance(stage, NativeFunction):
        args: list[Any] = [_place(each, returned) if isinstance(each, tuple) else each for each in stage.args]
        return replace(stage, args=tuple(args))
    results = tuple(_place(place, returned)[1] for place in recorded.results)
    grad_inputs = tuple(_place(place, returned) for place in stage.grad_inputs)
    watched = tuple((_place(place, returned), version) for place, version in stage.watched)
    return replace(stage, results=results, grad_inputs=grad_inputs, watched=watched)


def _place(place: Place, returned: tuple[int, int]) -> Place:
    kind, i = place
    if kind == "shell":
        return "result", returned[1] + i
    return ("result", returned[0] + i) if kind == "hidden" else place


def _metadata_mutated(world: TraceWorld, extractor: _Extractor, outputs: int) -> tuple[tuple[Place, int], ...]:
    """Returns the tensors whose version counters the replay of views increments, and by how much."""
    records = [r for r in world.heap.by_real.values() if isinstance(r, TensorRecord)]
    position = {id(real): i for i, real in enumerate(world.tracer.real_inputs)}
    found: dict[Place, int] = {}
    for base, count in world.replayed:
        counter = own_counter(world.tracer.node_of(base))
        holders: list[Place] = [
            ("result", i)
            for i, node in enumerate(extractor.results[:outputs])
            if isinstance(value := node.meta.get("val"), torch.Tensor)
            and compat.storage_id(value) == compat.storage_id(base)
            and own_counter(node) is counter
        ]
        shared = [r for r in records if compat.share_version_counter(r.shadow, base)]
        holders = [("input", position[id(r.real)]) for r in shared] or holders
        if holders:
            found[holders[0]] = found.get(holders[0], 0) + count
    return tuple(found.items())


class _Extractor:
    """Extracts backward graphs from the joint graph.

    Attributes:
        inputs: placeholders of the forward.
        results: results of the forward: the outputs, then the values that the backward needs.
        shown: views of the program, by node.
        ordering_nodes: targets of gradients that pass through an ordering node.
        gets_new_grad_fn: inputs that are saved without their history.
        wrappers: (place, wrapper, version after the step) of wrapper subclasses from outside and among the results.
    """

    def __init__(self, tracer: GraphTracer, outputs: list[fx.Node], inputs: list[fx.Node], one_by_one: bool) -> None:
        self.tracer = tracer
        self.one_by_one = one_by_one
        self.inputs = inputs
        self.results = list(outputs)
        self.shown: dict[fx.Node, Shown] = {}
        self.ordering_nodes: list[Place] = []
        self.gets_new_grad_fn: set[int] = set()
        self.wrappers: list[tuple[Place, Any, int]] = []
        self.position = {node: i for i, node in enumerate(tracer.graph.nodes)}

    def stage(self, recorded: RecordedStage, before: dict[fx.Node, None], among: dict[fx.Node, None]) -> Stage:
        """Returns the backward recorded as the nodes ``among``; ``results`` of the stage are set later."""
        tracer = self.tracer
        plain_tangents = [(i, each) for i, tangent in enumerate(recorded.tangents) for each in plain_tensors(tangent)]
        plain_grads = [(i, each) for i, (_, grad) in enumerate(recorded.grads) for each in plain_tensors(grad)]
        tangents = [tracer.node_of(tangent) for _, tangent in plain_tangents]
        grads = [tracer.node_of(grad) for _, grad in plain_grads]
        for node, (_, grad) in zip(grads, plain_grads, strict=True):
            if not grad._is_view():
                node.meta[OWN] = grad._version
        wanted = _needed(grads, among)
        after_backward_starts = {*wanted, *tangents}
        reads: list[tuple[fx.Node, list[fx.Node]]] = []
        for node in wanted:
            used = {
                _undetached(each, among) for each in node.all_input_nodes if not _detaches(node)
            } - after_backward_starts
            reads.append((node, sorted(used, key=self.position.__getitem__)))
        needed = in_eager_order(reads, before)
        needed += [_undetached(grad, among) for grad in grads]
        crossing = dict.fromkeys(used for used in needed if used not in after_backward_starts and used.op != "get_attr")
        for number in symbol_nodes(tracer.graph, [*self.inputs, *before], [*crossing, *tangents]):
            crossing[number] = None
            if number not in self.position:
                before[number], self.position[number] = None, len(self.position)
        feeds: list[Origin] = [self._origin(node) for node in crossing]
        feeds += [("tangent", i) for i in range(len(tangents))]
        taken = [self._taken(node, recorded.writes) for node in crossing]
        taken += [
            GraphInput(node.name, "tensor", compat.fake_snapshot(fake), node.name)
            for node, (_, fake) in zip(tangents, plain_tangents, strict=True)
        ]
        for node in crossing:
            node.meta[ORIGIN] = node.name
        constants = [node for node in before if node.op == "get_attr"]
        backward = _graph(tracer, [*crossing, *tangents], [*constants, *wanted], grads)
        return Stage(
            TracedGraph(backward, tuple(taken), tracer.fake_mode, _draws(wanted), gradients=True),
            (),
            tuple(feeds),
            tuple(grad_input for grad_input, _ in recorded.grads),
            self._depends(recorded, wanted, tangents, grads, plain_tangents, plain_grads),
            tuple(self._said(list(crossing), reads)),
            tuple(
                replace(
                    check,
                    tangents=frozenset(plain_tangents[i][0] for i in check.tangents),
                    grads=frozenset(plain_grads[i][0] for i in check.grads),
                )
                for check in saved_checks(reads, list(crossing), tangents, grads)
            ),
            self.one_by_one and not any(map(_goes_by_memory, wanted)),
            tuple(WrapperLayout.of(each) if compat.is_wrapper(each) else None for each in recorded.tangents),
            tuple(WrapperLayout.of(each) if compat.is_wrapper(each) else None for _, each in recorded.grads),
            _shared([*crossing, *tangents], plain_grads, recorded),
            self._watched(list(crossing)),
            self._tape(recorded, wanted, tangents, dict(zip(crossing, feeds, strict=False)), among),
        )

    def _watched(self, crossing: list[fx.Node]) -> tuple[tuple[Place, int], ...]:
        """Returns the wrapper subclasses that hold saved tensors: only they count what their operators write."""
        values = [node.meta.get("val") for node in crossing]
        saved = {compat.storage_id(value) for value in values if isinstance(value, torch.Tensor)}
        return tuple(
            (place, version)
            for place, wrapper, version in self.wrappers
            if any(compat.storage_id(each) in saved for each in plain_tensors(wrapper))
        )

    def _depends(
        self,
        recorded: RecordedStage,
        wanted: list[fx.Node],
        tangents: list[fx.Node],
        grads: list[fx.Node],
        plain_tangents: list[tuple[int, torch.Tensor]],
        plain_grads: list[tuple[int, torch.Tensor]],
    ) -> tuple[frozenset[int], ...]:
        """Returns for each gradient the results whose tangents it depends on."""
        reach = [recorded.reach[self.origin(place)] for place, _ in recorded.grads]
        firsts = {number: i for i, (number, _) in reversed(list(enumerate(plain_tangents)))}
        behind = [frozenset(firsts[root] for root in reach[i] if root in firsts) for i, _ in plain_grads]
        found: list[frozenset[int]] = [frozenset() for _ in recorded.grads]
        for (i, _), depends in zip(plain_grads, _dependence(wanted, tangents, grads, behind), strict=True):
            found[i] |= frozenset(plain_tangents[k][0] for k in depends)
        return tuple(found)

    def _tape(
        self,
        recorded: RecordedStage,
        wanted: list[fx.Node],
        tangents: list[fx.Node],
        feeds: dict[fx.Node, Origin],
        among: dict[fx.Node, None],
    ) -> Tape:
        """Returns the stage's backward by autograd nodes."""
        if recorded.recorder.problem:
            return Tape(problem=recorded.recorder.problem)
        for each in (*recorded.tangents, *(grad for _, grad in recorded.grads)):
            if compat.is_wrapper(each):
                return Tape(problem=f"it passes through a {type(each).__qualname__}, a tensor subclass")
        own = {place: ("root", i) for i, place in enumerate(recorded.results)}
        direct: dict[fx.Node, tuple[fx.Node, Any]] = {}
        for node in {*feeds, *wanted}:
            saved = _undetached(node, among)
            feed: Any = feeds.get(saved)
            if feed is not None and not (feed[0] == "input" and feed[1] in self.gets_new_grad_fn):
                direct[node] = saved, own.get(feed, feed)
        grads = [(self.origin(place), self.tracer.node_of(grad)) for place, grad in recorded.grads]
        return recorded.recorder.tape(dict.fromkeys(wanted), tangents, grads, direct)

    def origin(self, place: Place) -> Place:
        """Returns the final target of a gradient."""
        return self.ordering_nodes[place[1]] if place[0] == "ordering" else place

    def _said(self, crossing: list[fx.Node], reads: list[tuple[fx.Node, list[fx.Node]]]) -> list[Saved]:
        """Returns eager's error texts for saved values that were changed."""
        results = saved_as_results(reads)
        places = [None if node in results else self._place(node) for node in crossing]
        return [replace(each, shown=at) for each, at in zip(described(self.tracer, crossing), places, strict=True)]

    def _place(self, node: fx.Node) -> Shown | None:
        return ("input", self.inputs.index(node)) if node in self.inputs else self.shown.get(node)

    def _origin(self, node: fx.Node) -> Origin:
        if node in self.inputs:
            return "input", self.inputs.index(node)
        if node not in self.results:
            self.results.append(node)
        return "result", self.results.index(node)

    def _taken(self, node: fx.Node, writes: dict[int, int]) -> GraphInput:
        given = node in self.inputs
        value = self.tracer.inputs[self.inputs.index(node)].example if given else node.meta["val"]
        if isinstance(value, torch.Tensor):
            first = first_of(node)  # the input that the forward may have written to
            written = writes.get(self.inputs.index(first)) or None if first in self.inputs else None
            return GraphInput(node.name, "tensor", compat.fake_snapshot(value), node.name, writes=written)
        return GraphInput(node.name, "scalar", value, node.name, hint=compat.hint_of(value))


_BY_MEMORY = (aten.as_strided, aten.view_as_real, aten.view_as_complex, aten._reshape_alias)
_FRESH = (aten.new_zeros, aten.zeros, aten.new_empty_strided, aten.new_empty, aten.empty, aten.empty_strided)


def _goes_by_memory(node: fx.Node) -> bool:
    """Returns True for a view by memory positions of a value that may have the layout of a tangent."""
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
    """Returns the value that a node of the backward is detached from."""
    while node in among and _detaches(node):
        (node,) = node.all_input_nodes
    return node


def _dependence(
    nodes: list[fx.Node], tangents: list[fx.Node], grads: list[fx.Node], reach: list[frozenset[int]]
) -> tuple[frozenset[int], ...]:
    """Returns for each gradient the tangents it depends on; for a constant one, those from which autograd reaches it.

    A sum of a constant and another gradient is constant in this sense: zeros replace an undefined gradient.
    """
    made_of: dict[fx.Node, frozenset[int]] = {node: frozenset({i}) for i, node in enumerate(tangents)}
    constant: set[fx.Node] = set()
    for node in nodes:
        parts = [made_of.get(used, frozenset()) for used in node.all_input_nodes]
        made_of[node] = frozenset().union(*parts)
        if node.target is aten.add.Tensor and not all(parts):
            constant.add(node)
    return tuple(
        made_of.get(grad, frozenset()) | (behind if grad in constant or not made_of.get(grad) else frozenset())
        for grad, behind in zip(grads, reach, strict=True)
    )


def _shared(
    inputs: list[fx.Node], plain_grads: list[tuple[int, torch.Tensor]], recorded: RecordedStage
) -> frozenset[int]:
    """Returns the parts of gradients that are wrappers whose memory something else has too."""
    values = [node.meta.get("val") for node in inputs]
    held = [compat.storage_id(value) for value in values if isinstance(value, torch.Tensor)]
    held += [compat.storage_id(each) for _, each in plain_grads]
    return frozenset(
        k
        for k, (i, each) in enumerate(plain_grads)
        if compat.is_wrapper(recorded.grads[i][1]) and held.count(compat.storage_id(each)) > 1
    )


def _draws(nodes: list[fx.Node]) -> bool:
    return any(compat.is_random(node.target) for node in nodes if node.op == "call_function")


def _needed(roots: list[fx.Node], among: dict[fx.Node, None]) -> list[fx.Node]:
    """Returns the nodes of ``among`` that the roots depend on, and in-place operations, in order."""
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
        same = copies[node.all_input_nodes[0]] if SAME in node.meta else None
        copies[node] = graph.node_copy(node, lambda used: copies[used]) if same is None else same
    graph.output(tuple(copies[node] for node in results))
    for node in list(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    return compat.graph_module(tracer.tracer.root, graph)
