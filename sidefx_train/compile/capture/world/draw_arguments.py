"""Arguments of the calls that the prologue of a step makes early: draws of random numbers, and what they lead to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.source import can_fetch
from sidefx_train.compile.capture.shadows.containers.lists_and_dicts import ListRecord
from sidefx_train.compile.capture.shadows.deferred_values import DeferredValue
from sidefx_train.compile.capture.shadows.objects.numpy_arrays import ArrayRecord
from sidefx_train.compile.capture.world.symbolic_numbers.program_writer import ProgramWriter
from sidefx_train.compile.common.draws.draw import Computed, Drawn, Fetched, Joined, joined
from sidefx_train.compile.common.host_programs import HostProgram
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.guards.source import Source
    from sidefx_train.compile.capture.world.interfaces import CaptureWorldAPI

_PLAIN_ARGUMENTS = frozenset({int, float, bool, str, bytes, type(None), range, type(Ellipsis)})
_MOST_ELEMENTS = 256
"""Elements of an array that a draw holds, such as probabilities."""


class Arguments:
    """The arguments of an early call: what stands for them at each call, and their values now.

    Args:
        world: the capturing world.
        is_drawn: returns True for the path of an earlier result.

    Attributes:
        unknown: an argument is not found at each call.
        changes: there are drawn arrays or changing numbers among them.
        arrays: the arrays among them.
    """

    def __init__(self, world: CaptureWorldAPI, is_drawn: Callable[[Source], bool]) -> None:
        self._world = world
        self._is_drawn = is_drawn
        self._values: dict[int, Any] = {}
        self._written: list[Any] = []
        self.arrays: list[ArrayRecord] = []
        self.unknown = self.changes = False

    def read(self, result: Any) -> None:
        """Notes that the arrays were read, but those of which the result is a view: nothing may write to them."""
        for record in self.arrays:
            if type(result) is not np.ndarray or not np.may_share_memory(result, record.current):
                record.read_early = True

    def each(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(map(self._later, args))

    def named(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {name: self._later(value) for name, value in kwargs.items()}

    def now(self, later: Any) -> Any:
        """Returns the values now of what stands for them."""
        if id(later) in self._values:
            return self._values[id(later)]
        kind = type(later)
        if kind is dict:
            return {name: self.now(value) for name, value in later.items()}
        return kind(map(self.now, later)) if kind is tuple or kind is list else later

    def _later(self, value: Any) -> Any:
        if type(value) is torch.Size:
            value = tuple(value)
        kind = type(value)
        if kind in _PLAIN_ARGUMENTS or safe_isinstance(value, (type, np.dtype, np.generic)):
            return value
        if kind is slice:
            bounds = (value.start, value.stop, value.step)
            self.unknown |= not all(bound is None or type(bound) is int for bound in bounds)
            return value
        heap = self._world.heap
        record = heap.record_of(value)
        if safe_isinstance(record, ListRecord) and record.holds_changing_numbers:
            return self._numbers_of(record)
        if kind is tuple or kind is list or kind is deque:
            if record is not None:
                record.fill()
            return (list if kind is deque else kind)(map(self._later, value))
        if kind in (torch.SymInt, torch.SymFloat):
            return self._number(value)
        if kind is np.ndarray and record is None and not value.dtype.hasobject and value.size <= _MOST_ELEMENTS:
            return value.copy()  # the step makes it of constants
        if record is None or not (kind in (np.ndarray, DeferredValue) or record.unshadowed):
            self.unknown = True
            return None
        if safe_isinstance(record, ArrayRecord):
            self.unknown |= record.tensor is not None and bool(self._world.writes.to(record.tensor))
            self.arrays.append(record)
            self.changes |= record.computed
        if self._is_drawn(record.source):
            return self._stands(Drawn(record.source.key), record.real)
        self.unknown |= not can_fetch(record.source) or kind not in (np.ndarray, DeferredValue)
        now = record.current if safe_isinstance(record, ArrayRecord) else record.real
        return self._stands(Fetched(record.source, type(record.real)), now)

    def _numbers_of(self, record: ListRecord) -> Any:
        """Returns what stands for a list of numbers, which is found at each call, whatever numbers it has then."""
        self.unknown |= not can_fetch(record.source)
        self.changes = True
        appended = tuple(map(self._later, record.appended))
        now = [self.now(each) for each in appended]
        self.unknown |= not {*map(type, now)} <= {int, float}
        if self.unknown:
            return None
        removed = tuple(edit.place for edit in record.edits)
        held = Fetched(record.source, type(record.real))
        return self._stands(Joined(held, appended, removed), joined(record.real, now, removed))

    def _stands(self, later: Any, now: Any) -> Any:
        self._values[id(later)] = now
        self._written.append(later)  # its id is used
        return later

    def _number(self, value: Any) -> Any:
        tracer = self._world.heap.tracer
        if not tracer.has_node(value) or compat.is_unbacked(value):
            self.unknown = True
            return None
        written = ProgramWriter(self._world).of([tracer.node_of(value)])
        if written is None or not all(map(can_fetch, written.sources)):
            self.unknown = True
            return None
        program = HostProgram(written.sources, tuple(written.steps))
        with compat.real_world():
            values = program(*written.operands)
        if len(values) != 1:
            self.unknown = True
            return None
        now = values[0]
        self.changes = True
        of_numpy = compat.numpy_class(value)
        self.unknown |= of_numpy is not None and type(now) is not of_numpy
        return self._stands(Computed(program, type(now)), now)


def places_of(index: Any, numbers: list[Any]) -> Any:
    """Returns an index as plain values, in which strings stand for its numbers; these are appended in order."""
    if type(index) in (int, torch.SymInt):
        numbers.append(index)
        return "number"
    if type(index) is slice:
        return ("slice", *(places_of(bound, numbers) for bound in (index.start, index.stop, index.step)))
    if type(index) in (tuple, list):
        return (type(index).__name__, *(places_of(each, numbers) for each in index))
    if index is None or index is Ellipsis:
        return index
    numbers.append(index)  # an array, or what no early call takes
    return "number"


def item_at(array: Any, places: Any, *numbers: Any) -> Any:
    """Returns the item of an array at such an index."""
    return array[_index(places, iter(numbers))]


def _index(places: Any, numbers: Iterator[Any]) -> Any:
    if type(places) is not tuple:
        return next(numbers) if places == "number" else places
    kind, *parts = places
    made = [_index(part, numbers) for part in parts]
    return slice(*made) if kind == "slice" else tuple(made) if kind == "tuple" else made
