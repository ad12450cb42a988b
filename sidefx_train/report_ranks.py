"""The reports of one step on several ranks as one: the first rank's, and how the others differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from sidefx_train.report.rendering import Block, plain, table

if TYPE_CHECKING:
    from sidefx_train.report import StepReport


@dataclass(frozen=True)
class RankRecord:
    """What one rank's report says.

    Attributes:
        rank: the rank in its group.
        calls: calls of the step.
        replays: calls that a captured graph executed.
        eager: calls that ran eagerly.
        graphs: graphs, parts included.
        events: graph breaks, recaptures and eager steps as text, with how often each occurred.
        capture_seconds: seconds spent capturing and compiling.
    """

    rank: int
    calls: int
    replays: int
    eager: int
    graphs: int
    events: dict[str, int]
    capture_seconds: float


@dataclass(frozen=True)
class RanksReport:
    """One report for all ranks.

    Attributes:
        report: the report of the calling rank.
        ranks: what each rank's report says, by rank.
    """

    report: StepReport
    ranks: tuple[RankRecord, ...]

    def differences(self) -> dict[int, list[str]]:
        """Returns what differs from the first rank, by rank; ranks that agree with it are left out."""
        found = {record.rank: _differences(self.ranks[0], record) for record in self.ranks[1:]}
        return {rank: lines for rank, lines in found.items() if lines}

    def __str__(self) -> str:
        return plain(self.__rich__())

    def __rich__(self) -> RenderableType:
        differences = self.differences()
        rows = [
            (
                str(record.rank),
                str(record.graphs),
                str(record.calls),
                str(record.replays),
                str(record.eager),
                f"{record.capture_seconds:.2f}",
                "; ".join(differences.get(record.rank, ())) or "-",
            )
            for record in self.ranks
        ]
        columns = ("rank", "graphs", "calls", "replayed", "eager", "seconds capturing", "differs from rank 0")
        return Group(self.report.__rich__(), table(Block("ranks", columns, rows)))


def gather_reports(report: StepReport, group: Any = None) -> RanksReport:
    """Collects the reports of a step from all ranks; every rank must call it, outside the step.

    Args:
        report: this rank's report.
        group: process group; ``None``: the default one.

    Raises:
        RuntimeError: there is no process group.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("reports are gathered from ranks: call torch.distributed.init_process_group first")
    mine = _record(report, dist.get_rank(group))
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group)
    return RanksReport(report, tuple(gathered))


def _record(report: StepReport, rank: int) -> RankRecord:
    events = {f"graph break [{b.code}] {b.reason}": b.count for b in report.breaks}
    for change in report.recaptures:
        text = f"recapture: {change.source}"
        events[text] = events.get(text, 0) + 1
    events |= {f"eager [{f.code}] {f.reason}": f.count for f in report.fallbacks}
    counts = (report.calls, report.replays, report.fallback_count, report.graph_count)
    return RankRecord(rank, *counts, events, report.capture_seconds)


def _differences(first: RankRecord, other: RankRecord) -> list[str]:
    """Returns how often events occurred, for those that did not occur as often on the first rank."""
    lines = [] if other.calls == first.calls else [f"{other.calls} calls, not {first.calls}"]
    events: Sequence[str] = list(dict.fromkeys([*first.events, *other.events]))
    counts = [(event, other.events.get(event, 0), first.events.get(event, 0)) for event in events]
    return lines + [f"{event}: {theirs} times, not {ours}" for event, theirs, ours in counts if theirs != ours]
