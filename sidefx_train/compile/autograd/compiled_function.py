"""Joins a compiled forward and a compiled backward in one autograd function."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.autograd.accumulation_order import Point
from sidefx_train.compile.autograd.higher_order import TapeRunner, differentiated, link_to, refuse_derivative
from sidefx_train.compile.autograd.joint_graph import JointGraph, Stage
from sidefx_train.compile.autograd.saved_tensor_errors import in_eagers_words
from sidefx_train.compile.graph.artifacts import Executable
from sidefx_train.compile.residual.autograd_nodes import custom_view, own_node, pass_through
from sidefx_train.compile.residual.native_functions import NativeFunction, Place
from sidefx_train.compile.residual.saved_tensor_refs import Seen
from sidefx_train.compile.residual.view_replay import CustomView, IntermediateView, replay
from sidefx_train.compile.residual.wrapper_outputs import WrapperLayout
from sidefx_train.errors import SideFXWarning, UnfinishedError


class _CapturedPart(torch.autograd.Function):
    """A node in the user's autograd graph. Called with ``(backward, args, results, *grad_inputs)``."""

    @staticmethod
    def forward(ctx: Any, part: _Backward, args: list[Any], results: list[Any], *grad_inputs: torch.Tensor) -> Any:
        saved = [args[i] if kind == "input" else results[i] for kind, i in part.stage.feeds if kind != "tangent"]
        saved += [results[i] for i in part.saved_results]
        ctx.save_for_backward(*(value if isinstance(value, torch.Tensor) else None for value in saved))
        ctx.versions = [value._version if isinstance(value, torch.Tensor) else 0 for value in saved]
        ctx.numbers = {i: value for i, value in enumerate(saved) if not isinstance(value, torch.Tensor)}
        ctx.outputs = part.layouts(results)
        ctx.set_materialize_grads(False)
        ctx.part = part
        ctx.seen = part.seen.now
        ctx.watched = ()
        if part.unsaved:
            ctx.links = {i: link_to(grad_inputs[i]) for i in part.unsaved if grad_inputs[i].grad_fn is not None}
        return tuple(results[i] for i in part.stage.results)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> Any:
        _check_wrappers(ctx.watched)
        missing = {i for i, tangent in enumerate(tangents) if tangent is None}
        given = [ctx.numbers.get(i, tensor) for i, tensor in enumerate(_unpacked(ctx, missing))]
        shown = compat.dispatch_mode_active()  # a mode around the backward is asked for every operator
        if shown and ctx.part.stage.tape.problem and not torch.is_grad_enabled():
            why = f"a dispatch mode around a backward is shown compiled operations: {ctx.part.stage.tape.problem}"
            warnings.warn(why, SideFXWarning, stacklevel=2)
        if torch.is_grad_enabled() or shown or any(map(_is_special, tangents)):  # nothing is compiled for these
            return (None, None, None, *_differentiable(ctx, given, tangents, missing))
        ctx.maybe_clear_saved_tensors()  # if the graph is not retained: only the list refers to them, and is emptied
        return (None, None, None, *_computed(ctx, given, tangents, missing))


def _is_special(tangent: torch.Tensor | None) -> bool:
    """Returns True for a tangent that compiled code does not take: of a transform, or sparse."""
    return compat.is_batched(tangent) or (tangent is not None and tangent.is_sparse)


def _check_wrappers(watched: Sequence[tuple[Any, int]]) -> None:
    """Raises if a wrapper subclass was changed in place whose tensors the backward reads."""
    for held, version in watched:
        wrapper = held()
        if wrapper is not None and wrapper._version != version:
            what = f"a {type(wrapper).__qualname__} of size {list(wrapper.shape)}"
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{what} is at version {wrapper._version}; expected version {version} instead."
            )


def _computed(
    ctx: Any, given: list[Any], tangents: Sequence[torch.Tensor | None], missing: set[int]
) -> list[torch.Tensor | None]:
    """Computes the gradients with the compiled backward."""
    part: _Backward = ctx.part
    del given[len(part.stage.saved) :]
    with torch.no_grad():
        fixed = not part.stage.any_layout
        given += [layout.fit(part_of, fixed) for part_of, layout in zip(part.plain(tangents), ctx.outputs, strict=True)]
        run = part.cast if part.cast is not None and compat.autocast_enabled() else part.run
        grads = part.together(run(given))
    for i, made_of in enumerate(part.stage.depends):
        if made_of <= missing:  # of unused outputs: eager leaves the leaf alone
            grads[i] = None
    return grads


