"""Random numbers that the step draws in Python: symbolic numbers, drawn before the graph runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.common import trace_rules
from sidefx_train.compile.common.host_draws import Draw, HostDraws, copy_of, is_generator, is_global
from sidefx_train.compile.common.sentinels import ABSENT

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.shadow_table import ShadowTable

_PLAIN = frozenset({int, float})
_LARGEST = 2**62
"""Bound of integers that symbolic numbers represent."""


class RandomDraws:
    """The draws of one capture. It draws from copies: the program's generators do not advance.

    Attributes:
        values: the drawn numbers, in order; the entry draws its own into this list.
    """

    def __init__(self, heap: ShadowTable) -> None:
        self._heap = heap
        self._draws: list[Draw] = []
        self._copies: dict[int, Any] = {}
        self._ended = False
        self.values: list[Any] = []

    def end(self) -> None:
        """Draws nothing early from now on: a backward that is recorded next runs later, outside the step."""
        self._ended = True

    def finish(self) -> HostDraws:
        """Returns the draws for the entry."""
        return HostDraws(tuple(self._draws), self.values)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Draws a number by ``function(*args, **kwargs)``, a method of a generator.

        Returns:
            The number, or ``ABSENT`` if it is not drawn early: the generator is not an outside object that the entry
            holds, or an argument is not a plain number.

        Raises:
            Unsupported: the result is not a number that the graph could get.
        """
        heap, generator = self._heap, args[0]
        if self._ended or not heap.specialization.host_draws or not is_generator(generator):
            return ABSENT
        record = heap.record_of(generator)
        held = record is not None and record.real is generator and record.base.kind == "const"
        if not held and not is_global(generator):
            return ABSENT
        if not all(type(value) in _PLAIN for value in (*args[1:], *kwargs.values())):
            return ABSENT
        copy = self._copies.get(id(generator))
        if copy is None:
            copy = self._copies[id(generator)] = copy_of(generator)
        label = trace_rules.describe(function)
        try:
            value = function(copy, *args[1:], **kwargs)
        except (TypeError, ValueError):
            heap.refuse("SFX103", f"calls {label} with arguments that it rejects")
        known = type(value) in _PLAIN and math.isfinite(value) and abs(value) < _LARGEST
        if not known:
            heap.refuse("SFX103", f"calls {label}, whose result is not a number that the graph can get")
        self._draws.append(Draw(function, generator, args[1:], kwargs))
        self.values.append(value)
        number = len(self.values)
        name = f"{label}()" if number == 1 else f"{label}() (draw {number})"
        source = heap.sources.item(heap.sources.const(self.values, "draws"), number - 1, name)
        return heap.length(value, source)
