"""Training programs on a device: eager's values, and what of them is replayed."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.compare import check
from tests.support import device_programs as programs

pytestmark = pytest.mark.gpu

SINGLE, HALF = 1e-3, 2e-2
"""Of the largest element, after six updates: kernels of float32 sum in another order, bfloat16 has 8 digits."""

_HALF = {programs.autocast, programs.mlp_scaler, programs.mlp_scaler_adamw}
_RECORDED = {
    each for each in programs.REPLAYED if each not in (programs.ragged, programs.from_host, programs.accumulation)
}
"""Programs of which every call but the first two replays one recording."""


@pytest.mark.parametrize("make", programs.REPLAYED)
def test_the_captured_graph(make):
    check(make, "cuda", 0.0, backend="eager")


@pytest.mark.parametrize("make", programs.REPLAYED)
def test_the_functional_graph(make):
    check(make, "cuda", 1e-5, backend="aot_eager")


@pytest.mark.parametrize("make", programs.REPLAYED)
def test_kernel_by_kernel(make):
    tolerance = HALF if make in _HALF else SINGLE
    check(make, "cuda", tolerance, cuda_graphs="off", rng="eager")


@pytest.mark.parametrize("make", programs.REPLAYED)
def test_replayed(make):
    tolerance = HALF if make in _HALF else SINGLE
    step = check(make, "cuda", tolerance, rng="eager")
    report = step.report()
    graphs = [capture.cuda_graph for capture in report.captures]
    if make in _RECORDED:
        graph = graphs[-1]
        assert graph is not None and not graph.refused, report
        assert graph.recordings == 1 and graph.replays >= report.calls - 2 - len(graphs), report


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}], ids=["one", "four"])
@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_recurrent_layers(kind, options):
    """One graph with cuDNN's calls, which a recording contains."""
    with torch.backends.mkldnn.flags(enabled=False):
        step = check(lambda device: programs.recurrent(device, kind, **options), "cuda", SINGLE)
    report = step.report()
    assert not report.breaks and not report.fallbacks, report
    (capture,) = report.captures
    assert not capture.cuda_graph.refused and capture.cuda_graph.replays >= report.calls - 2, report
