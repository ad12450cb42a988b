"""Numbers from outside: each is a guarded constant, or a symbolic number that is an input of the graph.

A number is symbolic if it has changed between calls, if it belongs to an optimizer's groups, or if the step stores to
its name. NumPy's numbers, truth values, lengths, and the numbers in tensors become symbolic in the same table.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.guard import same_value
from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.capture.shadows.records import TensorRecord
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.interfaces import Number, ShadowTableAPI


class OutsideNumbers:
    """The numbers that a capture has read from outside.

    Args:
        heap: the table of outside objects.

    Attributes:
        inputs: symbolic number, source, and value now of each input.
        of_numpy: source and value of NumPy's numbers, by id of the symbolic number.
    """

    def __init__(self, heap: ShadowTableAPI) -> None:
        self.heap = heap
        self.inputs: list[tuple[Any, Source, Number]] = []
        self.of_numpy: dict[int, tuple[Source, Any]] = {}
        self._by_source: dict[int, Any] = {}
        self._of_truths: dict[int, tuple[Any, Any]] = {}

    def shadow(self, real: int | float, source: Source, name: str) -> Any:
        """Returns an integer or float, guarded, or a symbolic number for it."""
        found = self._by_source.get(id(source))
        if found is not None:
            return found
        heap = self.heap
        symbolic = source.label in heap.specialization.symbolic_numbers or (bool(name) and name in heap.written_names())
        symbolic = symbolic or source.is_picked
        if not symbolic and safe_isinstance(real, float):
            symbolic = heap.below(source, heap.symbolic_roots) or (heap.is_part and source.from_arguments)
        if not symbolic or not math.isfinite(real) or same_value(real, -0.0):  # sympy has no NaN and no negative zero
            heap.guard("equal", source, real)
            return real
        heap.guard("type", source, type(real))
        return self._add(real, source)

    def shadow_of_numpy(self, real: Number, source: Source) -> Any:
        """Returns the symbolic number for one of NumPy that changes; operators keep its class."""
        if not -(2.0**62) < float(real) < 2.0**62:
            self.heap.guard("equal", source, real)
            return real
        self.heap.guard("type", source, type(real))
        return self.number_of_numpy(real, source)

    def truth(self, real: bool, source: Source) -> Any:
        """Returns a symbolic truth value, whose number is 0 or 1."""
        found = self._by_source.get(id(source))
        if found is None:
            self.heap.guard("type", source, bool)
            as_number = self.heap.sources.slot(source, "__int__")
            number = self.length(int(real), self.heap.sources.call(as_number, source.label))
            found = self._by_source[id(source)] = number != 0
            self._of_truths[id(found)] = found, number
        return found

    def found(self, number: Any) -> tuple[Source, Number] | None:
        """Returns where a number or truth value is found that is an input, and its value now; ``None`` for a computed
        one."""
        truth, as_number = self._of_truths.get(id(number), (None, None))
        if truth is number and truth is not None:
            source, real = next((source, real) for known, source, real in self.inputs if known is as_number)
            assert source.parent is not None and source.parent.parent is not None, "a truth has an __int__"
            return source.parent.parent, bool(real)
        if id(number) in self.of_numpy:
            return self.of_numpy[id(number)]
        return next(((source, real) for known, source, real in self.inputs if known is number), None)

    def number_of(self, value: Any) -> Any:
        """Returns the symbolic 0 or 1 of a truth value that is an input; any other value as it is."""
        truth, number = self._of_truths.get(id(value), (None, None))
        return number if truth is value and truth is not None else value

    def length(self, real: Number, source: Source) -> Any:
        """Returns a symbolic length, or another number that is never a constant."""
        found = self._by_source.get(id(source))
        return self._add(real, source) if found is None else found

    def number_of_numpy(self, real: Any, source: Source) -> Any:
        """Returns the symbolic number for one of NumPy: graph and guards get Python's, whose arithmetic is not rounded
        to its class."""
        plain = self.heap.sources.call(self.heap.sources.slot(source, "item"), source.label)
        number = self.length(real.item(), plain)
        compat.mark_numpy(number, type(real))
        self.of_numpy[id(number)] = source, real
        return number

    def item_source(self, record: TensorRecord) -> Source:
        """Returns the source of the number in a 0-dim tensor."""
        return self.heap.sources.call(self.heap.sources.slot(record.source, "item"))

    def item_of(self, record: TensorRecord) -> Any:
        """Returns the number in a 0-dim CPU tensor at entry: symbolic, or guarded if it is a bool or not finite."""
        source = self.item_source(record)
        found = self._by_source.get(id(source))
        if found is not None:
            return found
        with compat.real_world():
            real = record.real.item()
        if type(real) is bool:
            self.heap.guard("is", source, real)
            return real
        if not math.isfinite(real):  # sympy has no NaN, and infinity is special
            self.heap.guard("equal", source, real)
            return real
        return self._add(real, source)

    def version_of(self, tensor: torch.Tensor) -> Any:
        """Returns ``tensor._version``; for an outside tensor or a view of one, it continues from the version at
        entry."""
        records = [record for record in self.heap.by_shadow.values() if safe_isinstance(record, TensorRecord)]
        counted = [record for record in records if compat.share_version_counter(record.shadow, tensor)]
        if not counted:
            return tensor._version
        record = counted[0]
        return self.length(record.real._version, self.heap.sources.slot(record.source, "_version")) + (
            tensor._version - record.entry_version
        )

    def _add(self, real: Number, source: Source) -> Any:
        number = self.heap.tracer.add_scalar(float(real) if safe_isinstance(real, float) else int(real), source.label)
        self.inputs.append((number, source, real))
        self._by_source[id(source)] = number
        return number
