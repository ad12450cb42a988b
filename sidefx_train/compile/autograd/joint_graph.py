"""A captured part whose results still need autograd outside: a forward, and its backward in stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from sidefx_train.compile.autograd.accumulation_order import Place, Point
from sidefx_train.compile.autograd.node_tape import Tape
from sidefx_train.compile.autograd.saved_tensor_errors import Saved, SavedCheck
from sidefx_train.compile.graph.artifacts import TracedGraph
from sidefx_train.compile.residual.saved_tensor_refs import Seen
from sidefx_train.compile.residual.view_replay import CustomView, IntermediateView

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
        saved: what eager says of the inputs of the backward, tangents apart, where they were changed.
        saved_checks: which of them eager looks at on the way from a tangent to a gradient.
        any_layout: tangents are taken as they come: eager adds up their elements in the order of their memory.
        tape: the same backward node by node, for derivatives of a higher order.
    """

    backward: TracedGraph
    results: tuple[int, ...]
    feeds: tuple[Origin, ...]
    grad_inputs: tuple[Place, ...]
    depends: tuple[frozenset[int], ...]
    saved: tuple[Saved, ...]
    saved_checks: tuple[SavedCheck, ...]
    any_layout: bool
    tape: Tape


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
        begins: inputs that begin to require gradients.
        updates: (result, input) of what is the new value of an input, in its memory.
        renewed: inputs that get another history or another layout: what they were enters by a node made before.
        customs: (result, how it is made) of views of inputs that custom autograd functions made.
        views: views that leave and that the backward passes through, made between the stages.
        ready: for each of them, the stage before which it is made.
        detours: (what gets the gradient, made right before which stage or view), in order: nodes that hand gradients on
            which the engine would add too early if they came from their stage.
        turned: (input or result, how often): version counters that the views will move, as ``squeeze_`` does; what the
            backward needs is saved as of after that.
        hidden: shape, type and device of values that do not leave, at which the backward is cut: results behind all
            that the forward returns.
        seen: which tensors of the program are what the backward saves.
    """

    forward: TracedGraph
    stages: tuple[Stage, ...]
    outputs: int
    aliases: tuple[tuple[int, int], ...]
    apart: tuple[int, ...]
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
    seen: Seen

    @property
    def graphs(self) -> tuple[TracedGraph, ...]:
        """All that has to be compiled, the forward first."""
        return (self.forward, *(stage.backward for stage in self.stages))
