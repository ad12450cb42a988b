"""Writes how the runner sets version counters, so that autograd sees the writes that eager would have counted."""

from __future__ import annotations

from typing import Any

from sidefx_train.compile.backend.runners.runner_source import RunnerSource, tuple_text
from sidefx_train.compile.graph.artifacts import Name, RunnerPlan


def bump_versions(graph: RunnerPlan, source: RunnerSource, counted: int) -> None:
    """Increments versions for writes unknown to autograd, so that an older graph raises instead of being wrong."""
    written: dict[str, int] = {}

    def wrote(position: int, counts: int) -> None:
        """Records a write to an input's storage; ``counts`` is 1 if its counter includes it already."""
        counter = graph.inputs[position].counter
        first = position if counter is None else counter
        moved = graph.inputs[first].writes
        written.setdefault(f"a{first}", 1 if moved is None else moved)
        written[f"a{first}"] -= counts

    def wrote_base(number: int) -> None:
        """Records a write to a base, which has its own version counter."""
        for member in graph.bases[number].members:
            wrote(member, 0)

    updated = {str(name) for call in graph.tail for name in _names((*call.args, *call.kwargs.values()))}
    for position, each in enumerate(graph.inputs):
        if each.writes and each.counter is None and f"a{position}" not in updated:
            wrote(position, 0)
    for position, *_ in graph.metadata_updates:
        wrote(position, 1)
    for position in graph.mutated:
        wrote(position, counted)
    for number in graph.mutated_bases:
        wrote_base(number)
    for position, *_ in graph.counters:
        wrote(position, 1)
    for target, _ in graph.deferred_copies:
        if target.startswith("a"):
            wrote(int(target[1:]), 1)
        else:
            wrote_base(int(target[1:]))
    names = [name for name, count in written.items() for _ in range(count)]
    if names:
        source(f"increment_versions({tuple_text(names)})")
    for name, count in written.items():
        if count < 0:  # eager wrote through Tensor.data, which does not count
            source(f"set_version({name}, {name}._version - {-count})")


def _names(value: Any) -> list[Name]:
    """Returns the names in nested arguments."""
    if isinstance(value, Name):
        return [value]
    return [name for item in value for name in _names(item)] if isinstance(value, (list, tuple)) else []


def write_versions(graph: RunnerPlan, source: RunnerSource) -> None:
    """Sets the versions of results to eager's after in-place operations; kernels count their own writes."""
    versions = versions_of(graph)
    if versions:
        source(version_line(versions))


def versions_of(graph: RunnerPlan) -> dict[str, int]:
    """Returns the versions of results, by name."""
    return {str(out.value): out.version for out in graph.outputs if out.version is not None}


def version_line(versions: dict[str, int]) -> str:
    numbers = tuple_text([str(version) for version in versions.values()])
    return f"set_versions({tuple_text(list(versions))}, {numbers})"
