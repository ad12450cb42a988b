"""``python -m sidefx_train.bench --suite core``, ``--suite distributed``, and ``--device cuda``."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sidefx_train.bench import device, ranks, show
from sidefx_train.bench.contenders import ON_DEVICE, REFERENCE, compared
from sidefx_train.bench.guard_cost import guard_cost
from sidefx_train.bench.imports import import_cost
from sidefx_train.bench.rounds import Plan, Run, measure
from sidefx_train.bench.summary import summarize
from sidefx_train.bench.workloads import GOALS, SUITES, names

DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"suite": "core", "rounds": 3, "seconds": 1.2, "timeout": 600.0},
    "cuda": {"suite": "gpu", "rounds": 1, "seconds": 1.0, "timeout": 150.0},
}
"""Defaults that depend on the device."""

MEMORY_PART = 0.9
"""Part of a device's memory that processes may fill."""


def choose(suite: str, only: str, on: str = "cpu") -> dict[str, list[str]]:
    """Returns contenders by workload from ``--only``: workloads, contenders, or ``workload:contender``, comma
    separated.

    Raises:
        SystemExit: a name is neither.
    """
    known = compared(suite, on)
    workloads, contenders, pairs = [], [], set()
    for token in filter(None, only.split(",")):
        workload, _, contender = token.partition(":")
        if contender:
            if workload not in names(suite) or contender not in known:
                raise SystemExit(f"--only: unknown name {token!r}")
            pairs.add((workload, contender))
        elif token in names(suite):
            workloads.append(token)
        elif token in known:
            contenders.append(token)
        else:
            raise SystemExit(f"--only: {token!r} is neither of {names(suite)} nor of {known}")
    if workloads or contenders or not pairs:
        pairs |= {(w, c) for w in workloads or names(suite) for c in contenders or known}
    pairs |= {(workload, REFERENCE) for workload, _ in pairs}
    return {
        workload: [c for c in known if (workload, c) in pairs]
        for workload in names(suite)
        if (workload, REFERENCE) in pairs
    }


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m sidefx_train.bench", description=__doc__)
    parser.add_argument("--device", choices=ON_DEVICE, default="cpu")
    parser.add_argument("--suite", choices=SUITES, help="core; on cuda: gpu, which is launch and large")
    parser.add_argument("--only", default="", help="workloads, contenders or workload:contender, comma separated")
    parser.add_argument("--rounds", type=int, help="3, on cuda 1; the first is cold, later ones reuse its caches")
    parser.add_argument("--threads", type=int, help="of each process: 2, with several processes 1")
    parser.add_argument("--seconds", type=float, help="steady-state seconds per process")
    parser.add_argument("--timeout", type=float, help="seconds per process")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which nothing more is started")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all figures here")
    parser.add_argument(
        "--plot", type=Path, metavar="OUT.png", help="draw speed-ups, first steps and memory (needs matplotlib)"
    )
    parser.add_argument("--wandb", action="store_true", help="write an offline W&B run (needs wandb)")
    parser.add_argument("--verbose", action="store_true", help="show the output of failed processes")
    args = parser.parse_args(argv)
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.threads is None:
        args.threads = 1 if args.suite == ranks.SUITE else 2
    return args


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    if args.suite == ranks.SUITE and args.device != "cpu":
        raise SystemExit(f"--suite {ranks.SUITE} is measured on the CPU")
    missing = device.missing(args.device)
    if missing:
        raise SystemExit(f"--device {args.device}: {missing}")
    plan = Plan(
        args.suite,
        choose(args.suite, args.only, args.device),
        args.rounds,
        args.threads,
        args.seconds,
        args.timeout,
        args.verbose,
        args.device,
        MEMORY_PART * device.memory_gib(args.device),
        args.limit,
    )
    console = Console() if sys.stdout.isatty() else Console(width=160)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("benchmark", total=plan.processes)
        so_far: list[Run] = []

        def tell(run: Run) -> None:
            progress.console.print(show.line(run), highlight=False, markup=False, soft_wrap=True)
            progress.advance(task)
            so_far.append(run)
            if args.json is not None:  # figures so far, in case the benchmark is stopped
                show.write_json(args.json, plan, summarize(plan, so_far), so_far)

        runs = measure(plan, tell)
    rows = summarize(plan, runs)
    alone = args.device == "cpu" and args.suite != ranks.SUITE
    goals = GOALS if alone else {}
    console.print(show.tables(rows, goals, console.width))
    for row in rows:
        if row.note:
            console.print(f"{row.workload}:{row.contender}: {row.note}", highlight=False, markup=False, soft_wrap=True)
    if alone and any(row.contender == "sidefx" and row.status == "ok" for row in rows):
        console.print(str(guard_cost()), highlight=False)
        console.print(str(import_cost()), highlight=False)
    if args.json is not None:
        show.write_json(args.json, plan, rows, runs)
        console.print(f"figures: {args.json}")
    if args.plot is not None:
        show.plot(args.plot, rows, goals)
        console.print(f"plot: {args.plot}")
    if args.wandb:
        console.print(f"W&B run: {show.log_to_wandb(Path('runs/bench'), rows)}")
    wrong = [f"{row.workload}:{row.contender}" for row in rows if row.wrong]
    if wrong:
        console.print(f"results differ from eager's: {', '.join(wrong)}", style="red")
    return 1 if any(name.endswith(":sidefx") for name in wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
