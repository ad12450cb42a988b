"""Records the backward of tensors that leave the step with a live autograd graph, after the forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.autograd.graph import GradientEdge, get_gradient_edge

from sidefx_train import torch_compat as compat
from sidefx_train.compile.autograd.accumulation_order import Point, order_contributions, times
from sidefx_train.compile.autograd.gradient_contributions import Uses, contributions
from sidefx_train.compile.autograd.node_tape import TapeRecorder
from sidefx_train.compile.autograd.shared_intermediates import Hidden, shared_values
from sidefx_train.compile.capture.shadows.records import LeafRecord, TensorRecord
from sidefx_train.compile.capture.side_effects.collect import observe
from sidefx_train.compile.capture.side_effects.compare import difference
from sidefx_train.compile.capture.side_effects.custom_functions import FunctionCall
from sidefx_train.compile.graph.view_chains import gradient_edge, gradient_edges_behind, own_counter
from sidefx_train.compile.residual.generate import outside_wrappers
from sidefx_train.compile.residual.native_functions import Like, NativeFunction, Place
from sidefx_train.compile.residual.view_replay import IntermediateView
from sidefx_train.compile.residual.wrapper_outputs import WrapperLayout, plain_tensors

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld
    from sidefx_train.compile.graph.step_metadata import InputFacts
    from sidefx_train.compile.residual.generate import Residual


@dataclass(frozen=True)
class RecordedStage:
    """A backward that was recorded after the forward.

    Attributes:
        results: the differentiated results.
        tangents: inputs of the backward, one for each.
        begin: the last node before it.
        end: its last node.
        grads: (target, gradient).
        reach: for each target, the results from which autograd reaches it.
        recorder: maps operations to autograd nodes.
        writes: increments of the version counters of outside tensors, by position.
    """

    results: tuple[Place, ...]
    tangents: tuple[torch.Tensor, ...]
    begin: fx.Node
    end: fx.Node
    grads: tuple[tuple[Place, torch.Tensor], ...]
    reach: dict[Place, frozenset[int]]
    recorder: TapeRecorder
    writes: dict[int, int]


@dataclass(frozen=True)
class RecordedNative:
    """A custom function whose own backward runs natively: nothing is recorded of it.

    Attributes:
        results, tangents, begin, end, grads: as of a :class:`RecordedStage`; no nodes and no gradients.
        function: the call.
    """

    results: tuple[Place, ...]
    tangents: tuple[torch.Tensor, ...]
    begin: fx.Node
    end: fx.Node
    grads: tuple[tuple[Place, torch.Tensor], ...]
    function: NativeFunction


@dataclass(frozen=True)
class Recorded:
    """The complete backward, with ``updates``, ``views``, ``ready``, ``detours`` and ``hidden`` of the joint graph.

    If recorded ``in_order``, operations run one by one.
    """

    stages: tuple[RecordedStage | RecordedNative, ...]
    updates: tuple[tuple[int, int], ...]
    views: tuple[IntermediateView, ...]
    ready: tuple[int, ...]
    ordering_nodes: tuple[tuple[Place, Point], ...]
    hidden: tuple[torch.Tensor, ...]
    own_nodes: tuple[tuple[int, int, str], ...]
    in_order: bool


def record_backward(world: TraceWorld, residual: Residual, in_order: bool) -> Recorded:
    """Runs the backward of some outputs on the fake tensors.

    Args:
        world: the capture, still recording.
        residual: the differentiable outputs, and the views they were computed from.
        in_order: pass gradients use by use, so that the engine adds them in eager's order.

    Raises:
        Unsupported: the outside autograd engine cannot run the graph.
    """
    return _BackwardRecording(world, residual).record(in_order)


class _BackwardRecording:
    """The backward of the differentiable outputs of a step.

    Attributes:
        world: the capture, still recording.
        residual: the outputs, and the views they were computed from.
        made_outside: results whose autograd node is not the graph's own.
        fakes: what is differentiated: results, intermediate views, and what several stages share.
        tangents: inputs of the backward, for results and shared values.
        inputs: (position, edge) of the outside tensors that get a gradient.
        levels: the parts, each with the results it begins at and what it ends at; the last one runs first.
        ready: for each view, the part after which its gradient is complete.
        hidden: values that several parts share and no result shows, empty.
        uses: for each part, how its gradients are summed.
    """

    def __init__(self, world: TraceWorld, residual: Residual) -> None:
        metadata, differentiable = residual.metadata, residual.differentiable
        self.world, self.residual, self.tracer = world, residual, world.tracer
        self.made_outside = {*residual.updates, *residual.customs}
        self.fakes: dict[Place, Any] = {("result", i): differentiable[i] for i in metadata.tangents}
        shells = residual.shells.values
        _check_separate(world, [fake for i, fake in differentiable.items() if i not in self.made_outside])
        self.tangents = {place: self.tracer.add_tangent(fake, i) for i, (place, fake) in enumerate(self.fakes.items())}
        first = len(self.tangents)
        self.tangents |= {("shell", i): self._wrapper_tangent(shell, first + i) for i, shell in enumerate(shells)}
        self.fakes |= {("shell", i): shell for i, shell in enumerate(shells)}
        self.inputs = _inputs(world, metadata.inputs)
        self.wrappers = _wrapper_edges(world)
        entered = {edge.node for _, edge in (*self.inputs, *self.wrappers)}
        _check_leaves(world, list(self.fakes.values()), entered)
        self._before = observe(world)
        self.fakes |= {("view", i): view.value for i, view in enumerate(residual.views)}
        self._values = list(self.fakes.values())
        self._ends = {(edge.node, edge.output_nr) for _, edge in (*self.inputs, *self.wrappers)}
        self.levels, self.ready = _levels(self.fakes, self._ends)
        self.hidden: list[torch.Tensor] = []
        self.uses: list[dict[Place, Uses]] = []

    def _wrapper_tangent(self, shell: Any, number: int) -> Any:
        """Returns a gradient of a wrapper: a wrapper over inputs of the backward."""
        layout = WrapperLayout.of(shell)
        assert layout is not None, "checked before"
        parts = [self.tracer.add_tangent(each, number) for each in plain_tensors(shell)]
        with compat.no_recording():
            return layout.build(iter(parts))

    def record(self, in_order: bool) -> Recorded:
        """Records all parts."""
        world, residual = self.world, self.residual
        self._share_values(in_order)
        leaves = {id(shadow): (edge.node, edge.output_nr) for shadow, edge in _leaves(world, self.inputs)}
        stages: list[RecordedStage | RecordedNative] = [
            self._record_stage(results, earlier, leaves) if (call := self._native(results)) is None else
            self._record_native(call, results)
            for results, earlier in self.levels
        ]  # fmt: skip
        self._check_effects()
        edges: dict[Place, tuple[Any, int]] = {
            ("input", position): (edge.node, edge.output_nr) for position, edge in self.inputs
        }
        edges |= {("wrapper", i): (edge.node, edge.output_nr) for i, edge in self.wrappers}
        edges |= {place: gradient_edge(fake) for place, fake in self.fakes.items()}
        made = times(residual.views, edges, self.ready, self.uses)
        ordering_nodes: tuple[tuple[Place, Point], ...] = ()
        if in_order:
            grads = [stage.grads for stage in stages]
            natives = [isinstance(stage, RecordedNative) for stage in stages]
            handed, ordering_nodes = order_contributions(grads, self.uses, residual.views, edges, made, natives)
            stages = [replace(stage, grads=grads) for stage, grads in zip(stages, handed, strict=True)]
        leaves_of = {place for place in edges if place[0] == "input" and _is_leaf(world, place[1])}
        if not all(_is_quiet(world, i) for _, i in leaves_of):
            stages, ordering_nodes = _in_eager_order(stages, leaves_of, ordering_nodes)
        return Recorded(
            tuple(stages),
            tuple(residual.updates.items()),
            residual.views,
            made,
            ordering_nodes,
            tuple(self.hidden),
            _own_nodes(stages, self.fakes, self.made_outside),
            in_order,
        )

    def _share_values(self, in_order: bool) -> None:
        """Splits the parts at values that several of them share, where eager's order of hooks and sums needs that."""
        heard = {(edge.node, edge.output_nr) for position, edge in self.inputs if not _is_quiet(self.world, position)}
        shown = {gradient_edge(fake) for fake in self.fakes.values()}
        heard |= shown
        unordered = [part for level in self.levels for part in _in_one_order(level, self.fakes, heard, self._ends)]
        if not in_order and len(unordered) <= len(self.levels):
            return
        met = shared_values(unordered, self.fakes.__getitem__, self._ends | shown)
        with compat.no_recording(), torch.no_grad():
            empty = [each.empty() for each in met]
        self.hidden = [like for like in empty if like is not None] if all(like is not None for like in empty) else []
        if self.hidden:
            first = len(self.tangents)
            self.fakes |= {("hidden", i): each for i, each in enumerate(met)}
            self.tangents |= {
                ("hidden", i): self.tracer.add_tangent(like, first + i) for i, like in enumerate(self.hidden)
            }
            self.levels, self.ready = _levels(self.fakes, self._ends)

    def _native(self, results: tuple[Place, ...]) -> FunctionCall | None:
        """Returns the custom function that made the results of a level and whose own backward runs natively."""
        place = results[0]
        return self.world.custom_functions.of(self.fakes[place]) if place[0] == "result" else None

    def _record_native(self, call: FunctionCall, results: tuple[Place, ...]) -> RecordedNative:
        """Finds out where the tensors are that a custom function gets and saves."""
        world, residual = self.world, self.residual
        edges: dict[Any, Place] = {(edge.node, edge.output_nr): ("input", position) for position, edge in self.inputs}
        edges |= {(edge.node, edge.output_nr): ("wrapper", i) for i, edge in self.wrappers}
        edges |= {gradient_edge(fake): place for place, fake in self.fakes.items()}
        places: dict[int, Place] = {id(fake): place for place, fake in self.fakes.items() if place[0] != "hidden"}

        def refuse(what: str) -> Any:
            reason = f"{call.cls.__name__}, whose backward must run natively outside of the step, {what}"
            return world.heap.refuse("SFX107", reason)

        following = iter(call.node.next_functions)
        args: list[Any] = []
        for arg in call.args:
            if not isinstance(arg, torch.Tensor):
                args.append(False)
                continue
            edge = next(following)
            args.append(True if edge[0] is None else edges.get(edge) or refuse("gets a tensor that is changed later"))
        plan = next(each for each in residual.natives if each.call is call)
        positions = dict(plan.results)
        outputs: list[Any] = []
        for i, output in enumerate(call.outputs):
            if not isinstance(output, torch.Tensor):
                outputs.append(None)
            elif i in positions:
                given = call.returned_input(output)
                outputs.append(positions[i] if given is None else (positions[i], given))
            elif not all(isinstance(size, int) for size in output.shape):
                refuse("has an unused output of a changing size")
            else:
                shape = tuple(output.shape)
                outputs.append(Like(shape, output.dtype, output.device, output.grad_fn is call.node))
        saved: list[Any] = []
        for value, position in zip(call.context.saved, plan.values, strict=True):
            record = world.heap.record_of(value)
            if not isinstance(value, torch.Tensor):
                saved.append(None)
            elif any(value is each for each in call.outputs) and call.returned_input(value) is not None:
                refuse("saves an output that is its argument")
            elif id(value) in places:
                saved.append(places[id(value)])
            elif isinstance(record, TensorRecord):
                saved.append(("input", next(i for i, x in enumerate(world.tracer.real_inputs) if x is record.real)))
            elif position is not None:
                saved.append(("result", position))
            else:
                refuse("saves a tensor that is neither its argument nor its output")
        if {place for place in results if place[0] == "result"} != {("result", i) for i in positions.values()}:
            refuse("has outputs that are used in another order")
        number = call.node._sequence_nr()
        self.uses.append({arg: Uses(last=number) for arg in args if isinstance(arg, tuple)})
        materializes, single = call.context.materializes, call.single
        function = NativeFunction(call.cls, tuple(args), tuple(outputs), single, tuple(saved), materializes)
        last = world.tracer.last_node()
        return RecordedNative(results, tuple(self.tangents[place] for place in results), last, last, (), function)

    def _record_stage(
        self, results: tuple[Place, ...], earlier: tuple[Place, ...], leaves: dict[int, tuple[Any, int]]
    ) -> RecordedStage:
        """Records the part from ``results`` to the inputs and to what earlier parts begin at."""
        world, tracer, fakes = self.world, self.tracer, self.fakes
        targets: list[tuple[Place, Any]] = [(("input", position), edge) for position, edge in self.inputs]
        targets += [(("wrapper", i), edge) for i, edge in self.wrappers]
        targets += [(place, _edge(fakes[place])) for place in earlier]
        edges = [edge for _, edge in targets]
        begin = tracer.last_node()
        roots, given = [fakes[place] for place in results], tuple(self.tangents[place] for place in results)
        versions = _versions(world)
        ended = {(edge.node, edge.output_nr): place for place, edge in targets}
        recorder = TapeRecorder(tracer, [gradient_edge(root) for root in roots], ended, leaves)
        try:
            with (
                torch.enable_grad(),
                compat.autocast_off(),
                _without_hooks(world),
                _without_gradients(self._values),
                _stopping_at(edges),
                contributions(roots, edges) as parts,
                recorder.recording(),
                world.reads.heard(),
                world.custom_functions.left_out(),
            ):
                asked = [root.edge if isinstance(root, Hidden) else root for root in roots]
                found = torch.autograd.grad(asked, edges, given, retain_graph=True, allow_unused=True) if edges else ()
        except (RuntimeError, ValueError) as error:  # the Python of nested tensors raises both
            first = str(error).splitlines()[0]
            world.native_backward_wanted = True
            world.heap.refuse("SFX107", f"the backward of an output could not be traced: {first}")
        end = tracer.last_node()
        writes = {i: version - versions.get(i, version) for i, version in _versions(world).items()}
        _record_unused(world, recorder, self._values)
        grads = [(target, grad) for (target, _), grad in zip(targets, found, strict=True) if grad is not None]
        if any(compat.is_wrapper(grad) and WrapperLayout.of(grad) is None for _, grad in grads):
            reason = "a gradient is a tensor subclass that holds something else than tensors and plain values"
            world.heap.refuse("SFX107", reason)
        if not grads:
            world.heap.refuse("SFX107", "an output requires gradients, but depends on no outside tensor that does")
        self.uses.append({target: part for (target, _), part in zip(targets, parts, strict=True)})
        return RecordedStage(results, given, begin, end, tuple(grads), _reach(roots, ended), recorder, writes)

    def _check_effects(self) -> None:
        """Refuses Python code in the backward that changes something, or reads what may change before it runs."""
        heap = self.world.heap
        changed = difference(self._before, observe(self.world))
        read = self.world.reads.changeable(self.residual.made)
        self.world.native_backward_wanted = bool(changed or read)
        if changed:
            lines = changed.splitlines()
            heap.refuse("SFX107", f"Python code in the backward of an output has side effects: {lines[0]}")
        if read:
            heap.refuse("SFX107", f"Python code in the backward of an output reads {read}")


