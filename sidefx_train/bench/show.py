"""Tables, plot, JSON and W&B run of a benchmark."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sidefx_train.bench.rounds import REFERENCE, Plan, Run
from sidefx_train.bench.summary import Row


def tables(rows: Sequence[Row], goals: dict[str, float]) -> RenderableType:
    """The main table, and one of dispatch times where there are any."""
    main = Table(title="step time; x = eager's step / contender's step, median of same-round pairs", title_style="bold")
    for name in ("workload", "contender"):
        main.add_column(name, no_wrap=True)
    for name in ("step ms", "best ms", "x eager", "min..max", "goal", "first s", "warm s", "MiB", "graphs", "right"):
        main.add_column(name, justify="right", no_wrap=True)
    last = None
    for row in rows:
        main.add_row(row.workload if row.workload != last else "", row.contender, *_cells(row, goals))
        last = row.workload
        if row.contender == [r.contender for r in rows if r.workload == row.workload][-1]:
            main.add_section()
    parts: list[RenderableType] = [main]
    measured = [row for row in rows if row.dispatch_s]
    if measured:
        dispatch = Table(title="dispatch: microseconds of a captured step outside its graph", title_style="bold")
        keys = list(measured[0].dispatch_s)
        dispatch.add_column("workload")
        for key in keys:
            dispatch.add_column(key, justify="right")
        for row in measured:
            dispatch.add_row(row.workload, *(f"{row.dispatch_s.get(key, math.nan) * 1e6:.1f}" for key in keys))
        parts.append(dispatch)
    return Group(*parts)


def _cells(row: Row, goals: dict[str, float]) -> list[Text]:
    if row.status != "ok":
        return [Text(row.status, style="red"), *[Text("")] * 8, Text(row.note[:60])]
    goal = goals.get(row.workload) if row.contender == "sidefx" else None
    reached = goal is None or row.ratio >= goal
    right = "reference" if row.contender == REFERENCE else "yes" if row.correct else f"NO {row.parameter_error:.0e}"
    notes = "" if not row.fallbacks else f" ({row.fallbacks} eager)"
    return [
        Text(f"{row.step_s * 1e3:.3f}"),
        Text(f"{row.step_min_s * 1e3:.3f}"),
        Text(_number(row.ratio, ".2f"), style="" if goal is None else "green" if reached else "red"),
        Text(f"{_number(row.ratio_low, '.2f')}..{_number(row.ratio_high, '.2f')}"),
        Text("" if goal is None else f"{goal:.2f}"),
        Text(_number(row.first_cold_s, ".2f")),
        Text(_number(row.first_warm_s, ".2f")),
        Text(_number(row.memory_mb, ".0f")),
        Text("-" if row.graphs is None else f"{row.graphs}{notes}"),
        Text(right, style="red" if right.startswith("NO") else ""),
    ]


def _number(value: float, spec: str) -> str:
    return "-" if math.isnan(value) else format(value, spec)


def line(run: Run) -> str:
    """One run in one line, for the log above the progress bar."""
    name = f"round {run['round']}  {run['workload']:13s} {run['contender']:24s}"
    if run["status"] != "ok":
        return f"{name} {run['status']}: {run.get('note', '')}"
    return f"{name} {run['step_s'] * 1e3:9.3f} ms   first {run['first_s']:.2f} s"


def write_json(path: Path, plan: Plan, rows: Sequence[Row], runs: Sequence[Run]) -> None:
    meta = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "suite": plan.suite,
        "rounds": plan.rounds,
        "threads": plan.threads,
        "seconds": plan.seconds,
        "torch": next((run["torch"] for run in runs if "torch" in run), None),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"meta": meta, "summary": [r.to_dict() for r in rows], "runs": list(runs)}, indent=1))


def plot(path: Path, rows: Sequence[Row]) -> None:
    """Bars of speed-ups by workload, as an image file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    workloads = list(dict.fromkeys(row.workload for row in rows))
    contenders = list(dict.fromkeys(row.contender for row in rows if row.contender != REFERENCE))
    figure, axes = pyplot.subplots(figsize=(1.6 * len(workloads) + 2, 4))
    width = 0.8 / max(1, len(contenders))
    for index, contender in enumerate(contenders):
        ratios = {row.workload: row.ratio for row in rows if row.contender == contender and row.status == "ok"}
        at = [position + index * width for position in range(len(workloads))]
        bars = axes.bar(at, [ratios.get(name, 0.0) for name in workloads], width, label=contender)
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks([p + width * (len(contenders) - 1) / 2 for p in range(len(workloads))], workloads, rotation=20)
    axes.set_ylabel("speed-up over eager")
    axes.legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def log_to_wandb(rows: Sequence[Row]) -> str:
    """Writes an offline W&B run; returns where."""
    import wandb

    run: Any = wandb.init(project="sidefx-train-bench", mode="offline", settings=wandb.Settings(silent=True))
    columns = ["workload", "contender", "step_s", "ratio", "first_cold_s", "first_warm_s", "memory_mb", "correct"]
    table = [[row.to_dict()[column] for column in columns] for row in rows]
    run.log({"bench": wandb.Table(columns=columns, data=table)})
    run.log({f"{row.workload}/{row.contender}/ratio": row.ratio for row in rows if row.status == "ok"})
    folder = str(run.dir)
    run.finish()
    return folder
