"""Specialization state: which outside values a capture treats as changing, decided by earlier calls."""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from types import CodeType

PASSED_ON: tuple[type, ...] = (str, bytes, datetime.datetime, datetime.date, datetime.time, datetime.timedelta)
"""Classes of values that are passed on if they keep changing; so are tuples of strings."""

EXACT_STRINGS = 8
"""How often a string that the step decides on may change; then what reads it runs natively, between two parts."""


def passed_on(changes: tuple[str, ...], limit: int) -> frozenset[str]:
    """Returns the labels of strings that have changed more often than ``limit``."""
    return frozenset(label for label in changes if changes.count(label) > limit)


_INDEX = re.compile(r"\[\d+\]")

_CLASS_CHANGES = 4
"""How often the items of one container may change between a tensor and ``None``, each pattern being a capture."""


def items_of_any_class(changes: tuple[str, ...], known: bool) -> frozenset[str]:
    """Returns the items that change between a tensor and ``None``, with ``[*]`` for the index at which they differ.

    Args:
        changes: labels of items that have changed, once for each time.
        known: such items are known to reach this part of a step, so that two of them are enough.
    """
    by_container: dict[str, list[str]] = {}
    for label in changes:
        for index in _INDEX.finditer(label):
            by_container.setdefault(f"{label[: index.start()]}[*]{label[index.end() :]}", []).append(label)
    fewest, often = (2, 1) if known else (3, _CLASS_CHANGES)
    return frozenset(
        items for items, labels in by_container.items() if len({*labels}) >= fewest and len(labels) > often
    )


def is_among(items: frozenset[str], label: str) -> bool:
    """Returns True for the label of one of these items."""
    found = (f"{label[: index.start()]}[*]{label[index.end() :]}" for index in _INDEX.finditer(label))
    return any(each in items for each in found)


