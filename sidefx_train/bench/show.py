"""Tables, plot, JSON and W&B run of a benchmark."""

from __future__ import annotations

import json
import math
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sidefx_train.bench.device import hardware
from sidefx_train.bench.rounds import REFERENCE, Plan, Run
from sidefx_train.bench.summary import Row

COLUMNS = ("step ms", "best ms", "x eager", "min..max", "goal", "first s", "warm s", "graphs", "right")
ON_CUDA = (
    "step ms",
    "best ms",
    "x eager",
    "host ms",
    "launches",
    "CUDA graphs",
    "copies",
    "first s",
    "graphs",
    "right",
)
WITH_OTHERS = (
    "step ms",
    "best ms",
    "x eager",
    "min..max",
    "sent MiB",
    "collectives ms",
    "hidden",
    "first s",
    "warm s",
    "graphs",
    "right",
)
ONLY_WIDE = ("best ms", "min..max")
WIDE = 125


def tables(rows: Sequence[Row], goals: dict[str, float], width: int = 140) -> RenderableType:
    """Returns the main table, and those of dispatch and of the first step's stages if there are any figures.

    Below ``WIDE`` characters the main table has fewer columns.
    """
    on_cuda = any(not math.isnan(row.host_s) for row in rows)
    with_others = any(not math.isnan(row.communication_s) for row in rows)
    wanted = ON_CUDA if on_cuda else WITH_OTHERS if with_others else COLUMNS
    labels = {"first s": "8 steps s", "warm s": "warm 8 s"} if with_others else {}
    columns = [name for name in wanted if width >= WIDE or name not in ONLY_WIDE]
    main = Table(title="x = eager's step / contender's step, median over adjacent runs", box=box.SIMPLE_HEAD)
    for name in ("workload", "contender"):
        main.add_column(name, no_wrap=True)
    for name in columns:
        main.add_column(labels.get(name, name), justify="right", no_wrap=True)
    for index, row in enumerate(rows):
        first = index == 0 or rows[index - 1].workload != row.workload
        last = index + 1 == len(rows) or rows[index + 1].workload != row.workload
        cells = _cells(row, goals)
        main.add_row(
            row.workload if first else "",
            row.contender,
            *(cells.get(name, Text()) for name in columns),
            end_section=last,
        )
    parts: list[RenderableType] = [main]
    measured = [row for row in rows if row.dispatch_s]
    if measured:
        dispatch = Table(title="dispatch, microseconds", box=box.SIMPLE_HEAD)
        keys = list(measured[0].dispatch_s)
        dispatch.add_column("workload")
        for key in keys:
            dispatch.add_column(key, justify="right")
        for row in measured:
            dispatch.add_row(row.workload, *(f"{row.dispatch_s.get(key, math.nan) * 1e6:.1f}" for key in keys))
        parts.append(dispatch)
    if any(not math.isnan(row.held_mb) for row in rows):
        parts.append(_memory(rows))
    if any(row.scaling for row in rows):
        parts.append(_scaling(rows))
    if any(row.stages_cold_s for row in rows):
        parts.append(_stages(rows))
    return Group(*parts)


def _memory(rows: Sequence[Row]) -> Table:
    """Returns the memory of a step, and of the process including loaded and compiled code."""
    on_cuda = any(not math.isnan(row.reserved_mb) for row in rows)
    title = "peak memory, MiB: tensors held by a step, and the process"
    if on_cuda:
        title = "peak device memory, MiB: allocated in a step, reserved with CUDA graphs, allocated by the process"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for name in ("workload", "contender"):
        table.add_column(name, no_wrap=True)
    for name in ("step", "of eager's", *(("reserved", "of eager's") if on_cuda else ()), "process"):
        table.add_column(name, justify="right")
    for row in rows:
        if row.status == "ok":
            figures = [(row.held_mb, ".1f"), (row.held_ratio, ".2f")]
            figures += [(row.reserved_mb, ".1f"), (row.reserved_ratio, ".2f")] if on_cuda else []
            figures += [(row.memory_mb, ".0f")]
            table.add_row(row.workload, row.contender, *(_number(*figure) for figure in figures))
    return table


