"""A step as the capture left it, what earlier calls taught about it, and why a capture stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from sidefx_train.compile.autograd.joint_graph import JointGraph
from sidefx_train.compile.capture.guards.guard import Guard
from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.capture.resume.suspension import StopPoint, Suspension
from sidefx_train.compile.graph.artifacts import TracedGraph
from sidefx_train.compile.residual.generate import Residual
from sidefx_train.errors import Location


@dataclass(frozen=True)
class Learned:
    """What earlier calls taught about a step's outside values.

    Attributes:
        symbolic: labels of numbers that change from call to call.
        moving: labels of objects that are replaced from call to call.
        dynamic: (label, dimension) of tensors whose size changes.
        all_dynamic: every size of the arguments is to be taken for changing.
        walked: labels of iterators that are at another place from call to call.
        grown: labels of lists that have grown, once for each time.
        growing: labels of lists that go on growing: they are not read as a whole any more.
        texts: labels of texts that have changed, once for each time.
        passing: labels of texts that go on changing: they are only handed on.
        reads_texts: the step decides on one of them, so that they are exact after all.
        based: labels of views whose bases get a new value, from which they have their history.
        doubts: conditions on tensors are not taken for granted: some did not hold, or a backward outside is cut off.
        whole: names of classes (metrics) whose calls cannot be captured and are replayed after the graph.
        inlined: code of torch's functions that warn: they are interpreted, so that the warnings are replayed.
        divided: those of them with whose results the step computes: their calls are captured in parts.
    """

    symbolic: frozenset[str] = frozenset()
    moving: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    divided: frozenset[str] = frozenset()
    dynamic: frozenset[tuple[str, int]] = frozenset()
    all_dynamic: bool = False
    walked: frozenset[str] = frozenset()
    grown: tuple[str, ...] = ()
    growing: frozenset[str] = frozenset()
    texts: tuple[str, ...] = ()
    passing: frozenset[str] = frozenset()
    reads_texts: bool = False
    based: frozenset[str] = frozenset()
    doubts: bool = False
    inlined: frozenset[CodeType] = frozenset()


@dataclass(frozen=True)
class Captured:
    """A step as the capture left it: a graph, generated source around it, and what it relies on.

    No value of the trace is among it: some stand for themselves, and an entry is not to keep the first call's objects.

    Attributes:
        ends: the first condition that the step itself ends, so that the next call will be captured again; in words.
        granted: lines whose conditions on tensors are taken for granted.
    """

    name: str
    traced: TracedGraph
    residual: Residual
    guards: tuple[Guard, ...]
    effects: tuple[str, ...]
    state_check: Any
    commits: tuple[tuple[Callable[[], None], Callable[[], None]], ...]
    learned: Learned
    seconds: float
    suspension: Suspension | None = None
    joint: JointGraph | None = None
    symbolic_sizes: bool = False
    iterators: tuple[Source, ...] = ()
    symbols: dict[str, Source] = field(default_factory=dict)
    ends: str = ""
    granted: tuple[Location, ...] = ()


class CaptureFailed(Exception):
    """A capture that stopped.

    Attributes:
        code: error code.
        reason: what stopped it.
        location: the user's line.
        holds: ``holds(args, kwargs)``: true if the state at entry is such that it would stop again.
        points: instructions in front of which the step can be suspended instead, innermost first.
        raised: an exception came out of the step while it was captured; eagerly it may raise just so.
        uncut: why the step could not be captured in parts around the instruction either, if that was tried.
    """

    def __init__(
        self,
        code: str,
        reason: str,
        location: Location | None,
        holds: Callable[..., bool] | None,
        raised: bool = False,
        points: tuple[StopPoint, ...] = (),
    ) -> None:
        super().__init__(reason)
        self.points = points
        self.uncut = ""
        self.raised = raised
        self.code = code
        self.reason = reason
        self.location = location
        self.holds = holds

    @property
    def why_eager(self) -> str:
        """Why the step runs as it is, not even in parts."""
        return f"{self.reason}; behind that it could not go on: {self.uncut}" if self.uncut else self.reason


def nodes_of(traced: TracedGraph) -> int:
    return sum(node.op == "call_function" for node in traced.module.graph.nodes)
