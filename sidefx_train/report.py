"""The report of a compiled step: plain data that prints itself.

The compiler fills a :class:`StepReport` while the step is captured and called (``record_*``). People read it: printed,
in a notebook, as JSON. It never holds tensors, only text and numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

from sidefx_train.communication import CommunicationRecord
from sidefx_train.errors import CODES, FOLLOWING, Location
from sidefx_train.report_tables import Block, as_html, as_text, plain

_MEANWHILE = 6
"""Collectives of a kind of which the table of communication shows the operations that run meanwhile."""


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
        captured_seconds: median time of a captured step; 0 if not compared.
        eager_seconds: median time of an eager step, which includes testing the guards; 0 if not compared.
        captured_steps: captured steps behind the median.
        eager_steps: eager steps behind the median.
        why_not: why the times were not compared.
    """

    decision: Literal["captured", "eager", "not compared"]
    captured_seconds: float = 0.0
    eager_seconds: float = 0.0
    captured_steps: int = 0
    eager_steps: int = 0
    why_not: str = ""

    def __str__(self) -> str:
        if self.why_not:
            return f"not compared with eager: {self.why_not}"
        return (
            f"a captured step takes {_milliseconds(self.captured_seconds)}, an eager one "
            f"{_milliseconds(self.eager_seconds)} (medians of {self.captured_steps} and {self.eager_steps} steps)"
        )


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


