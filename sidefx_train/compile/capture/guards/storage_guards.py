"""Guards on the storages of tensors that an entry holds: which tensors share one, and its address.

``tensor.data = ...`` replaces the storage of a tensor and nothing else. This matters only if a written tensor now
shares storage with another.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sidefx_train import torch_compat as compat


class StorageSharing:
    """Storage addresses of held tensors; updated while storage sharing is that of the capture.

    Args:
        tensors: the tensors that the entry holds.
        written: those that the step writes to.

    Attributes:
        tensors: the same.
        every: current addresses of their storages.
        changed: addresses of the storages that the step writes to.
    """

    def __init__(self, tensors: Iterable[Any], written: Iterable[Any]) -> None:
        self.tensors = tuple(tensors)
        self._written = frozenset(map(id, written))
        self.every: set[int] = set()
        self.changed: set[int] = set()
        self._shared = self._look()

    def holds(self) -> bool:
        """Returns True if written tensors share storage with the same tensors as during the capture."""
        return self._groups([compat.storage_address(tensor) for tensor in self.tensors]) == self._shared

    def refresh(self) -> bool:
        """Returns the result of :meth:`holds` after storages were replaced; updates the addresses if it is true."""
        if not self.holds():
            return False
        self._look()
        return True

    def _look(self) -> frozenset[frozenset[int]]:
        places = [compat.storage_address(tensor) for tensor in self.tensors]
        for known in (self.every, self.changed):
            known.clear()
        self.every.update(places)
        self.changed.update(p for t, p in zip(self.tensors, places, strict=True) if id(t) in self._written)
        for known in (self.every, self.changed):
            known.discard(0)
        return self._groups(places)

    def _groups(self, places: list[int]) -> frozenset[frozenset[int]]:
        """Returns groups of tensor positions that share storage with a written tensor."""
        at: dict[int, list[int]] = {}
        for index, place in enumerate(places):
            if place:
                at.setdefault(place, []).append(index)
        return frozenset(
            frozenset(group)
            for group in at.values()
            if len(group) > 1 and any(id(self.tensors[index]) in self._written for index in group)
        )

    def __str__(self) -> str:
        return f"{len(self.tensors)} tensors that the step holds"
