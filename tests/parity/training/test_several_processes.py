"""Models captured inside and around those that reduce gradients between processes: eager's weights on every rank.

Steps over such models are in ``tests/distributed``.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sidefx_train

KINDS = ("ddp compiled", "compiled inside", "within", "dtensor")


class Within(nn.Module):
    """A model that contains a wrapped one."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 2


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def _wrapped(kind, compiled):
    """Returns the model that the step calls, and the owner of its report."""

    def ours(value):
        return sidefx_train.compile(value, backend="eager") if compiled else value

    model = _model()
    if kind == "dtensor":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, distribute_module

        mesh = init_device_mesh("cpu", (2,))

        def spread(module, args, mesh):
            return tuple(DTensor.from_local(value, mesh, [Replicate()]) for value in args)

        return distribute_module(model, mesh, None, spread, lambda module, out, mesh: out.to_local()), None
    if kind == "compiled inside":
        inner = ours(model)
        return DistributedDataParallel(inner), inner
    if kind == "within":
        found = ours(Within(DistributedDataParallel(model)))
        return found, found
    found = DistributedDataParallel(model)
    return (ours(found), None) if kind == "ddp compiled" else (found, None)


def _train(kind, compiled):
    net, inner = _wrapped(kind, compiled)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x, y):
        (net(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    whole = kind == "dtensor" and compiled
    call = sidefx_train.compile(step, backend="eager") if whole else step
    generator = torch.Generator().manual_seed(dist.get_rank() if kind != "dtensor" else 0)
    for _ in range(6):
        call(torch.randn(3, 4, generator=generator), torch.randn(3, 2, generator=generator))
    report = None
    if compiled:
        report = sidefx_train.explain(call if whole else net if inner is None else inner)
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
    return [w.detach().clone() for w in weights], report


def _check(kind):
    expected, _ = _train(kind, False)
    found, report = _train(kind, True)
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b), f"{kind}: other weights than eager's"
    for weight in found:
        others = [torch.empty_like(weight) for _ in range(2)]
        dist.all_gather(others, weight)
        assert torch.equal(*others), f"{kind}: the ranks have drifted apart"
    until_final = 2 if kind in ("ddp compiled", "within") else 0
    assert (report.calls, report.replays, report.fallback_count) == (6, 6 - until_final, until_final), str(report)
    assert {f.code for f in report.fallbacks} <= {"SFX212"}, str(report)


def _rank(rank, file, kinds):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    warnings.simplefilter("ignore")
    try:
        for kind in kinds:
            _check(kind)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the other rank may be waiting in a collective
    dist.barrier()
    os._exit(0)  # gloo's threads may crash the process during the interpreter's exit


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [KINDS[:2], pytest.param(KINDS[2:], marks=pytest.mark.slow)], ids=["few", "others"])
def test_ranks_end_with_eagers_weights(kinds):
    folder = tempfile.mkdtemp()
    mp.spawn(_rank, (os.path.join(folder, "meeting"), kinds), nprocs=2)
