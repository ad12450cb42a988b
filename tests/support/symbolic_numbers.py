"""Compares a step that reads a changing number with eager Python, and counts the graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import sidefx_train
from tests.support.parity import seed


class Space:
    """A plain object that a step may change."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def __repr__(self) -> str:
        return repr(vars(self))


def graphs_for(step: Callable[[Space, int], Any], make: Callable[[], Space], calls: int = 8) -> int:
    """Compares ``step(space, k)``, ``k`` counting up, with eager after every call; returns the number of graphs.

    Raises:
        AssertionError: a result, an error or the contents of the space differ.
    """
    want, have = make(), make()
    compiled = sidefx_train.compile(step, backend="aot_eager")
    for k in range(calls):
        shown = []
        for run, space in ((step, want), (compiled, have)):
            seed(k)
            try:
                shown.append((repr(run(space, k)), repr(space)))
            except IndexError as error:
                shown.append((repr(error), repr(space)))
        assert shown[0] == shown[1], f"call {k}"
    return compiled.report().graph_count


def shown(value: Any) -> Any:
    """Returns a result with its classes and dtypes, for a comparison."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    return [shown(item) for item in value] if isinstance(value, tuple) else (type(value), value)


def check_two_captures(step: Any, values: Any) -> None:
    """Asserts eager's results for all values, of one capture at the first and another for the rest."""
    compiled = sidefx_train.compile(step, backend="eager")
    for value in values:
        assert repr(shown(compiled(value))) == repr(shown(step(value)))
    report = compiled.report()
    assert len(report.captures) == 2 and not report.breaks and not report.fallbacks, f"{report}"
