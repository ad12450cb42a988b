"""Steps over ``DistributedDataParallel``: eager's numbers on every rank, whichever of them captures."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import sidefx_train
from sidefx_train.report_ranks import gather_reports
from sidefx_train.torch_compat import gradient_buckets
from tests.distributed.data_parallel_programs import PROGRAMS, Program, State
from tests.distributed.processes import WORLD, agree, in_two_processes

CALLS = 7
EVERY = tuple(range(WORLD))
UNTIL_FINAL = 2
"""Eager steps until the wrapper's buckets are final."""

FEW = (
    "many buckets",
    "batch norm, many buckets",
    "accumulation",
    "unused, kept gradients",
    "accumulation, finding unused",
    "static graph, unused",
    "branch in the model",
    "loss read between",
)
"""Programs of the fast test."""

Change = Callable[[State, int, Any], Any]
"""``(state, call, batch) -> batch``, called before each call; may change the world."""


def _unchanged(state: State, call: int, batch: Any) -> Any:
    return batch


def _trained(
    program: Program,
    rank: int,
    compiled: Callable[[Any], Any],
    change: Change = _unchanged,
    adaptive: bool = True,
) -> tuple[State, Any]:
    state = program.state(adaptive)
    step = compiled(partial(program.step, state))
    generator = torch.Generator().manual_seed(rank)
    for call in range(CALLS):
        step(*change(state, call, program.batch(generator)))
    return state, step


def _plain(step: Any) -> Any:
    return step


def _captured(step: Any, backend: str = "eager") -> Any:
    return sidefx_train.compile(step, backend=backend)


def _check_equal(name: str, found: State, expected: State, exact: bool = True, both: bool = True) -> None:
    for number, (a, b) in enumerate(zip(found.tensors(), expected.tensors(), strict=True)):
        same = torch.equal(a, b) if exact else torch.allclose(a, b, atol=1e-4)
        assert same, f"{name}: tensor {number} is {a}, eager has {b}"
    for parameter in found.net.parameters() if exact or both else ():
        assert agree(parameter), f"{name}: the ranks have drifted apart"


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
        waited = sum(each.count for each in report.fallbacks if each.code == "SFX212")
        assert report.replays == CALLS - waited or program.divided, f"{name}: {report}"
        if program.divided:
            assert report.breaks and min(report.replays, sum(part.replays for part in report.parts)) >= 4, str(report)
            continue
        assert not report.breaks and len(report.captures) == program.graphs, f"{name}: {report}"
        assert waited >= (1 if program.options.get("find_unused_parameters") else UNTIL_FINAL), f"{name}: {report}"


def _another_flag(state: State, call: int, batch: Any) -> Any:
    state.factor = 1 + (call >= 4)
    return batch


def _another_size(state: State, call: int, batch: Any) -> Any:
    return tuple(each[: 1 + call % 2] for each in batch)


def _breaks(s: State, x: Any, y: Any) -> None:
    """Reads the loss between forward and backward: the real reducer takes over."""
    loss = s.loss(s.net(x), y)
    assert loss.item() == loss.item()
    loss.backward()
    s.optimizer.step()
    s.optimizer.zero_grad()
    s.losses.append(loss.detach())


