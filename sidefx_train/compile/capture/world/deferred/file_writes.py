"""Text that a step writes to open files from outside, in pieces, lines or rows of csv: after the graph, in order."""

from __future__ import annotations

import csv
import gc
import io
import types
from typing import Any

import torch

from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.capture.world.deferred.argument_snapshot import deferred_string
from sidefx_train.compile.capture.world.deferred.deferral import own_stream
from sidefx_train.compile.capture.world.interfaces import CaptureWorldAPI
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import descriptor_of, safe_isinstance

_WRITE: dict[type, Any] = {io.TextIOWrapper: io.TextIOWrapper.write, io.StringIO: io.StringIO.write}
_FLUSHES = (io.TextIOWrapper.flush, io.StringIO.flush)
_LINES: Any = vars(io._io._IOBase)["writelines"]  # type: ignore[attr-defined]
_ENCODE_ALL = ("utf-8", "utf-16", "utf-32")
_ROWS: Any = type(csv.writer(io.StringIO()))
_NUMBERS = frozenset({int, float, bool, type(None), torch.SymInt, torch.SymFloat})


class FileWrites:
    """Defers ``write``, ``writelines`` and ``flush`` of an open text file, and ``writerow`` of a writer of csv; what
    else the step does with a file is a break."""

    def __init__(self, world: CaptureWorldAPI) -> None:
        self.world, self.heap = world, world.heap

    def call(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of a call; :data:`ABSENT` for one that is none of these, or may raise."""
        owner = fn.__self__ if type(fn) is types.BuiltinMethodType else None
        if kwargs or self.heap.record_of(owner) is None:
            return ABSENT
        if type(owner) is _ROWS:
            return self._write_row(fn, owner, args)
        method = descriptor_of(fn) if safe_isinstance(owner, (io.TextIOWrapper, io.StringIO)) else None
        if method in _FLUSHES:
            pieces: Any = [] if not args else ABSENT
        elif method is _LINES and type(owner) in _WRITE and len(args) == 1 and type(args[0]) in (list, tuple):
            self.world.touch(args)
            pieces = list(args[0])
        else:
            pieces = list(args) if method in _WRITE.values() and len(args) == 1 else ABSENT
        if pieces is ABSENT or not all(map(self._is_text, pieces)) or not self._is_open(owner, self._source(owner)):
            return ABSENT
        if method in _FLUSHES:
            self.world.defer(method, (owner,), {})
        for piece in pieces:
            self.world.defer(method if method is not _LINES else _WRITE[type(owner)], (owner, piece), {})
        if method in _FLUSHES or method is _LINES:
            return None
        return len(pieces[0]) if type(pieces[0]) is str else deferred_string(self.world, len, (pieces[0],))

    def _write_row(self, fn: Any, writer: Any, args: tuple[Any, ...]) -> Any:
        """Writes a row of numbers and texts; ``DictWriter`` makes it by a generator."""
        record = self.heap.record_of(writer)
        write = next((each for each in gc.get_referents(writer) if type(each) is types.BuiltinMethodType), None)
        quotes = writer.dialect.quoting != csv.QUOTE_NONE and writer.dialect.doublequote
        if write is None or descriptor_of(write) not in _WRITE.values() or not quotes:
            return ABSENT
        if fn.__name__ != "writerow" or len(args) != 1 or record is None or record.base.kind != "const":
            return ABSENT
        if not self._is_dropped():  # what it returns is known when the row is written
            return ABSENT
        file = write.__self__
        if not self._is_open(file, self.heap.sources.const(file, f"the file of {record.base.label}")):
            return ABSENT
        (row,) = args
        if type(row) not in (list, tuple):
            row = list(self.world.interp.iterate(row)) if hasattr(type(row), "__next__") else ABSENT
        self.world.touch((row,))
        if row is ABSENT or not all(type(cell) in _NUMBERS or self._is_text(cell) for cell in row):
            self.heap.refuse("SFX104", f"writes a row of other values than numbers and texts by {record.base.label}")
        self.world.defer(_ROWS.writerow, (writer, row), {})
        return None

    def _is_dropped(self) -> bool:
        """Returns True if the program does not use the result of the running call."""
        frame = self.world.interp.current_frame
        while frame is not None and frame.instructions[frame.pc].name == "RETURN_VALUE":
            frame = frame.back
        return frame is not None and frame.instructions[frame.pc].name == "POP_TOP"

    def _source(self, file: Any) -> Source:
        record = self.heap.record_of(file)
        assert record is not None, "the file comes from outside"
        return record.source

    def _is_open(self, file: Any, source: Source) -> bool:
        """Returns True for an open file that takes any text, which is guarded."""
        if not _takes_text(file):
            return False
        self.heap.guard("is", self.heap.sources.slot(source, "closed"), False)
        return True

    def _is_text(self, value: Any) -> bool:
        if type(value) is str:
            return value.isascii() or not any(
                "\ud800" <= letter <= "\udfff" for letter in value
            )  # no encoding has those
        return bool(self.world.interp.type_of(value) is str)


def _takes_text(file: Any) -> bool:
    """Returns True for an open file that takes any text; the program's own code below it may read what a step
    changes."""
    encodes = file.encoding is None or file.encoding.lower() in _ENCODE_ALL
    return not file.closed and file.writable() and encodes and own_stream(file) is None
