"""Generates code that builds real values from values of the trace, after the graph has run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.source_writer import Writer
from sidefx_train.compile.capture.interpreter.generators import InterpretedGenerator
from sidefx_train.compile.capture.shadows.records import TensorRecord
from sidefx_train.compile.capture.shadows.shadow_table import BY_IDENTITY, BY_VALUE
from sidefx_train.compile.common.plain_values import PLAIN_TYPES, is_derived
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.residual.reconstruct.reconstruction import Reconstruction
from sidefx_train.compile.residual.reconstruct.table import builder_of
from sidefx_train.compile.residual.view_replay import KnownOutputs

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


class Rebuilder(Reconstruction):
    """Generates expressions for values of the trace: constants, outside objects by their path, new objects by the
    function that :func:`builder_of` finds."""

    def __init__(self, world: TraceWorld, writer: Writer, known_outputs: KnownOutputs) -> None:
        super().__init__(world, writer, known_outputs)
        self._constructed: list[Any] = []

    def expression(self, value: Any) -> str:
        """Returns code for a value of the trace."""
        plain = type(value) in PLAIN_TYPES or safe_isinstance(value, (*BY_IDENTITY, *BY_VALUE))
        if plain and not is_derived(type(value)):
            if not safe_isinstance(value, torch.Size) or not any(
                safe_isinstance(size, compat.SYMBOLS) for size in value
            ):
                return self.constant(value)
            return f"{self.constant(torch.Size)}(({', '.join(map(self.expression, value))},))"
        if safe_isinstance(value, torch.Tensor):
            self.asked[id(value)] += 1
        made = self.name_of(value)
        if made is not None:
            return made
        record = self.world.heap.record_of(value)
        if record is not None:
            self.world.heap.identities.refuse_made(record)
            if safe_isinstance(record, TensorRecord):
                self.given(record)
            return self.writer.value(record.source)
        if safe_isinstance(value, torch.Tensor) and (record := self.world.heap.memory.record_of(value)) is not None:
            return self.entry_alias(record)
        if any(value is each for each in self._constructed):
            what = f"a {type(value).__qualname__}"
            if type(value) is InterpretedGenerator:
                what = f"the generator {value.__qualname__}"
            self.refuse("SFX111", f"cannot rebuild {what}, which the step creates and which refers to itself")
        self._constructed.append(value)
        try:
            return builder_of(self, value)(self, value)
        finally:
            self._constructed.pop()