def _own_nodes(
    stages: list[RecordedStage | RecordedNative], fakes: dict[Place, Any], made_outside: set[int]
) -> tuple[tuple[int, int, str], ...]:
    """Returns the results that get a node of their own: (result, stage after which it is created, its name), in order.

    The engine runs the newest node first. A node of its own is reached only if the result has a gradient, and before
    all stages that eager runs later, so hooks on the result are called as in eager.
    """
    begun = [max(_begun(fakes[place]) for place in stage.results) for stage in stages]
    found: list[tuple[int, int, int, str]] = []
    for k, stage in enumerate(stages):
        for place in stage.results:
            fake = fakes[place]
            if isinstance(stage, RecordedNative) or place[0] != "result" or place[1] in made_outside:
                continue
            last = k
            while last + 1 < len(stages) and begun[last + 1] < _begun(fake):
                last += 1
            if last > k or len(stage.results) > 1:
                found.append((last, _begun(fake), place[1], fake.grad_fn.name()))
    return tuple((i, last, name) for last, _, i, name in sorted(found))


def _begun(value: torch.Tensor | Hidden) -> int:
    node: Any = value.grad_fn
    return int(node._sequence_nr())


def _versions(world: TraceWorld) -> dict[int, int]:
    """Returns the version counters of outside tensors, by position."""
    position = {id(real): i for i, real in enumerate(world.tracer.real_inputs)}
    records = [record for record in world.heap.by_real.values() if isinstance(record, TensorRecord)]
    return {position[id(record.real)]: record.version for record in records}


