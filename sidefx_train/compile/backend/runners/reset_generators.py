"""Random generators that a step makes: one object draws for all runs, and begins each as the step made it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sidefx_train.compile.graph.artifacts import Executable, TracedGraph


def with_generator_reset(executable: Executable, traced: TracedGraph) -> Executable:
    """The executable with the generators of its graph set to the states that they are made in, before each run."""
    if not traced.created_generators:
        return executable

    def run(args: list[Any]) -> Any:
        for generator, state in traced.created_generators:
            generator.set_state(state)
        return executable.run(args)

    return replace(executable, run=run)
