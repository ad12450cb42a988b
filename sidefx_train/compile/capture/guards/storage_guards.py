"""Memory of the tensors that an entry holds: which of them share it, and where it lies.

``tensor.data = ...`` gives a tensor other memory and leaves everything else about it as it was. That matters only
where a written tensor comes to share memory with another.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sidefx_train import torch_compat as compat


class StorageSharing:
    """Where held tensors lie; kept up to date while the way they share memory is that of the capture.

    Args:
        tensors: the tensors that the entry holds.
        written: those that the step writes to.

    Attributes:
        tensors: the same.
        every: addresses of their memory now.
        changed: addresses of memory that the step writes to.
    """

    def __init__(self, tensors: Iterable[Any], written: Iterable[Any]) -> None:
        self.tensors = tuple(tensors)
        self._written = frozenset(map(id, written))
        self.every: set[int] = set()
        self.changed: set[int] = set()
        self._shared = self._look()

    def holds(self) -> bool:
        """True if written tensors share memory with those with which they shared it during the capture."""
        return self._groups([compat.storage_address(tensor) for tensor in self.tensors]) == self._shared

    def refresh(self) -> bool:
        """:meth:`holds`, and notes the addresses if so: memory has moved."""
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
        """Tensors, by position, that share memory with one that is written."""
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
