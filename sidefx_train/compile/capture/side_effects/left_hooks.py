"""Hooks on tensors that a step registers and leaves: the epilogue registers them on the real tensors.

A hook on a tensor from outside runs in any later backward. A hook on a tensor of the step runs in a backward outside:
it is recorded with that backward or, if it has side effects or reads what may change until then, registered natively.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.shadows.deferred_values import DeferredCall, DeferredResult
from sidefx_train.compile.capture.shadows.records import LeafRecord, TensorRecord
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.graph.view_chains import gradient_edges_behind

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.capture_context import CaptureContext
    from sidefx_train.errors import Location


_REGISTER = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)


@dataclass
class _Watched:
    """A tensor on which the step registers hooks.

    Attributes:
        tensor: the tensor of the trace.
        node: its autograd node at the first registration.
        location: where that is.
    """

    tensor: torch.Tensor
    node: Any
    location: Location | None


class LeftHooks:
    """Hooks that the step has registered on tensors.

    Attributes:
        handles: handles of hooks that the epilogue registers, by number.
        wants_native: a handle of a hook in the backward leaves the step, so that hook must be registered natively.
    """

    def __init__(self, world: CaptureContext) -> None:
        self._world = world
        self._watched: list[_Watched] = []
        self.handles: dict[int, DeferredResult] = {}
        self.wants_native = False

    def note(self, tensor: torch.Tensor) -> None:
        """Records that a hook is registered on a tensor."""
        if not any(each.tensor is tensor for each in self._watched):
            self._watched.append(_Watched(tensor, tensor.grad_fn, self._world.locate()))

    def known(self, tensor: torch.Tensor) -> bool:
        """Returns True if the step has registered hooks on a tensor from outside through its methods."""
        return any(each.tensor is tensor for each in self._watched)

    def of_inputs(self) -> list[DeferredCall]:
        """Returns the calls that register hooks on leaves from outside."""
        return self._calls([each for each in self._watched if self._leaf(each.tensor) is not None])

    def of_step(self, results: Iterable[torch.Tensor]) -> list[DeferredCall]:
        """Returns the calls that register hooks on tensors of the step from which ``results`` were computed."""
        results = tuple(results)
        reached = {result.grad_fn for result in results} | {node for node, _ in gradient_edges_behind(*results)}
        inside = [each for each in self._watched if each.node is not None and self._leaf(each.tensor) is None]
        found = [each for each in inside if each.node in reached and any(compat.hook_numbers(each.tensor))]
        for each in found:
            if each.tensor.grad_fn is not each.node:
                self._world.heap.refuse("SFX107", "a hook is registered on a tensor that is changed in place later")
        return self._calls(found)

    def on_step(self) -> list[torch.Tensor]:
        """Returns the tensors of the step that have hooks."""
        return [each.tensor for each in self._watched if each.node is not None]

    def is_registered(self, number: int) -> bool:
        """Returns True if a hook with this number is on a tensor of the step."""
        return any(number in numbers for each in self._watched for numbers in compat.hook_numbers(each.tensor))

    def _leaf(self, tensor: torch.Tensor) -> TensorRecord | LeafRecord | None:
        record = self._world.heap.record_of(tensor)
        if safe_isinstance(record, (TensorRecord, LeafRecord)) and tensor.grad_fn is None:
            return record
        return None

    def _calls(self, watched: list[_Watched]) -> list[DeferredCall]:
        found: list[tuple[int, DeferredCall]] = []
        for each in watched:
            record = self._leaf(each.tensor)
            before = ((), ()) if record is None or record.hooks is None else record.hooks
            for register, hooks, earlier in zip(_REGISTER, compat.hooks_of(each.tensor), before, strict=True):
                for number, hook in (hooks or {}).items():
                    if number not in earlier:
                        result = self.handles.setdefault(number, DeferredResult())
                        call = DeferredCall(register, (each.tensor, hook), {}, each.location, result=result)
                        found.append((number, call))
        return [call for _, call in sorted(found, key=lambda item: item[0])]


def unregister(world: CaptureContext) -> None:
    """Removes hooks from shadows of leaves whose handle from outside the step has removed."""
    for record in world.heap.by_real.values():
        if safe_isinstance(record, (TensorRecord, LeafRecord)):
            for carried, hooks in zip(record.carried, compat.hooks_of(record.shadow), strict=True):
                for number, (shadow, key) in carried.items():
                    if key not in shadow and hooks is not None:
                        hooks.pop(number, None)


def leaves_unknown(world: Any, record: TensorRecord | LeafRecord) -> bool:
    """Returns True if hooks of a leaf were changed other than by registrations and handles."""
    before, now = record.hooks or ((), ()), compat.hook_numbers(record.shadow)
    for carried, earlier, numbers in zip(record.carried, before, now, strict=True):
        kept = [number for number in earlier if number not in carried or carried[number][1] in carried[number][0]]
        if list(numbers[: len(kept)]) != kept:
            return True
        if len(numbers) > len(kept) and not world.left_hooks.known(record.shadow):
            return True
    return False