def _scaling(rows: Sequence[Row]) -> Table:
    """Returns what a step sends with other numbers of processes, computed from its graph."""
    table = Table(
        title="sent by each process in a step, MiB, and messages that follow one another", box=box.SIMPLE_HEAD
    )
    table.add_column("workload", no_wrap=True)
    shown = [row for row in rows if row.scaling]
    for count, _, _ in shown[0].scaling:
        table.add_column(f"{count} processes", justify="right")
    for row in shown:
        table.add_row(row.workload, *(f"{sent:.2f}, {messages}" for _, sent, messages in row.scaling))
    return table


def _stages(rows: Sequence[Row]) -> Table:
    """Returns the stages of the first step, with empty caches and in later processes."""
    table = Table(title="capturing and compiling, seconds by stage", box=box.SIMPLE_HEAD)
    kinds = [(row, kind, found) for row in rows for kind, found in _kinds(row)]
    keys = dict.fromkeys(key for _, _, found in kinds for key in found)
    for name in ("workload", "caches"):
        table.add_column(name, no_wrap=True)
    for key in (*keys, "sum"):
        table.add_column(key, justify="right")
    for row, kind, found in kinds:
        cells = (f"{found[key]:.2f}" if key in found else "-" for key in keys)
        table.add_row(row.workload, kind, *cells, f"{sum(found.values()):.2f}")
    return table


def _kinds(row: Row) -> list[tuple[str, dict[str, float]]]:
    return [(kind, found) for kind, found in (("empty", row.stages_cold_s), ("warm", row.stages_warm_s)) if found]


def _cells(row: Row, goals: dict[str, float]) -> dict[str, Text]:
    if row.status != "ok":
        return {"step ms": Text(row.status, style="red"), "right": Text(row.note[:40])}
    goal = goals.get(row.workload) if row.contender == "sidefx" else None
    reached = goal is None or row.ratio >= goal
    right = "yes" if row.correct else f"NO {row.parameter_error:.0e}" if row.compared else "-"
    right = "reference" if row.contender == REFERENCE else right
    notes = "" if not row.fallbacks else f" ({row.fallbacks} eager)"
    return {
        "step ms": Text(f"{row.step_s * 1e3:.3f}"),
        "best ms": Text(f"{row.step_min_s * 1e3:.3f}"),
        "x eager": Text(_number(row.ratio, ".2f"), style="" if goal is None else "green" if reached else "red"),
        "min..max": Text(f"{_number(row.ratio_low, '.2f')}..{_number(row.ratio_high, '.2f')}"),
        "host ms": Text(_number(row.host_ms, ".3f")),
        "launches": Text(_number(row.launches, ".0f")),
        "CUDA graphs": Text(_number(row.graph_launches, ".0f")),
        "copies": Text(_number(row.copies, ".0f")),
        "sent MiB": Text(_number(row.sent_mb, ".2f")),
        "collectives ms": Text(_number(row.communication_ms, ".2f")),
        "hidden": Text(_number(row.hidden, ".0%")),
        "goal": Text("" if goal is None else f"{goal:.2f}"),
        "first s": Text(_number(row.first_cold_s, ".2f")),
        "warm s": Text(_number(row.first_warm_s, ".2f")),
        "graphs": Text("-" if row.graphs is None else f"{row.graphs}{notes}"),
        "right": Text(right, style="red" if right.startswith("NO") else ""),
    }


def _number(value: float, spec: str) -> str:
    return "-" if math.isnan(value) else format(value, spec)


def line(run: Run) -> str:
    """Formats one run in one line, for the log above the progress bar."""
    name = f"round {run['round']}  {run['workload']:13s} {run['contender']:24s}"
    if run["status"] != "ok":
        return f"{name} {run['status']}: {run.get('note', '')}"
    return f"{name} {statistics.median(run['slices']) * 1e3:9.3f} ms   first {run['first_s']:.2f} s"


def write_json(path: Path, plan: Plan, rows: Sequence[Row], runs: Sequence[Run]) -> None:
    """Writes how it was measured, the rows, and every run."""
    meta = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": hardware(plan.device),
        "suite": plan.suite,
        "rounds": plan.rounds,
        "threads": plan.threads,
        "seconds": plan.seconds,
        "torch": next((run["torch"] for run in runs if "torch" in run), None),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"meta": meta, "summary": [r.to_dict() for r in rows], "runs": list(runs)}, indent=1))


