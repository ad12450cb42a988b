"""Explains guard failures and updates the specialization after them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from sidefx_train.compile.capture.guards.kinds import describe
from sidefx_train.compile.capture.guards.specialization import Specialization
from sidefx_train.compile.capture.shadows.transient_objects import same_structure
from sidefx_train.compile.pipeline.entry import Entry
from sidefx_train.compile.runtime.describe import short
from sidefx_train.errors import Location

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


def specialized_after(
    newest: Entry,
    spec: Specialization,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    sizes: bool,
    in_part: bool,
) -> tuple[Specialization, Missed]:
    """Returns the next specialization, which treats what changed as changing, and the guard failure.

    Args:
        newest: the entry whose guards failed.
        spec: specialization of the entry.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        sizes: changed sizes may become symbolic.
        in_part: the step is the rest of another.

    Returns:
        The specialization, and what has changed.
    """
    found = newest.why(args, kwargs)
    if found is None and newest.captured.state_check.check():
        return spec, Missed("arguments", "as captured", "different in number, names or dispatch keys", None)
    if found is None:
        return spec, Missed("global state", "as captured", "changed (grad mode, autocast, threads...)", None)
    guard, value = found
    label = guard.source.label
    changes = newest.changes(args, kwargs)
    if changes.iterators:
        spec = replace(spec, native_iterators=spec.native_iterators | changes.iterators)
    if guard.kind in ("names", "code"):
        return spec, Missed(f"{label}.{value}", str(guard.value), "another", guard.location)
    # All that have changed, not only the first: each would need a capture of its own.
    longer = (*spec.list_growths, *dict.fromkeys(changes.lists))
    texts = (*spec.string_changes, *dict.fromkeys(changes.texts))
    spec = replace(
        spec,
        symbolic_numbers=spec.symbolic_numbers | changes.numbers,
        list_growths=longer,
        string_changes=texts,
        pass_through_strings=frozenset(label for label in texts if texts.count(label) > 1 and not spec.guards_strings),
        unbounded_lists=frozenset(label for label in longer if longer.count(label) > _GROWTHS),
    )
    if guard.kind == "tensor" and sizes:
        spec = replace(spec, dynamic_sizes=spec.dynamic_sizes | changes.sizes)
    elif guard.kind == "is" and _replaced(guard.value, value, in_part):
        spec = replace(spec, refetched=spec.refetched | {label})
    old = describe(guard) if guard.kind in ("number", "absent", "no_item") else short(guard.value)
    return spec, Missed(label, old, short(value), guard.location)


def _replaced(old: Any, new: Any, in_part: bool) -> bool:
    """Returns True for a replaced object that is fetched at every call from now on."""
    if isinstance(old, torch.Tensor):
        return isinstance(new, torch.Tensor)
    if in_part and isinstance(old, torch.nn.Module) and type(new) is type(old):  # a loop over layers
        return True
    return same_structure(old, new)
