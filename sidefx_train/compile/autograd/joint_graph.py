"""Joint graph of a captured part whose results need autograd outside: a forward, and its backward in stages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from sidefx_train.compile.autograd.accumulation_order import Point
from sidefx_train.compile.autograd.node_tape import Tape
from sidefx_train.compile.autograd.saved_tensor_errors import Saved, SavedCheck
from sidefx_train.compile.graph.artifacts import TracedGraph
from sidefx_train.compile.residual.native_functions import NativeFunction, Place
from sidefx_train.compile.residual.saved_tensor_refs import Seen
from sidefx_train.compile.residual.view_replay import CustomView, IntermediateView
from sidefx_train.compile.residual.wrapper_outputs import Shells, WrapperLayout

Origin = tuple[Literal["input", "result", "tangent"], int]


@dataclass(frozen=True)
class Stage:
    """Backward of some results: one node in the outside autograd graph.

    Attributes:
        backward: graph whose inputs are saved values and tangents, and whose results are gradients.
        results: positions of the differentiated results among the results of the forward; one tangent each.
        feeds: source of each input of the backward.
        grad_inputs: gradient inputs, the targets of the gradients, one per result of the backward: inputs, results of
            earlier stages, views, ordering nodes.
        depends: for each of them, the tangents that its gradient depends on.
        saved: eager's error texts for changed inputs of the backward, without tangents.
        saved_checks: which of them eager checks between a tangent and a gradient.
        any_layout: tangents keep their layout: eager's sums run over their elements in memory order.
        tangent_layouts: for each result how its tangent consists of inputs of the backward; ``None`` for plain tensors.
        grad_layouts: for each gradient how it consists of results of the backward; ``None`` for plain tensors.
        shared: results of the backward whose memory a tangent, a saved tensor or another gradient has too, and which a
            gradient that is a wrapper holds: autograd cannot see that, and would add to them in place.
        watched: wrapper subclasses whose tensors the backward reads: (where, version), relative to the version at the
            call for those from outside.
        tape: the same backward node by node, for higher-order derivatives.
    """

    backward: TracedGraph
    results: tuple[int, ...]
    feeds: tuple[Origin, ...]
    grad_inputs: tuple[Place, ...]
    depends: tuple[frozenset[int], ...]
    saved: tuple[Saved, ...]
    saved_checks: tuple[SavedCheck, ...]
    any_layout: bool
    tangent_layouts: tuple[WrapperLayout | None, ...]
    grad_layouts: tuple[WrapperLayout | None, ...]
    shared: frozenset[int]
    watched: tuple[tuple[Place, int], ...]
    tape: Tape


@dataclass(frozen=True)
class JointGraph:
    """Forward and backward of a capture.

    If a differentiable output was computed from another, the backward is split there: the gradient between the two
    stages passes through the outside engine, which runs hooks and ``retain_grad`` of the inner output.

    Attributes:
        forward: its results are the step's outputs, then the values other than inputs that the backward needs.
        stages: the backward, in forward order: compiled ones, and custom functions whose own backward runs natively.
        outputs: number of results of the forward that are the step's.
        aliases: (result, output) of results that share storage with an output: detached ones, or saved values.
        own_counters: results after the outputs with version counters of their own, though their storage is known
            outside.
        counted: (result, input, is it the input itself) of results whose storage replaces an input's, with the input's
            version counter.
        begins: inputs that begin to require gradients.
        updates: (result, input) of new values of inputs, in the input's storage.
        gets_new_grad_fn: inputs that get a new history or layout: their old history enters through a node created
            before.
        customs: (result, view) of views of inputs that custom autograd functions made.
        views: views that leave the step and that the backward passes through, made between the stages.
        ready: for each of them, the stage before which it is made.
        ordering_nodes: (target of the gradient, stage or view right before which it is created), in order: nodes for
            gradients that the engine would otherwise add too early.
        metadata_mutated: (input or result, count): version counters that replaying the views will increment, as
            ``squeeze_`` does; the backward saves tensors with the version after that.
        hidden: shape, dtype and device of intermediates at which the backward is split: results after all those that
            the forward returns.
        own_nodes: (result, stage after which it is created, name), in order: nodes of one result each, on which hooks
            are called as in eager.
        shells: results that are wrapper subclasses, with their layouts: after the hidden ones.
        seen: the program's tensors that the backward saves.
    """

    forward: TracedGraph
    stages: tuple[Stage | NativeFunction, ...]
    outputs: int
    aliases: tuple[tuple[int, int], ...]
    own_counters: tuple[int, ...]
    counted: tuple[tuple[int, int, bool], ...]
    begins: tuple[int, ...]
    updates: tuple[tuple[int, int], ...]
    gets_new_grad_fn: tuple[int, ...]
    customs: tuple[tuple[int, CustomView], ...]
    views: tuple[IntermediateView, ...]
    ready: tuple[int, ...]
    ordering_nodes: tuple[tuple[Place, Point], ...]
    metadata_mutated: tuple[tuple[Place, int], ...]
    hidden: tuple[tuple[tuple[int, ...], torch.dtype, torch.device], ...]
    own_nodes: tuple[tuple[int, int, str], ...]
    shells: tuple[Shells, tuple[WrapperLayout, ...]]
    seen: Seen

    @property
    def graphs(self) -> tuple[TracedGraph, ...]:
        """Returns all graphs to compile, the forward first."""
        return (self.forward, *(stage.backward for stage in self.compiled))

    @property
    def compiled(self) -> tuple[Stage, ...]:
        """Returns the stages that are compiled."""
        return tuple(stage for stage in self.stages if isinstance(stage, Stage))

    def without_trace(self) -> JointGraph:
        """Returns what a call needs: the tensors of the trace keep their autograd graph."""
        customs = tuple((i, view.without_trace()) for i, view in self.customs)
        return replace(self, customs=customs, views=tuple(view.without_trace() for view in self.views))
