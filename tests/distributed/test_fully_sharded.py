"""Steps over modules of ``fully_shard``: eager's numbers and objects on every rank, whichever of them captures."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import sidefx_train
from tests.distributed.fully_sharded_programs import PROGRAMS, Program, State
from tests.distributed.processes import in_two_processes

CALLS = 7

Change = Callable[[State, int], Any]
"""``(state, call)``, called before each call; may change the world."""


def _unchanged(state: State, call: int) -> None:
    pass


def _trained(program: Program, rank: int, compiled: Callable[[Any], Any], change: Change = _unchanged) -> Any:
    state = program.state()
    step = compiled(partial(program.step, state))
    generator = torch.Generator().manual_seed(rank)
    facts = []
    for call in range(CALLS):
        change(state, call)
        step(*program.batch(generator))
        facts.append(state.facts())
    return facts, step


def _plain(step: Any) -> Any:
    return step


def _captured(step: Any, backend: str = "eager") -> Any:
    return sidefx_train.compile(step, backend=backend)


def _check_equal(name: str, found: list[Any], expected: list[Any], exact: bool = True) -> None:
    for call, (ours, eagers) in enumerate(zip(found, expected, strict=True)):
        for number, (a, b) in enumerate(zip(ours, eagers, strict=True)):
            if isinstance(b, torch.Tensor):
                same = torch.equal(a, b) if exact else torch.allclose(a, b, atol=1e-4)
            else:
                same = a == b
            assert same, f"{name}, call {call}: fact {number} is {a}, eager has {b}"


def _programs(rank: int, capturing: tuple[int, ...], names: tuple[str, ...]) -> None:
    for name in names:
        program = PROGRAMS[name]
        expected, _ = _trained(program, rank, _plain)
        found, step = _trained(program, rank, _captured if rank in capturing else _plain)
        _check_equal(name, found, expected)
        if rank not in capturing:
            continue
        report = step.report()
        print(name, report.replays, len(report.captures), [(f.code, f.reason, f.count) for f in report.fallbacks], [(b.code, b.reason, str(b.location)) for b in report.breaks])
        if program.eager:
            assert report.replays == 0 and any(program.eager in each.reason for each in report.fallbacks), str(report)
            continue
        if program.divided:
            assert report.replays >= CALLS - 1, str(report)
            continue
        assert not report.breaks and len(report.captures) == program.graphs, f"{name}: {report}"
        waited = sum(each.count for each in report.fallbacks if each.code == "SFX212")
        assert report.replays == CALLS - waited and waited >= 1, f"{name}: {report}"
