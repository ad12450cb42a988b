"""Summarizes single runs in one row per workload and contender."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from sidefx_train.bench.rounds import REFERENCE, Plan, Run
from sidefx_train.bench.workloads import FLOAT32

MEDIANS = (
    "memory_mb",
    "held_mb",
    "reserved_mb",
    "host_s",
    "launches",
    "graph_launches",
    "copies",
    "communication_s",
    "hidden",
    "sent_mb",
)
"""Figures of single runs of which a row has the median."""


@dataclass(frozen=True)
class Row:
    """Figures of one contender on one workload; times in seconds, ratios are eager's step over this one's.

    Attributes:
        ratio: median over the rounds of the median ratio of two adjacent runs, with the least and largest.
        memory_mb: MiB of the process at its peak; on CUDA, MiB that it has allocated on the device.
        held_mb: MiB of tensors of one step at its peak; on CUDA with parameters.
        held_ratio: the same, relative to eager's.
        reserved_mb: MiB taken from a CUDA device during a step, CUDA graphs included.
        reserved_ratio: the same, relative to eager's.
        host_s: time of a call on CUDA, without waiting for the device.
        launches: kernels that the host launches in a step on CUDA.
        graph_launches: CUDA graphs that the host launches in a step.
        copies: copies and fills of memory that the host starts in a step on CUDA.
        communication_s: seconds that collectives with other processes take in a step.
        hidden: part of these seconds in which the program does not wait for them.
        sent_mb: MiB that a process sends to others in a step.
        scaling: number of processes, MiB that each of them sends, and messages that follow one another, in a step.
        first_cold_s: first step with empty caches; of several processes, the first eight steps.
        first_warm_s: first step of later processes.
        dispatch_s: seconds a captured step spends outside its graph, by part.
        stages_cold_s: seconds of capturing and compiling by stage, with empty caches.
        stages_warm_s: the same in later processes.
    """

    workload: str
    contender: str
    status: str
    note: str = ""
    step_s: float = math.nan
    step_min_s: float = math.nan
    ratio: float = math.nan
    ratio_low: float = math.nan
    ratio_high: float = math.nan
    first_cold_s: float = math.nan
    first_warm_s: float = math.nan
    memory_mb: float = math.nan
    held_mb: float = math.nan
    held_ratio: float = math.nan
    reserved_mb: float = math.nan
    reserved_ratio: float = math.nan
    host_s: float = math.nan
    launches: float = math.nan
    graph_launches: float = math.nan
    copies: float = math.nan
    communication_s: float = math.nan
    hidden: float = math.nan
    sent_mb: float = math.nan
    loss_error: float = math.nan
    parameter_error: float = math.nan
    loss_tolerance: float = FLOAT32.loss
    parameter_tolerance: float = FLOAT32.parameters
    graphs: int | None = None
    breaks: int | None = None
    fallbacks: int | None = None
    scaling: list[tuple[int, float, int]] = field(default_factory=list)
    dispatch_s: dict[str, float] = field(default_factory=dict)
    stages_cold_s: dict[str, float] = field(default_factory=dict)
    stages_warm_s: dict[str, float] = field(default_factory=dict)

    @property
    def correct(self) -> bool:
        return self.loss_error <= self.loss_tolerance and self.parameter_error <= self.parameter_tolerance

    @property
    def host_ms(self) -> float:
        return self.host_s * 1e3

    @property
    def communication_ms(self) -> float:
        return self.communication_s * 1e3

    @property
    def compared(self) -> bool:
        """Whether there were results of eager to compare with."""
        return not math.isnan(self.loss_error)

    @property
    def wrong(self) -> bool:
        """Whether results differ from eager's."""
        return self.status == "ok" and self.compared and not self.correct

    def to_dict(self) -> dict[str, Any]:
        values = {**asdict(self), "correct": self.correct}
        return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in values.items()}


def summarize(plan: Plan, runs: list[Run]) -> list[Row]:
    """Returns one row per pair of the plan, in order."""
    return [
        _row(workload, contender, [r for r in runs if r["workload"] == workload])
        for workload, contenders in plan.pairs.items()
        for contender in contenders
    ]


def _row(workload: str, contender: str, runs: list[Run]) -> Row:
    mine = [run for run in runs if run["contender"] == contender]
    good = [run for run in mine if run["status"] == "ok"]
    if not good:
        last = mine[-1] if mine else {"status": "given up"}
        return Row(workload, contender, last["status"], last.get("note", ""))
    eager = {run["round"]: run for run in runs if run["contender"] == REFERENCE and run["status"] == "ok"}
    ratios = [_ratio(eager[run["round"]], run) for run in good if run["round"] in eager]
    cold = [run["first_s"] for run in good if run["round"] == 0]
    warm = [run["first_s"] for run in good if run["round"] > 0]
    medians = {key: _median_of(key, good) for key in MEDIANS}
    of_eager = {key: _median_of(key, eager.values()) for key in ("held_mb", "reserved_mb")}
    dispatch = [run["dispatch_s"] for run in good if "dispatch_s" in run]
    return Row(
        workload,
        contender,
        "ok",
        "; ".join(sorted({run["note"] for run in mine if run.get("note")})),
        step_s=_median([_median(run["slices"]) for run in good]),
        step_min_s=min(min(run["slices"]) for run in good),
        ratio=_median(ratios),
        ratio_low=min(ratios, default=math.nan),
        ratio_high=max(ratios, default=math.nan),
        first_cold_s=_median(cold),
        first_warm_s=_median(warm),
        **medians,
        held_ratio=medians["held_mb"] / (of_eager["held_mb"] or math.nan),
        reserved_ratio=medians["reserved_mb"] / (of_eager["reserved_mb"] or math.nan),
        loss_error=max(run.get("loss_error", math.nan) for run in good),
        parameter_error=max(run.get("parameter_error", math.nan) for run in good),
        loss_tolerance=good[-1].get("loss_tolerance", FLOAT32.loss),
        parameter_tolerance=good[-1].get("parameter_tolerance", FLOAT32.parameters),
        graphs=good[-1].get("graphs"),
        breaks=good[-1].get("breaks"),
        fallbacks=good[-1].get("fallbacks"),
        scaling=good[-1].get("scaling", []),
        dispatch_s=_medians(dispatch),
        stages_cold_s=_medians(
            [run["capture_seconds"] for run in good if run["round"] == 0 and "capture_seconds" in run]
        ),
        stages_warm_s=_medians(
            [run["capture_seconds"] for run in good if run["round"] > 0 and "capture_seconds" in run]
        ),
    )


def _ratio(eager: Run, run: Run) -> float:
    """Returns the ratio of eager's step time to that of another process of the same round, run by run."""
    return _median([theirs / mine for theirs, mine in zip(eager["slices"], run["slices"], strict=True)])


def _median_of(key: str, runs: Iterable[Run]) -> float:
    """Returns the median of a figure, of the runs that have it."""
    return _median([run[key] for run in runs if key in run])


def _medians(found: list[dict[str, float]]) -> dict[str, float]:
    """Returns medians by key, in the order of the keys."""
    keys = dict.fromkeys(key for one in found for key in one)
    return {key: _median([one[key] for one in found if key in one]) for key in keys}


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else math.nan
