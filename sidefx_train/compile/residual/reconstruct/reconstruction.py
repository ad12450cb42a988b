"""What the rebuilding functions share: the code written so far, and the names of the values that it has made."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.guards.source_writer import Writer
from sidefx_train.compile.capture.shadows.records import Record
from sidefx_train.compile.residual.jagged_outputs import JaggedOutputs
from sidefx_train.compile.residual.reconstruct.construction_order import ConstructionOrder
from sidefx_train.compile.residual.tensor_outputs import TensorRebuilder
from sidefx_train.compile.residual.view_replay import KnownOutputs
from sidefx_train.compile.residual.wrapper_outputs import Shells

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


class Reconstruction(ConstructionOrder, TensorRebuilder):
    """The state of a reconstruction, without the knowledge how each kind of object is rebuilt.

    Attributes:
        constant: returns code for an object that is the same at every call.
        refuse: raises the graph break of a value that cannot be rebuilt.
        shells: wrappers with a history that leave the step.
        jagged: jagged nested tensors that leave the step.
        kept: the values that have an expression, kept alive since their ids are keys.
        apply: writes the effects on an outside object before everything that is written later.
    """

    apply: Callable[[Record], None]

    def __init__(self, world: TraceWorld, writer: Writer, known_outputs: KnownOutputs) -> None:
        super().__init__(world, writer, known_outputs)
        self.constant, self.refuse = writer.constant, world.heap.refuse
        self._made: dict[int, str] = {}
        self.kept: list[Any] = []
        self.shells = Shells()
        self.jagged = JaggedOutputs(world, writer, self.expression, self.made)

    def write(self, line: str) -> None:
        """Appends a statement."""
        self.lines.append(line)

    def made(self) -> frozenset[int]:
        """Returns the ids of all values that have an expression."""
        return frozenset(self._made)

    def name_of(self, value: Any) -> str | None:
        """Returns the expression of a value that was made before."""
        return self._made.get(id(value))

    def named(self, value: Any, expression: str) -> str:
        """Keeps identity: one value of the trace becomes one real object, which ``expression`` is."""
        self._made[id(value)] = expression
        self.kept.append(value)
        return expression

    def remember(self, value: Any, expression: str) -> str:
        """Writes what makes a value, unless it is a result of the graph, and returns its name."""
        if not expression.startswith("o["):
            name = self.writer.fresh("r")
            self.write(f"{name} = {expression}")
            expression = name
        return self.named(value, expression)
