"""Which tensors of the program are what a backward has saved: they may be turned in place after that."""

from __future__ import annotations

import weakref
from typing import Literal

import torch

Shown = tuple[Literal["input", "view", "made"], int]
"""An input of the captured part, a view that it makes, or one that the generated code makes."""


class Reference(weakref.ref[torch.Tensor]):
    """Not one of the program's, which would tell that it misses the tensor."""


class Seen:
    """Tensors of the latest call.

    Attributes:
        now: those tensors; each call has a mapping of its own, which its backward keeps.
    """

    def __init__(self) -> None:
        self.now: dict[Shown, Reference] = {}

    def begin(self) -> None:
        """Another call."""
        self.now = {}

    def note(self, place: Shown, tensor: torch.Tensor) -> torch.Tensor:
        """Notes a tensor, and gives it back."""
        self.now[place] = Reference(tensor)
        return tensor

    def made(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """Notes what generated code has made."""
        return self.note(("made", number), tensor)
