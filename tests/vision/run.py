"""Trains vision models eagerly and captured, compares them, and prints a table in Markdown.

    python tests/vision/run.py [-k NAME] [--backends eager inductor] [--steps 3]

``backend="eager"`` must equal eager bit by bit. Under Inductor a step may lead as far from eager as the same step of
eager on float64 parameters does, times a factor (``FACTOR``): rounding grows through many layers, and differs between
models. Each of these steps begins with the parameters, buffers and momenta that eager had there: otherwise an
activation that rounding moves across the edge of a ReLU, once, decides how far apart the later steps are.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import sidefx_train
from tests.vision.models import MODELS

FACTOR = 20.0


@dataclass
class Trained:
    """What training a model left.

    Attributes:
        states: parameters, buffers and momenta by name after each step.
        losses: one per step.
        report: the report, ``None`` for eager.
        seconds: wall time of the first step, and of the last.
    """

    states: list[dict[str, torch.Tensor]]
    losses: list[float]
    report: Any
    seconds: tuple[float, float]


def trained(
    name: str,
    backend: str | None,
    steps: int,
    dtype: torch.dtype = torch.float32,
    follows: list[dict[str, torch.Tensor]] | None = None,
) -> Trained:
    """Trains a model from the same weights, batches and random state; before each step it gets the state that it
    ``follows``."""
    build, loss_of, make_batch = MODELS[name]
    torch.manual_seed(0)
    model = build().train().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(batch: Any) -> torch.Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def state() -> dict[str, torch.Tensor]:
        momenta = {
            f"momentum of {name}": optimizer.state[parameter]["momentum_buffer"]
            for name, parameter in model.named_parameters()
            if optimizer.state[parameter].get("momentum_buffer") is not None
        }
        return model.state_dict() | momenta

    call: Any = step if backend is None else sidefx_train.compile(step, backend=backend, rng="eager")
    losses, seconds, states = [], [], list[dict[str, torch.Tensor]]()
    for number in range(steps):
        if follows is not None and number > 0:
            with torch.no_grad():
                for key, value in state().items():
                    value.copy_(follows[number - 1][key])
        torch.manual_seed(1 + number)
        batch = _cast(make_batch(), dtype)
        began = time.perf_counter()
        losses.append(float(call(batch)))
        seconds.append(time.perf_counter() - began)
        states.append({key: value.detach().clone() for key, value in state().items()})
    return Trained(states, losses, None if backend is None else call.report(), (seconds[0], seconds[-1]))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    return type(value)(_cast(item, dtype) for item in value) if isinstance(value, (list, tuple)) else value


def distance(a: Trained, b: Trained) -> float:
    """Returns the norm of the difference of all floating-point parameters and buffers over their norm, after the step
    with the largest."""
    found = []
    for left, right in zip(a.states, b.states, strict=True):
        difference = total = 0.0
        for key, value in left.items():
            if value.is_floating_point():
                difference += float((value.double() - right[key].double()).square().sum())
                total += float(value.double().square().sum())
        found.append((difference / total) ** 0.5)
    return max(found)


def equal(a: Trained, b: Trained) -> bool:
    """Returns True if all states are equal bit by bit."""
    pairs = zip(a.states, b.states, strict=True)
    return all(
        left.keys() == right.keys() and all(map(torch.equal, left.values(), right.values())) for left, right in pairs
    )


def compared(name: str, backends: list[str], steps: int) -> tuple[bool, list[str]]:
    """Returns whether a model agrees with eager on all backends, and its rows of the table."""
    eager = trained(name, None, steps)
    if not equal(eager, trained(name, None, steps)):
        return False, [f"| {name} | - | eager differs from itself | | | | |"]
    limit: float | None = None
    rows, good = [], True
    for backend in backends:
        ours = trained(name, backend, steps, follows=None if backend == "eager" else eager.states)
        report = ours.report
        if backend == "eager":
            same = equal(eager, ours) and eager.losses == ours.losses
            agreement = "bitwise" if same else f"differs by {distance(eager, ours):.1e}"
            good = good and same
        else:
            if limit is None:
                exact = trained(name, None, steps, torch.float64, eager.states)
                limit = FACTOR * max(distance(exact, eager), 1e-7)
            off = distance(eager, ours)
            good = good and off <= limit
            agreement = f"{off:.1e} (limit {limit:.1e})"
        why = "; ".join(dict.fromkeys(f"{found.code} {found.reason}" for found in (*report.breaks, *report.fallbacks)))
        counts = (report.graph_count, len(report.breaks), len(report.recaptures), f"{report.replays}/{report.calls}")
        figures = " | ".join(map(str, counts))
        rows.append(f"| {name} | {backend} | {agreement} | {figures} | {why} |")
    return good, rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", default="", help="only models whose name contains this")
    parser.add_argument("--backends", nargs="+", default=["eager", "inductor"])
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    warnings.simplefilter("ignore", sidefx_train.errors.SideFXWarning)
    print("| model | backend | against eager | graphs | breaks | recaptures | replayed | why |")
    print("|---|---|---|---|---|---|---|---|")
    failed = 0
    for name in MODELS:
        if args.k not in name:
            continue
        try:
            good, rows = compared(name, args.backends, args.steps)
        except Exception:  # the others are still of interest
            good, rows = False, [f"| {name} | - | raised | | | | | |", traceback.format_exc()]
        failed += not good
        print("\n".join(rows), flush=True)
    print(f"\n{failed} differ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
