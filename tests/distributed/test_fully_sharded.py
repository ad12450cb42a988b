"""Steps over modules of ``fully_shard``: eager's numbers and objects on every rank, whichever of them captures."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import sidefx_train
from tests.distributed.fully_sharded_programs import PROGRAMS, Program, State
from tests.distributed.processes import in_two_processes

CALLS = 5

FEW = (
    "clipping, foreach",
    "half, accumulation",
    "loss read between",
    "hybrid",
    "tensor parallel",
    "regularized",
)
"""Programs of the fast test."""

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
        if program.eager:
            assert report.replays == 0 and any(program.eager in each.reason for each in report.fallbacks), str(report)
            continue
        if program.divided:
            assert report.breaks and report.replays == CALLS - 1, str(report)
            continue
        assert not report.breaks and len(report.captures) == program.graphs, f"{name}: {report}"
        assert [(each.code, each.count) for each in report.fallbacks] == [("SFX212", 1)], f"{name}: {report}"
        assert report.replays == CALLS - 1, f"{name}: {report}"


def _evaluated(state: State, call: int) -> None:
    """Evaluates eagerly before the third call, which leaves the root's parameters gathered."""
    if call == 2:
        with torch.no_grad():
            state.seen.append(state.net(torch.ones(2, 4)))


def _loaded(state: State, call: int) -> None:
    """Loads other parameters, some of them as other objects, and changes the learning rate."""
    if call in (2, 4):
        values = {
            name: value * 0.5 if value.is_floating_point() else value for name, value in state.net.state_dict().items()
        }
        state.net.load_state_dict(values, assign=call == 4)
    if call == 3:
        state.optimizer.param_groups[0]["lr"] = 0.05


def _frozen_later(state: State, call: int) -> None:
    if call == 2:
        state.net.head.requires_grad_(False)


def _synchronized_later(state: State, call: int) -> None:
    state.net.set_requires_gradient_sync(call % 2 == 1)


def _kept_gathered_later(state: State, call: int) -> None:
    if call == 3:
        state.net.set_reshard_after_forward(False)


def _hooked_later(state: State, call: int) -> None:
    if call == 3:
        state.net.blocks[0][0].weight.register_post_accumulate_grad_hook(
            lambda p: state.seen.append(p.grad.to_local().sum())
        )


CHANGES: dict[Any, tuple[int, int]] = {
    _evaluated: (1, 2),
    _loaded: (2, 1),
    _frozen_later: (2, 2),
    _synchronized_later: (2, 1),
    _kept_gathered_later: (2, 1),
    _hooked_later: (1, 3),
}
"""Changes between calls: number of graphs, and of eager steps."""


def _changes(rank: int, capturing: tuple[int, ...], changes: tuple[Any, ...]) -> None:
    for change in changes:
        program, (graphs, eager) = PROGRAMS["resharded"], CHANGES[change]
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


def _failing_backend(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("no compiler")


def _no_compiler(rank: int) -> None:
    """The compiler of one rank fails: both end as in eager."""
    program = PROGRAMS["blocks"]
    expected, _ = _trained(program, rank, _plain)
    found, step = _trained(program, rank, partial(_captured, backend=_failing_backend if rank == 0 else "eager"))
    _check_equal("no compiler", found, expected)
    assert (step.report().replays == 0) == (rank == 0), str(step.report())


def _drop(rank: int) -> None:
    """Nothing keeps a model that the program drops."""
    program = PROGRAMS["whole"]
    state = program.state()
    step = _captured(partial(program.step, state))
    for _ in range(3):
        step(*program.batch(torch.Generator().manual_seed(rank)))
    assert step.report().replays == 2, str(step.report())
    net = weakref.ref(state.net)
    del state, step
    gc.collect()
    assert net() is None, "the capture keeps the model"


def _many_checks(rank: int) -> None:
    _programs(rank, (1,), FEW)
    _changes(rank, (0, 1), (_evaluated, _loaded))
    _drop(rank)
    _through_inductor(rank, ("resharded",), (0,))


def test_ranks_have_eagers_numbers():
    in_two_processes(_many_checks)


def _all_changes(rank: int) -> None:
    _changes(rank, (0,), tuple(CHANGES))
    _no_compiler(rank)


@pytest.mark.slow
def test_changes_between_calls_are_seen():
    in_two_processes(_all_changes, seconds=300)


@pytest.mark.slow
def test_one_rank_captures_while_the_other_runs_eagerly():
    in_two_processes(_programs, (1,), tuple(PROGRAMS), seconds=600)


@pytest.mark.slow
def test_both_ranks_capture():
    in_two_processes(_programs, (0, 1), tuple(PROGRAMS), seconds=600)


@pytest.mark.slow
def test_other_models_go_through_inductor():
    in_two_processes(_through_inductor, ("whole, momentum", "tied weights"), (0, 1), seconds=300)
