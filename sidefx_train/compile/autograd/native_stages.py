"""Stages of a backward that run natively: custom functions with effects, of whose backward nothing is recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from sidefx_train.compile.capture.shadows.records import TensorRecord
from sidefx_train.compile.residual.native_functions import Like, NativeFunction, Place, PlannedFunction

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


@dataclass(frozen=True)
class RecordedNative:
    """A custom function whose own backward runs natively: nothing is recorded of it.

    Attributes:
        results: its outputs that are results.
        tangents: inputs of the backward, one for each.
        function: the call.
    """

    results: tuple[Place, ...]
    tangents: tuple[torch.Tensor, ...]
    function: NativeFunction


def record_native(
    world: TraceWorld,
    plan: PlannedFunction,
    results: tuple[Place, ...],
    tangents: Mapping[Place, torch.Tensor],
    edges: Mapping[Place, tuple[Any, int]],
    values: Mapping[Place, Any],
) -> RecordedNative:
    """Finds out where the tensors are that a custom function gets, returns and saves.

    Args:
        world: the capture, still recording.
        plan: the call, and the positions of its results.
        results: its results, in the order in which the backward gets their gradients.
        tangents: inputs of the backward.
        edges: gradient edge of each location.
        values: the results and views of the step, and what several stages share.

    Raises:
        Unsupported: a tensor is nowhere when the backward runs.
    """
    call, positions = plan.call, dict(plan.results)
    places = {id(value): place for place, value in values.items() if place[0] != "hidden"}

    def refuse(what: str) -> NoReturn:
        reason = f"{call.cls.__name__}, whose backward must run natively outside of the step, {what}"
        world.heap.refuse("SFX107", reason)

    def output_of(i: int, output: Any) -> int | tuple[int, int] | Like | None:
        if not isinstance(output, torch.Tensor):
            return None
        if i in positions:
            given = call.returned_input(output)
            return positions[i] if given is None else (positions[i], given)
        if not all(isinstance(size, int) for size in output.shape):
            refuse("has an unused output of a changing size")
        return Like(tuple(output.shape), output.dtype, output.device, output.grad_fn is call.node)

    def place_of(saved: Any, position: int | None) -> Place | None:
        if not isinstance(saved, torch.Tensor):
            return None
        if any(saved is each for each in call.outputs) and call.returned_input(saved) is not None:
            refuse("saves an output that is its argument")
        if id(saved) in places:
            return places[id(saved)]
        record = world.heap.record_of(saved)
        if isinstance(record, TensorRecord):
            return "input", next(i for i, real in enumerate(world.tracer.real_inputs) if real is record.real)
        if position is None:
            refuse("saves a tensor that is neither its argument nor its output")
        return "result", position

    place_at = {edge: place for place, edge in edges.items()}
    following = iter(call.node.next_functions)
    args: list[Place | bool] = []
    for arg in call.args:
        if not isinstance(arg, torch.Tensor):
            args.append(False)
            continue
        edge = next(following)
        if edge[0] is not None and edge not in place_at:
            refuse("gets a tensor that is changed later")
        args.append(True if edge[0] is None else place_at[edge])
    outputs = tuple(output_of(i, output) for i, output in enumerate(call.outputs))
    saved = tuple(place_of(*each) for each in zip(call.context.saved, plan.values, strict=True))
    if {place for place in results if place[0] == "result"} != {("result", i) for i in positions.values()}:
        refuse("has outputs that are used in another order")
    function = NativeFunction(call.cls, tuple(args), outputs, call.single, saved, call.context.materializes)
    return RecordedNative(results, tuple(tangents[place] for place in results), function)