def _differentiable(
    ctx: Any, saved: list[Any], tangents: Sequence[torch.Tensor | None], missing: set[int]
) -> list[torch.Tensor | None]:
    """Computes the gradients with a history of their own."""
    part: _Backward = ctx.part
    links = ctx.links if part.unsaved else {}
    grad_inputs = [_grad_input(ctx, i, links, saved) for i in range(len(ctx.next_functions))]
    if part.stage.tape.problem:
        reached = [*saved, *(tangent for tangent in tangents if tangent is not None)]
        return refuse_derivative(
            part.stage.tape.problem, reached, grad_inputs, _computed(ctx, saved, tangents, missing)
        )
    if not part.stage.any_layout and not any(map(_is_special, tangents)):
        laid_out = zip(tangents, ctx.outputs, strict=True)
        tangents = [None if tangent is None else layout.fit(tangent, True) for tangent, layout in laid_out]
    asked = [node is not None and compat.is_asked_for(node) for node, _ in ctx.next_functions]
    count = len(part.stage.saved)
    numbers = {result: number for number, result in enumerate(part.stage.results)}
    outputs = {numbers[i]: made for i, made in zip(part.saved_results, saved[count:], strict=True)}
    return differentiated(part.tape_runner, saved[:count], outputs, links, grad_inputs, tangents, asked)


def _grad_input(ctx: Any, i: int, links: dict[int, torch.Tensor], saved: list[Any]) -> torch.Tensor | None:
    """Returns a tensor that leads to the gradient's target: the target itself if something keeps it, else a link."""
    node, _ = ctx.next_functions[i]
    if node is None:
        return None
    if hasattr(node, "variable"):
        return node.variable  # type: ignore[no-any-return]
    kept = ctx.part.kept.get(i)
    return links[i] if kept is None else saved[kept]


def _unpacked(ctx: Any, missing: set[int]) -> Sequence[torch.Tensor | None]:
    """Returns the saved tensors.

    Args:
        ctx: context of the node.
        missing: unused outputs.

    Raises:
        RuntimeError: a saved tensor was changed since; the message is eager's.
    """
    try:
        return ctx.saved_tensors  # type: ignore[no-any-return]
    except RuntimeError as error:
        stopped = error
    stage, saved = ctx.part.stage, compat.unchecked_saved(ctx)
    changed = [
        i for i, tensor in enumerate(saved) if isinstance(tensor, torch.Tensor) and tensor._version != ctx.versions[i]
    ]
    if not changed:  # it was freed, or this torch does not say
        raise stopped
    wanted = {i for i, (node, _) in enumerate(ctx.next_functions) if node is not None and compat.is_asked_for(node)}
    reached = [check.saved for check in stage.saved_checks if not check.tangents <= missing and check.grads & wanted]
    first = next((i for i in changed if any(i in checked for checked in reached)), None)
    if first is None:  # eager does not check it
        return saved
    tensor, known = saved[first], stage.saved[first]
    assert tensor is not None, "what was changed is a tensor"
    shown = ctx.seen.get(known.shown)
    now = None if shown is None else shown()
    size = (tensor if now is None else now).size()
    said = in_eagers_words(stopped, known, tensor, ctx.versions[first], size, first == changed[0])
    raise RuntimeError(said)


class _Update(torch.autograd.Function):
    """Gives a tensor the autograd history of its new value, which its storage already contains."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, *grads


def _seen_as(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns an alias of ``memory``, with its version counter, in the layout of ``like``."""
    if memory.dtype != like.dtype:
        elements = memory.untyped_storage().nbytes() // memory.itemsize
        memory = memory.as_strided((elements,), (1,), 0).view(like.dtype)
    return memory.as_strided(like.size(), like.stride(), like.storage_offset())


