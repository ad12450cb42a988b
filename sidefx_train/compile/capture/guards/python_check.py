"""Generates Python code for guards; each test is true if its guard fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.guard import Guard, TensorFacts
from sidefx_train.compile.capture.guards.kinds import KINDS
from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.capture.guards.source_writer import Writer
from sidefx_train.compile.common import signal_handlers

FETCH_ERRORS = (KeyError, IndexError, AttributeError, ValueError, TypeError)
"""Errors of fetching or testing a value when the state has changed."""

_READ_ERRORS = (*FETCH_ERRORS, RuntimeError)
"""The same, before the sizes of a tensor are tested whose ``item()`` is read."""


HANDLER_RAISED = {"handler_raised": signal_handlers.raised}
"""Globals of :func:`answering_errors`."""


def answering_errors(answer: str) -> list[str]:
    """Returns the handler around guards: errors are answered, except those of a signal handler of the program.

    A handler's frame is below that of the guards; most errors are raised in the latter, and nothing more is asked.
    """
    errors = ", ".join(error.__name__ for error in FETCH_ERRORS)
    return [
        f"    except ({errors}) as error:",
        "        if error.__traceback__.tb_next is not None and handler_raised(error): raise",
        f"        {answer}",
    ]


def write_guards(writer: Writer, guards: list[Guard], miss: str = "return MISS") -> list[str]:
    """Returns lines that execute ``miss`` if a guard fails; adds the fetches to ``writer.fetched`` in between.

    Fetch lines and tests are interleaved, so that nothing is fetched below a value whose type is wrong.
    """
    lines: list[str] = []
    tensors: list[Guard] = []
    relations: list[Guard] = []
    empty = {id(g.source) for g in guards if g.kind == "length" and g.value == 0}
    for guard in guards:
        kind = KINDS[guard.kind]
        if kind.phase == "tensor":
            tensors.append(guard)
        elif kind.phase == "relation" or guard.source.reads_contents:
            relations.append(guard)
        elif guard.kind == "type" and id(guard.source) in empty and not guard.source.from_arguments:
            continue  # an empty container is only tested for emptiness
        else:
            lines += _failing_test(writer, guard, miss)
    if tensors:
        fetched = ", ".join(writer.value(guard.source) for guard in tensors if guard.source.kind != "const")
        held = tuple(guard.source.key for guard in tensors if guard.source.kind == "const")
        values = ", ".join([fetched] * bool(fetched) + [f"*{writer.constant(held, 'tensors')}"] * bool(held))
        lines += _drain(writer)
        lines.append(f"if not check_tensors({values}): {miss}")
    for guard in relations:
        lines += _failing_test(writer, guard, miss)
    return lines


def _failing_test(writer: Writer, guard: Guard, miss: str) -> list[str]:
    test = KINDS[guard.kind].python_test(writer, guard)
    return [*_drain(writer), f"if {test}: {miss}"]


def tensor_check(guards: list[Guard], fetch: Callable[[Source], Any]) -> Callable[..., bool]:
    """Returns the batched check of all tensor guards; tensors come in the order of :func:`write_guards`."""
    wanted = [guard for guard in guards if guard.kind == "tensor"]
    wanted.sort(key=lambda guard: guard.source.kind == "const")  # stable: fetched ones first
    if not wanted:
        return _always
    if not any(guard.value.may_repeat for guard in wanted):
        return _metadata_check(wanted, fetch)
    return _check_with_repeats(wanted, fetch)


def _metadata_check(wanted: list[Guard], fetch: Callable[[Source], Any]) -> Callable[..., bool]:
    """Returns the check in C++, which also requires that no tensor is given twice."""
    facts: list[TensorFacts] = [guard.value for guard in wanted]
    sizes, strides = [list(fact.shape) for fact in facts], [list(fact.stride) for fact in facts]
    return compat.tensor_guards([fetch(guard.source) for guard in wanted], sizes, strides).check  # type: ignore[no-any-return]


def _check_with_repeats(wanted: list[Guard], fetch: Callable[[Source], Any]) -> Callable[..., bool]:
    """Returns a check in which some tensors may be given twice, each of which is compared alone."""
    alone = [(place, _metadata_check([guard], fetch)) for place, guard in enumerate(wanted) if guard.value.may_repeat]
    places = [place for place, guard in enumerate(wanted) if not guard.value.may_repeat]
    others = _metadata_check([wanted[place] for place in places], fetch) if places else _always

    def check(*tensors: Any) -> bool:
        return all(holds(tensors[place]) for place, holds in alone) and others(*[tensors[place] for place in places])

    return check


def _always() -> bool:
    return True


def _drain(writer: Writer) -> list[str]:
    lines, writer.fetched[:] = list(writer.fetched), []
    return lines


class Missing(str):
    """Describes a value that could not be read, in place of the value."""


def failing(guard: Guard, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """Evaluates one guard without generated code; returns (failed, current value)."""
    try:
        with compat.subclasses_off():
            value = guard.source.fetch(args, kwargs)
    except _READ_ERRORS:
        return guard.kind != "empty_cell", Missing("missing")
    try:
        with compat.subclasses_off():
            return KINDS[guard.kind].check(guard, value, (args, kwargs))
    except _READ_ERRORS:  # what it is compared with is elsewhere, or nowhere
        return True, Missing("a value that cannot be compared: what it is compared with is missing")
