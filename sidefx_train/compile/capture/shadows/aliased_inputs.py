"""Inputs that the step finds in several places and only reads: each place is an input of its own.

The observation after a step is the one before the next, so a batch of transitions may hold one tensor twice, at other
places in every call. Each such pattern would be a capture.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.guard import Guard
from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.capture.shadows.records import Record, TensorRecord
from sidefx_train.compile.common.plain_values import is_named_tuple, make_tuple
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI


class AliasedInputs:
    """The inputs of one capture that count as several."""

    def __init__(self, heap: ShadowTableAPI) -> None:
        self._heap = heap
        self._copies: dict[int, Any] = {}
        """By place, what the capture has there instead of the object that it knows from another place."""
        self._known: dict[int, Record] = {}
        """Records of the objects that they are copies of."""
        self._free: set[int] = set()

    def copy(self, record: Record, source: Source) -> Any:
        """Returns another object for a place where a known tensor or tuple is found again; :data:`ABSENT` for one that
        must be the same there."""
        if not self._heap.specialization.separates_aliases:
            return ABSENT
        made = self._copies.get(id(source), ABSENT)
        if made is ABSENT and self._may_differ(record):
            real = record.real
            is_tensor = safe_isinstance(real, torch.Tensor)
            made = _of_tensor(real) if is_tensor else make_tuple(type(real), tuple.__iter__(real))
            self._copies[id(source)] = made
            self._known[id(record)] = record
        return made

    def _may_differ(self, record: Record) -> bool:
        if safe_isinstance(record, TensorRecord):
            in_tensor = record.source.parent is not None and id(record.source.parent) in self._of_tensors()
            dense = record.real.layout is torch.strided and record.real._base is None
            return _is_readable(record) and dense and not in_tensor
        return type(record.real) is tuple or is_named_tuple(type(record.real))

    def settle(self, changed: set[int]) -> bool:
        """Determines which tensors may be in several places at later calls; returns False if the capture has a copy of
        one that the step does not only read.

        Args:
            changed: ids of the sources of all objects, and of all tensors, that the step changes.
        """
        if not self._heap.specialization.separates_aliases:
            return True
        compared = self._compared()
        copies = [self._heap.by_real[id(copy)] for copy in self._copies.values() if id(copy) in self._heap.by_real]
        known = (*copies, *self._known.values())
        if any(not self._only_reads(record, changed) or id(record.base) in compared for record in known):
            return False
        tensors = [each for each in self._heap.by_real.values() if safe_isinstance(each, TensorRecord)]
        within = self._of_tensors()
        free = tuple(r.source for r in tensors if self._only_reads(r, changed) and id(r.source.parent) not in within)
        kept = tuple(each.source for each in tensors if id(each.source) in changed or each.instance is not None)
        self._free = set(map(id, free))
        if free and kept:
            self._heap.guard("disjoint_sets", kept[0], (kept, free))
        return True

    def marked(self, guards: list[Guard]) -> list[Guard]:
        """Returns guards that accept such tensors in several places."""
        if not self._free:
            return guards
        return [
            replace(guard, value=replace(guard.value, may_repeat=True))
            if guard.kind == "tensor" and id(guard.source) in self._free
            else guard
            for guard in guards
        ]

    def _only_reads(self, record: Record, changed: set[int]) -> bool:
        """Returns True if the step only reads an object: ``changed`` as of :meth:`settle`."""
        if safe_isinstance(record, TensorRecord) and (not _is_readable(record) or record.shadow.requires_grad):
            return False
        if any(offsets is record.shadow for offsets in self._heap.ragged.values()):
            return False
        return id(record.source) not in changed and record.instance is None

    def _of_tensors(self) -> set[int]:
        """Returns ids of the sources of all tensors. What is below one is a part of it: jagged tensors have equal sizes
        if their offsets are one tensor."""
        return {id(each.source) for each in self._heap.by_real.values() if safe_isinstance(each.real, torch.Tensor)}

    def _compared(self) -> set[int]:
        """Returns ids of the sources of objects that the step compares by identity."""
        found: set[int] = set()
        for guard in (*self._heap.guards.values(), *self._heap.identities.separated()):
            if guard.kind in ("all_distinct", "same"):
                found |= {id(guard.source), *map(id, guard.value if guard.kind == "all_distinct" else (guard.value,))}
            elif guard.kind == "is":
                found.add(id(guard.source))
        return found


def _is_readable(record: TensorRecord) -> bool:
    """Returns True for a tensor that is fetched at every call, and has no part in the backward."""
    real = record.real
    plain = type(real) is torch.Tensor and not real.requires_grad and not real.is_inference()
    return plain and record.kind == "tensor" and not real.is_conj() and not real.is_neg()


def _of_tensor(real: torch.Tensor) -> torch.Tensor:
    """Returns a tensor like another, in memory of its own."""
    with compat.real_world(), torch.no_grad():
        made = torch.empty(0, dtype=real.dtype, device=real.device)
        return made.set_(real.untyped_storage().clone(), real.storage_offset(), real.size(), real.stride())