def _counted(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Returns an alias of ``memory`` with the version counter of a tensor whose storage it will replace."""
    alias = tensor.detach()
    alias.data = memory
    return alias


_before = pass_through("Before", compat.alias_hidden_from_autograd)
"""Returns a tensor with its autograd history from before it is updated."""

_ordering_node = pass_through("Detour", compat.alias_hidden_from_autograd)
"""Passes a tensor through an ordering node, which delays its gradient contribution."""


@dataclass(frozen=True)
class _Backward:
    """A compiled part of the backward; it may empty the list of its inputs.

    Attributes:
        stage: the stage it belongs to.
        run: the compiled graph.
        cast: the graph under the caller's autocast, if enabled; ``None`` if the compiled graph runs then too.
        seen: the program's tensors that it saves.
        gets_new_grad_fn: inputs that are saved without their history.
        own_counters: results that are saved as aliases with their own version counter.
    """

    stage: Stage
    run: Callable[[list[Any]], Sequence[Any]]
    cast: Callable[[list[Any]], Sequence[Any]] | None
    seen: Seen
    gets_new_grad_fn: frozenset[Place]
    own_counters: frozenset[int]

    @property
    def results(self) -> tuple[int, ...]:
        """The differentiated results."""
        return self.stage.results

    def layouts(self, results: list[Any]) -> list[_Layout]:
        """Returns the layouts of the plain tensors of which the tangents consist."""
        found: list[_Layout] = []
        for i, layout in zip(self.stage.results, self.stage.tangent_layouts, strict=True):
            found += [_Layout.of(results[i])] if layout is None else [_Layout(*_laid(each)) for each in layout.plain]
        return found

    def plain(self, tangents: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Returns the plain tensors of which the tangents consist."""
        found: list[torch.Tensor | None] = []
        for tangent, layout in zip(tangents, self.stage.tangent_layouts, strict=True):
            if layout is None:
                found.append(tangent)
            else:
                found += [None] * len(layout.plain) if tangent is None else layout.taken_apart(tangent)
        return found

    def together(self, parts: Sequence[Any]) -> list[Any]:
        """Returns the gradients that consist of some plain tensors."""
        each = iter(part.clone() if i in self.stage.shared else part for i, part in enumerate(parts))
        return [next(each) if layout is None else layout.build(each) for layout in self.stage.grad_layouts]

    @property
    def targets(self) -> tuple[Place, ...]:
        """The targets of the gradients."""
        return self.stage.grad_inputs

    @cached_property
    def tape_runner(self) -> TapeRunner:
        """Runs the same backward operation by operation, under autograd."""
        return TapeRunner(self.stage)

    @cached_property
    def kept(self) -> dict[int, int]:
        """Gradient inputs that are saved with their history: index -> index of the saved tensor."""
        feeds = {feed: i for i, feed in enumerate(self.stage.feeds) if feed[0] != "tangent"}
        places: list[Any] = list(self.stage.grad_inputs)
        return {
            i: feeds[place] for i, place in enumerate(places) if place in feeds and place not in self.gets_new_grad_fn
        }

    @cached_property
    def unsaved(self) -> tuple[int, ...]:
        """Gradient inputs that are not saved: one with a history needs a link when the node runs."""
        return tuple(i for i in range(len(self.stage.grad_inputs)) if i not in self.kept)

    @cached_property
    def saved_results(self) -> tuple[int, ...]:
        """Results that are saved as results too, in addition to aliases: hooks are registered on them."""
        tape = self.stage.tape
        roots = dict(zip(tape.roots, self.stage.results, strict=bool(tape.roots)))
        sources = {edge for node, edge in tape.sources.items() if node not in tape.direct}
        return tuple(sorted({roots[edge] for edge in sources if edge in roots} - self.own_counters))


class Joined:
    """A forward and its backward.

    Args:
        graph: the joint graph.
        forward: the compiled forward.
        backwards: the compiled backward of each stage.
        casting: the same, for calls under autocast.
    """

    def __init__(
        self,
        graph: JointGraph,
        forward: Executable,
        backwards: list[Executable],
        casting: Sequence[Callable[[list[Any]], Any] | None],
    ) -> None:
        self.graph = graph
        self.forward = forward.run
        compiled = [done.run for done in backwards]
        gets_new_grad_fn = frozenset[Place](("input", i) for i in graph.gets_new_grad_fn)
        shared = {output for _, output in graph.aliases}
        own_counters = frozenset(i for i in range(graph.outputs) if i not in shared)
        joined = iter(zip(graph.compiled, compiled, casting, strict=True))
        self.parts: list[_Backward | NativeFunction] = [
            stage
            if isinstance(stage, NativeFunction)
            else _Backward(*next(joined), graph.seen, gets_new_grad_fn, own_counters)
            for stage in graph.stages
        ]
        self.leaves_marks = graph.forward.uses_rng or any(each.writes for each in graph.forward.inputs)
        self.ordering_nodes: dict[Point, list[int]] = {}
        for i, (_, before) in enumerate(graph.ordering_nodes):
            self.ordering_nodes.setdefault(before, []).append(i)
        self.own_nodes: dict[int, list[tuple[int, Callable[[torch.Tensor], None]]]] = {}
        for i, after, name in graph.own_nodes:
            self.own_nodes.setdefault(after, []).append((i, own_node(name)))

    def run(self, args: list[Any]) -> list[Any]:
        """Returns the step's outputs; differentiable ones are results of autograd nodes over the inputs and each
        other."""
        graph, taken = self.graph, list(args)
        wrappers = args[len(graph.forward.inputs) :]
        del args[len(graph.forward.inputs) :], taken[len(graph.forward.inputs) :]
        graph.seen.begin()
        entering, held = self._as_given(taken)
        with torch.no_grad():
            results = list(self.forward(args))
        try:
            return self._joined(taken, results, entering, held, wrappers)
        except Exception as error:
            if not self.leaves_marks:
                raise
            raise UnfinishedError("SFX207", f"{type(error).__name__}: {error}") from error

    def _joined(
        self,
        taken: list[Any],
        results: list[Any],
        entering: dict[int, torch.Tensor],
        held: list[Any],
        wrappers: list[Any],
    ) -> list[Any]:
        """Returns the results with autograd nodes; inputs have been written."""
        graph = self.graph
        given = dict(graph.updates)
        with torch.no_grad():
            results += [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in graph.hidden]
            first_shell = len(results)
            results += [layout.shell() for layout in graph.shells[1]]
        for part in self.parts:
            for i in (i for i in part.results if i < first_shell):
                of_input = i in given
                results[i] = taken[given[i]].detach() if of_input else compat.without_view_relation(results[i])
        for i, output in graph.aliases:  # aliases share one version counter, so in-place changes are detected
            results[i] = _seen_as(results[output].detach(), results[i])
        for i, position, itself in graph.counted:
            results[i] = taken[position] if itself else _counted(taken[position], results[i])
        for i in graph.own_counters:
            results[i] = compat.alias_hidden_from_autograd(results[i])
        views: dict[int, torch.Tensor] = {}
        ordering_nodes: dict[int, torch.Tensor] = {}
        made_by: dict[str, Any] = {"input": taken, "result": results, "view": views, "ordering": ordering_nodes}
        made_by["wrapper"] = wrappers

        def at(place: Place) -> Any:
            return made_by[place[0]][place[1]]

        def grad_input(place: Place) -> Any:
            return entering[place[1]] if place[0] == "input" and place[1] in entering else at(place)

        def make_ordering_nodes(before: Point) -> None:
            for i in self.ordering_nodes.get(before, ()):
                ordering_nodes[i] = _ordering_node(grad_input(graph.ordering_nodes[i][0]))

        customs = dict(graph.customs)
        nodes: list[tuple[_Backward, Any]] = []

        def viewed(view: IntermediateView | CustomView) -> torch.Tensor:
            numbers, chain = tuple(results[j] for j in view.numbers), view.chain
            assert chain is not None, "a replayed view has a chain"
            base = at(view.base)
            how = (chain.ops, chain.grad, numbers, chain.version, chain.unrelated, chain.creation)
            return replay(base, *how, chain.regenerates_grad_fn)

        def make_views(stage: int) -> None:
            for i, view in enumerate(graph.views):
                if graph.ready[i] == stage:
                    make_ordering_nodes(("view", i))
                    if view.position is None:
                        views[i] = graph.seen.note(("view", i), viewed(view))
                    else:
                        views[i] = taken[view.position]
                        views[i].grad_fn  # noqa: B018  created now, for the accumulation order

        final = [(place, at(place)._version + count) for place, count in graph.metadata_mutated]

        def apply(part: _Backward | NativeFunction) -> Any:
            if isinstance(part, NativeFunction):
                return part.apply(grad_input, at)
            before_write = [(at(place), version, at(place)._version) for place, version in final]
            for tensor, version, _ in before_write:
                compat.set_version(tensor, version)
            made = _CapturedPart.apply(part, held, results, *map(grad_input, part.stage.grad_inputs))
            watched = [(place, version) for place, version in part.stage.watched if place[0] == "wrapper"]
            for_check = [(weakref.ref(at(place)), at(place)._version + version) for place, version in watched]
            if part.stage.watched:
                made[0].grad_fn.watched = for_check
                nodes.append((part, made[0].grad_fn))
            for tensor, _, version in before_write:
                compat.set_version(tensor, version)
            return made

        for i in graph.begins:
            taken[i].requires_grad_()
        with torch.enable_grad():  # what autograd did not record in the step is not in the backward
            for number, part in enumerate(self.parts):
                make_views(number)
                make_ordering_nodes(("stage", number))
                for i, tensor in zip(part.results, apply(part), strict=True):
                    results[i] = _updated(taken[given[i]], tensor) if i in given else tensor
                    if i in customs:
                        results[i] = custom_view(customs[i].name)(tensor, partial(viewed, customs[i]))
                for i, add_node in self.own_nodes.get(number, ()):
                    add_node(results[i])
            make_views(len(self.parts))
        for part, node in nodes:
            shells = ((results[i], version) for (kind, i), version in part.stage.watched if kind == "result")
            node.watched += [(weakref.ref(shell), version) for shell, version in shells]
        graph.shells[0].now = results[first_shell:]
        return [*results[: graph.outputs], *(views[i] for i in reversed(range(len(graph.views))))]

    def _as_given(self, taken: list[Any]) -> tuple[dict[int, torch.Tensor], list[Any]]:
        """Returns inputs that get a new history in the step: aliases with the current history, and detached ones to
        save."""
        changed = self.graph.gets_new_grad_fn
        entered: set[Place] = {place for part in self.parts for place in part.targets}
        entered |= {place for place, _ in self.graph.ordering_nodes}
        entering = {i: _before(taken[i]) for i in changed if ("input", i) in entered and taken[i].requires_grad}
        held = list(taken)
        for i in changed:
            held[i] = taken[i].detach()
            self.graph.seen.note(("input", i), taken[i])
        return entering, held


def _updated(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns the tensor with the history of its new value."""
    counted = tensor._version
    if tensor.requires_grad and not tensor.is_leaf and not tensor._is_view() and not tensor.retains_grad:
        tensor.detach_()  # its old value is an input of the captured part, if needed
    _Update.apply(tensor, value)
    compat.set_version(tensor, counted)  # the write has been counted
    return tensor


class _Layout:
    """Layout of a tangent: the backward was compiled for the layout of the output."""

    def __init__(self, size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> None:
        self.size, self.stride, self.dtype, self.device = size, stride, dtype, device

    @classmethod
    def of(cls, output: torch.Tensor) -> _Layout:
        return cls(output.size(), output.stride(), output.dtype, output.device)

    def fit(self, tangent: torch.Tensor | None, fixed: bool) -> torch.Tensor:
        """Returns the tangent, in that layout if ``fixed``, without conjugate and negative bits; zeros for ``None``."""
        if tangent is not None and (tangent.is_conj() or tangent.is_neg()):
            tangent = tangent.resolve_conj().resolve_neg()
        if tangent is not None and (not fixed or tangent.stride() == self.stride or tangent.numel() == 0):
            return tangent
        made = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
        return made.zero_() if tangent is None else made.copy_(tangent)


def _laid(layout: WrapperLayout) -> tuple[Any, ...]:
    size, stride, _, dtype, device = layout.layout
    return size, stride, dtype, device


def join(
    graph: JointGraph,
    forward: Executable,
    backwards: list[Executable],
    casting: Sequence[Callable[[list[Any]], Any] | None],
) -> Executable:
    """Returns one executable of forward and backward."""
    joined = Joined(graph, forward, backwards, casting)
    sources, seconds = dict(forward.sources), dict(forward.seconds)
    for number, backward in enumerate(backwards):
        name = f"backward {number}" if number else "backward"
        sources |= {f"{name} {key}": text for key, text in backward.sources.items()}
        seconds |= {f"{name} {key}": value for key, value in backward.seconds.items()}
    notes = (
        *forward.notes,
        "joined with its backward for autograd outside",
        *(note for backward in backwards for note in backward.notes),
    )
    choices = tuple(choice for each in (forward, *backwards) for choice in each.choices)
    return Executable(joined.run, forward.atomic, sources, seconds, notes, choices)