def _is_leaf(world: TraceWorld, position: int) -> bool:
    record = world.heap.by_real[id(world.tracer.real_inputs[position])]
    return isinstance(record, TensorRecord) and record.edge is None


def _in_eager_order(
    stages: list[RecordedStage | RecordedNative],
    leaves: set[Place],
    ordering_nodes: tuple[tuple[Place, Point], ...],
) -> tuple[list[RecordedStage | RecordedNative], tuple[tuple[Place, Point], ...]]:
    """Adds ordering nodes to gradients of leaves, so that the engine reaches the leaves, and their hooks, as in eager.

    The engine reaches all leaves of one node in an order of its own; among ordering nodes it runs the newest first.
    """
    found, more = list(stages), list(ordering_nodes)
    for k, stage in enumerate(stages):
        if isinstance(stage, RecordedNative):
            continue
        last: dict[Place, tuple[int, int]] = {}
        for time, run in enumerate(stage.recorder.runs):
            for number, edge in enumerate(run.node.next_functions):
                place = stage.recorder.grad_inputs.get(edge)
                if place is not None and run.outgoing[number] is not None:
                    last[place] = time, number
        given = [i for i, (place, _) in enumerate(stage.grads) if place in leaves]
        taken: dict[int, Place] = {}
        for i in sorted(given, key=lambda i: (last.get(stage.grads[i][0], (-1, 0)), i), reverse=True):
            taken[i] = ("ordering", len(more))
            more.append((stage.grads[i][0], ("stage", k)))
        grads = tuple((taken.get(i, place), grad) for i, (place, grad) in enumerate(stage.grads))
        found[k] = replace(stage, grads=grads)
    return found, tuple(more)


