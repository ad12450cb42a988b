"""Trains models of libraries, plainly and captured, and compares them: with Lightning, or by steps in plain loops.

    python tests/libraries/run.py [-k NAME] [--backends eager inductor] [--results FOLDER] [--again]

Every training is a process of its own. Its figures are a file in ``FOLDER`` (``build/libraries``), and are taken from
there the next time, unless ``--again`` is given. ``backend="eager"`` must leave the same weights bit for bit. Under
Inductor their relative distance must be below ``LIMIT``, or not much above that of a plain training whose weights were
changed by a rounding error after its first step (in plain loops before it, too): some trainings magnify these.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

SECONDS = 600
"""Time limit of one training."""

UNTIMED = 60
"""First steps, which capture, compile, and compare times with eager's."""

LIMIT = 1e-2
"""Largest distance under Inductor: rounding grows over the steps."""

CHANGE, FACTOR = 1e-7, 3
"""Relative change of the weights of mode ``"changed"``, and how many times its distance Inductor's may be."""


def _change(module: Any) -> None:
    """Changes the weights by a rounding error."""
    import torch

    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(1 + CHANGE * torch.randn(weight.shape, generator=noise))


def _fit_model(name: str, mode: str, times: list[float]) -> tuple[Any, Any]:
    """Trains a model with Lightning; returns it, and the report."""
    import lightning.pytorch as pl

    import sidefx_train
    from tests.libraries.models import MODELS

    class Timer(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            self.began = time.process_time()

        def on_train_batch_end(self, *_: Any) -> None:
            times.append(time.process_time() - self.began)

    class Change(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            if len(times) == 1:
                _change(module)

    captured = None
    callbacks: list[Any] = [Timer()]
    if mode == "changed":
        callbacks.append(Change())
    elif mode != "plain":
        captured = sidefx_train.SideFXCompile(backend=mode, warmup="now", rng="eager")
        callbacks.append(captured)
    module = MODELS[name](callbacks)
    return module, None if captured is None else captured.report


def _run_program(name: str, mode: str, times: list[float]) -> tuple[Any, Any]:
    """Runs a program's step in a loop; returns what it trained, and the report."""
    import sidefx_train
    from tests.libraries import optimizers, programs, training_loops  # noqa: F401
    from tests.libraries.models import STEPS
    from tests.libraries.training_steps import PROGRAMS

    program = PROGRAMS[name]()
    step = program.step
    if mode not in ("plain", "changed"):
        step = sidefx_train.compile(step, backend=mode, warmup="now", rng="eager")
    for number in range(STEPS):
        if mode == "changed" and number < 2:
            _change(program.module)
        batch = program.batch(number)
        began = time.process_time()
        step(*batch)
        times.append(time.process_time() - began)
    return program.module, None if step is program.step else step.report()


def train(name: str, mode: str) -> dict[str, Any]:
    """Trains a model or runs a program; returns its figures."""
    from tests.libraries.models import MODELS, import_torchvision

    import_torchvision()  # before libraries try to
    import numpy as np
    import torch

    times: list[float] = []
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, report = (_fit_model if name in MODELS else _run_program)(name, mode, times)
    figures: dict[str, Any] = {"seconds": time.perf_counter() - began, "steps": len(times)}
    figures["step"] = statistics.median(times[UNTIMED:])
    figures["state"] = {
        key: value.detach().double().flatten().tolist()
        for key, value in module.state_dict().items()
        if isinstance(value, torch.Tensor) and not key.endswith("num_batches_tracked")
    }
    if report is not None:
        figures |= {"graphs": report.graph_count, "breaks": len(report.breaks), "recaptures": len(report.recaptures)}
        figures |= {"calls": report.calls, "replays": report.replays}
        figures["timing"] = [str(found.timing) for found in report.captures if found.timing is not None]
        reasons = (*report.breaks, *report.fallbacks)
        figures["why"] = list(dict.fromkeys(f"{found.code} {found.reason}" for found in reasons))
    return figures


def figures_of(name: str, mode: str, folder: Path, again: bool) -> dict[str, Any]:
    """Returns the figures of a training, from a file if there is one."""
    path = folder / f"{name}.{mode}.json"
    if again or not path.exists():
        path.unlink(missing_ok=True)
        options = ["--one", name, "--mode", mode, "--results", str(folder)]
        command = [sys.executable, str(Path(__file__).resolve()), *options]
        try:
            with tempfile.TemporaryDirectory() as scratch:  # some libraries write to the current folder
                done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=scratch)
        except subprocess.TimeoutExpired:
            return {"failed": f"took more than {SECONDS} s"}
        if not path.exists():
            said = (done.stderr.strip() or "no output").splitlines()[-1]
            return {"failed": f"exit {done.returncode}: {said}"[:200], "log": done.stderr[-3000:]}
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def distance(a: dict[str, list[float]], b: dict[str, list[float]]) -> float:
    """Returns the norm of the difference of two states, relative to the norm of the first."""
    pairs = [(x, y) for key in a for x, y in zip(a[key], b[key], strict=True)]
    off = sum((x - y) ** 2 for x, y in pairs if x != y and (x == x or y == y))  # equal infinities have no difference
    return float((off / max(sum(x**2 for x, _ in pairs if math.isfinite(x)), 1e-30)) ** 0.5)


def row(name: str, mode: str, plain: dict[str, Any], folder: Path, again: bool) -> tuple[bool, str]:
    """Trains captured; returns whether that is right, and its row of the table."""
    ours = figures_of(name, mode, folder, again)
    if "failed" in ours:
        return False, f"| {name} | {mode} | {ours['failed']} | | | | | | |"
    off = distance(plain["state"], ours["state"])
    agrees = off == 0 if mode == "eager" else off < LIMIT
    agreement = "bitwise" if off == 0 else f"{off:.1e}"
    if not agrees and mode != "eager":
        changed = distance(plain["state"], figures_of(name, "changed", folder, again)["state"])
        agrees = off < FACTOR * changed
        agreement += f" (a rounding error: {changed:.1e})"
    counts = [ours.get(key, 0) for key in ("graphs", "breaks", "recaptures")]
    share = f"{ours.get('replays', 0)}/{ours.get('calls', 0)} of {ours['steps']}"
    ratio = f"{plain['step'] / ours['step']:.2f}"
    why = "; ".join(ours.get("why", []))[:300]
    cells = [name, mode, agreement if agrees else f"DIFFERS {agreement}", *map(str, counts), share, ratio, why]
    return agrees, f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", default="", help="only models and programs whose name contains this")
    parser.add_argument("--backends", nargs="+", default=["eager", "inductor"])
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "libraries")
    parser.add_argument("--again", action="store_true", help="ignore figures of earlier runs")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.results = args.results.resolve()
    args.results.mkdir(parents=True, exist_ok=True)
    if args.one:
        (args.results / f"{args.one}.{args.mode}.json").write_text(json.dumps(train(args.one, args.mode)))
        return 0
    from tests.libraries import optimizers, programs, training_loops  # noqa: F401
    from tests.libraries.models import MODELS
    from tests.libraries.training_steps import PROGRAMS

    print("| model | backend | against plain | graphs | breaks | recaptures | replayed | x plain | why |")
    print("|---|---|---|---|---|---|---|---|---|")
    wrong = 0
    for name in (*MODELS, *PROGRAMS):
        if args.k not in name:
            continue
        plain = figures_of(name, "plain", args.results, args.again)
        if "failed" in plain:
            print(f"| {name} | plain | {plain['failed']} | | | | | | |", flush=True)
            continue
        for backend in args.backends:
            good, line = row(name, backend, plain, args.results, args.again)
            wrong += not good
            print(line, flush=True)
    print(f"\n{wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception:
        traceback.print_exc()
        sys.exit(2)