def plot(path: Path, rows: Sequence[Row], goals: dict[str, float]) -> None:
    """Writes an image with bars by workload: speed-up, cold first step, and memory of a step; on CUDA, host time.

    A contender has one color in all of them. Speed-ups have the range of their rounds, and goals are dashes.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    workloads = list(dict.fromkeys(row.workload for row in rows))
    contenders = list(dict.fromkeys(row.contender for row in rows if row.status == "ok"))
    on_cuda = any(not math.isnan(row.host_s) for row in rows)
    panels = {
        "speed-up over eager": ("ratio", True),
        **({"host time of a step, ms": ("host_ms", False)} if on_cuda else {}),
        "first step with empty caches, s": ("first_cold_s", False),
        **({"device memory / eager's": ("reserved_ratio", True)} if on_cuda else {}),
        **({} if on_cuda else {"tensor memory of a step / eager's": ("held_ratio", True)}),
    }
    figure, all_axes = pyplot.subplots(len(panels), figsize=(1.6 * len(workloads) + 2, 3.2 * len(panels)))
    for axes, (label, (figure_name, relative)) in zip(all_axes, panels.items(), strict=True):
        shown = [name for name in contenders if not (relative and name == REFERENCE)]
        width = 0.8 / max(1, len(shown))
        for index, contender in enumerate(shown):
            measured = [row for row in rows if row.contender == contender and row.status == "ok"]
            at = [workloads.index(row.workload) + index * width for row in measured]
            heights = [getattr(row, figure_name) for row in measured]
            bars = axes.bar(
                at,
                [0.0 if math.isnan(height) else height for height in heights],
                width,
                color=f"C{contenders.index(contender)}",
                yerr=_ranges(measured) if figure_name == "ratio" else None,
                capsize=2,
                error_kw={"linewidth": 0.8},
            )
            axes.bar_label(bars, labels=[_bar_label(*each) for each in zip(heights, measured, strict=True)], fontsize=7)
        middle = width * (len(shown) - 1) / 2
        if relative:
            axes.axhline(1.0, color="black", linewidth=0.8)
        if figure_name == "ratio":
            for position, name in enumerate(workloads):
                if name in goals:
                    ends = position + middle - 0.45, position + middle + 0.45
                    axes.hlines(goals[name], *ends, colors="black", linestyles="dashed", linewidth=1.0)
        axes.set_xticks([position + middle for position in range(len(workloads))], workloads, rotation=20)
        axes.set_ylabel(label, fontsize=8)
        axes.margins(y=0.12)
    keys: list[Any] = [pyplot.Rectangle((0, 0), 1, 1, color=f"C{index}") for index in range(len(contenders))]
    keys.append(pyplot.Line2D([], [], color="black", linestyle="dashed", linewidth=1.0))
    labels = [*contenders, *(["goal of sidefx"] if goals else [])]
    figure.legend(keys[: len(labels)], labels, fontsize=8, ncols=len(labels), loc="upper center")
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _ranges(rows: Sequence[Row]) -> list[list[float]]:
    """Returns the distances of the smallest and largest ratios of all rounds from the median."""
    return [
        [0.0 if math.isnan(row.ratio_low) else row.ratio - row.ratio_low for row in rows],
        [0.0 if math.isnan(row.ratio_high) else row.ratio_high - row.ratio for row in rows],
    ]


def _bar_label(height: float, row: Row) -> str:
    return "" if math.isnan(height) else f"{height:.2f}{', wrong' if row.wrong else ''}"


def log_to_wandb(folder: Path, rows: Sequence[Row]) -> str:
    """Writes an offline W&B run below ``folder``; returns its path."""
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    settings = wandb.Settings(silent=True)
    run: Any = wandb.init(project="sidefx-train-bench", mode="offline", dir=folder, settings=settings)
    columns = [
        "workload",
        "contender",
        "step_s",
        "ratio",
        "first_cold_s",
        "first_warm_s",
        "memory_mb",
        "held_mb",
        "correct",
    ]
    table = [[row.to_dict()[column] for column in columns] for row in rows]
    run.log({"bench": wandb.Table(columns=columns, data=table)})
    run.log({f"{row.workload}/{row.contender}/ratio": row.ratio for row in rows if row.status == "ok"})
    where = str(Path(run.dir).parent)
    run.finish()
    return where
