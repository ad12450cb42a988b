"""The report of a compiled step, which prints itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

from sidefx_train.communication import CommunicationRecord
from sidefx_train.errors import FOLLOWING, Location
from sidefx_train.report import tables
from sidefx_train.report.records import (
    BreakRecord,
    CaptureRecord,
    ChoiceRecord,
    CudaGraphRecord,
    FallbackRecord,
    GuardRecord,
    PrefetchRecord,
    RecaptureRecord,
)
from sidefx_train.report.rendering import Block, as_html, as_text, plain
from sidefx_train.report.tables import counted


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
    blocks = (
        tables.captures(report.captures),
        tables.comparisons(report.captures),
        tables.cuda_graphs(report.captures),
        tables.prefetches(report.prefetches),
        tables.communication(report.communication if report._whole is None else []),
        tables.breaks(report.breaks),
        tables.parts([_row(part) for part in report.parts]),
        tables.fallbacks(report.fallbacks),
        tables.recaptures(report.recaptures),
    )
    return [block for block in blocks if block.rows]


def _details(report: StepReport) -> list[Block]:
    """Returns the tables behind the overview: stages, measured choices, side effects, guards."""
    blocks = (
        tables.stages(report.captures),
        tables.effects(report.effects),
        tables.choices(report.captures),
        tables.guards(report.guards),
    )
    return [block for block in blocks if block.rows]


def _row(part: StepReport) -> tuple[str, ...]:
    """Returns the row of a part in the table of parts."""
    counts = (part.graph_count, part.calls, part.replays)
    return (
        part.name,
        *map(str, counts),
        tables.eager_because(part.fallbacks),
        tables.recaptured_because(part.recaptures),
    )


def _figures(report: StepReport) -> str:
    """Returns the counts of a step in one line."""
    graphs, breaks = counted(report.graph_count, "graph"), counted(len(report.breaks), "graph break")
    return (
        f"[{report.backend}]: {graphs}, {breaks}, {counted(len(report.recaptures), 'recapture')}; "
        f"{counted(report.calls, 'call')}: {report.replays} replayed, {report.fallback_count} eager; "
        f"{report.capture_seconds:.2f} s capturing"
    )