def _record_unused(world: TraceWorld, recorder: TapeRecorder, values: list[Any]) -> None:
    """Records the backward of saved tensors off all paths from the results, up to where it joins one."""
    begun = recorder.unreached()
    if not begun:
        return
    tracer = world.tracer
    ends = [GradientEdge(*edge) for edge in recorder.known()]
    other = TapeRecorder(
        tracer, begun, {edge: ("hidden", i) for i, edge in enumerate(recorder.known())}, recorder.leaves
    )
    try:
        with torch.no_grad():
            given = [Hidden(*edge).empty() for edge in begun]
        if any(each is None for each in given):
            return
        other.begin = tracer.last_node()
        with (
            torch.enable_grad(),
            compat.autocast_off(),
            _without_hooks(world),
            _without_gradients(values),
            _stopping_at(ends),
            other.recording(),
            world.custom_functions.left_out(),
        ):
            asked = [GradientEdge(*edge) for edge in begun]
            torch.autograd.grad(asked, ends, given, retain_graph=True, allow_unused=True)
    except RuntimeError:  # a second derivative raises an error instead
        return
    recorder.unused = other, [tracer.node_of(each) for each in given]


def _is_quiet(world: TraceWorld, position: int) -> bool:
    """Returns True for a leaf without hooks: it is not observable that the engine reaches it without a gradient."""
    record = world.heap.by_real[id(world.tracer.real_inputs[position])]
    if not isinstance(record, TensorRecord) or record.edge is not None:
        return False
    hooked = any(compat.hooks_of(record.real)) or any(compat.hook_numbers(record.shadow))
    return not hooked and not record.accumulator_hooked


