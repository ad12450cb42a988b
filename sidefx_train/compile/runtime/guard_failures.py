"""Why a call is not replayed, and what that teaches about the step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from sidefx_train.compile.capture.shadows.transient_objects import replaced_alike
from sidefx_train.compile.pipeline.captured import Learned
from sidefx_train.compile.pipeline.entry import Entry
from sidefx_train.compile.runtime.describe import short
from sidefx_train.errors import Location

_GROWTHS = 4
"""How many lengths of a list that the step reads as a whole are captured."""


class Missed(NamedTuple):
    """What has changed since a capture.

    Attributes:
        label: which value, as the report names it.
        old: what it was, or the whole condition, in words.
        new: what it is.
        location: the line that read it.
    """

    label: str
    old: str
    new: str
    location: Location | None


def learned_of(
    newest: Entry, learned: Learned, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: bool, in_part: bool
) -> tuple[Learned, Missed]:
    """Why an entry missed a call, and what is known by that: numbers and objects that change are treated as such.

    Args:
        newest: the entry.
        learned: what was known.
        args: of the call.
        kwargs: of the call.
        sizes: sizes that change may become symbolic.
        in_part: the step is the rest of another.

    Returns:
        What is known, and what has changed.
    """
    found = newest.why(args, kwargs)
    if found is None and newest.captured.state_check.check():
        return learned, Missed("arguments", "as captured", "others in number, names or dispatch keys", None)
    if found is None:
        return learned, Missed("global state", "as captured", "changed (grad mode, autocast, threads...)", None)
    guard, value = found
    label = guard.source.label
    moved = newest.moved_iterators(args, kwargs)
    if moved:
        learned = replace(learned, walked=learned.walked | moved)
    if guard.kind in ("taken", "body"):
        return learned, Missed(f"{label}.{value}", str(guard.value), "another", guard.location)
    # All that have changed, not the first alone: each would cost a capture of its own.
    grown = (*learned.grown, *newest.grown_lists(args, kwargs))
    texts = (*learned.texts, *newest.changed_texts(args, kwargs))
    learned = replace(
        learned,
        symbolic=learned.symbolic | newest.changed_numbers(args, kwargs),
        grown=grown,
        texts=texts,
        passing=frozenset(label for label in texts if texts.count(label) > 1 and not learned.reads_texts),
        growing=frozenset(label for label in grown if grown.count(label) > _GROWTHS),
    )
    if guard.kind == "tensor" and sizes:
        learned = replace(learned, dynamic=learned.dynamic | newest.changed_sizes(args, kwargs))
    elif guard.kind == "is" and _replaced(guard.value, value, in_part):
        learned = replace(learned, moving=learned.moving | {label})
    old = guard.describe() if guard.kind in ("number", "absent", "no_item") else short(guard.value)
    return learned, Missed(label, old, short(value), guard.location)


def _replaced(old: Any, new: Any, in_part: bool) -> bool:
    """True for objects whose place is looked up at every call once they have been seen to be replaced."""
    if isinstance(old, torch.Tensor):
        return isinstance(new, torch.Tensor)
    if in_part and isinstance(old, torch.nn.Module) and type(new) is type(old):  # a loop over layers
        return True
    return replaced_alike(old, new)
