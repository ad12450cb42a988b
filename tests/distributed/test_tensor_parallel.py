"""Steps over modules of ``parallelize_module``: eager's numbers and objects, whichever rank captures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import sidefx_train
from tests.distributed.fully_sharded_programs import plain
from tests.distributed.processes import WORLD, in_two_processes

CALLS = 3


class Block(nn.Module):
    """A normalized layer of two products."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def by_columns(mesh: Any) -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    return parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def by_sequence(mesh: Any) -> nn.Module:
    plan = {
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(output_layouts=Shard(0)),
    }
    net = nn.Sequential(Block(), Block())
    for block in net:
        parallelize_module(block, mesh, plan)
    first = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(0),), use_local_output=True)
    return parallelize_module(net, mesh, first)


def trained(net: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = net(x)
    loss = (out * y[: out.shape[0]]).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def clipped(net: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    for part in (x, x * 2):
        F.mse_loss(net(part), y).backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    optimizer.step()
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def checkpointed(net: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    F.mse_loss(checkpoint(net, x, use_reentrant=False), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def parallel_loss(net: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with loss_parallel():
        loss = F.cross_entropy(net(x), y.argmax(1))
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach().full_tensor()


def classes(mesh: Any) -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4))
    return parallelize_module(net, mesh, {"0": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)})


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.1)


PROGRAMS: dict[str, tuple[Any, Any, Any]] = {
    "sgd": (by_columns, sgd, trained),
    "adam": (by_columns, adam, trained),
    "sequence": (by_sequence, adam, trained),
    "clipping, accumulation": (by_columns, sgd, clipped),
    "checkpoint": (by_columns, sgd, checkpointed),
    "loss parallel": (classes, sgd, parallel_loss),
}


def _facts(name: str, mesh: Any, compiled: Callable[[Any], Any]) -> tuple[list[Any], Any]:
    make, optimize, body = PROGRAMS[name]
    torch.manual_seed(0)
    net = make(mesh)
    optimizer = optimize(net)
    step, facts = compiled(lambda x, y: body(net, optimizer, x, y)), []
    for call in range(CALLS):
        generator = torch.Generator().manual_seed(call)
        shown = step(torch.randn(4, 4, generator=generator), torch.randn(4, 4, generator=generator))
        facts.append(plain(shown))
        for p in net.parameters():
            facts.append([*plain(p), p._version, *plain(p.grad)])
            facts += [plain(value) for value in optimizer.state.get(p, {}).values()]
    return facts, step


def _same(want: Any, have: Any) -> bool:
    if isinstance(want, list):
        return len(want) == len(have) and all(map(_same, want, have))
    return torch.equal(want, have) if isinstance(want, torch.Tensor) else want == have


def _captured(step: Any) -> Any:
    return sidefx_train.compile(step, backend="eager")


def _compare(rank: int) -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    for name in PROGRAMS:
        want, _ = _facts(name, mesh, lambda step: step)
        for captures in ({0, 1}, {0}):
            have, step = _facts(name, mesh, _captured if rank in captures else lambda step: step)
            different = [i for i, pair in enumerate(zip(want, have, strict=True)) if not _same(*pair)]
            assert not different, f"{name}, captured by {captures}: {different}"
            if rank in captures:
                report = sidefx_train.explain(step)
                assert report.replays == CALLS and not report.breaks, f"{name}: {report}"


def test_tensor_parallel_steps():
    in_two_processes(_compare, seconds=200)


def _inductor(rank: int) -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    want, _ = _facts("sequence", mesh, lambda step: step)
    have, step = _facts("sequence", mesh, lambda step: sidefx_train.compile(step, fullgraph=True, on_failure="raise"))
    for a, b in zip(want, have, strict=True):
        for x, y in zip(a, b, strict=True):
            assert not isinstance(x, torch.Tensor) or torch.allclose(x, y, rtol=1e-4, atol=1e-5)
    assert sidefx_train.explain(step).replays == CALLS


@pytest.mark.slow
def test_tensor_parallel_with_inductor():
    in_two_processes(_inductor, seconds=200)


def _outside(rank: int) -> None:
    net = by_columns(init_device_mesh("cpu", (WORLD,)))
    step = sidefx_train.compile(lambda x: net(x).sum(), backend="eager")
    for seed in range(2):
        torch.manual_seed(seed)
        step(torch.randn(4, 4)).backward()
        assert all(p.grad is not None for p in net.parameters())
        net.zero_grad()
    assert sidefx_train.explain(step).replays == 0


def _hooked(rank: int) -> None:
    net = by_columns(init_device_mesh("cpu", (WORLD,)))
    step = sidefx_train.compile(lambda: net[0].weight.register_hook(lambda gradient: gradient), backend="eager")
    for calls in (1, 2):
        step()
        assert len(net[0].weight._backward_hooks) == calls


def test_a_hook_that_stays_is_refused():
    in_two_processes(_hooked)


def test_a_backward_outside_is_refused():
    in_two_processes(_outside)