@dataclass(frozen=True)
class Specialization:
    """How the outside values of a step are specialized. A guard failure or a stopped capture returns an updated copy.

    Attributes:
        symbolic_numbers: labels of numbers that change from call to call.
        refetched: labels of objects that are replaced between calls: fetched at every call, guarded by type.
        opaque_classes: names of classes (metrics) whose calls cannot be captured and are run after the graph.
        split_classes: those of them whose results the step computes with: their calls split the capture.
        dynamic_sizes: (label, dimension) of tensors whose size changes.
        all_dynamic: every size of the arguments is symbolic.
        native_iterators: labels of iterators whose position changes between calls.
        list_growths: labels of lists that became longer, once for each time.
        changed_lengths: labels of lists whose length differed from that of a capture.
        unbounded_lists: labels of lists that become longer at every call: guarded by a prefix.
        string_changes: labels of strings, bytes, dates and tuples of strings that have changed, once for each time;
            twice if many changed at once.
        pass_through_strings: labels of strings that keep changing: passed on, not guarded by value.
        guards_strings: the step branches on one of these strings, so strings are guarded by value after all, until
            they have changed often.
        class_changes: labels of items that were a tensor and are ``None`` now, or the reverse, once for each time.
        items_of_any_class: such labels, with ``[*]`` for the index, of items that keep changing: passed on.
        array_changes: labels of NumPy arrays whose contents have changed, and of such numbers, once for each time.
        changing_arrays: those of them that keep changing: what reads these runs natively.
        perhaps_changing: those of them that have changed once or twice: the same, unless that stops the capture.
        native_array_functions: code of library functions that get such an array, and run natively as a whole.
        separates_aliases: one tensor, or one tuple, in several places counts as several that the step only reads.
        picks_appended: an item drawn from a list may be one that the step has just appended to it.
        aliases_matter: the step does not only read them.
        views_needing_base: labels of views whose bases are mutated with grad and enter the graph too.
        assumes_nothing: no condition on a tensor is assumed: one did not hold, or a backward outside is cut off.
        usual_truths: branches on tensors, by code and index, with the truth of their condition in all of the last
            calls, which is assumed.
        endless_branches: branches, and tests of numbers, that are never assumed: a loop that one of them ends has no
            other end.
        inlined_code: code of torch functions that warn: they are interpreted, so that the warnings are replayed.
        native_rest: what follows the last tensor operation may run natively, from the first decision on a number.
        graph_decisions: instructions that decided on a number before a tensor operation, by code and index.
        host_draws: random numbers that Python draws, or on which the step decides, are drawn before the graph runs.
        draw_decisions: number of captures that another decision on such a number caused.
        reads_draws: the step decides on numbers that torch draws on the CPU; the prologue reads them.
        reads_dependent_draws: so it does on those whose bounds are numbers that change.
        foretells_draws: the graph will draw them as eager does, not from a generator of the backend.
        early_arrays: instructions, by code and index, that make arrays which a generator shuffles: before the graph.
        host_reads: values of inputs may be read before the graph runs.
        read_decisions: number of captures that another decision on such a value caused.
        reads_inputs: the step needs values of inputs as Python numbers; the prologue computes them.
        passes_ragged_gradients: the backward runs outside, and gradients of jagged tensors from outside leave the step.
        native_backward: Python code in a backward outside has effects, or reads what may change: it runs natively.
        native_lookups: embeddings with sparse gradients run natively: these leave a part of the step, or more is done
            with them than is captured.
        clamps_slices: bounds of slices that only the graph knows are clamped to the size first: the backend does not
            compile others.
        splits_slices: slices whose bounds only the graph knows end a part: the backend does not compile them.
        lists_numbers: ``tolist`` of a small tensor is captured; False if the step needs their values.
        defers_numbers: what NumPy makes of numbers of the graph is computed after it; False if the step needs it.
    """

    symbolic_numbers: frozenset[str] = frozenset()
    refetched: frozenset[str] = frozenset()
    opaque_classes: frozenset[str] = frozenset()
    split_classes: frozenset[str] = frozenset()
    dynamic_sizes: frozenset[tuple[str, int]] = frozenset()
    all_dynamic: bool = False
    native_iterators: frozenset[str] = frozenset()
    list_growths: tuple[str, ...] = ()
    changed_lengths: frozenset[str] = frozenset()
    unbounded_lists: frozenset[str] = frozenset()
    string_changes: tuple[str, ...] = ()
    pass_through_strings: frozenset[str] = frozenset()
    guards_strings: bool = False
    class_changes: tuple[str, ...] = ()
    items_of_any_class: frozenset[str] = frozenset()
    array_changes: tuple[str, ...] = ()
    changing_arrays: frozenset[str] = frozenset()
    perhaps_changing: frozenset[str] = frozenset()
    native_array_functions: frozenset[CodeType] = frozenset()
    separates_aliases: bool = False
    picks_appended: bool = True
    aliases_matter: bool = False
    views_needing_base: frozenset[str] = frozenset()
    assumes_nothing: bool = False
    usual_truths: frozenset[tuple[tuple[CodeType, int], bool]] = frozenset()
    endless_branches: frozenset[tuple[CodeType, int]] = frozenset()
    inlined_code: frozenset[CodeType] = frozenset()
    native_rest: bool = True
    graph_decisions: frozenset[tuple[CodeType, int]] = frozenset()
    host_draws: bool = True
    draw_decisions: int = 0
    reads_draws: bool = False
    reads_dependent_draws: bool = False
    foretells_draws: bool = True
    early_arrays: frozenset[tuple[CodeType, int]] = frozenset()
    host_reads: bool = True
    read_decisions: int = 0
    reads_inputs: bool = False
    passes_ragged_gradients: bool = False
    native_backward: bool = False
    native_lookups: bool = False
    clamps_slices: bool = False
    splits_slices: bool = False
    lists_numbers: bool = True
    defers_numbers: bool = True

    @property
    def has_symbolic_sizes(self) -> bool:
        """Returns True if some size of the next capture is symbolic."""
        return self.all_dynamic or bool(self.dynamic_sizes)

    def passes_on(self, cls: type, label: str) -> bool:
        """Returns True for a string, bytes, date or tuple of strings that is passed on; other tuples are read item by
        item."""
        if cls is tuple:
            return label in self.pass_through_strings and label not in self.symbolic_numbers
        return cls in PASSED_ON and label in self.pass_through_strings
