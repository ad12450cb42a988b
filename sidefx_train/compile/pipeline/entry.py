"""Cache entry: one compiled variant of a step, and analyses of its misses."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from sidefx_train.compile.capture.guards.guard import Guard, TensorFacts
from sidefx_train.compile.capture.guards.native_check import split
from sidefx_train.compile.capture.guards.python_check import failing
from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.capture.guards.specialization import PASSED_ON
from sidefx_train.compile.capture.shadows.objects.numpy_arrays import CONTENTS, SHAPE
from sidefx_train.compile.common.host_programs import OF_NUMPY
from sidefx_train.compile.common.plain_values import maxlen_of
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.graph.artifacts import Executable
from sidefx_train.compile.residual.generate import MISS, link

if TYPE_CHECKING:
    from sidefx_train.compile.pipeline.captured import Captured

_MOST_LENGTHS = 12
"""Limit of captured lengths of a bounded deque."""


class Changes(NamedTuple):
    """Values, by their labels, that are not what a capture saw.

    Attributes:
        sizes: (label, dimension) of every tensor that misses by its size alone.
        numbers: numbers, also of NumPy, also in tuples and slices, and lengths of lists.
        lists: lists that are longer than in the capture.
        texts: strings, and tuples of strings, and how many differ in each.
        iterators: iterators that are at another place.
        arrays: arrays of NumPy with other contents or shapes, these shapes, and other numbers of NumPy.
        classes: items that were a tensor and are ``None``, or the reverse.
    """

    sizes: set[tuple[str, int]]
    numbers: set[str]
    lists: list[str]
    texts: dict[str, int]
    iterators: set[str]
    arrays: set[str]
    classes: list[str]


@dataclass
class Entry:
    """One compiled variant of a step.

    Attributes:
        replay: ``replay(args, kwargs)``; returns the step's value or :data:`MISS`.
        fetch: guards and prologue only, for timing.
        guards: for :meth:`why`.
        captured: the capture.
        executable: its compiled graph.
        bindings: functions that the generated function calls.
        fresh: True until it has run once.
        once: it runs once, op by op: the step invalidates its own guards.
        dispatch: called in place of ``replay`` where that is not ``None``, with the same arguments and result: while
            times are compared with eager, or if the entry is left for eager.
        added_at: number of the step's calls before the entry was added.
        family: number shared by entries that differ in decisions on random numbers alone.
    """

    replay: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    fetch: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    guards: tuple[Guard, ...]
    captured: Captured
    executable: Executable
    bindings: dict[str, Any]
    fresh: bool = True
    once: bool = False
    dispatch: Callable[[tuple[Any, ...], dict[str, Any]], Any] | None = None
    added_at: int = 0
    family: int = 0

    @property
    def shared(self) -> tuple[Any, ...]:
        """The parts that do not refer to the objects that the step was captured for."""
        captured = self.captured
        return self.executable, captured.traced, captured.joint, captured.suspension

    def why(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Guard, Any] | None:
        """Returns the first guard that fails, with the current value."""
        return first_failure(self.guards, args, kwargs)

    def tensors_fit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Returns False if a tensor that is fetched at every call fails the check in C++."""
        tensors = [guard.source for guard in split(list(self.captured.guards))[1] if guard.kind == "tensor"]
        tensors.sort(key=lambda source: source.kind == "const")  # in the order of the generated code
        return bool(self.bindings["check_tensors"](*[source.fetch(args, kwargs) for source in tensors]))

    def repeated_tensor(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str] | None:
        """Returns the labels of two places with one tensor, if the capture had two there; else ``None``."""
        known: dict[int, str] = {}
        for guard in self.captured.guards:
            if guard.kind == "tensor" and not guard.value.may_repeat:
                label, tensor = guard.source.label, guard.source.fetch(args, kwargs)
                if id(tensor) in known:
                    return known[id(tensor)], label
                known[id(tensor)] = label
        return None

    def changes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Changes:
        """What a call has that the capture had not, of the values that a later capture may treat as changing."""
        return changed_values(self.guards, args, kwargs, set(self.captured.iterators))

    def over(self, run: Callable[[list[Any]], Any]) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        """Returns the generated function with ``run`` in place of the compiled graph, for timing."""
        replay = link(self.captured.residual, self.captured.name, {**self.bindings, "run": run})
        return self.captured.draws.before(replay, MISS, keep=False)


