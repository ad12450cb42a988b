"""Collectives in a captured step: eager's results, also where only one rank captures."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist

import sidefx_train
from sidefx_train.errors import UnfinishedError
from tests.distributed.collective_programs import captured_programs, divided_programs, raising_programs
from tests.distributed.processes import WORLD, in_two_processes

CALLS = 3


def _flat(value: Any) -> list[Any]:
    return [part for each in value for part in _flat(each)] if isinstance(value, (tuple, list)) else [value]


def _run(step: Any, rank: int) -> list[Any]:
    """Returns the results of a few calls."""
    results = [_flat(step(torch.arange(4.0) + 10 * rank + call)) for call in range(CALLS)]
    return [each.detach().clone() if isinstance(each, torch.Tensor) else each for found in results for each in found]


def _check(name: str, found: list[Any], expected: list[Any], exact: bool) -> None:
    for a, b in zip(found, expected, strict=True):
        same = a == b if not isinstance(b, torch.Tensor) else torch.equal(a, b) if exact else torch.allclose(a, b)
        assert same, f"{name}: {a}, eager has {b}"


def _one_graph(rank: int, backend: str, capturing: tuple[int, ...], names: tuple[str, ...] = ()) -> None:
    plain, compiled = captured_programs(), captured_programs()
    for name in names or plain:
        expected = _run(plain[name], rank)
        if rank not in capturing:
            found = _run(compiled[name], rank)
        else:
            step = sidefx_train.compile(compiled[name], backend=backend, fullgraph=True)
            found = _run(step, rank)
            report = step.report()
            assert (len(report.captures), report.replays, report.breaks) == (1, CALLS, []), str(report)
            notes = report.captures[0].notes
            assert not any("failed" in note for note in notes), f"{name} is no single C++ function: {notes}"
        _check(name, found, expected, backend == "eager")


def _in_parts(rank: int) -> None:
    plain, compiled = divided_programs(), divided_programs()
    for name in plain:
        step = sidefx_train.compile(compiled[name], backend="eager")
        _check(name, _run(step, rank), _run(plain[name], rank), True)
        assert step.report().breaks, f"{name} is captured now"


def _constants(rank: int) -> None:
    """Reductions and groups are guarded."""
    ours, everybody = dist.new_group([rank], use_local_synchronization=True), dist.group.WORLD

    def step(x, op, group):
        y = x * 2
        dist.all_reduce(y, op, group=group)
        return y * dist.get_world_size(group)

    compiled = sidefx_train.compile(step, backend="eager")
    for _ in range(2):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            for group in (ours, everybody, None):
                x = torch.arange(3.0) + rank
                assert torch.equal(compiled(x, op, group), step(x, op, group))
    assert len(compiled.report().captures) <= 6


def _failing(rank: int) -> None:
    """A graph that has communicated does not run again: its error is raised."""

    @sidefx_train.compile(backend="eager")
    def step(x, rows):
        y = x * 2
        dist.all_reduce(y)
        return y[(rows * y[0]).long()]

    x = torch.ones(4)
    step(x, torch.zeros(1))
    with pytest.raises(UnfinishedError, match=f"IndexError.*in process {rank} of {WORLD}"):
        step(x, torch.full((1,), 9.0))
    y = torch.ones(1)
    dist.all_reduce(y)
    assert y.item() == 2, "the processes issue different collectives"


def _alone(rank: int, backend: str) -> None:
    """A process that waits for one that has failed says so, and which one it is."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))

    @sidefx_train.compile(backend=backend)
    def step(x, fails):
        if fails:
            raise ValueError("stop")
        y = x * 2
        dist.all_reduce(y, group=group)
        return y

    step(torch.ones(4), False)
    error, text = (
        (ValueError, "stop") if rank else (UnfinishedError, rf"RuntimeError: .*gloo.* \(in process {rank} of {WORLD}")
    )
    with pytest.raises(error, match=text):
        step(torch.ones(4), rank > 0)


def _raising(rank: int) -> None:
    """What raises does so as in eager, and no graph that stops halfway is made of it."""
    for name, program in raising_programs().items():
        x, messages = torch.arange(4.0) + rank, []
        for step in (program, sidefx_train.compile(program, backend="eager")):
            with pytest.raises(RuntimeError) as raised:
                step(x)
            messages.append(str(raised.value))
        assert messages[0] == messages[1], name


def _all_with_one_operation_each(rank: int) -> None:
    _one_graph(rank, "eager", (0, 1))
    _one_graph(rank, "eager", (1,))
    _in_parts(rank)
    _constants(rank)
    _failing(rank)
    _raising(rank)
    _alone(rank, "eager")
    _alone(rank, "inductor")


def test_collectives_have_eagers_results():
    in_two_processes(_all_with_one_operation_each)


@pytest.mark.slow
def test_one_rank_compiles_and_compares_while_the_other_runs_eagerly():
    """The comparison of a first run communicates with nobody; equal collectives are not merged."""
    in_two_processes(_one_graph, "inductor", (0,), ("the_same_twice", "result_unused", "reduces_a_copy"))


@pytest.mark.slow
def test_every_collective_goes_through_inductor():
    in_two_processes(_one_graph, "inductor", (0,), seconds=600)
