"""The part of a step that a CUDA graph records."""

import pytest
from torch import fx

from sidefx_train.compile.gpu.section import section_of
from sidefx_train.compile.graph.artifacts import Name, Output, RunnerPlan


@pytest.mark.parametrize("more", [{}, {"late": ("s1 = r4",)}, {"counters": ((0, "s0", "r3"), (1, "s0", None))}])
def test_results_that_outlive_a_replay_escape(more):
    """Regression: a result before a counter's flag was not copied, and the next replay overwrote it."""
    outputs = (Output("result", Name("r2")), Output("result", Name("r5")))
    kept = {"r2", "r5"} | {"late": {"r4"}, "counters": {"r3"}}.get(next(iter(more), ""), set())
    section = section_of(RunnerPlan(inputs=(), outputs=outputs, **more), fx.Graph())
    assert {f"r{position}" for position in section.escaping} == kept
