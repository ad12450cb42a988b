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


def _evaluated(state: State, call: int) -> None:
    """Evaluates eagerly before the fourth call, which leaves the root's parameters gathered."""
    if call == 3:
        with torch.no_grad():
            state.seen.append(state.net(torch.ones(2, 4)))


def _loaded(state: State, call: int) -> None:
    """Loads other parameters, some of them as other objects, and changes the learning rate."""
    if call in (3, 5):
        values = {name: value * 0.5 if value.is_floating_point() else value for name, value in state.net.state_dict().items()}
        state.net.load_state_dict(values, assign=call == 5)
    if call == 4:
        state.optimizer.param_groups[0]["lr"] = 0.05


def _frozen_later(state: State, call: int) -> None:
    if call == 4:
        state.net.head.requires_grad_(False)


def _synchronized_later(state: State, call: int) -> None:
    state.net.set_requires_gradient_sync(call % 2 == 1)


def _kept_gathered_later(state: State, call: int) -> None:
    if call == 4:
        state.net.set_reshard_after_forward(False)


def _hooked_later(state: State, call: int) -> None:
    if call == 4:
        state.net.blocks[0][0].weight.register_post_accumulate_grad_hook(lambda p: state.seen.append(p.grad.to_local().sum()))


CHANGES: dict[Any, tuple[int, int]] = {
    _evaluated: (1, 2),
    _loaded: (3, 1),
    _frozen_later: (2, 2),
    _synchronized_later: (2, 1),
    _kept_gathered_later: (2, 1),
    _hooked_later: (1, 4),
}
"""Changes between calls: number of graphs, and of eager steps."""


def _changes(rank: int, capturing: tuple[int, ...] = (0, 1)) -> None:
    for change, (graphs, eager) in CHANGES.items():
        program = PROGRAMS["blocks"]
        expected, _ = _trained(program, rank, _plain, change)
        found, step = _trained(program, rank, _captured if rank in capturing else _plain, change)
        _check_equal(change.__name__, found, expected)
        if rank in capturing:
            report = step.report()
            assert (len(report.captures), CALLS - report.replays) == (graphs, eager), f"{change.__name__}: {report}"


def _through_inductor(rank: int, names: tuple[str, ...], capturing: tuple[int, ...]) -> None:
    for name in names:
        program = PROGRAMS[name]
        expected, _ = _trained(program, rank, _plain)
        found, step = _trained(program, rank, partial(_captured, backend="inductor") if rank in capturing else _plain)
        _check_equal(name, found, expected, exact=False)
        if rank in capturing:
            report = step.report()
            assert len(report.captures) == program.graphs and report.replays == CALLS - 1, str(report)
