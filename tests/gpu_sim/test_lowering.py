"""A step's graph becomes GPU code by the path of a real device; its kernels compile for two kinds of GPU."""

from __future__ import annotations

import pytest
import torch

from sidefx_train.compile.gpu.simulation import lower
from tests.gpu_sim.test_placement import of_optimizer

pytest.importorskip("triton")


def test_kernels_compile_for_the_two_kinds_of_gpu_and_nothing_of_the_device_stays():
    before = {name: value for name, value in vars(torch.cuda).items() if callable(value)}
    graph = lower(of_optimizer(torch.optim.SGD))
    assert graph.kernels and "device='cuda'" in graph.executable.sources["inductor"]
    for capability in (80, 90):
        made = graph.compile_kernels(capability)
        assert [each.kernel for each in made] == [each.name for each in graph.kernels]
        assert all(each.size > 1000 and each.capability == capability for each in made)
    assert {name: value for name, value in vars(torch.cuda).items() if callable(value)} == before
    assert not torch.cuda.is_available()
