"""Result of a capture, and the error of a stopped one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sidefx_train.compile.autograd.joint_graph import JointGraph
from sidefx_train.compile.capture.guards.guard import Guard
from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.capture.guards.specialization import Specialization
from sidefx_train.compile.capture.resume.branch_history import Branch
from sidefx_train.compile.capture.resume.suspension import StopPoint, Suspension
from sidefx_train.compile.common.draws.host_draws import HostDraws
from sidefx_train.compile.graph.artifacts import TracedGraph
from sidefx_train.compile.residual.generate import MISS, Residual, link
from sidefx_train.errors import Location


@dataclass(frozen=True)
class Captured:
    """A captured step: a graph, generated source around it, and its guards.

    It contains no values of the trace: some pass through, and an entry must not keep the first call's objects.

    Attributes:
        self_invalidated: the first self-invalidated guard, as text: the next call will be captured again.
        assumptions: lines with assumed conditions on tensors.
        draws: random numbers to draw before the guards are tested.
    """

    name: str
    traced: TracedGraph
    residual: Residual
    guards: tuple[Guard, ...]
    effects: tuple[str, ...]
    state_check: Any
    commits: tuple[tuple[Callable[[], None], Callable[[], None]], ...]
    specialization: Specialization
    seconds: float
    suspension: Suspension | None = None
    joint: JointGraph | None = None
    symbolic_sizes: bool = False
    iterators: tuple[Source, ...] = ()
    symbols: dict[str, Source] = field(default_factory=dict)
    self_invalidated: str = ""
    assumptions: tuple[Location, ...] = ()
    draws: HostDraws = field(default_factory=lambda: HostDraws((), []))

    def fetcher(self, checks: dict[str, Any]) -> Callable[..., Any]:
        """Returns the function of guards and prologue alone, which leaves random generators as they are.

        Args:
            checks: functions that it calls to check guards.
        """
        return self.draws.before(link(self.residual, self.name, checks, measuring=True), MISS, keep=False)


class StopGuard(NamedTuple):
    """When a capture would stop at the same location.

    Attributes:
        holds: ``holds(args, kwargs)``: True if the state at entry would stop the capture again.
        guards: the conditions.
    """

    holds: Callable[..., bool]
    guards: tuple[Guard, ...]


class CaptureBroke(Exception):
    """An exception that no stop explains ended a capture: an error of this library, or the step's own. It is the cause.

    Attributes:
        holds: guard that is true while another capture would end like this one; ``None`` if that is not known.
    """

    def __init__(self, holds: StopGuard | None) -> None:
        super().__init__("a capture ended with an exception")
        self.holds = holds


class CaptureFailed(Exception):
    """A capture that stopped.

    Attributes:
        code: error code.
        reason: what stopped it.
        location: the user's line.
        holds: when the capture would stop again; a compiled step replaces it by a holder of its function.
        points: instructions before which the step can be suspended instead, innermost first.
        raised: an exception came out of the step during the capture; the eager step may raise the same.
        without_break: why the step could not be split around the instruction either, if that was tried.
        of_backend: the step was captured, but its graph could not be compiled.
        endless_branches: branches of which the capture found that they must not be assumed.
    """

    def __init__(
        self,
        code: str,
        reason: str,
        location: Location | None,
        holds: StopGuard | None,
        raised: bool = False,
        points: tuple[StopPoint, ...] = (),
    ) -> None:
        super().__init__(reason)
        self.points = points
        self.without_break = ""
        self.of_backend = False
        self.endless_branches: frozenset[Branch] = frozenset()
        self.raised = raised
        self.code = code
        self.reason = reason
        self.location = location
        self.holds: Any = holds

    @property
    def why_eager(self) -> str:
        """Why the step runs eagerly, not even in parts."""
        return (
            f"{self.reason}; it could not continue after that: {self.without_break}"
            if self.without_break
            else self.reason
        )


def nodes_of(traced: TracedGraph) -> int:
    return sum(node.op == "call_function" for node in traced.module.graph.nodes)
