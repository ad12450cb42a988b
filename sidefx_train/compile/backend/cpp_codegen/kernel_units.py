"""Groups Inductor's kernels to compilation units: as they are written, and all in the end."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend.cpp_codegen.compile_queue import CompileQueue, Unit
from sidefx_train.compile.backend.cpp_codegen.kernel_prelude import header_free_header, header_free_kernels

LARGEST_PART = 12_000
"""Characters of kernels below which splitting costs more than it saves: each unit reads the headers again."""

_PIECE = re.compile(rf"(?m)^(?=[ \t]*#include <{re.escape(compat.KERNEL_HEADER)}>)")


class Kernels:
    """Compiles kernels while others are still being written.

    Only header-free ones are compiled before all are known: torch's header takes longer to read than kernels to
    compile, and each unit reads it again.

    Args:
        queue: the compile queue.
        command: the compiler and its flags.
        header_free: whether kernels may be header-free.
    """

    def __init__(self, queue: CompileQueue, command: Sequence[str], header_free: bool) -> None:
        self._queue = queue
        self._command = tuple(command)
        found = re.search(r"-D ?(CPU_CAPABILITY_\w+)", " ".join(command))
        self._header = header_free_header(found[1] if found is not None else "") if header_free else None
        self._texts: dict[str, str | None] = {}
        self._waiting: list[str] = []
        self._units: dict[Unit, list[str]] = {}

    def add(self, kernel: str) -> None:
        """Adds a kernel with the include of its header; repeated ones once."""
        piece = kernel.strip()
        if not _PIECE.match(piece) or piece in self._texts or self._header_free(piece) is None:
            return
        self._waiting.append(piece)
        if sum(map(len, self._waiting)) >= LARGEST_PART and self._queue.idle:
            unit = self._unit(self._waiting)
            self._units[unit], self._waiting = self._waiting, []
            self._queue.compile(unit)

    def units(self, kernels: str) -> list[Unit]:
        """Returns units of all kernels, including those being compiled.

        Args:
            kernels: source of all kernels, each after the include of its header.
        """
        shared, *pieces = _PIECE.split(kernels)
        if shared.strip() or not pieces:  # code that all of them may need
            return [self._plain(kernels)] if kernels.strip() else []
        left = dict.fromkeys(piece.strip() for piece in pieces)
        begun = [piece for unit in self._units.values() for piece in unit]
        if not left.keys() >= set(begun):  # one was changed since
            self._queue.close()
            self._units.clear()
        for piece in begun if self._units else ():
            del left[piece]
        header_free = [piece for piece in left if self._header_free(piece) is not None]
        others = [piece for piece in left if self._header_free(piece) is None]
        units = [*self._units, *map(self._unit, _parts(header_free))]
        return units + [self._plain("".join(f"{piece}\n" for piece in part)) for part in _parts(others)]

    def _header_free(self, piece: str) -> str | None:
        if piece not in self._texts:
            self._texts[piece] = header_free_kernels(f"{piece}\n") if self._header is not None else None
        return self._texts[piece]

    def _unit(self, pieces: Sequence[str]) -> Unit:
        assert self._header is not None, "there is nothing in place of torch's header"
        command = tuple("-O2" if word == "-O3" else word for word in self._command)
        return Unit(self._header + "".join(self._texts[piece] or "" for piece in pieces), command, header_free=True)

    def _plain(self, text: str) -> Unit:
        return Unit(text, self._command, compat.KERNEL_HEADER)


def _parts(pieces: Sequence[str]) -> list[list[str]]:
    """Splits kernels to parts of equal size, one per processor: together they take longer than the wrapper."""
    if not pieces:
        return []
    count = max(1, min(os.cpu_count() or 1, len(pieces), sum(map(len, pieces)) // LARGEST_PART))
    parts: list[list[str]] = [[] for _ in range(count)]
    for piece in sorted(pieces, key=len, reverse=True):
        min(parts, key=lambda part: sum(map(len, part))).append(piece)
    return parts
