"""Side effects as data: changes to outside objects, deferred calls, and the checkpoint they were taken at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.capture.shadows.deferred_values import DeferredCall, TraceKey
from sidefx_train.compile.capture.side_effects.checkpoint import Checkpoint

EffectKind = Literal[
    "set_attr",
    "del_attr",
    "set_slot",
    "del_slot",
    "set_item",
    "del_item",
    "clear",
    "extend",
    "replace",
    "add",
    "remove",
    "set_cell",
    "del_cell",
    "set_class_attr",
    "set_grad",
    "set_requires_grad",
    "detach",
    "set_data",
    "grow",
    "set_rows",
    "count_writes",
    "advance",
]


@dataclass(frozen=True)
class Effect:
    """One change to apply after the graph has succeeded.

    Attributes:
        kind: kind of the change.
        target: source of the object to change.
        key: attribute name or dict key, if any.
        value: value of the trace (shadow, fake tensor, symbolic number, plain value, container of such).
        through: class whose method makes the change, for containers whose own class may override it.
    """

    kind: EffectKind
    target: Source
    key: Any = None
    value: Any = None
    through: type | None = None

    @property
    def switches(self) -> bool:
        """Returns True for a change of ``requires_grad``, which precedes the creation of views."""
        return self.kind in ("detach", "set_requires_grad")

    def describe(self) -> str:
        label = self.target.label
        if self.kind in ("set_attr", "set_slot", "set_class_attr"):
            return f"sets {label}.{self.key}"
        if self.kind in ("del_attr", "del_slot"):
            return f"deletes {label}.{self.key}"
        if self.kind == "set_item":
            return f"sets {label}[{_text(self.key)}]"
        if self.kind == "del_item":
            return f"deletes {label}[{_text(self.key)}]"
        if self.kind == "extend":
            return f"appends {len(self.value)} to {label}"
        if self.kind in ("replace", "clear"):
            return f"rewrites {label}"
        if self.kind == "add":
            return f"adds {len(self.value)} to {label}"
        if self.kind == "remove":
            return f"removes {len(self.value)} from {label}"
        if self.kind in ("set_cell", "del_cell"):
            return f"sets variable {label}"
        if self.kind == "advance":
            return f"takes {'the rest' if self.value is None else self.value} from {label}"
        if self.kind in ("count_writes", "set_rows"):
            return f"writes to {label}"
        if self.kind == "set_grad":
            return f"sets {label}.grad"
        if self.kind in ("set_data", "grow"):
            return f"{'sets' if self.kind == 'set_data' else 'enlarges'} the memory of {label}"
        return f"sets {label}.requires_grad"


@dataclass
class SideEffects:
    """Python side effects of a captured step.

    :func:`collect` returns those of a finished step, for the residual. :func:`observe` returns those up to a point in
    the middle of one, which can be compared with others and rolled back to.

    Attributes:
        changes: writes to outside objects.
        calls: deferred calls, in program order.
        checkpoint: contents of everything that the step may still change; ``None`` for a finished step.
    """

    changes: list[Effect] = field(default_factory=list)
    calls: list[DeferredCall] = field(default_factory=list)
    checkpoint: Checkpoint | None = None

    def describe(self) -> list[str]:
        return [change.describe() for change in self.changes] + [call.describe() for call in self.calls]

    def clone(self) -> SideEffects:
        """Returns a copy with its own lists, which later effects of the step do not change."""
        point = None if self.checkpoint is None else self.checkpoint.clone()
        return SideEffects(list(self.changes), list(self.calls), point)

    def rollback(self) -> None:
        """Reverts everything the step did after these effects were taken.

        Shadows, objects created in the step, variables of running frames and suspended generators are restored; values
        read in between stay guarded. C iterators that were advanced in between, and random numbers that were drawn, are
        not reverted.

        Raises:
            ValueError: the effects are not a result of :func:`observe`.
            Unsupported: a tensor was changed in place in between: the graph contains that.
        """
        self.point().rollback()

    def made(self) -> list[Any]:
        """Returns the objects that the step created and something still refers to.

        Raises:
            ValueError: the effects are not a result of :func:`observe`.
        """
        return self.point().made()

    def prune(self, live: Iterable[Any] = ()) -> int:
        """Removes objects created in the step that neither an effect nor ``live`` reaches.

        Args:
            live: values that are still needed: what the step returns, variables of frames that continue.

        Returns:
            The number of removed objects.

        Raises:
            ValueError: the effects are not a result of :func:`observe`.
        """
        return self.point().prune([*live, *self.values()])

    def values(self) -> list[Any]:
        """Returns the values that the effects write, and arguments of the deferred calls."""
        found: list[Any] = [change.key.value for change in self.changes if isinstance(change.key, TraceKey)]
        found += [change.value for change in self.changes]
        return [*found, *self.calls]

    def point(self) -> Checkpoint:
        """Returns the checkpoint.

        Raises:
            ValueError: there is none.
        """
        if self.checkpoint is None:
            raise ValueError("these are the effects of a finished step; only those from observe() can be restored")
        return self.checkpoint


def _text(key: Any) -> str:
    return repr(key) if isinstance(key, (str, int, float, bool, type(None))) else type(key).__name__
