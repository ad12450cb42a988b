"""Explains guard failures, and keeps what they say about the next capture: the specialization state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from sidefx_train.compile.capture.guards.guard import Guard
from sidefx_train.compile.capture.guards.kinds import KINDS, describe
from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.capture.guards.specialization import (
    EXACT_STRINGS,
    Specialization,
    items_of_any_class,
    passed_on,
)
from sidefx_train.compile.capture.resume.branch_history import Branch
from sidefx_train.compile.capture.resume.driver import Parts
from sidefx_train.compile.capture.shadows.objects.numpy_arrays import CONTENTS, SHAPE
from sidefx_train.compile.capture.shadows.transient_objects import same_structure
from sidefx_train.compile.common.host_programs import OF_NUMPY
from sidefx_train.compile.pipeline.captured import StopGuard
from sidefx_train.compile.pipeline.entry import Changes, Entry, changed_values, first_failure
from sidefx_train.compile.pipeline.run_context import Call
from sidefx_train.compile.runtime.describe import short
from sidefx_train.config import CompileConfig
from sidefx_train.errors import Location

_DECISIONS = 8
"""Limit of captures for other decisions on random numbers, and on values of inputs; then the step is captured in parts
for the others."""

_ARRAY_CHANGES = 3
"""Limit of captures for other contents of one array of NumPy."""

_NAMES = 3
"""Number of strings that, if they change at once, are taken for the names in a batch, which always change."""

_GROWTHS = 4
"""Limit of captured lengths of a list that the step reads completely."""


class Missed(NamedTuple):
    """A value that has changed since a capture.

    Attributes:
        label: the value, as the report names it.
        old: its old value, or the full condition as text.
        new: its new value.
        location: the line that read it.
    """

    label: str
    old: str
    new: str
    location: Location | None


class SpecializationState:
    """The specialization of a step, as guard failures and failed captures change it.

    Args:
        config: options.
        is_part: the step is the rest of another.
        parts: the parts of the step.

    Attributes:
        current: the specialization of the next capture.
    """

    def __init__(self, config: CompileConfig, is_part: bool, parts: Parts) -> None:
        own_numbers = config.backend == "inductor" and config.rng != "eager"
        self.current = Specialization(all_dynamic=bool(config.dynamic), foretells_draws=not own_numbers)
        self._static_sizes = config.dynamic is False
        self._is_part = is_part
        self._parts = parts
        self._assumes_nothing = False

    def update_after(self, missed_entry: Entry, call: Call) -> Missed:
        """Returns why an entry missed; what has changed counts as changing from now on."""
        sizes = not self._static_sizes
        self.current, missed = specialized_after(missed_entry, self.current, call, sizes, self._is_part)
        self._pass_items()
        return missed

    def update_after_stop(self, stop: StopGuard, call: Call) -> None:
        """Counts what has changed since a capture that stopped as changing from now on: the next one that stops at the
        same location applies to all values."""
        found = first_failure(stop.guards, *call)
        if found is not None:
            changes = changed_values(stop.guards, *call, set())
            self.current = _after_changes(self.current, *found, changes, not self._static_sizes, self._is_part)
            self._pass_items()

    def _pass_items(self) -> None:
        """Passes on items that keep changing between a tensor and ``None``; a later part learns it earlier."""
        items = items_of_any_class(self.current.class_changes, self._parts.pass_items)
        if items:
            self.current = replace(self.current, items_of_any_class=items)
            self._parts.pass_items = True

    def with_static_sizes(self) -> Specialization:
        """Returns the current specialization without symbolic sizes."""
        return replace(self.current, dynamic_sizes=frozenset(), all_dynamic=False)

    def keep_sizes_static(self) -> None:
        """Ignores changed sizes from now on: symbolic ones could not be captured or compiled."""
        self._static_sizes = True

    def assume_nothing(self) -> None:
        """Captures no branch under a condition on a tensor from now on."""
        self._assumes_nothing = True
        self.current = replace(self.current, assumes_nothing=True)

    def assume_usual(self, truths: frozenset[tuple[Branch, bool]]) -> None:
        """Assumes from now on that the conditions of these branches, and of no others, are as they have been; a
        backward may no longer lie outside."""
        self.current = replace(self.current, usual_truths=truths, assumes_nothing=self._assumes_nothing)

    def capture_rest(self) -> None:
        """Captures the whole step from now on, also what decides on numbers after the last tensor operation."""
        self.current = replace(self.current, native_rest=False)

    def refetch(self, label: str) -> None:
        """Fetches this object at every call from now on."""
        self.current = replace(self.current, refetched=self.current.refetched | {label})


def specialized_after(
    newest: Entry, spec: Specialization, call: Call, sizes: bool, in_part: bool
) -> tuple[Specialization, Missed]:
    """Returns the next specialization, which treats what changed as changing, and the guard failure.

    Args:
        newest: the entry whose guards failed.
        spec: specialization of the entry.
        call: the call.
        sizes: changed sizes may become symbolic.
        in_part: the step is the rest of another.

    Returns:
        The specialization, and what has changed.
    """
    found = newest.why(*call)
    if found is None and newest.captured.state_check.check():
        repeated = newest.repeated_tensor(*call)
        if repeated is not None:
            found_in = Missed(repeated[1], "a tensor of its own", f"the one in {repeated[0]}", None)
            return _with_aliases(spec), found_in
        return spec, _other_arguments(newest, call)
    if found is None:
        return spec, Missed("global state", "as captured", "changed (grad mode, autocast, threads...)", None)
    guard, value = found
    label = guard.source.label
    spec = _after_read(_after_draw(spec, newest, guard), guard)
    changes = newest.changes(*call)
    if changes.iterators:  # loops around the one that has gone on will go on, too
        around = {each.label for each in newest.captured.iterators} if in_part else set()
        spec = replace(spec, native_iterators=spec.native_iterators | changes.iterators | around)
    if guard.kind in ("names", "code"):
        return spec, Missed(f"{label}.{value}", str(guard.value), "another", guard.location)
    spec = _after_changes(spec, guard, value, changes, sizes, in_part)
    old = describe(guard) if guard.kind in ("number", "absent", "no_item") else _shown(guard.kind, guard.value)
    return spec, Missed(label, old, _shown(guard.kind, value), guard.location)


def _after_changes(
    spec: Specialization, guard: Guard, value: Any, changes: Changes, sizes: bool, in_part: bool
) -> Specialization:
    """Returns the next specialization if a guard found another value.

    All that have changed count as changing, not only the first: each would need a capture of its own.

    Args:
        spec: the specialization so far.
        guard: the first guard that failed.
        value: what it found.
        changes: all that has changed.
        sizes: changed sizes may become symbolic.
        in_part: the step is the rest of another.
    """
    label = guard.source.label
    longer = (*spec.list_growths, *dict.fromkeys(changes.lists))
    texts = (*spec.string_changes, *changes.texts)
    if sum(changes.texts.values()) >= _NAMES:
        texts = (*texts, *changes.texts)
    spec = replace(
        spec,
        symbolic_numbers=spec.symbolic_numbers | changes.numbers,
        list_growths=longer,
        class_changes=(*spec.class_changes, *changes.classes),
        string_changes=texts,
        pass_through_strings=passed_on(texts, 1) if not spec.guards_strings else passed_on(texts, EXACT_STRINGS),
        unbounded_lists=frozenset(label for label in longer if longer.count(label) > _GROWTHS),
    )
    if guard.kind == "tensor" and sizes:
        spec = replace(spec, dynamic_sizes=spec.dynamic_sizes | changes.sizes)
    elif guard.kind == "is" and _replaced(guard.value, value, in_part):
        spec = replace(spec, refetched=spec.refetched | {label})
    elif guard.kind == "equal" and type(guard.value) is type(value) in OF_NUMPY:
        spec = replace(spec, symbolic_numbers=spec.symbolic_numbers | {label})
    elif guard.kind == "equal" and (label.endswith((CONTENTS, SHAPE)) or isinstance(guard.value, np.generic)):
        spec = _after_arrays(spec, changes.arrays | {label.removesuffix(CONTENTS)})
    elif guard.kind == "same" and isinstance(value, (torch.Tensor, tuple)):
        spec = _with_aliases(spec)
    elif guard.kind == "length":
        spec = replace(spec, changed_lengths=spec.changed_lengths | {label})
    return spec


def _with_aliases(spec: Specialization) -> Specialization:
    """Returns the next specialization if one tensor is in other places than at an earlier call."""
    return replace(spec, separates_aliases=not spec.aliases_matter)


def _after_draw(spec: Specialization, newest: Entry, guard: Guard) -> Specialization:
    """Returns the next specialization if a decision on a drawn number was another one: too many, or one that needs this
    very float, are left to Python, in parts of the step."""
    if guard.kind != "number":
        return spec
    draws = newest.captured.draws
    drawn = {name: source.fetch((), {}) for name, source in guard.value.names if draws.has(source.parent)}
    if not drawn:
        return spec
    exact = any(type(drawn[name]) is float and guard.value.code.startswith(f"{name} == ") for name in drawn)
    decisions = spec.draw_decisions + 1
    return replace(spec, draw_decisions=decisions, host_draws=spec.host_draws and not exact and decisions < _DECISIONS)


def _after_arrays(spec: Specialization, labels: set[str]) -> Specialization:
    """Returns the next specialization if arrays of NumPy, or numbers of it, have changed: what reads one that keeps
    changing is computed before the graph, or left to Python."""
    changed = (*spec.array_changes, *sorted(labels))
    often = frozenset(each for each in changed if changed.count(each) >= _ARRAY_CHANGES)
    return replace(spec, array_changes=changed, changing_arrays=often, perhaps_changing=frozenset(changed) - often)


def _after_read(spec: Specialization, guard: Guard) -> Specialization:
    """Returns the next specialization if a decision on a value of an input was another one: too many are left to
    Python."""
    if not any(_is_computed(source) for source in (guard.source, *KINDS[guard.kind].others(guard))):
        return spec
    decisions = spec.read_decisions + 1
    allowed = decisions < _DECISIONS
    return replace(spec, read_decisions=decisions, host_reads=allowed, reads_inputs=spec.reads_inputs and allowed)


def _is_computed(source: Source | None) -> bool:
    return source is not None and (source.kind == "computed" or _is_computed(source.parent))


def _shown(kind: str, value: Any) -> str:
    """Returns a value as text: strings of the program in quotes, not what other guards have as text."""
    return short(repr(value) if kind == "equal" and type(value) is str else value)


def _other_arguments(newest: Entry, call: Call) -> Missed:
    """Returns the failure of an entry whose guards all hold, but not the check of the arguments before them."""
    captured = newest.captured.residual
    was, now = ((captured.positional, captured.keywords), (len(call.args), tuple(call.kwargs)))
    if was == now and not newest.captured.draws.fit(*call):
        what = "values of other types, or one generator in place of two"
        return Missed("what the step draws random numbers with", "as captured", what, None)
    if was == now:
        unnamed = "something else that no guard names"
        found = unnamed if newest.tensors_fit(*call) else "tensors with other dispatch keys"
        return Missed("arguments", "as captured", found, None)
    return Missed("the call", _signature(*was), _signature(*now), None)


def _signature(positional: int, keywords: tuple[str, ...]) -> str:
    """Describes the arguments of a call."""
    named = f" and {', '.join(f'{name}=' for name in keywords)}" if keywords else ""
    return f"{positional} positional argument{'' if positional == 1 else 's'}{named}"


def _replaced(old: Any, new: Any, in_part: bool) -> bool:
    """Returns True for a replaced object that is fetched at every call from now on."""
    if isinstance(old, torch.Tensor):
        return isinstance(new, torch.Tensor)
    if in_part and isinstance(old, torch.nn.Module) and type(new) is type(old):  # a loop over layers
        return True
    return same_structure(old, new)
