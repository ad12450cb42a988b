"""References to the program's tensors that a backward saved: their metadata may be mutated in place later."""

from __future__ import annotations

import weakref
from typing import Literal

import torch

Shown = tuple[Literal["input", "view", "made"], int]
"""An input of the captured part, a view that the part makes, or one that the generated code makes."""


class Reference(weakref.ref[torch.Tensor]):
    """A weak reference of its own class, which does not count as an observer of finalization."""


class Seen:
    """Tensors of the latest call.

    Attributes:
        now: those tensors; each call has its own mapping, which its backward keeps.
    """

    def __init__(self) -> None:
        self.now: dict[Shown, Reference] = {}

    def begin(self) -> None:
        """Begins another call."""
        self.now = {}

    def note(self, place: Shown, tensor: torch.Tensor) -> torch.Tensor:
        """Records and returns a tensor."""
        self.now[place] = Reference(tensor)
        return tensor

    def made(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """Records and returns a view made by generated code."""
        return self.note(("made", number), tensor)
