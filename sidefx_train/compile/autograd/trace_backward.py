"""Records the backward of tensors that leave the step with a live autograd graph, after the forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.autograd.graph import GradientEdge

from sidefx_train import torch_compat as compat
from sidefx_train.compile.autograd.accumulation_order import Point, order_contributions, times
from sidefx_train.compile.autograd.backward_ends import (
    check_leaves,
    check_separate,
    gradient_inputs,
    input_leaves,
    is_leaf,
    is_quiet,
    wrapper_edges,
)
from sidefx_train.compile.autograd.backward_levels import edge_of, in_one_order, levels_of, reach_of
from sidefx_train.compile.autograd.gradient_contributions import Uses, contributions
from sidefx_train.compile.autograd.native_stages import RecordedNative, record_native
from sidefx_train.compile.autograd.node_tape import TapeRecorder
from sidefx_train.compile.autograd.shared_intermediates import Hidden, shared_values
from sidefx_train.compile.capture.shadows.records import LeafRecord, TensorRecord
from sidefx_train.compile.capture.side_effects.collect import observe
from sidefx_train.compile.capture.side_effects.compare import difference
from sidefx_train.compile.graph.view_chains import gradient_edge
from sidefx_train.compile.residual.native_functions import Place, PlannedFunction
from sidefx_train.compile.residual.view_replay import IntermediateView
from sidefx_train.compile.residual.wrapper_outputs import WrapperLayout, plain_tensors

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld
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
class Recorded:
    """The complete backward, with ``updates``, ``views``, ``ready``, ``detours`` and ``hidden`` of the joint graph.

    If recorded ``in_order``, operations run one by one; ``forward_end`` is the last node before the backward.
    """

    forward_end: fx.Node
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
        check_separate(world, [fake for i, fake in differentiable.items() if i not in self.made_outside])
        self.tangents = {place: self.tracer.add_tangent(fake, i) for i, (place, fake) in enumerate(self.fakes.items())}
        first = len(self.tangents)
        self.tangents |= {("shell", i): self._wrapper_tangent(shell, first + i) for i, shell in enumerate(shells)}
        self.fakes |= {("shell", i): shell for i, shell in enumerate(shells)}
        self.inputs = gradient_inputs(world, metadata.inputs)
        self.wrappers = wrapper_edges(world)
        entered = {edge.node for _, edge in (*self.inputs, *self.wrappers)}
        check_leaves(world, list(self.fakes.values()), entered)
        self._before = observe(world)
        self.fakes |= {("view", i): view.value for i, view in enumerate(residual.views)}
        self._values = list(self.fakes.values())
        self._ends = {(edge.node, edge.output_nr) for _, edge in (*self.inputs, *self.wrappers)}
        self.levels, self.ready = levels_of(self.fakes, self._ends)
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
        leaves = {id(shadow): (edge.node, edge.output_nr) for shadow, edge in input_leaves(world, self.inputs)}
        forward_end = self.tracer.last_node()
        stages: list[RecordedStage | RecordedNative] = [
            self._record_stage(results, earlier, leaves) if (plan := self._native(results)) is None else
            self._record_native(plan, results)
            for results, earlier in self.levels
        ]  # fmt: skip
        self._check_effects()
        edges = self._edges()
        made = times(residual.views, edges, self.ready, self.uses)
        ordering_nodes: tuple[tuple[Place, Point], ...] = ()
        if in_order:
            grads = [() if isinstance(stage, RecordedNative) else stage.grads for stage in stages]
            natives = [isinstance(stage, RecordedNative) for stage in stages]
            handed, ordering_nodes = order_contributions(grads, self.uses, residual.views, edges, made, natives)
            stages = [
                stage if isinstance(stage, RecordedNative) else replace(stage, grads=grads)
                for stage, grads in zip(stages, handed, strict=True)
            ]
        leaves_of = {place for place in edges if place[0] == "input" and is_leaf(world, place[1])}
        if not all(is_quiet(world, i) for _, i in leaves_of):
            stages, ordering_nodes = _in_eager_order(stages, leaves_of, ordering_nodes)
        return Recorded(
            forward_end,
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
        heard = {(edge.node, edge.output_nr) for position, edge in self.inputs if not is_quiet(self.world, position)}
        shown = {gradient_edge(fake) for fake in self.fakes.values()}
        heard |= shown
        unordered = [part for level in self.levels for part in in_one_order(level, self.fakes, heard, self._ends)]
        if not in_order and len(unordered) <= len(self.levels):
            return
        met: list[Hidden] = []
        fakes, ends, levels = dict(self.fakes), self._ends | shown, unordered
        while more := shared_values(levels, fakes.__getitem__, ends):  # those that begin at one may meet again
            fakes |= {("hidden", len(met) + i): each for i, each in enumerate(more)}
            ends = ends | {(each.grad_fn, each.output_nr) for each in more}
            met += more
            levels, _ = levels_of(fakes, self._ends)
        with compat.no_recording(), torch.no_grad():
            empty = [each.empty() for each in met]
        self.hidden = [like for like in empty if like is not None] if all(like is not None for like in empty) else []
        if self.hidden:
            first = len(self.tangents)
            self.fakes |= {("hidden", i): each for i, each in enumerate(met)}
            self.tangents |= {
                ("hidden", i): self.tracer.add_tangent(like, first + i) for i, like in enumerate(self.hidden)
            }
            self.levels, self.ready = levels_of(self.fakes, self._ends)

    def _edges(self) -> dict[Place, tuple[Any, int]]:
        """Returns the gradient edge of each location."""
        edges: dict[Place, tuple[Any, int]] = {
            ("input", position): (edge.node, edge.output_nr) for position, edge in self.inputs
        }
        edges |= {("wrapper", i): (edge.node, edge.output_nr) for i, edge in self.wrappers}
        return edges | {place: gradient_edge(fake) for place, fake in self.fakes.items()}

    def _native(self, results: tuple[Place, ...]) -> PlannedFunction | None:
        """Returns the custom function that made the results of a level and whose own backward runs natively."""
        place = results[0]
        call = self.world.custom_functions.of(self.fakes[place]) if place[0] == "result" else None
        return None if call is None else next(each for each in self.residual.natives if each.call is call)

    def _record_native(self, plan: PlannedFunction, results: tuple[Place, ...]) -> RecordedNative:
        recorded = record_native(self.world, plan, results, self.tangents, self._edges(), self.fakes)
        number = plan.call.node._sequence_nr()
        self.uses.append({place: Uses(last=number) for place in recorded.function.targets})
        return recorded

    def _record_stage(
        self, results: tuple[Place, ...], earlier: tuple[Place, ...], leaves: dict[int, tuple[Any, int]]
    ) -> RecordedStage:
        """Records the part from ``results`` to the inputs and to what earlier parts begin at."""
        world, tracer, fakes = self.world, self.tracer, self.fakes
        targets: list[tuple[Place, Any]] = [(("input", position), edge) for position, edge in self.inputs]
        targets += [(("wrapper", i), edge) for i, edge in self.wrappers]
        targets += [(place, edge_of(fakes[place])) for place in earlier]
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
                tracer.proxy_mode.recurrent_sums.of_backward_outside(),
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
        return RecordedStage(results, given, begin, end, tuple(grads), reach_of(roots, ended), recorder, writes)

    def _check_effects(self) -> None:
        """Refuses Python code in the backward that changes something, or reads what may change before it runs."""
        heap = self.world.heap
        changed = difference(self._before, observe(self.world))
        read = self.world.reads.changeable(self.residual.made)
        kept = self.world.custom_functions.kept_changes
        self.world.native_backward_wanted = bool(changed or read or kept)
        if changed:
            lines = changed.splitlines()
            heap.refuse("SFX107", f"Python code in the backward of an output has side effects: {lines[0]}")
        if read:
            heap.refuse("SFX107", f"Python code in the backward of an output reads {read}")
        if kept:
            heap.refuse("SFX107", f"the backward of a custom function changes {kept[0]}, which it reads")


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
