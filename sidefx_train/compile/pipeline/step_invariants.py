"""What a step itself changes: counters, tensors that it replaces, and guards that it invalidates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.guard import Guard, NumberCondition
from sidefx_train.compile.capture.guards.kinds import describe
from sidefx_train.compile.capture.guards.symbol_guards import CONDITION_NAMES
from sidefx_train.compile.capture.shadows.deferred_values import DeferredValue
from sidefx_train.compile.capture.side_effects.effect import SideEffects
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.guards.source import SourceTable
    from sidefx_train.compile.capture.world.trace_world import TraceWorld

_SYMBOLIC = (torch.SymInt, torch.SymFloat)
_FLAGS = (bool, str, type(None))
_UNKNOWN = (torch.SymBool, DeferredValue)
"""Values that may later equal a flag's old value."""


def counters(world: TraceWorld, effects: SideEffects) -> frozenset[str]:
    """Returns labels of numbers that the step read as constants and then changed: they must be symbolic."""
    exact = {
        guard.source.label
        for guard in world.heap.guards.values()
        if guard.kind == "equal" and type(guard.value) in (int, float)
    }
    changed = _changed(world.heap.sources, effects)
    return frozenset(label for label in changed if label in exact and _is_number(changed[label]))


def replaced_tensors(world: TraceWorld, effects: SideEffects) -> frozenset[str]:
    """Returns labels of tensors that the step read as the ones they are, and then replaced: each call has another."""
    held = {
        guard.source.label: guard.value
        for guard in world.heap.guards.values()
        if guard.kind == "is" and safe_isinstance(guard.value, torch.Tensor)
    }
    changed = _changed(world.heap.sources, effects) if held else {}
    found = {label: changed[label] for label in held if safe_isinstance(changed.get(label), torch.Tensor)}
    return frozenset(label for label, value in found.items() if value is not _shadow(world, held[label]))


def _shadow(world: TraceWorld, real: torch.Tensor) -> Any:
    record = world.heap.by_real.get(id(real))
    return record.shadow if record is not None else None


def first_self_invalidated(world: TraceWorld, guards: Iterable[Guard], effects: SideEffects) -> str:
    """Describes the first guard that the step's own effects invalidate; empty if there is none.

    A scheduler tests whether this is its first step; a loop, whether a flag is already set.
    """
    changed = _changed(world.heap.sources, effects)
    if not changed:
        return ""
    hints = {str(compat.symbol_of_input(number)): _value(number) for number, _, _ in world.heap.numbers.inputs}
    for guard in guards:
        if guard.kind == "number":
            holds = _still_holds(guard.value, changed, hints)
        elif guard.kind in ("equal", "is") and type(guard.value) in _FLAGS:
            after = changed.get(guard.source.label, guard.value)
            holds = issubclass(type(after), _UNKNOWN) or (type(after) in _FLAGS and after == guard.value)
        else:
            continue
        if not holds:
            return describe(guard)
    return ""


def _still_holds(condition: NumberCondition, changed: dict[str, Any], hints: dict[str, Any]) -> bool:
    """Returns whether a number condition holds after the step; True if that is unknown."""
    if not any(source.label in changed for _, source in condition.names):
        return True
    values = {name: changed.get(source.label, hints.get(name)) for name, source in condition.names}
    plain = {name: _value(value) for name, value in values.items()}
    if not all(type(value) in (int, float) for value in plain.values()):
        return True
    return bool(eval(condition.code, {**CONDITION_NAMES, **plain}))


def _changed(sources: SourceTable, effects: SideEffects) -> dict[str, Any]:
    """Returns the final value of each location that the step writes to, by label."""
    found: dict[str, Any] = {}
    for effect in effects.changes:
        if effect.kind in ("set_attr", "set_slot"):
            found[f"{effect.target.label}.{effect.key}"] = effect.value
        elif effect.kind == "set_item":
            found[sources.item(effect.target, effect.key).label] = effect.value
        elif effect.kind == "set_cell":
            found[effect.target.label] = effect.value
    return found


def _is_number(value: Any) -> bool:
    return type(value) in (int, float, *_SYMBOLIC)


def _value(number: Any) -> Any:
    """Returns a number's value in this call; ``None`` for an unbacked one."""
    if type(number) not in _SYMBOLIC:
        return number
    return None if compat.is_unbacked(number) else compat.hint_of(number)
