"""Random generators that a step creates: one object draws for all runs, reset at each to its initial state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sidefx_train.compile.graph.artifacts import Executable, TracedGraph


def with_generator_reset(executable: Executable, traced: TracedGraph) -> Executable:
    """Wraps an executable so that each run first resets the generators of its graph to their initial states."""
    if not traced.created_generators:
        return executable

    def run(args: list[Any]) -> Any:
        for generator, state in traced.created_generators:
            generator.set_state(state)
        return executable.run(args)

    return replace(executable, run=run)
