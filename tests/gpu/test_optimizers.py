"""The optimizers of torch on a device, replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sidefx_train.compile.backend.autotune import multi_tensor
from tests.gpu.compare import check
from tests.support import device_programs as programs

pytestmark = pytest.mark.gpu

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "ASGD": {}, "Adadelta": {}, "Adafactor": {}, "Adagrad": {}, "Adam": {"amsgrad": True}, "AdamW": {}, "Adamax": {},
    "NAdam": {}, "RAdam": {}, "RMSprop": {"momentum": 0.9}, "Rprop": {}, "SGD": {"momentum": 0.9, "nesterov": True},
}  # fmt: skip
TOLERANCE = 1e-2
"""An update that divides by the size of the gradient makes its rounding as large as the learning rate."""
FUSED = ("Adam", "AdamW", "Adagrad", "SGD")


def training(name: str, **options: Any) -> Any:
    def make(device: str) -> programs.Program:
        net = programs.mlp(device)
        kind: Any = getattr(torch.optim, name)
        return programs.trained(net, kind(net.parameters(), **OPTIMIZERS[name], **options), programs.labeled(device))

    return make


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("foreach", [True, False])
def test_updates(name, foreach):
    step = check(training(name, foreach=foreach), "cuda", TOLERANCE)
    report = step.report()
    assert not report.breaks and not report.fallbacks, report
    graphs = [capture.cuda_graph for capture in report.captures]
    assert not any(graph.refused for graph in graphs), report
    assert sum(graph.replays for graph in graphs) >= report.calls - 2 * len(graphs), report


@pytest.mark.parametrize("name", [each for each in FUSED if each != "Adagrad"])
def test_fused_updates_are_replayed(name):
    step = check(training(name, fused=True), "cuda", TOLERANCE)
    (capture,) = step.report().captures
    assert capture.cuda_graph.replays >= 4, step.report()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_that_a_scaler_skips(name):
    """One graph, replayed also in the steps whose gradients are infinite."""
    made = getattr(torch.optim, name)

    def make(device: str) -> programs.Program:
        return programs.scaled(device, lambda p: made(p, **OPTIMIZERS[name]), half=False)

    step = check(make, "cuda", TOLERANCE)
    report = step.report()
    assert {record.code for record in report.fallbacks} <= {"SFX211"} and not report.breaks, report
    graphs = [capture.cuda_graph for capture in report.captures]
    assert not any(graph.refused for graph in graphs), report
    assert sum(graph.replays for graph in graphs) >= report.calls - 2 - 2 * len(graphs), report


@pytest.fixture
def one_kernel(monkeypatch):
    """Updates are one kernel wherever it is possible."""
    times = {multi_tensor.INDUCTOR: 2.0, multi_tensor.ONE_KERNEL: 1.0}
    monkeypatch.setattr(multi_tensor, "timings", lambda tasks: dict.fromkeys(tasks, times))


@pytest.mark.parametrize("name", ["Adagrad", "Adam", "AdamW", "RMSprop", "SGD"])
@pytest.mark.parametrize("foreach", [True, False])
def test_updates_of_one_kernel(one_kernel, name, foreach):
    step = check(training(name, foreach=foreach), "cuda", TOLERANCE)
    report = step.report()
    capture = report.captures[-1]
    assert [choice.chosen for choice in capture.choices] == [multi_tensor.ONE_KERNEL], report
    assert not capture.cuda_graph.refused and capture.cuda_graph.replays >= 3, report


def test_updates_of_one_kernel_that_a_scaler_skips(one_kernel):
    def make(device: str) -> programs.Program:
        return programs.scaled(device, lambda p: torch.optim.RMSprop(p, foreach=True), half=False)

    report = check(make, "cuda", TOLERANCE).report()
    assert multi_tensor.ONE_KERNEL in {choice.chosen for choice in report.captures[-1].choices}, report


def test_both_ways_to_update_are_timed():
    report = check(training("RMSprop", foreach=True), "cuda", TOLERANCE).report()
    (choice,) = report.captures[-1].choices
    assert choice.seconds.keys() == {multi_tensor.INDUCTOR, multi_tensor.ONE_KERNEL}, report
    assert all(0 < seconds < 1 for seconds in choice.seconds.values()), report
