"""Compares a step that runs as on a GPU, its kernels by interpreter, with eager on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional as F

from sidefx_train.compile.gpu.simulation import SimulatedStep
from sidefx_train.config import CompileConfig
from tests.support.parity import Factory, Picture, Program, batches, mlp, run


def simulated(
    make: Factory,
    steps: int = 3,
    rtol: float = 1e-5,
    atol: float = 1e-6,
    captures: int = 1,
    eager: int = 0,
    **options: Any,
) -> SimulatedStep:
    """Compares ``make()`` run eagerly with ``make()`` simulated, call by call; returns the simulated step.

    Args:
        make: builds the program from the current seed.
        steps: number of calls.
        rtol: largest relative difference of an element.
        atol: largest difference of an element near 0, such as a gradient that only rounding makes different from 0.
        captures: largest number of captures allowed.
        eager: number of calls that run eagerly.
        options: options of :func:`sidefx_train.compile`.
    """
    made = []

    def wrap(fn):
        made.append(SimulatedStep(fn, CompileConfig(**{"verify": 0, "on_failure": "raise", **options})))
        return made[-1]

    expected, got = run(make, steps, lambda fn: fn, None), run(make, steps, wrap, None)
    for index, (want, have) in enumerate(zip(expected, got, strict=True)):
        if have.raised is not None:
            have.raised.add_note(f"in call {index}, where eager raised {want.raised!r}")
            raise have.raised
        of_eager, ours = (list(leaves((moment.outcome, moment.state), f"call {index}: ")) for moment in (want, have))
        assert [where for where, _ in of_eager] == [where for where, _ in ours]
        for (where, one), (_, other) in zip(of_eager, ours, strict=True):
            if isinstance(one, (torch.Tensor, float)):
                torch.testing.assert_close(other, one, rtol=rtol, atol=atol, msg=lambda text: f"{where}: {text}")
            else:
                assert one == other, f"{where}: {other!r}, eager has {one!r}"
    assert made[0].kernels, "a step without a kernel proves nothing"
    report = made[0].report()
    assert report.fallback_count == eager, f"calls ran eagerly:\n{report}"
    assert len(report.captures) <= captures, f"{len(report.captures)} captures, expected {captures}:\n{report}"
    return made[0]


def leaves(snapshot: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yields what a snapshot consists of, and where it is."""
    if isinstance(snapshot, Picture):
        yield from leaves(snapshot.content, f"{where}{snapshot.kind} ")
    elif isinstance(snapshot, dict):
        for name, item in snapshot.items():
            yield from leaves(item, f"{where}.{name}")
    elif isinstance(snapshot, (list, tuple)) and not isinstance(snapshot, torch.Size):
        for index, item in enumerate(snapshot):
            yield from leaves(item, f"{where}[{index}]")
    else:
        yield where, snapshot


def skipped_by_a_scaler(create: Callable[..., torch.optim.Optimizer]) -> Program:
    """Returns a step under a ``GradScaler`` that skips the updates of batches 2 and 4.

    Args:
        create: makes the optimizer from parameters.
    """
    model, usual = mlp(), batches((5, 6), classes=3)
    optimizer = create(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss / (x[0, 0] != 5)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    def batch(index: int) -> tuple[torch.Tensor, ...]:
        x, y = usual(index)
        if index in (2, 4):
            x[0, 0] = 5
        return x, y

    return Program(step, batch, (model, optimizer, scaler))
