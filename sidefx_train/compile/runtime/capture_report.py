"""Reports a capture."""

from __future__ import annotations

from sidefx_train.compile.capture.guards.kinds import describe
from sidefx_train.compile.graph.collectives import communication
from sidefx_train.compile.graph.step_metadata import in_words
from sidefx_train.compile.pipeline.captured import nodes_of
from sidefx_train.compile.pipeline.entry import Entry
from sidefx_train.compile.runtime.guard_failures import Missed
from sidefx_train.report import CaptureRecord, GuardRecord, StepReport, changed

_ASSUMED = "assumes conditions on tensors, which the graph checks: {}"
_NATIVE_REST = "the step runs natively from {} on: it {}"
_ONCE = "runs once, operation by operation: the step itself invalidates a guard ({})"


def record_capture(report: StepReport, entry: Entry, missed: Missed | None, is_part: bool) -> CaptureRecord:
    """Adds a capture to a report, and returns its record.

    Args:
        report: report of the step.
        entry: the captured and compiled entry.
        missed: why it was captured again; ``None`` for the first capture.
        is_part: the step is the rest of another.
    """
    captured, executable = entry.captured, entry.executable
    nodes = nodes_of(captured.traced)
    kinds: dict[str, int] = {}
    for item in captured.traced.inputs:
        kinds[item.kind] = kinds.get(item.kind, 0) + 1
    sources = {"facts": in_words(captured.residual.metadata), "residual": captured.residual.source}
    if "graph" not in executable.sources:
        sources["graph"] = captured.traced.module.print_readable(print_output=False)
    caveats = [_ONCE.format(captured.self_invalidated)] if entry.once else []
    if captured.assumptions:
        caveats.append(_ASSUMED.format(", ".join(map(str, captured.assumptions))))
    rest = captured.suspension.point if captured.suspension is not None else None
    natively = [_NATIVE_REST.format(rest.location, rest.reason)] if rest is not None and rest.native else []
    return report.record_capture(
        trigger="first call" if missed is None else changed(missed.label, missed.old, missed.new),
        nodes={"capture": nodes},
        graphs=1 if nodes or not (is_part or captured.suspension) else 0,
        seconds={"capture": captured.seconds, **executable.seconds},
        inputs=kinds,
        effects=list(captured.effects),
        guards=[GuardRecord(g.source.label, g.kind, g.location, describe(g)) for g in captured.guards],
        sources={**sources, **executable.sources},
        caveats=caveats,
        notes=[*natively, *executable.notes],
        choices=executable.choices,
        verification=executable.verification,
        cuda_graph=executable.replays,
        communication=communication(captured.traced.module.graph),
    )
