"""The records of a report: plain data, only text and numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sidefx_train.communication import CommunicationRecord
from sidefx_train.errors import CODES, Location


@dataclass(frozen=True)
class ChoiceRecord:
    """The implementation chosen for an operation, and the measurements behind the choice.

    Attributes:
        what: the operation, its shapes and other arguments.
        count: how often it occurs in the graph.
        threads: threads used for each candidate.
        chosen: name of the candidate that the graph was compiled with.
        seconds: time of one call, by candidate; empty if nothing was measured.
        why_not: why nothing was measured; empty if it was, or if the time limit was reached first.
    """

    what: str
    count: int
    threads: int
    chosen: str
    seconds: dict[str, float]
    why_not: str = ""


@dataclass(frozen=True)
class TimingRecord:
    """Times of a captured step and of the same step run eagerly.

    Attributes:
        decision: ``"captured"`` if the captured step is used, ``"eager"`` if it is slower and left for eager,
            ``"not compared"`` if its time says nothing.
        captured_seconds: time of a captured step; 0 if not compared.
        eager_seconds: time of an eager step, which includes testing the guards; 0 if not compared.
        captured_steps: captured steps behind that time.
        eager_steps: eager steps behind that time.
        why_not: why the times were not compared.
        statistic: ``"mean"`` of a step in parts that run eagerly in some calls, else ``"median"``.
    """

    decision: Literal["captured", "eager", "not compared"]
    captured_seconds: float = 0.0
    eager_seconds: float = 0.0
    captured_steps: int = 0
    eager_steps: int = 0
    why_not: str = ""
    statistic: Literal["median", "mean"] = "median"

    def __str__(self) -> str:
        if self.why_not:
            return f"not compared with eager: {self.why_not}"
        captured, eager = milliseconds(self.captured_seconds), milliseconds(self.eager_seconds)
        behind = f"{self.statistic}s of {self.captured_steps} and {self.eager_steps} steps"
        return f"a captured step takes {captured}, an eager one {eager} ({behind})"


@dataclass
class CudaGraphRecord:
    """What became of the calls of a captured step on a device.

    Attributes:
        replays: calls that replayed a CUDA graph.
        recordings: CUDA graphs that were recorded.
        plain: calls that launched kernel by kernel, by reason.
        memory: bytes of results in the CUDA graphs that exist.
        refused: why nothing is recorded; empty if it is.
        kernels: Triton kernels that a call launches, all at once if it is replayed.
        library_calls: operators of libraries among its launches; each launches one kernel or several.
        updates: operations behind the graph, such as a fused optimizer, among its launches.
        reserved: bytes that the device's allocator reserved while CUDA graphs were recorded.
    """

    replays: int = 0
    recordings: int = 0
    plain: dict[str, int] = field(default_factory=dict)
    memory: int = 0
    refused: str = ""
    kernels: int = 0
    library_calls: int = 0
    updates: int = 0
    reserved: int = 0

    def ran_plainly(self, reason: str) -> None:
        """Counts a call that launched kernel by kernel."""
        self.plain[reason] = self.plain.get(reason, 0) + 1


@dataclass
class PrefetchRecord:
    """What became of batches that were copied to the device ahead of their step.

    Attributes:
        prefetched: batches whose copy was begun.
        used: those that a step took.
        dropped: those that no step took, or not all of them, by reason: they were copied again.
        refused: why nothing is prefetched any more; empty if it is.
    """

    prefetched: int = 0
    used: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    refused: str = ""

    def drop(self, reason: str) -> None:
        """Counts a batch that was dropped."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1


@dataclass
class CaptureRecord:
    """One successful capture.

    Attributes:
        index: position in :attr:`StepReport.captures`.
        trigger: the reason: ``"first call"`` or what had changed.
        nodes: graph nodes by stage (``"capture"``, ``"functionalize"``, ...).
        seconds: wall seconds by stage.
        inputs: number of graph inputs by kind (``"static"``, ``"tensor"``, ``"scalar"``).
        graphs: graphs of this capture; more than one if the step was split at graph breaks.
        caveats: what a user has to know about this capture, such as assumed conditions.
        notes: decisions worth knowing, in the order they were made.
        choices: what was chosen by measuring, the most work first.
        verification: results and cost of the comparisons of the compiled graph with the captured one.
        timing: the comparison of its time with eager's; ``None`` before it is decided and where there is none.
        cuda_graph: what became of its calls on a device; ``None`` for a step on the CPU.
        communication: its collectives with other processes, in order.
    """

    index: int
    trigger: str = "first call"
    nodes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    inputs: dict[str, int] = field(default_factory=dict)
    graphs: int = 1
    caveats: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    choices: list[ChoiceRecord] = field(default_factory=list)
    verification: list[str] = field(default_factory=list)
    timing: TimingRecord | None = None
    cuda_graph: CudaGraphRecord | None = None
    communication: list[CommunicationRecord] = field(default_factory=list)

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())


@dataclass
class BreakRecord:
    """A location where a capture stopped.

    Attributes:
        code: the reason's code, such as ``"SFX101"``.
        reason: what could not be captured, by the user's names.
        location: the user's line.
        count: captures that stopped there.
    """

    code: str
    reason: str
    location: Location | None = None
    count: int = 1

    @property
    def title(self) -> str:
        return CODES[self.code][0]

    @property
    def advice(self) -> str:
        return CODES[self.code][1]


@dataclass
class RecaptureRecord:
    """A value that changed between two calls, so that the step was captured again.

    Attributes:
        source: expression of the value, as the user would write it.
        old: its value when the step was captured (``repr``).
        new: its value at the call that missed.
        location: the user's line that read it.
        seconds: time spent capturing again.
    """

    source: str
    old: str
    new: str
    location: Location | None = None
    seconds: float = 0.0


@dataclass
class GuardRecord:
    """A condition under which a captured step may be replayed.

    Attributes:
        source: expression of the value, as the user would write it.
        kind: what is tested: ``"is"``, ``"equal"``, ``"type"``, ``"length"``, ``"tensor"``, ...
        location: the user's line that read the value; for arguments, where the step is defined.
        condition: the full condition as text.
    """

    source: str
    kind: str
    location: Location | None = None
    condition: str = ""


@dataclass
class FallbackRecord:
    """Counts the steps that ran eagerly for one reason.

    Attributes:
        code: the reason's code, such as ``"SFX101"``.
        reason: why the steps were not replayed, by the user's names.
        location: the user's line, if the reason has one.
        count: steps that ran eagerly.
    """

    code: str
    reason: str
    location: Location | None = None
    count: int = 1


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
