"""What a CUDA graph of a training step has to get right, on a device."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import sidefx_train
from sidefx_train.compile.gpu import replaying
from tests.gpu.training import BATCHES, CHANGES, USES, Training, both

pytestmark = pytest.mark.gpu


def replayed(between: Any, **options: Any) -> Training:
    training, _, _ = both(between, "cuda", 1e-3, **options)
    return training


def test_losses_that_are_kept_stay_right():
    training, kept, _ = both(lambda training, call: None, "cuda", 1e-3)
    graph = training.graph
    assert graph.kernels and graph.library_calls and graph.updates, "the fused update is one of them"
    assert training.graph.replays >= len(BATCHES) - 2
    assert len({loss.data_ptr() for loss in kept[1::2]}) == len(BATCHES)


@pytest.mark.parametrize("keep", USES.values(), ids=USES)
def test_a_gradient_that_is_used_elsewhere_is_copied(keep):
    held: list[Any] = []

    def between(training: Training, call: int) -> Any:
        if call != 5:
            return None
        held.append(keep(next(iter(training.net.parameters()))))
        return held[-1] if isinstance(held[-1], torch.Tensor) else None

    training = replayed(between)
    assert training.graph.recordings == 2, training.graph
    if isinstance(held[-1], weakref.ref):
        assert held[0]() is None and held[1]() is None


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_world_changes(change):
    def between(training: Training, call: int) -> None:
        if call in (4, 8):
            change(training)

    replayed(between)


def test_learning_rates_are_no_part_of_a_recording():
    def between(training: Training, call: int) -> None:
        training.optimizer.param_groups[0]["lr"] = 0.1 / (call + 1)

    training = replayed(between)
    assert training.graph.recordings == 1 and training.graph.replays >= len(BATCHES) - 2


def test_accumulation_shares_gradients():
    def between(training: Training, call: int) -> None:
        if call % 3 == 0:
            training.optimizer.step()
            training.optimizer.zero_grad()

    training = replayed(between, accumulates=True)
    graphs = [capture.cuda_graph for capture in training.step.report().captures]
    assert all(graph.replays >= 3 for graph in graphs), graphs


def test_random_numbers_are_those_of_eager():
    def step(x: Any) -> Any:
        return F.dropout(x, 0.5)

    compiled = sidefx_train.compile(step, rng="eager")
    x = torch.ones(64, device="cuda")
    runs = []
    for run in (step, compiled, compiled):
        torch.manual_seed(3)
        runs.append([run(x) for _ in range(5)])
    for expected, found, again in zip(*runs, strict=True):
        assert torch.equal(expected, found) and torch.equal(expected, again)


def test_a_recording_that_fails_leaves_the_process_usable(monkeypatch):
    monkeypatch.setattr(replaying, "why_not", lambda plan, graph: "")

    def waits(x: Any) -> Any:
        return torch.linalg.eigvalsh(x @ x.t()).sum() + torch.linalg.cholesky_ex(x @ x.t())[0].sum() + x[x > 0].sum()

    compiled = sidefx_train.compile(waits)
    for _ in range(3):
        x = torch.randn(4, 4, device="cuda")
        torch.testing.assert_close(compiled(x), waits(x), rtol=1e-3, atol=1e-3)
    test_random_numbers_are_those_of_eager()
    test_losses_that_are_kept_stay_right()


def test_nothing_synchronizes():
    training = Training(True, "cuda")
    batches = [[t.to("cuda") for t in batch] for batch in BATCHES]
    for batch in batches[:4]:
        training.step(*batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses = [training.step(*batch) for batch in batches[4:]]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.isfinite(loss) for loss in losses)


def test_two_models_and_their_ends():
    Training(True, "cuda").step(BATCHES[0][0].cuda(), BATCHES[0][1].cuda())  # workspaces of libraries
    gc.collect()
    before = torch.cuda.memory_allocated()
    trainings = [Training(True, "cuda") for _ in range(2)]
    for x, y in BATCHES:
        for training in trainings:
            training.step(x.cuda(), y.cuda())
    for a, b in zip(trainings[0].values(), trainings[1].values(), strict=True):
        assert torch.equal(a, b)
    del trainings, training, a, b
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + 2**26  # and those of the stream of recordings


def test_a_model_moves_to_another_device_and_back():
    training = Training(True, "cuda")
    expected = Training(False, "cuda")
    for call, (x, y) in enumerate(BATCHES):
        device = "cpu" if 4 <= call < 8 else "cuda"
        for each in (training, expected):
            each.net.to(device)
            for state in each.optimizer.state.values():
                state.update({name: value.to(device) for name, value in state.items()})
            each.step(x.to(device), y.to(device))
    for a, b in zip(training.values(), expected.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_a_user_stream():
    training, expected = Training(True, "cuda"), Training(False, "cuda")
    stream = torch.cuda.Stream()
    for x, y in BATCHES:
        for each in (training, expected):
            with torch.cuda.stream(stream):
                loss = each.step(x.cuda(non_blocking=True), y.cuda(non_blocking=True))
            stream.synchronize()
            assert torch.isfinite(loss)
    for a, b in zip(training.values(), expected.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_a_soak_of_a_thousand_steps_with_a_changing_world():
    changes = list(CHANGES.values())[:-1]

    def run(compiled: bool) -> tuple[list[torch.Tensor], Any]:
        training = Training(compiled, "cuda")
        losses = []
        for call in range(1000):
            if call % 50 == 49:
                changes[call // 50 % len(changes)](training)
            x, y = BATCHES[call % len(BATCHES)]
            losses.append(training.step(x.cuda(), y.cuda()))
        return [torch.stack(losses[-20:]).detach(), *training.values()], training

    (expected, _), (found, training) = run(False), run(True)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=0.05, atol=1e-2)  # rounding grows over a thousand steps
    assert training.step.report().replays > 900
