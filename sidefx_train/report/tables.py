"""The tables of a report: one function each, which returns a table without rows if there is nothing to show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sidefx_train.communication import CommunicationRecord
from sidefx_train.errors import Location
from sidefx_train.report.records import (
    BreakRecord,
    CaptureRecord,
    ChoiceRecord,
    CudaGraphRecord,
    FallbackRecord,
    GuardRecord,
    PrefetchRecord,
    RecaptureRecord,
    milliseconds,
)
from sidefx_train.report.rendering import Block

_MEANWHILE = 6
"""Collectives of a kind of which the table of communication shows the operations that run meanwhile."""


def captures(records: Sequence[CaptureRecord]) -> Block:
    noted = any(c.caveats for c in records)
    rows = [
        (
            str(c.index),
            c.trigger,
            _pairs(c.nodes, "{}"),
            _pairs(c.inputs, "{}"),
            f"{c.total_seconds:.2f}",
            *(["; ".join(c.caveats)] if noted else []),
        )
        for c in records
    ]
    return Block("captures", ("#", "because", "nodes", "inputs", "seconds", *(["note"] if noted else [])), rows)


def comparisons(records: Sequence[CaptureRecord]) -> Block:
    times = [(c.index, c.timing) for c in records if c.timing is not None and not c.timing.why_not]
    rows = [
        (
            str(index),
            milliseconds(timing.captured_seconds),
            milliseconds(timing.eager_seconds),
            f"{timing.captured_steps}, {timing.eager_steps}",
            "captured" if timing.decision == "captured" else "left for eager",
        )
        for index, timing in times
    ]
    return Block("compared with eager", ("#", "captured step", "eager step", "steps timed", "decision"), rows)


def cuda_graphs(records: Sequence[CaptureRecord]) -> Block:
    rows = [(str(c.index), *_replayed(c.cuda_graph)) for c in records if c.cuda_graph is not None]
    columns = ("#", "replayed", "recorded", "a call launches", "launched kernel by kernel", "results, reserved, MiB")
    return Block("CUDA graphs", columns, rows)


def prefetches(ahead: PrefetchRecord) -> Block:
    rows = []
    if ahead.prefetched or ahead.dropped or ahead.refused:
        why = "; ".join(filter(None, [_pairs(ahead.dropped, "{}"), ahead.refused and f"no more: {ahead.refused}"]))
        rows = [(str(ahead.prefetched), str(ahead.used), str(sum(ahead.dropped.values())), why or "-")]
    return Block("batches prefetched to the device", ("prefetched", "used", "dropped", "why"), rows)


def communication(records: Sequence[CommunicationRecord]) -> Block:
    columns = ("collective", "times", "processes", "sent by each, MiB", "messages", "operations meanwhile")
    return Block("communication", columns, _collectives(records))


def breaks(records: Sequence[BreakRecord]) -> Block:
    rows = [(b.code, str(b.count), _place(b.location), f"{b.title}: {b.reason}", b.advice) for b in records]
    return Block("graph breaks", ("code", "times", "where", "what", "what to do"), rows)


def parts(rows: Sequence[Sequence[str]]) -> Block:
    columns = ("part", "graphs", "calls", "replayed", "eager", "recaptures")
    return Block("captured after a graph break", columns, rows)


def fallbacks(records: Sequence[FallbackRecord]) -> Block:
    rows = [(f.code, str(f.count), _place(f.location), f.reason) for f in records]
    return Block("steps that ran eagerly", ("code", "steps", "where", "why"), rows)


def recaptures(records: Sequence[RecaptureRecord]) -> Block:
    return Block("recaptures", ("guard that failed",), [(_sentence(r),) for r in records])


def stages(records: Sequence[CaptureRecord]) -> Block:
    rows = [
        (str(c.index), _pairs(c.seconds, "{:.2f}"), "; ".join([*c.notes, *c.verification, *_not_timed(c)]))
        for c in records
    ]
    return Block("captures by stage", ("#", "seconds", "notes"), rows)


def effects(texts: Sequence[str]) -> Block:
    return Block("side effects kept", ("effect",), [(effect,) for effect in texts])


def choices(records: Sequence[CaptureRecord]) -> Block:
    rows = [
        (str(c.index), choice.what, str(choice.count), str(choice.threads), choice.chosen, _measured(choice))
        for c in records
        for choice in c.choices
    ]
    columns = ("#", "operation", "count", "threads", "chosen", "measured, microseconds")
    return Block("autotuning choices", columns, rows)


def guards(records: Sequence[GuardRecord]) -> Block:
    rows = [(g.condition or f"{g.source}: {g.kind}", _place(g.location)) for g in records]
    return Block(f"guards ({len(rows)})", ("holds at every replay", "read at"), rows)


def eager_because(records: Sequence[FallbackRecord]) -> str:
    """Returns how many steps ran eagerly, and the most frequent reason."""
    if not records:
        return "0"
    worst = max(records, key=lambda record: record.count)
    return f"{sum(record.count for record in records)}: [{worst.code}] {worst.reason}"


def recaptured_because(records: Sequence[RecaptureRecord]) -> str:
    """Returns how many recaptures there were, and the last reason."""
    if not records:
        return "0"
    last = records[-1]
    return f"{len(records)}: {changed(last.source, last.old, last.new)}"


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


def _not_timed(capture: CaptureRecord) -> list[str]:
    return [str(capture.timing)] if capture.timing is not None and capture.timing.why_not else []


def _sentence(record: RecaptureRecord) -> str:
    """Describes a recapture: the failed guard, the old and new value, the line that read it, and the cost."""
    read = f", read at {record.location}" if record.location is not None else ""
    return f"{changed(record.source, record.old, record.new)}{read}; captured again in {record.seconds:.2f} s"


def changed(label: str, old: str, new: str) -> str:
    """Describes a failed guard; ``old`` may be a full condition, which names the value itself."""
    return f"{old} no longer holds: now {new}" if old.startswith(label) else f"{label} changed from {old} to {new}"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _place(location: Location | None) -> str:
    return str(location) if location is not None else "-"


def _measured(choice: ChoiceRecord) -> str:
    shown = {name: 1e6 * choice.seconds[name] for name in sorted(choice.seconds, key=choice.seconds.__getitem__)}
    return _pairs(shown, "{:.1f}") or f"nothing: {choice.why_not or 'the time limit was reached'}"


def _pairs(values: Mapping[str, float], spec: str) -> str:
    return ", ".join(f"{key} {spec.format(value)}" for key, value in values.items())
