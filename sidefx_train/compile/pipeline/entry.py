"""One compiled variant of a step, and what its misses teach."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.guards.guard import Guard, TensorFacts
from sidefx_train.compile.capture.guards.python_check import failing
from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.graph.artifacts import Executable
from sidefx_train.compile.residual.generate import link

if TYPE_CHECKING:
    from sidefx_train.compile.pipeline.captured import Captured

_MOST_LENGTHS = 12
"""How many lengths of a bounded deque are captured."""


@dataclass
class Entry:
    """One compiled variant of a step.

    Attributes:
        replay: ``replay(args, kwargs)``, the step's value or :data:`MISS`.
        fetch: guards and prologue only, for measuring.
        guards: for :meth:`why`.
        captured: the capture it was made from.
        executable: its compiled graph.
        bindings: what the generated function calls.
        fresh: true until it has run once.
        once: it is to run once, operation by operation: the step ends what it relies on.
    """

    replay: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    fetch: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    guards: tuple[Guard, ...]
    captured: Captured
    executable: Executable
    bindings: dict[str, Any]
    fresh: bool = True
    once: bool = False

    def why(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Guard, Any] | None:
        """The first guard that fails, with the value found."""
        return first_failure(self.guards, args, kwargs)

    def changed_sizes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[tuple[str, int]]:
        """(label, dimension) of every tensor that misses by its size alone."""
        changed: set[tuple[str, int]] = set()
        for guard in self.guards:
            if guard.kind == "tensor":
                missed, found = failing(guard, args, kwargs)
                if missed and isinstance(found, TensorFacts):
                    changed |= {(guard.source.label, dim) for dim in guard.value.sizes_that_differ(found)}
        return frozenset(changed)

    def changed_numbers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[str]:
        """Labels of the numbers, also in tuples, and of the lengths that are not what the capture saw."""
        changed = {f"{label}.__len__()" for label in self.longer_lists(args, kwargs)}
        for guard in self.guards:
            if guard.kind == "equal" and type(guard.value) in (int, float, tuple, slice):
                missed, found = failing(guard, args, kwargs)
                if missed and type(found) is type(guard.value):
                    changed |= _changed(guard.source.label, guard.value, found)
        return frozenset(changed)

    def longer_lists(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[str]:
        """Labels of the lists that are longer than in the capture."""
        grown: set[str] = set()
        for guard in self.guards:
            if guard.kind == "length":
                missed, found = failing(guard, args, kwargs)
                if missed and type(found) is int and found > guard.value and not _bounded(guard.source, args, kwargs):
                    grown.add(guard.source.label)
        return frozenset(grown)

    def changed_texts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[str]:
        """Labels of the texts among the arguments that are not what the capture saw."""
        changed: set[str] = set()
        for guard in self.guards:
            if guard.kind == "equal" and type(guard.value) is str and guard.source.from_arguments:
                missed, found = failing(guard, args, kwargs)
                if missed and type(found) is str:
                    changed.add(guard.source.label)
        return frozenset(changed)

    def advanced_iterators(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[str]:
        """Labels of the iterators that are at another place than in the capture."""
        known = set(self.captured.iterators)
        advanced: set[str] = set()
        for guard in self.guards:
            source: Source | None = guard.source
            while source is not None and source not in known:
                source = source.parent
            if source is not None and source.label not in advanced and failing(guard, args, kwargs)[0]:
                advanced.add(source.label)
        return frozenset(advanced)

    def over(self, run: Callable[[list[Any]], Any]) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        """The generated function with ``run`` in place of the compiled graph, for measuring."""
        return link(self.captured.residual, self.captured.name, {**self.bindings, "run": run})  # type: ignore[no-any-return]


def _bounded(source: Source, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True for a deque that stops growing before long."""
    found = source.fetch(args, kwargs)
    return isinstance(found, deque) and found.maxlen is not None and found.maxlen <= _MOST_LENGTHS


def _changed(label: str, old: Any, new: Any) -> set[str]:
    """Labels of a number that differs; of a tuple or slice and the numbers in it that differ."""
    if type(old) is slice:
        named = {f"{label}.{name}": (getattr(old, name), getattr(new, name)) for name in ("start", "stop", "step")}
    elif type(old) is not tuple:
        return {label}
    elif len(old) != len(new):
        return set()
    else:
        named = {f"{label}[{i}]": pair for i, pair in enumerate(zip(old, new, strict=True))}
    differing = {name for name, (a, b) in named.items() if type(a) is type(b) and type(a) in (int, float) and a != b}
    return differing | {label} if differing else set()


def first_failure(guards: tuple[Guard, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Guard, Any] | None:
    """The first guard that fails, with the value found."""
    for guard in guards:
        missed, found = failing(guard, args, kwargs)
        if missed:
            return guard, found
    return None