def _failing_backend(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("no compiler")


def _disagreements(rank: int) -> None:
    """One rank does something else than the other: both end as in eager."""
    for name in ("batch norm, many buckets",):
        program = PROGRAMS[name]
        for change in (_another_flag, _another_size):
            ours = change if rank == 0 else _unchanged
            expected, _ = _trained(program, rank, _plain, ours)
            found, step = _trained(program, rank, _captured, ours)
            _check_equal(f"{name}, {change.__name__}", found, expected)
            report = step.report()
            assert bool(report.recaptures) == (rank == 0) and report.replays == CALLS - UNTIL_FINAL, str(report)
        expected, _ = _trained(program, rank, _plain)
        found, step = _trained(program, rank, partial(_captured, backend=_failing_backend if rank == 0 else "eager"))
        _check_equal(f"{name}, no compiler", found, expected)
        assert (step.report().replays == 0) == (rank == 0), str(step.report())
        together = gather_reports(step.report())
        assert [record.replays for record in together.ranks] == [0, *[CALLS - UNTIL_FINAL] * (WORLD - 1)], str(together)
        assert "no compiler" in "".join(together.differences()[1]) and "differs from rank 0" in str(together)
        broken = Program(program.model, program.batch, _breaks, options=program.options)
        found, step = _trained(broken if rank == 0 else program, rank, _captured)
        _check_equal(f"{name}, a break", found, expected)
        assert step.report().replays == CALLS - UNTIL_FINAL, str(step.report())
        assert bool(step.report().breaks) == (rank == 0), str(step.report())


def _backward_outside(rank: int) -> None:
    """A wrapper, or a function that calls it, is captured; the backward and the reduction run outside."""
    program = PROGRAMS["batch norm, many buckets"]

    def trained(which: str, compiled: Callable[[Any], Any]) -> tuple[State, Any]:
        state, generator = program.state(), torch.Generator().manual_seed(rank)
        wanted = compiled(state.net if which == "wrapper" else lambda x, y: state.loss(state.net(x), y))
        for call in range(CALLS):
            with state.net.no_sync() if call % 3 == 1 else contextlib.nullcontext():
                x, y = program.batch(generator)
                loss = state.loss(wanted(x), y) if which == "wrapper" else wanted(x, y)
                loss.backward()
            if call % 3 != 1:
                state.optimizer.step()
                state.optimizer.zero_grad()
            state.losses.append(loss.detach())
        return state, wanted

    for which in ("wrapper", "loss"):
        expected, _ = trained(which, _plain)
        found, wanted = trained(which, _captured if rank else _plain)
        _check_equal(f"a compiled {which}", found, expected)
        assert not rank or (wanted.report().replays >= CALLS - 3 and not wanted.report().breaks), str(wanted.report())


def _eager_in_between(rank: int) -> None:
    """Eager steps between captured ones leave the reducer usable, and find it so."""
    program = PROGRAMS["batch norm, many buckets"]

    def now_and_then(step: Any) -> Any:
        compiled, calls = _captured(step), iter(range(CALLS))

        def run(*batch: Any) -> None:
            (step if next(calls) % 2 == rank else compiled)(*batch)

        return run

    expected, _ = _trained(program, rank, _plain)
    found, _ = _trained(program, rank, now_and_then)
    _check_equal("eager in between", found, expected)


def _unused_without_saying_so(rank: int) -> None:
    """A parameter takes no part, which the wrapper was not told: eager's error."""
    program = Program(PROGRAMS["unused"].model, PROGRAMS["unused"].batch)
    messages = []
    for compiled in (_plain, _captured):
        with pytest.raises(RuntimeError, match="Expected to have finished reduction") as raised:
            _trained(program, rank, compiled)
        messages.append(str(raised.value))
        dist.barrier()
    assert messages[0] == messages[1]


def _register_hook(state: State, call: int, batch: Any) -> Any:
    if call == 4:
        state.net.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return batch


def _register_builtin_hook(state: State, call: int, batch: Any) -> Any:
    if call == 4:
        state.net._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return batch


def _changes(rank: int) -> None:
    """A hook registered later is seen; nothing keeps a wrapper that the program drops; early steps are no breaks."""
    program = PROGRAMS["many buckets"]
    expected, _ = _trained(program, rank, _plain, _register_hook)
    found, step = _trained(
        program, rank, partial(sidefx_train.compile, backend="eager", fullgraph=True), _register_hook
    )
    _check_equal("a later hook", found, expected)
    assert len(step.report().captures) == 2, str(step.report())
    expected, _ = _trained(program, rank, _plain, _register_builtin_hook)
    found, step = _trained(program, rank, _captured, _register_builtin_hook)
    _check_equal("a later hook in C++", found, expected)
    assert step.report().fallback_count > UNTIL_FINAL and step.report().replays > 0, str(step.report())
    net = weakref.ref(found.net)
    del found, step
    gc.collect()
    assert net() is None, "the capture keeps the wrapper"


def _copied(state: State, call: int, batch: Any) -> Any:
    if call == 3:
        state.net = copy.deepcopy(state.net)
        state.optimizer = torch.optim.SGD(state.net.parameters(), lr=0.1)
    return batch


def _frozen_once(state: State, call: int, batch: Any) -> Any:
    first = next(state.net.parameters())
    if call == 3:
        first.requires_grad_(False).grad = None
    elif call == 4:
        first.requires_grad_(True)
    return batch


def _reducers(rank: int) -> None:
    """A copy arranges its buckets again; a reduction that stopped halfway raises; ranks that capture go along."""
    program = PROGRAMS["many buckets"]
    expected, _ = _trained(program, rank, _plain, _copied)
    found, step = _trained(program, rank, _captured if rank else _plain, _copied)
    _check_equal("a copied wrapper", found, expected)
    assert not rank or step.report().replays == 2, str(step.report())
    for compiled in (_plain, _captured if rank else _plain):
        with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
            _trained(program, rank, compiled, _frozen_once)
        dist.barrier()
    inner = program.model()
    named = [(name, p) for name, p in inner.named_parameters() if name.startswith("2")]
    delayed = DistributedDataParallel(
        inner, delay_all_reduce_named_params=named, param_to_hook_all_reduce=inner[0].weight
    )
    for net in (lambda x: delayed(x), lambda x: DistributedDataParallel(program.model())(x)):
        step = sidefx_train.compile(torch.no_grad()(net), backend="eager")
        step(torch.ones(1, 4))
        assert step.report().breaks[0].code == "SFX121" and step.report().replays == 0, str(step.report())


def _without_views(state: State, call: int, batch: Any) -> Any:
    for parameter in state.net.parameters() if call == 5 else ():
        parameter.grad = parameter.grad.clone()
    return batch


def _bucket_views(rank: int) -> None:
    """Gradients are the same objects in every step, views of one memory; others are replaced, and none escapes."""
    program, seen = PROGRAMS["bucket views, zeroed first"], []

    def noted(state: State, call: int, batch: Any) -> Any:
        seen.append([parameter.grad for parameter in state.net.parameters()])
        gc.collect()
        return batch

    state, step = _trained(program, rank, _captured, noted)
    assert all(a is b for a, b in zip(seen[3], seen[-1], strict=True)) and step.report().replays == CALLS - UNTIL_FINAL
    assert len(step.report().captures) == 1, str(step.report())
    storages = {grad.untyped_storage().data_ptr() for grad in seen[-1]}
    assert len(storages) == len(gradient_buckets(state.net.reducer)) < len(seen[-1])
    expected, _ = _trained(program, rank, _plain, _without_views)
    found, step = _trained(program, rank, _captured, _without_views)
    _check_equal("gradients that are no views", found, expected)
    kept: list[Any] = []

    def keeps_one(s: State, x: Any, y: Any) -> None:
        s.loss(s.net(x), y).backward()
        kept.append(next(s.net.parameters()).grad.detach())
        s.optimizer.zero_grad()

    _, step = _trained(Program(program.model, program.batch, keeps_one, options=program.options), rank, _captured)
    assert len({grad.data_ptr() for grad in kept[UNTIL_FINAL:]}) == 1, "eager's gradients are one memory"
    assert any("views of buckets" in each.reason for each in step.report().fallbacks), str(step.report())


def _many_checks(rank: int) -> None:
    _bucket_views(rank)
    _changes(rank)
    _reducers(rank)
    _programs(rank, (0, 1), FEW)
    _disagreements(rank)
    _backward_outside(rank)
    _eager_in_between(rank)
    _unused_without_saying_so(rank)


def test_ranks_have_eagers_numbers():
    in_two_processes(_many_checks)


@pytest.mark.slow
def test_one_rank_captures_while_the_other_runs_eagerly():
    in_two_processes(_programs, (1,), tuple(PROGRAMS))


@pytest.mark.slow
def test_both_ranks_capture():
    in_two_processes(_programs, EVERY, tuple(PROGRAMS))


def _through_inductor(rank: int, names: tuple[str, ...], capturing: tuple[int, ...]) -> None:
    for name in names:
        program = PROGRAMS[name]
        expected, _ = _trained(program, rank, _plain, adaptive=False)
        compiled = partial(_captured, backend="inductor") if rank in capturing else _plain
        found, step = _trained(program, rank, compiled, adaptive=False)
        _check_equal(name, found, expected, exact=False, both=len(capturing) == WORLD)
        if rank in capturing:
            assert len(step.report().captures) == PROGRAMS[name].graphs, str(step.report())


def test_inductor_keeps_the_order_of_buckets():
    in_two_processes(_through_inductor, ("many buckets",), (0,))


@pytest.mark.slow
def test_ranks_with_the_same_code_agree_bit_for_bit():
    in_two_processes(_through_inductor, ("many buckets", "validation"), EVERY)


@pytest.mark.slow
def test_other_models_go_through_inductor():
    in_two_processes(_through_inductor, ("tied weights", "accumulation inside", "kept gradients"), EVERY, seconds=500)
