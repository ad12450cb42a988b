"""Writes how the runner takes its arguments, passes them to a device section, and drops them.

The lines depend on what the others read, so placeholders (:data:`TAKE`, :data:`SECTION`, :data:`FORGET`) stand for them
until the function is complete.
"""

from __future__ import annotations

import re

from sidefx_train.compile.backend.runners.runner_source import RunnerSource, tuple_text
from sidefx_train.compile.backend.runners.runner_versions import version_line, versions_of
from sidefx_train.compile.graph.artifacts import RunnerPlan

TAKE, SECTION, FORGET = "# arguments", "# section", "# forget"
_MANY = 32
"""Number of inputs, or results, from which a section gets, or returns, a list if possible, without variables."""


def take_arguments(graph: RunnerPlan, source: RunnerSource) -> set[int]:
    """Writes how the arguments are taken from their list, and the call of the section; returns which are variables.

    A section that gets most of them gets them in the list that they came in: to make variables of hundreds of tensors
    takes longer than to launch a graph.
    """
    count, place = len(graph.inputs), source.lines.index(TAKE)
    target, names = source.section
    edits = _edits(names, count)
    read = _arguments([*source.lines, *(name for _, _, new in edits for name in new)])
    whole = bool(names) and count >= _MANY and 4 * len(read) <= count
    if whole:
        source.lines[place : place + 1] = [f"a{i} = args[{i}]" for i in sorted(read)]
        call = [f"args[{start}:{stop}] = {tuple_text(list(new))}" for start, stop, new in reversed(edits)]
        call += [f"{target}section(args)", "args.clear()"]
    else:
        taken = [f"{tuple_text([f'a{i}' for i in range(count)])} = args"] if count else []
        source.lines[place : place + 1] = [*taken, "args.clear()"]
        call = [f"{target}section([{', '.join(names)}])"]
    if SECTION in source.lines:
        place = source.lines.index(SECTION)
        source.lines[place : place + 1] = call
    return read if whole else set(range(count))


def _arguments(lines: list[str]) -> set[int]:
    """Returns the numbers of the inputs whose variables occur in lines."""
    return {int(number) for number in re.findall(r"\ba(\d+)\b", "\n".join(lines))}


def _edits(names: tuple[str, ...], count: int) -> list[tuple[int, int, tuple[str, ...]]]:
    """Returns the replacements of slices (start, stop, names) that make the list ``a0, a1, ...`` one of ``names``."""
    edits: list[tuple[int, int, tuple[str, ...]]] = []
    new: list[str] = []
    at = 0

    def replace_until(stop: int) -> None:
        if new or stop > at:
            edits.append((at, stop, tuple(new)))
            new.clear()

    for name in names:
        kept = int(name[1:]) if re.fullmatch(r"a\d+", name) else -1
        if kept < at:
            new.append(name)
            continue
        replace_until(kept)
        at = kept + 1
    replace_until(count)
    return edits


def return_list(graph: RunnerPlan, source: RunnerSource) -> None:
    """Returns the results of a section as the section does, if the outputs are they and other lines read none."""
    names = [f"r{i}" for i in range(len(graph.results))]
    returned = f"return {tuple_text(names)}"
    if len(names) < _MANY or SECTION not in source.lines or source.lines[-1] != returned:
        return
    versions = versions_of(graph)
    lines = source.lines[:-1]
    if list(versions) == names:
        lines.remove(version_line(versions))
    if not re.search(r"\br\d+\b", "\n".join(lines)):
        source.section = "results = ", source.section[1]
        setting = (
            [f"set_versions(results, {tuple_text([str(each) for each in versions.values()])})"] if versions else []
        )
        source.lines = [*lines, *setting, "return results"]


def drop_arguments(graph: RunnerPlan, source: RunnerSource, variables: set[int]) -> None:
    """Drops references after the graph that nothing reads, so that memory is freed as soon as possible."""
    place = source.lines.index(FORGET)
    later = _arguments(source.lines[place:])
    free = [f"a{i}" for i in sorted(variables - later) if graph.inputs[i].kind == "tensor"]
    source.lines[place : place + 1] = [f"del {', '.join(free)}"] if free else []
