"""Kernels that Inductor writes, as units for the compiler: as they come, and all that there are."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend.cpp_codegen.compile_queue import Unit, Workshop
from sidefx_train.compile.backend.cpp_codegen.kernel_prelude import lean_header, lean_kernels

LARGEST_PART = 12_000
"""Characters of kernels below which splitting costs more than it saves: each part reads the headers again."""

_PIECE = re.compile(rf"(?m)^(?=[ \t]*#include <{re.escape(compat.KERNEL_HEADER)}>)")


class Kernels:
    """Gives kernels to the compiler while further ones are being written.

    Only those that do without torch's header are compiled before all are known: it takes longer to read than they take
    to compile, and each unit reads it again.

    Args:
        workshop: what compiles them.
        command: the compiler's words.
        lean: whether any may do without torch's header.
    """

    def __init__(self, workshop: Workshop, command: Sequence[str], lean: bool) -> None:
        self._workshop = workshop
        self._command = tuple(command)
        found = re.search(r"-D ?(CPU_CAPABILITY_\w+)", " ".join(command))
        self._header = lean_header(found[1] if found is not None else "") if lean else None
        self._texts: dict[str, str | None] = {}
        self._waiting: list[str] = []
        self._units: dict[Unit, list[str]] = {}

    def add(self, kernel: str) -> None:
        """Takes in a kernel with the include of its header; one that comes again is known."""
        piece = kernel.strip()
        if not _PIECE.match(piece) or piece in self._texts or self._lean(piece) is None:
            return
        self._waiting.append(piece)
        if sum(map(len, self._waiting)) >= LARGEST_PART and self._workshop.idle:
            unit = self._unit(self._waiting)
            self._units[unit], self._waiting = self._waiting, []
            self._workshop.compile(unit)

    def units(self, kernels: str) -> list[Unit]:
        """Units of all kernels, among them those that are being compiled.

        Args:
            kernels: the source of all, each behind the include of its header.
        """
        shared, *pieces = _PIECE.split(kernels)
        if shared.strip() or not pieces:  # something that all of them may need
            return [self._plain(kernels)] if kernels.strip() else []
        left = dict.fromkeys(piece.strip() for piece in pieces)
        begun = [piece for unit in self._units.values() for piece in unit]
        if not left.keys() >= set(begun):  # one has been changed since
            self._workshop.close()
            self._units.clear()
        for piece in begun if self._units else ():
            del left[piece]
        lean = [piece for piece in left if self._lean(piece) is not None]
        others = [piece for piece in left if self._lean(piece) is None]
        units = [*self._units, *map(self._unit, _parts(lean))]
        return units + [self._plain("".join(f"{piece}\n" for piece in part)) for part in _parts(others)]

    def _lean(self, piece: str) -> str | None:
        if piece not in self._texts:
            self._texts[piece] = lean_kernels(f"{piece}\n") if self._header is not None else None
        return self._texts[piece]

    def _unit(self, pieces: Sequence[str]) -> Unit:
        assert self._header is not None, "there is nothing in place of torch's header"
        command = tuple("-O2" if word == "-O3" else word for word in self._command)
        return Unit(self._header + "".join(self._texts[piece] or "" for piece in pieces), command, lean=True)

    def _plain(self, text: str) -> Unit:
        return Unit(text, self._command, compat.KERNEL_HEADER)


def _parts(pieces: Sequence[str]) -> list[list[str]]:
    """Kernels in parts of about equal size, one per processor: together they take longer than the caller."""
    if not pieces:
        return []
    count = max(1, min(os.cpu_count() or 1, len(pieces), sum(map(len, pieces)) // LARGEST_PART))
    parts: list[list[str]] = [[] for _ in range(count)]
    for piece in sorted(pieces, key=len, reverse=True):
        min(parts, key=lambda part: sum(map(len, part))).append(piece)
    return parts