def _in_one_order(
    level: tuple[tuple[Place, ...], tuple[Place, ...]],
    fakes: dict[Place, Any],
    heard: set[tuple[Any, int]],
    ends: set[tuple[Any, int]],
) -> list[tuple[tuple[Place, ...], tuple[Place, ...]]]:
    """Splits the results of a level if some lead to an observable target, such as hooks, to which others do not.

    The engine continues from a node to all its successors, even without a gradient: their hooks are called.
    """
    results, earlier = level
    stops: dict[tuple[Any, int], Place] = {
        edge: ("input", i) for i, edge in enumerate(ends | {gradient_edge(fakes[place]) for place in earlier})
    }
    reach = _reach([fakes[place] for place in results], stops)
    uneven = any(len(reach[place]) not in (0, len(results)) for edge, place in stops.items() if edge in heard)
    return [((result,), earlier) for result in results] if uneven else [level]


def _reach(
    roots: list[torch.Tensor | Hidden], grad_inputs: dict[tuple[Any, int], Place]
) -> dict[Place, frozenset[int]]:
    """Returns the roots that lead to each gradient input without passing another."""
    found: dict[Place, set[int]] = {place: set() for place in grad_inputs.values()}
    for i, root in enumerate(roots):
        seen, waiting = set[Any](), [root.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            for edge in node.next_functions:
                if edge in grad_inputs:
                    found[grad_inputs[edge]].add(i)
                else:
                    waiting.append(edge[0])
    return {place: frozenset(numbers) for place, numbers in found.items()}


def _edge(value: torch.Tensor | Hidden) -> Any:
    return value.edge if isinstance(value, Hidden) else get_gradient_edge(value)


def _unconnected(results: list[tuple[Place, Any]], ends: set[tuple[Any, int]]) -> list[tuple[Place, ...]]:
    """Groups results by the autograd graphs they share, up to ``ends``, in the order in which those were begun."""
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
    """Returns the results, level by level, each with the outputs it was computed from; and the level of each view."""
    place_of = {gradient_edge(fake): place for place, fake in fakes.items()}
    behind = {
        place: {place_of[edge] for edge in gradient_edges_behind(fake) if edge in place_of} - {place}
        for place, fake in fakes.items()
    }
    levels: list[tuple[tuple[Place, ...], tuple[Place, ...]]] = []
    ready: dict[Place, int] = {}
    waiting = list(fakes)
    while waiting:
        now = tuple(place for place in waiting if not behind[place] & set(waiting))
        views = [place for place in now if place[0] == "view"]
        if views:  # they need no stage of their own
            ready |= dict.fromkeys(views, len(levels))
        else:
            for unordered in _unconnected([(place, fakes[place]) for place in now], inputs | set(place_of)):
                levels.append((unordered, tuple(sorted(set().union(*(behind[place] for place in unordered))))))
        waiting = [place for place in waiting if place not in (views or now)]
    return levels, ready


@contextmanager
def _stopping_at(edges: list[Any]) -> Iterator[None]:
    """Stops the engine at some tensors: their gradients are requested, and not propagated further.

    An input may be a view of another: outside, autograd takes its gradient there.
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
    """Refuses gradients of leaves that the step created itself: the captured part gets its leaves as inputs."""
    seen, waiting = set(entered), [fake.grad_fn for fake in fakes]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            reason = "the backward of an output reaches a tensor that the step made a leaf or a non-leaf"
            world.heap.refuse("SFX107", reason)
        if not hasattr(node, "variable") and all(before is None for before, _ in node.next_functions):
            reason = "the backward of an output ends at a view of a leaf created with autograd off"
            world.heap.refuse("SFX107", reason)
        waiting += [before for before, _ in node.next_functions]


@contextmanager
def _without_hooks(world: TraceWorld) -> Iterator[None]:
    """Removes the hooks of leaves, and those that run natively: the outside engine, which calls the backward, runs
    them."""
    records = [r for r in world.heap.by_real.values() if isinstance(r, (TensorRecord, LeafRecord))]
    hooked = [r.shadow for r in records if r.shadow.grad_fn is None and any(compat.hook_numbers(r.shadow))]
    if world.specialization.native_backward:
        hooked += world.left_hooks.on_step()
    before = [(shadow, compat.tensor_hooks(shadow)) for shadow in hooked]
    for shadow, _ in before:
        compat.set_tensor_hooks(shadow, {})
    try:
        with world.custom_functions.without_hooks():
            yield
    finally:
        for shadow, hooks in before:
            compat.set_tensor_hooks(shadow, hooks)


@contextmanager
def _without_gradients(fakes: list[torch.Tensor]) -> Iterator[None]:
    """Keeps the gradients of tensors unchanged: the engine sets those of the real tensors."""
    keeping = [(fake, fake.grad) for fake in fakes if fake.retains_grad]
    try:
        yield
    finally:
        for fake, grad in keeping:
            fake.grad = grad


def _check_separate(world: TraceWorld, fakes: list[torch.Tensor]) -> None:
    """Refuses differentiable aliases of each other or of an input: autograd would miss later in-place changes."""
    outside = {compat.storage_id(r.memory) for r in world.heap.by_real.values() if isinstance(r, TensorRecord)}
    taken = set(outside)
    for fake in fakes:
        if compat.is_wrapper(fake):
            continue
        node = world.tracer.node_of(fake)
        if compat.storage_id(fake) in outside and own_counter(node) is node:
            continue  # autograd does not know of it in eager either
        native = world.custom_functions.of(fake)
        if native is not None and native.returned_input(fake) is not None:
            continue  # as in eager, the function's node makes it a view
        if compat.storage_id(fake) in taken:
            world.heap.refuse("SFX107", "cannot return a differentiable view together with its base")
        taken.add(compat.storage_id(fake))


def _inputs(world: TraceWorld, inputs: tuple[InputFacts, ...]) -> list[tuple[int, Any]]:
    """Returns (input position, edge to differentiate by) of every input that requires gradients."""
    records = {id(r.real): r for r in world.heap.by_real.values() if isinstance(r, TensorRecord)}
    found: list[tuple[int, Any]] = []
    for facts in inputs:
        record = records[id(world.tracer.real_inputs[facts.position])]
        if facts.leaf and facts.changes_requires_grad and not facts.requires_grad:
            if record.real._is_view():
                world.heap.refuse("SFX107", f"cannot make {facts.label}, a view, require gradients")
            if facts.mutates_metadata or record.shadow.dtype != record.real.dtype:
                world.heap.refuse("SFX107", f"cannot change the shape of {facts.label} and make it require gradients")
            found.append((facts.position, get_gradient_edge(record.shadow)))
            continue
        if not facts.requires_grad:
            continue
        if facts.leaf and facts.changes_requires_grad:  # it ceases to require gradients: its results end at no leaf
            continue
        if facts.leaf and facts.mutates_metadata:
            world.heap.refuse("SFX107", f"{facts.label}, which requires gradients, changes its shape")
        if facts.leaf and facts.updates_history:
            world.heap.refuse("SFX107", f"{facts.label} joins the step's autograd graph")
        if (record.shadow.shape, record.shadow.dtype) != (record.memory.shape, record.memory.dtype):
            world.heap.refuse("SFX107", f"{facts.label}, which requires gradients, gets another shape or dtype")
        if record.edge is not None and _is_out_of_date(record):
            world.heap.refuse(
                "SFX107", f"{facts.label}, which requires gradients, has another shape than in its autograd history"
            )
        found.append((facts.position, record.edge if record.edge is not None else get_gradient_edge(record.shadow)))
    return found


def _wrapper_edges(world: TraceWorld) -> list[tuple[int, Any]]:
    """Returns (position, gradient edge) of every wrapper subclass from outside that requires gradients."""
    found: list[tuple[int, Any]] = []
    for i, record in enumerate(outside_wrappers(world)):
        if record.accumulator_hooked or any(compat.hook_numbers(record.shadow)):
            world.heap.refuse("SFX107", f"{record.source.label}, a tensor subclass, has hooks in a backward outside")
        if record.requires_grad:
            found.append((i, GradientEdge(compat.accumulator_of(record.shadow), 0)))
    return found


def _leaves(world: TraceWorld, inputs: list[tuple[int, Any]]) -> list[tuple[torch.Tensor, Any]]:
    """Returns shadows of leaves, with their gradient edges."""
    records = [world.heap.by_real[id(world.tracer.real_inputs[position])] for position, _ in inputs]
    found = [(record.shadow, edge) for record, (_, edge) in zip(records, inputs, strict=True)]
    return [(shadow, edge) for shadow, edge in found if shadow.grad_fn is None]


def _is_out_of_date(record: TensorRecord) -> bool:
    """Returns True for a tensor whose storage was replaced (``.data =``): its gradients have the old shape."""
    real = record.real
    if real._is_view() or real.grad_fn is None:
        return False
    shape, dtype, _ = compat.output_of(real.grad_fn, real.output_nr)
    return (tuple(shape), dtype) != (tuple(real.shape), real.dtype)
