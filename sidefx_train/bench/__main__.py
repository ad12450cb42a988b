"""``python -m sidefx_train.bench --suite core``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sidefx_train.bench import show
from sidefx_train.bench.contenders import CONTENDERS, REFERENCE
from sidefx_train.bench.guard_cost import guard_cost
from sidefx_train.bench.imports import import_cost
from sidefx_train.bench.rounds import Plan, Run, measure
from sidefx_train.bench.summary import summarize
from sidefx_train.bench.workloads import GOALS, SUITES, names


def choose(suite: str, only: str) -> dict[str, list[str]]:
    """Returns contenders by workload from ``--only``: workloads, contenders, or ``workload:contender``, comma
    separated.

    Raises:
        SystemExit: a name is neither.
    """
    workloads, contenders, pairs = [], [], set()
    for token in filter(None, only.split(",")):
        workload, _, contender = token.partition(":")
        if contender:
            if workload not in names(suite) or contender not in CONTENDERS:
                raise SystemExit(f"--only: unknown name {token!r}")
            pairs.add((workload, contender))
        elif token in names(suite):
            workloads.append(token)
        elif token in CONTENDERS:
            contenders.append(token)
        else:
            raise SystemExit(f"--only: {token!r} is neither of {names(suite)} nor of {list(CONTENDERS)}")
    if workloads or contenders or not pairs:
        pairs |= {(w, c) for w in workloads or names(suite) for c in contenders or CONTENDERS}
    pairs |= {(workload, REFERENCE) for workload, _ in pairs}
    return {
        workload: [c for c in CONTENDERS if (workload, c) in pairs]
        for workload in names(suite)
        if (workload, REFERENCE) in pairs
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sidefx_train.bench", description=__doc__)
    parser.add_argument("--suite", choices=SUITES, default="core")
    parser.add_argument("--only", default="", help="workloads, contenders or workload:contender, comma separated")
    parser.add_argument("--rounds", type=int, default=3, help="the first is cold, later ones reuse its caches")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.2, help="steady-state seconds per process")
    parser.add_argument("--timeout", type=float, default=600, help="seconds per process")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all figures here")
    parser.add_argument(
        "--plot", type=Path, metavar="OUT.png", help="draw speed-ups, first steps and memory (needs matplotlib)"
    )
    parser.add_argument("--wandb", action="store_true", help="write an offline W&B run (needs wandb)")
    parser.add_argument("--verbose", action="store_true", help="show the output of failed processes")
    args = parser.parse_args(argv)

    plan = Plan(
        args.suite, choose(args.suite, args.only), args.rounds, args.threads, args.seconds, args.timeout, args.verbose
    )
    console = Console() if sys.stdout.isatty() else Console(width=140)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("benchmark", total=plan.processes)

        def tell(run: Run) -> None:
            progress.console.print(show.line(run), highlight=False, markup=False)
            progress.advance(task)

        runs = measure(plan, tell)
    rows = summarize(plan, runs)
    console.print(show.tables(rows, GOALS, console.width))
    if any(row.contender == "sidefx" and row.status == "ok" for row in rows):
        console.print(str(guard_cost()), highlight=False)
        console.print(str(import_cost()), highlight=False)
    if args.json is not None:
        show.write_json(args.json, plan, rows, runs)
        console.print(f"figures: {args.json}")
    if args.plot is not None:
        show.plot(args.plot, rows, GOALS)
        console.print(f"plot: {args.plot}")
    if args.wandb:
        console.print(f"W&B run: {show.log_to_wandb(Path('runs/bench'), rows)}")
    wrong = [f"{row.workload}:{row.contender}" for row in rows if row.status == "ok" and not row.correct]
    if wrong:
        console.print(f"results differ from eager's: {', '.join(wrong)}", style="red")
    return 1 if any(name.endswith(":sidefx") for name in wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
