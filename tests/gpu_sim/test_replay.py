"""The replay of recorded steps, with a recorder of CPU tensors in place of a device.

The recorder keeps to what a CUDA graph knows: it raises where a replay uses memory that was freed or has moved, and
overwrites everything in its pool at each replay.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from sidefx_train.compile.gpu.replaying import recording_on_host
from sidefx_train.compile.gpu.simulation import recorder
from sidefx_train.compile.gpu.simulation.recorder import HostRecorder
from tests.fuzz import accumulation
from tests.gpu.compare import check
from tests.gpu.training import BATCHES, CHANGES, USES, Training, both
from tests.support import device_programs as programs

_HALF = {programs.autocast, programs.mlp_scaler, programs.mlp_scaler_adamw}
_NOT_RECORDED = {programs.mlp_adam_capturable}


@pytest.fixture(autouse=True)
def device():
    made = HostRecorder()
    with recording_on_host(made):
        yield made


@pytest.mark.parametrize("make", [each for each in programs.REPLAYED if each not in _NOT_RECORDED])
@pytest.mark.every(4)
def test_programs(make):
    # Casts of a fused kernel round elsewhere; the rest rounds learning rates to float32.
    step = check(make, "cpu", 2e-2 if make in _HALF else 1e-5, backend="aot_eager")
    report = step.report()
    for capture in report.captures[-1:]:
        graph = capture.cuda_graph
        assert graph.recordings == 1 and not graph.refused, report
        assert graph.plain == {"first call with its sizes and numbers": 1}, report


def test_losses_that_are_kept_stay_right():
    training, kept, _ = both(lambda training, call: None)
    assert training.graph.replays == len(BATCHES) - 1 and training.graph.reserved >= training.graph.memory > 0
    assert len({loss.data_ptr() for loss in kept[1::2]}) == len(BATCHES)


def test_gradients_are_written_again_where_nothing_else_uses_them():
    pointers = []

    def note(training: Training, call: int) -> None:
        if call > 2 and hasattr(training.step, "report"):
            pointers.append([p.grad.data_ptr() for p in training.net.parameters()])

    both(note)
    assert len(pointers) > 5 and all(each == pointers[0] for each in pointers)


@pytest.mark.parametrize("keep", USES.values(), ids=USES)
@pytest.mark.parametrize("when", [3, 6])
@pytest.mark.every(2)
def test_a_gradient_that_is_used_elsewhere_is_copied(keep, when):
    held: list[Any] = []

    def between(training: Training, call: int) -> Any:
        if call != when:
            return None
        held.append(keep(next(iter(training.net.parameters()))))
        return held[-1] if isinstance(held[-1], torch.Tensor) else None

    training, _, _ = both(between)
    graph = training.graph
    assert graph.recordings == 2, graph
    assert [reason for reason in graph.plain if "in use" in reason], graph
    assert graph.replays >= len(BATCHES) - 4
    if isinstance(held[-1], weakref.ref):
        assert held[0]() is None and held[1]() is None


def test_a_gradient_that_another_tensor_has_is_not_written_again():
    others = []

    def between(training: Training, call: int) -> Any:
        if call == 4:
            first = next(iter(training.net.parameters()))
            others.append(torch.zeros_like(first).requires_grad_())
            others[-1].grad = first.grad
            first.grad = None
        return others[-1].grad if call == 11 else None

    training, _, _ = both(between)
    assert training.graph.recordings == 2


def test_the_memory_of_a_gradient_is_replaced():
    def between(training: Training, call: int) -> None:
        if call in (4, 7):
            for p in training.net.parameters():
                p.grad.data = torch.full_like(p, 7.0)

    both(between)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.every(2)
def test_the_world_changes(change):
    def between(training: Training, call: int) -> None:
        if call in (4, 8):
            change(training)

    both(between)


def test_learning_rates_are_no_part_of_a_recording():
    def between(training: Training, call: int) -> None:
        training.optimizer.param_groups[0]["lr"] = 0.1 / (call + 1)

    training, _, _ = both(between)
    assert training.graph.recordings == 1 and training.graph.replays == len(BATCHES) - 1


def test_a_zero_of_another_sign_is_another_hyperparameter():
    def between(training: Training, call: int) -> None:
        training.optimizer.param_groups[0]["weight_decay"] = 0.0 if call < 6 else -0.0

    training, _, _ = both(between)
    assert training.graph.recordings == 2, training.graph


def test_accumulation_shares_gradients():
    def between(training: Training, call: int) -> None:
        if call % 3 == 0:
            training.optimizer.step()
            training.optimizer.zero_grad()

    training, _, _ = both(between, accumulates=True)
    graphs = [capture.cuda_graph for capture in training.step.report().captures]
    assert all(graph.recordings <= 2 and graph.replays >= 3 for graph in graphs), graphs


def _of_rows(limit: int, sequence: list[int]) -> Any:
    torch.manual_seed(0)
    net = nn.Linear(3, 1)

    def step(x: Any) -> Any:
        return net(x).square().mean()

    compiled = sidefx_train.compile(step, backend="aot_eager", dynamic=True, cuda_graph_limit=limit)
    with torch.no_grad():
        for rows in sequence:
            x = torch.randn(rows, 3)
            torch.testing.assert_close(compiled(x), step(x))
    return compiled.report().captures[0].cuda_graph


def test_recordings_are_dropped_beyond_the_limit():
    graph = _of_rows(2, [4, 5, 4, 5, 4, 5, 6, 6, 6, 5, 4, 4])
    assert (graph.recordings, graph.replays) == (4, 9), graph


def test_no_more_is_recorded_where_recordings_are_dropped_again_and_again():
    graph = _of_rows(2, [4, 5, 6, 7] * 6)
    assert graph.recordings == 7, graph
    assert graph.plain["more combinations of sizes and numbers than recordings are kept"] == 7, graph


def test_what_cannot_be_recorded_runs_plainly_and_the_report_says_so():
    def step(x: Any) -> Any:
        return x.nonzero().sum() + x.sum()

    compiled = sidefx_train.compile(step, backend="aot_eager")
    for _ in range(3):
        x = torch.randn(5).relu()
        assert torch.equal(compiled(x), step(x))
    graph = compiled.report().captures[0].cuda_graph
    assert "nonzero" in graph.refused or "depends on data" in graph.refused


@pytest.mark.parametrize("after", [0, 7, None], ids=["first", "eighth", "last"])
def test_memory_that_runs_out_while_recording_leaves_eager_s_values(device, monkeypatch, after):
    """Nothing that the recording wrote before it remains; the calls run plainly."""
    made = recorder._Recorder

    class Exhausted(made):  # type: ignore[misc, valid-type]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if len(self.calls) == after:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
            return super().__torch_dispatch__(func, types, args, kwargs)

    def record(run: Any, pool: Any) -> Any:
        def exhausting() -> Any:
            run()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

        return HostRecorder.record(device, run if after is not None else exhausting, pool)

    monkeypatch.setattr(recorder, "_Recorder", Exhausted)
    monkeypatch.setattr(device, "record", record)
    training, _, _ = both(lambda training, call: None)
    assert training.graph.refused.startswith("cannot be recorded: OutOfMemoryError: CUDA out of memory")
    assert training.graph.plain[training.graph.refused] == len(BATCHES) - 1 and not training.graph.memory
    assert training.step.report().fallback_count == 0


def test_a_recording_that_fails_leaves_everything_usable(device, monkeypatch):
    def fails(run: Any, pool: Any) -> Any:
        run()
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(device, "record", fails)
    training = Training(True)
    for batch in BATCHES[:3]:
        training.step(*batch)
    assert training.graph.refused.startswith("cannot be recorded: RuntimeError: operation not permitted")
    assert training.graph.plain[training.graph.refused] == 2
    assert training.step.report().replays == 3


def test_comparisons_with_copies_are_not_recorded():
    training = Training(True, verify=3)
    for batch in BATCHES[:6]:
        training.step(*batch)
    assert training.graph.recordings == 1 and training.graph.replays >= 2, training.graph
    assert training.graph.plain["compared with the captured graph"] >= 1, training.graph


def test_version_counters_are_those_of_eager():
    counts = []
    for compiled in (False, True):
        training = Training(compiled)
        for batch in BATCHES[:5]:
            loss = training.step(*batch)
        state = [t for each in training.optimizer.state.values() for t in each.values()]
        tensors = [loss, *training.net.parameters(), *(p.grad for p in training.net.parameters()), *state]
        counts.append([tensor._version for tensor in tensors])
    assert counts[0] == counts[1]


def test_random_numbers_are_drawn_anew_and_repeat_with_the_seed():
    def step(x: Any) -> Any:
        return F.dropout(x, 0.5)

    compiled = sidefx_train.compile(step, backend="aot_eager")
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append([compiled(torch.ones(64)) for _ in range(4)])
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)
    assert len({tuple(each.tolist()) for each in runs[0]}) == 4
    torch.manual_seed(3)
    assert all(torch.equal(step(torch.ones(64)), each) for each in runs[0])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.every(3)
def test_random_programs_that_accumulate(seed):
    difference, _ = accumulation.difference(seed, "aot_eager")
    assert not difference