def changed_values(
    guards: tuple[Guard, ...], args: tuple[Any, ...], kwargs: dict[str, Any], iterators: set[Source]
) -> Changes:
    """Returns what a call has that a capture had not, of the values that a later capture may treat as changing.

    Args:
        guards: those of the capture.
        args: of the call.
        kwargs: of the call.
        iterators: sources of the outside iterators that the capture advanced.
    """
    changes = Changes(set(), set(), [], {}, set(), set(), [])
    for guard in guards:
        below = _below(guard.source, iterators) if iterators else None
        asked = guard.kind in ("tensor", "equal", "length") or _is_truth(guard) or _may_be_none(guard)
        if below is None and not asked:
            continue
        missed, found = failing(guard, args, kwargs)
        if not missed:
            continue
        label = guard.source.label
        if below is not None:
            changes.iterators.add(below.label)
        if _may_be_none(guard) and _is_other_class(guard, found):
            changes.classes.append(label)
        elif guard.kind == "tensor" and isinstance(found, TensorFacts):
            changes.sizes.update((label, dim) for dim in guard.value.sizes_that_differ(found))
        elif guard.kind == "equal" and type(found) is type(guard.value):
            if _is_text(found) and _is_text(guard.value):
                changes.texts[label] = _differing(guard.value, found)
            elif type(found) in (int, float, tuple, slice, *OF_NUMPY):
                changes.numbers.update(_changed(label, guard.value, found))
                if type(found) is tuple and label.endswith(SHAPE):
                    changes.arrays.update((label, label.removesuffix(SHAPE)))
                if type(found) is tuple and (texts := _changed_texts(label, guard.value, found)):
                    changes.numbers.add(label)  # read item by item from now on
                    changes.texts.update(texts)
            elif label.endswith(CONTENTS) or isinstance(found, np.generic):
                changes.arrays.add(label.removesuffix(CONTENTS))
        elif guard.kind == "is" and type(found) is bool:
            changes.numbers.add(label)
        elif guard.kind == "length" and type(found) is int:
            changes.numbers.add(f"{label}.__len__()")
            if _is_longer(guard, found, args, kwargs):
                changes.lists.append(label)
    return changes


def _is_truth(guard: Guard) -> bool:
    """Returns True for a truth value among arguments or items, as data is; those of attributes are settings."""
    passed = guard.source.from_arguments or (guard.source.kind == "item" and type(guard.source.key) is int)
    return guard.kind == "is" and type(guard.value) is bool and passed


def _may_be_none(guard: Guard) -> bool:
    """Returns True for a value in a list or tuple among the arguments that was a tensor or ``None``."""
    was = guard.kind in ("tensor", "same") or (guard.kind == "is" and guard.value is None)
    return was and guard.source.from_arguments and any(type(each.key) is int for each in _path(guard.source))


def _is_other_class(guard: Guard, found: Any) -> bool:
    """Returns True for ``None`` in place of a tensor, or the reverse."""
    if guard.kind == "is":
        return isinstance(found, torch.Tensor)
    return found is None or found is type(None)


def _is_text(value: Any) -> bool:
    """Returns True for a string, bytes or a date, and for a tuple of strings, as data loaders make one of the names in
    a batch."""
    if type(value) is tuple:
        return bool(value) and all(type(each) is str for each in value)
    return type(value) in PASSED_ON


def _differing(old: Any, new: Any) -> int:
    """Returns the number of strings that differ in two tuples of strings; 1 for two strings."""
    if type(old) is not tuple or type(new) is not tuple:
        return 1
    return sum(a != b for a, b in itertools.zip_longest(old, new))


def _changed_texts(label: str, old: tuple[Any, ...], new: tuple[Any, ...]) -> dict[str, int]:
    """Returns the labels of strings that differ in two tuples of one length, each with 1."""
    if len(old) != len(new):
        return {}
    pairs = enumerate(zip(old, new, strict=True))
    return {f"{label}[{i}]": 1 for i, (a, b) in pairs if type(a) is type(b) and type(a) in PASSED_ON and a != b}


def _path(source: Source | None) -> Iterator[Source]:
    """The items that lead to a source, from the inside."""
    while source is not None:
        if source.kind == "item":
            yield source
        source = source.parent


def _below(source: Source | None, known: set[Source]) -> Source | None:
    """The source on the way to this one, or itself, that is among the known ones."""
    while source is not None and source not in known:
        source = source.parent
    return source


def _is_longer(guard: Guard, found: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True for more items than in the capture, except in a deque that stops growing before long."""
    if found <= guard.value:
        return False
    held = guard.source.fetch(args, kwargs)
    most = maxlen_of(held) if safe_isinstance(held, deque) else None
    return most is None or most > _MOST_LENGTHS


def _changed(label: str, old: Any, new: Any) -> set[str]:
    """Returns labels of a changed number; for a tuple or slice, its own and those of changed numbers in it."""
    if type(old) is slice:
        named = {f"{label}.{name}": (getattr(old, name), getattr(new, name)) for name in ("start", "stop", "step")}
    elif type(old) is not tuple:
        return {label}
    elif len(old) != len(new):
        return set()
    else:
        named = {f"{label}[{i}]": pair for i, pair in enumerate(zip(old, new, strict=True))}
    differing = {
        name for name, (a, b) in named.items() if type(a) is type(b) and type(a) in (int, float, bool) and a != b
    }
    return differing | {label} if differing else set()


def first_failure(guards: tuple[Guard, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Guard, Any] | None:
    """Returns the first guard that fails, with the current value."""
    for guard in guards:
        missed, found = failing(guard, args, kwargs)
        if missed:
            return guard, found
    return None