@dataclass
class StepReport:
    """What was captured of a step, what was not, and why.

    Attributes:
        name: the step's name.
        backend: name of the backend.
        captures: one record per capture, oldest first.
        breaks: where captures stopped, also after an earlier break; one record per line and reason.
        recaptures: the values that caused the step to be captured again.
        effects: Python side effects that replay performs after the graph, as text.
        guards: conditions for replay.
        fallbacks: every uncaptured step, grouped by reason.
        calls: calls of the step.
        replays: calls that a captured graph executed. ``calls == replays + fallback_count`` after a call has returned.
        parts: reports of the captured sections after a break, one per resume location.
        prefetches: batches that were copied to the device ahead of their step.
    """

    name: str = "step"
    backend: str = "inductor"
    captures: list[CaptureRecord] = field(default_factory=list)
    breaks: list[BreakRecord] = field(default_factory=list)
    recaptures: list[RecaptureRecord] = field(default_factory=list)
    effects: list[str] = field(default_factory=list)
    guards: list[GuardRecord] = field(default_factory=list)
    fallbacks: list[FallbackRecord] = field(default_factory=list)
    calls: int = 0
    replays: int = 0
    parts: list[StepReport] = field(default_factory=list)
    prefetches: PrefetchRecord = field(default_factory=PrefetchRecord)
    _sources: dict[str, str] = field(default_factory=dict, repr=False)
    _whole: StepReport | None = field(default=None, repr=False)

    # ------------------------------------------------------------------ filled by the compiler
    def record_capture(
        self,
        *,
        trigger: str = "first call",
        nodes: Mapping[str, int] | None = None,
        seconds: Mapping[str, float] | None = None,
        inputs: Mapping[str, int] | None = None,
        graphs: int = 1,
        effects: Iterable[str] = (),
        guards: Iterable[GuardRecord] = (),
        sources: Mapping[str, str] | None = None,
        caveats: Iterable[str] = (),
        notes: Iterable[str] = (),
        choices: Iterable[ChoiceRecord] = (),
        verification: list[str] | None = None,
        cuda_graph: CudaGraphRecord | None = None,
        communication: Iterable[CommunicationRecord] = (),
    ) -> CaptureRecord:
        """Adds a capture; new ``effects`` and ``guards`` are appended to the report's.

        ``verification`` and ``cuda_graph`` are stored by reference: later runs add to them.
        """
        record = CaptureRecord(
            index=len(self.captures),
            trigger=trigger,
            nodes=dict(nodes or {}),
            seconds=dict(seconds or {}),
            inputs=dict(inputs or {}),
            graphs=graphs,
            caveats=list(caveats),
            notes=list(notes),
            choices=list(choices),
            verification=verification if verification is not None else [],
            cuda_graph=cuda_graph,
            communication=list(communication),
        )
        self.captures.append(record)
        self.effects.extend(e for e in dict.fromkeys(effects) if e not in self.effects)
        known = {(g.source, g.kind, g.condition) for g in self.guards}
        self.guards.extend(g for g in guards if (g.source, g.kind, g.condition) not in known)
        for key, text in (sources or {}).items():
            self._sources[key if key not in self._sources else f"{key}#{record.index}"] = text
        return record

    def add_part(self, name: str) -> StepReport:
        """Adds and returns the report of a part captured after a break."""
        part = StepReport(name=name, backend=self.backend, _whole=self._whole or self)
        self.parts.append(part)
        return part

    def record_break(self, code: str, reason: str, location: Location | None = None) -> BreakRecord:
        """Counts a break; breaks of a part also count for the whole step. Equal code, reason and location share a
        record."""
        if self._whole is not None and code not in FOLLOWING:
            self._whole.record_break(code, reason, location)
        for known in self.breaks:
            if (known.code, known.reason, known.location) == (code, reason, location):
                known.count += 1
                return known
        record = BreakRecord(code, reason, location)
        self.breaks.append(record)
        return record

    def record_recapture(
        self, source: str, old: Any, new: Any, location: Location | None = None, seconds: float = 0.0
    ) -> RecaptureRecord:
        """Adds a recapture; ``old`` and ``new`` are stored as text."""
        record = RecaptureRecord(source, _as_text(old), _as_text(new), location, seconds)
        self.recaptures.append(record)
        return record

    def record_fallback(
        self, code: str, reason: str, location: Location | None = None, count: int = 1
    ) -> FallbackRecord:
        """Counts ``count`` steps that were not captured."""
        for known in self.fallbacks:
            if (known.code, known.reason, known.location) == (code, reason, location):
                known.count += count
                return known
        record = FallbackRecord(code, reason, location, count)
        self.fallbacks.append(record)
        return record

    # ------------------------------------------------------------------ read by people
    @property
    def graph_count(self) -> int:
        """Number of graphs, including those of the parts after a break."""
        return sum(capture.graphs for capture in self.captures) + sum(part.graph_count for part in self.parts)

    @property
    def fallback_count(self) -> int:
        """Calls that ran eagerly, except those that began captured (see :attr:`parts`)."""
        return sum(record.count for record in self.fallbacks)

    @property
    def capture_seconds(self) -> float:
        """Wall seconds spent capturing and compiling, parts included."""
        own = sum(capture.total_seconds for capture in self.captures)
        return own + sum(part.capture_seconds for part in self.parts)

    @property
    def communication(self) -> list[CommunicationRecord]:
        """Collectives of the last capture, parts included, in the order in which they start."""
        own = self.captures[-1].communication if self.captures else []
        return own + [record for part in self.parts for record in part.communication]

    def sources(self) -> dict[str, str]:
        """Generated code by name: guards, prologue, epilogue, and the backend's code."""
        return dict(self._sources)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-able data (generated sources by name only)."""
        data = asdict(replace(self, _whole=None, parts=[]))
        del data["_sources"], data["_whole"]
        data.update(
            parts=[part.to_dict() for part in self.parts],
            graph_count=self.graph_count,
            fallback_count=self.fallback_count,
            capture_seconds=self.capture_seconds,
            sources=sorted(self._sources),
        )
        return data

    def __str__(self) -> str:
        """Returns the headline, captures, graph breaks and recaptures as plain text, for ``print`` and logs."""
        return plain(self.__rich__())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.__rich__()

    def __rich__(self) -> RenderableType:
        return as_text(self.name, _figures(self), _overview(self))

    def details(self) -> str:
        """Returns all tables as plain text: also seconds by stage, side effects, measured choices and guards."""
        return plain(as_text(self.name, _figures(self), [*_overview(self), *_details(self)]))

    def to_html(self) -> str:
        """Returns the complete report as a ``<section>`` of HTML tables; the details are folded."""
        return as_html(self.name, _figures(self), _overview(self), _details(self))

    def _repr_html_(self) -> str:
        return self.to_html()


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def _overview(report: StepReport) -> list[Block]:
    """Returns the tables a user reads first: captures, graph breaks, eager steps, recaptures."""
    blocks = []
    if report.captures:
        noted = any(c.caveats for c in report.captures)
        rows = [
            (
                str(c.index),
                c.trigger,
                _pairs(c.nodes, "{}"),
                _pairs(c.inputs, "{}"),
                f"{c.total_seconds:.2f}",
                *(["; ".join(c.caveats)] if noted else []),
            )
            for c in report.captures
        ]
        columns = ("#", "because", "nodes", "inputs", "seconds", *(["note"] if noted else []))
        blocks.append(Block("captures", columns, rows))
    times = [(c.index, c.timing) for c in report.captures if c.timing is not None and not c.timing.why_not]
    if times:
        rows = [
            (
                str(index),
                _milliseconds(timing.captured_seconds),
                _milliseconds(timing.eager_seconds),
                f"{timing.captured_steps}, {timing.eager_steps}",
                "captured" if timing.decision == "captured" else "left for eager",
            )
            for index, timing in times
        ]
        columns = ("#", "captured step", "eager step", "steps timed", "decision")
        blocks.append(Block("compared with eager", columns, rows))
    graphs = [(str(c.index), *_replayed(c.cuda_graph)) for c in report.captures if c.cuda_graph is not None]
    if graphs:
        columns = (
            "#",
            "replayed",
            "recorded",
            "a call launches",
            "launched kernel by kernel",
            "results, reserved, MiB",
        )
        blocks.append(Block("CUDA graphs", columns, graphs))
    ahead = report.prefetches
    if ahead.prefetched or ahead.dropped or ahead.refused:
        why = "; ".join(filter(None, [_pairs(ahead.dropped, "{}"), ahead.refused and f"no more: {ahead.refused}"]))
        row = (str(ahead.prefetched), str(ahead.used), str(sum(ahead.dropped.values())), why or "-")
        blocks.append(Block("batches prefetched to the device", ("prefetched", "used", "dropped", "why"), [row]))
    communication = report.communication if report._whole is None else []
    if communication:
        columns = ("collective", "times", "processes", "sent by each, MiB", "messages", "operations meanwhile")
        blocks.append(Block("communication", columns, _collectives(communication)))
    if report.breaks:
        breaks = [(b.code, str(b.count), _place(b.location), f"{b.title}: {b.reason}", b.advice) for b in report.breaks]
        blocks.append(Block("graph breaks", ("code", "times", "where", "what", "what to do"), breaks))
    if report.parts:
        parts = [
            (p.name, str(p.graph_count), str(p.calls), str(p.replays), _eager_because(p), _recaptured_because(p))
            for p in report.parts
        ]
        columns = ("part", "graphs", "calls", "replayed", "eager", "recaptures")
        blocks.append(Block("captured after a graph break", columns, parts))
    if report.fallbacks:
        eager = [(f.code, str(f.count), _place(f.location), f.reason) for f in report.fallbacks]
        blocks.append(Block("steps that ran eagerly", ("code", "steps", "where", "why"), eager))
    if report.recaptures:
        blocks.append(Block("recaptures", ("guard that failed",), [(_sentence(r),) for r in report.recaptures]))
    return blocks


def _details(report: StepReport) -> list[Block]:
    """Returns the tables behind the overview: stages, measured choices, side effects, guards."""
    blocks = []
    if report.captures:
        rows = [
            (str(c.index), _pairs(c.seconds, "{:.2f}"), "; ".join([*c.notes, *c.verification, *_not_timed(c)]))
            for c in report.captures
        ]
        blocks.append(Block("captures by stage", ("#", "seconds", "notes"), rows))
    if report.effects:
        blocks.append(Block("side effects kept", ("effect",), [(effect,) for effect in report.effects]))
    choices = [
        (str(c.index), choice.what, str(choice.count), str(choice.threads), choice.chosen, _measured(choice))
        for c in report.captures
        for choice in c.choices
    ]
    if choices:
        columns = ("#", "operation", "count", "threads", "chosen", "measured, microseconds")
        blocks.append(Block("autotuning choices", columns, choices))
    if report.guards:
        guards = [(g.condition or f"{g.source}: {g.kind}", _place(g.location)) for g in report.guards]
        blocks.append(Block(f"guards ({len(guards)})", ("holds at every replay", "read at"), guards))
    return blocks


def _replayed(graph: CudaGraphRecord) -> tuple[str, ...]:
    """Returns the cells of the table of CUDA graphs."""
    plain = _pairs(graph.plain, "{}") or graph.refused or "-"
    numbers = {"kernels": graph.kernels, "library calls": graph.library_calls, "updates": graph.updates}
    launches = ", ".join(f"{count} {what}" for what, count in numbers.items() if count) or "-"
    memory = f"{_mebibytes(graph.memory)}, {_mebibytes(graph.reserved)}"
    return str(graph.replays), str(graph.recordings), launches, plain, memory


def _collectives(records: Sequence[CommunicationRecord]) -> list[tuple[str, ...]]:
    """Returns the rows of the table of communication: one for each kind of collective and group size."""
    kinds: dict[tuple[str, str, int], list[CommunicationRecord]] = {}
    for record in records:
        kinds.setdefault((record.operator, record.dtype, record.group_size), []).append(record)
    return [
        (
            f"{operator}, {dtype}",
            str(len(found)),
            str(size or "-"),
            f"{sum(record.sent() for record in found) / 2**20:.3g}" if size else "-",
            str(sum(record.messages() for record in found)) if size else "-",
            ", ".join(f"{record.between} of {record.nodes}" for record in found[:_MEANWHILE])
            + (", ..." if len(found) > _MEANWHILE else ""),
        )
        for (operator, dtype, size), found in kinds.items()
    ]


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f}"


def _figures(report: StepReport) -> str:
    """Returns the counts of a step in one line."""
    return (
        f"[{report.backend}]: {_count(report.graph_count, 'graph')}, {_count(len(report.breaks), 'graph break')}, "
        f"{_count(len(report.recaptures), 'recapture')}; "
        f"{_count(report.calls, 'call')}: {report.replays} replayed, {report.fallback_count} eager; "
        f"{report.capture_seconds:.2f} s capturing"
    )


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _not_timed(capture: CaptureRecord) -> list[str]:
    return [str(capture.timing)] if capture.timing is not None and capture.timing.why_not else []


def _sentence(record: RecaptureRecord) -> str:
    """Describes a recapture: the failed guard, the old and new value, the line that read it, and the cost."""
    read = f", read at {record.location}" if record.location is not None else ""
    return f"{changed(record.source, record.old, record.new)}{read}; captured again in {record.seconds:.2f} s"


def changed(label: str, old: str, new: str) -> str:
    """Describes a failed guard; ``old`` may be a full condition, which names the value itself."""
    return f"{old} no longer holds: now {new}" if old.startswith(label) else f"{label} changed from {old} to {new}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _place(location: Location | None) -> str:
    return str(location) if location is not None else "-"


def _measured(choice: ChoiceRecord) -> str:
    shown = {name: 1e6 * choice.seconds[name] for name in sorted(choice.seconds, key=choice.seconds.__getitem__)}
    return _pairs(shown, "{:.1f}") or f"nothing: {choice.why_not or 'the time limit was reached'}"


def _eager_because(report: StepReport) -> str:
    if not report.fallbacks:
        return "0"
    worst = max(report.fallbacks, key=lambda record: record.count)
    return f"{report.fallback_count}: [{worst.code}] {worst.reason}"


def _recaptured_because(report: StepReport) -> str:
    if not report.recaptures:
        return "0"
    last = report.recaptures[-1]
    return f"{len(report.recaptures)}: {changed(last.source, last.old, last.new)}"


def _pairs(values: Mapping[str, float], spec: str) -> str:
    return ", ".join(f"{key} {spec.format(value)}" for key, value in values.items())
