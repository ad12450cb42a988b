"""Training steps over modules of ``fully_shard``, by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from tests.distributed.data_parallel_programs import TinyGPT, entropy, square
from tests.distributed.processes import WORLD


def plain(tensor: torch.Tensor | None, versions: bool = True) -> list[Any]:
    """Returns facts of a tensor, a ``DTensor`` or ``None`` that two runs have in common.

    Args:
        tensor: the tensor.
        versions: False for what a gradient scaler may have skipped: a captured step counts that as a write.
    """
    if tensor is None:
        return [None]
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    how = str(tensor.placements) if isinstance(tensor, DTensor) else ""
    facts = [type(tensor), how, tuple(tensor.shape), tensor.requires_grad, tensor.is_leaf]
    facts += [tensor._version] if versions else []
    return [*facts, local.detach().clone()]


@dataclass
class State:
    """What a step uses and changes.

    Attributes:
        net: the sharded model.
        optimizer: its optimizer.
        loss: the loss function.
        seen: values that the steps so far have shown.
        factor: multiplies the loss; guarded.
        calls: number of calls so far.
        scheduler: changes the learning rate.
        scaler: scales the loss.
    """

    net: Any
    optimizer: torch.optim.Optimizer
    loss: Callable[..., torch.Tensor]
    seen: list[Any] = field(default_factory=list)
    factor: int = 1
    calls: int = 0
    scheduler: Any = None
    scaler: Any = None

    def facts(self) -> list[Any]:
        """Returns facts of parameters, gradients, buffers, optimizer state and the groups."""
        found: list[Any] = []
        for p in self.net.parameters():
            found += [*plain(p, self.scaler is None), *plain(p.grad)]
        for state in self.optimizer.state.values():
            for value in state.values():
                found += plain(value)
        for name, value in (*self.net.named_buffers(), *self.net.state_dict().items()):
            found += [name, *plain(value, self.scaler is None)]
        for module in self.net.modules():
            if isinstance(module, FSDPModule):
                found += _of_group(module._get_fsdp_state())
        for value in self.seen:
            found += plain(value) if isinstance(value, torch.Tensor) else [value]
        return found


def _of_group(state: Any) -> list[Any]:
    context = state._comm_ctx
    found = [state._training_state, len(context.post_forward_order), context.all_gather_state]
    groups = getattr(state, "_fsdp_param_groups", None)  # one group before torch 2.12
    for group in [state._fsdp_param_group] if groups is None else groups:
        if group is None:
            continue
        found += [group._sharded_state, group._training_state, group._all_gather_result, group._post_forward_indices]
        for param in group.fsdp_params:
            found += [
                param.sharded_state,
                *plain(param._unsharded_param.grad),
                *plain(param.unsharded_accumulated_grad),
            ]
            found.append([each.untyped_storage().size() for each in param.all_gather_outputs])
            found.append(getattr(param._module_info.module, param._module_info.param_name) is param.sharded_param)
    return found


class Net(nn.Module):
    """Two blocks, a norm with buffers, and a head of one output."""

    def __init__(self, buffers: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4)) for _ in range(2))
        self.norm, self.head = nn.BatchNorm1d(4) if buffers else nn.LayerNorm(4), nn.Linear(4, 1)
        self.checkpointed = False

    def forward(self, x):
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x))
        return self.head(self.norm(x))


def _vectors(generator):
    return torch.randn(3, 4, generator=generator), torch.randn(3, 1, generator=generator)


def _tokens(generator):
    return torch.randint(11, (2, 5), generator=generator), torch.randint(11, (2, 5), generator=generator)


def whole(buffers=True, **options):
    net = Net(buffers)
    fully_shard(net, **options)
    return net


def by_block(buffers=True, **options):
    net = Net(buffers)
    for block in net.blocks:
        fully_shard(block, **options)
    fully_shard(net, **options)
    return net


def checkpointed():
    net = by_block()
    net.checkpointed = True
    return net


def grouped():
    net = Net()
    fully_shard(net.blocks[0])
    fully_shard([net.norm, net.head])
    fully_shard(net)
    return net


def prefetching():
    net = by_block()
    net.set_modules_to_forward_prefetch([net.blocks[0], net.blocks[1]])
    net.blocks[1].set_modules_to_backward_prefetch([net.blocks[0]])
    return net


def frozen():
    net = Net()
    net.blocks[0][0].weight.requires_grad_(False)
    net.head.requires_grad_(False)
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
    return net


def frozen_block():
    net = Net()
    net.blocks[0].requires_grad_(False)
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
    return net


def without_own_parameters():
    net = Net()
    for part in (*net.blocks, net.norm, net.head):
        fully_shard(part)
    fully_shard(net)
    return net


def replicated():
    net = Net()
    fully_shard(net, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    return net


def hybrid():
    mesh = init_device_mesh("cpu", (WORLD // 2, 2), mesh_dim_names=("replicate", "shard"))
    net = Net()
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def tensor_parallel():
    mesh = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("data", "tensor"))
    net = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 1))
    parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net, mesh=mesh["data"])
    return net


def hooked():
    net = by_block()
    net.blocks[0].set_all_reduce_hook(lambda buffer: None)
    return net


def tied():
    net = TinyGPT()
    fully_shard(net)
    return net


def train(s: State, x, y):
    loss = s.loss(s.net(x), y) * s.factor
    loss.backward()
    s.optimizer.step()
    s.optimizer.zero_grad()
    s.seen.append(loss.detach())


def keeps_gradients(s: State, x, y):
    s.optimizer.zero_grad(set_to_none=False)
    loss = s.loss(s.net(x), y)
    loss.backward()
    s.optimizer.step()
    s.seen.append(loss.detach())


def forgets_gradients_first(s: State, x, y):
    s.optimizer.zero_grad()
    s.loss(s.net(x), y).backward()
    s.optimizer.step()


def clips(s: State, x, y):
    loss = s.loss(s.net(x), y)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(s.net.parameters(), 0.5)
    s.optimizer.step()
    s.optimizer.zero_grad()
    s.seen.append(loss.detach())
    s.seen.append(norm)


def accumulates(s: State, x, y):
    last = s.calls % 3 == 2
    s.calls += 1
    s.net.set_requires_gradient_sync(last)
    loss = s.loss(s.net(x), y) / 3
    loss.backward()
    if last:
        s.optimizer.step()
        s.optimizer.zero_grad()
    s.seen.append(loss.detach())


def accumulates_inside(s: State, x, y):
    s.net.set_requires_gradient_sync(False)
    for _ in range(2):
        s.loss(s.net(x), y).backward()
    s.net.set_requires_gradient_sync(True)
    train(s, x * 2, y)


def accumulates_shards(s: State, x, y):
    s.loss(s.net(x), y).backward()
    train(s, x * 2, y)


def autocast(s: State, x, y):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = s.loss(s.net(x), y)
    loss.backward()
    s.optimizer.step()
    s.optimizer.zero_grad()
    s.seen.append(loss.detach())


def two_forwards(s: State, x, y):
    loss = s.loss(s.net(x), y) + s.loss(s.net(x + 1), y)
    loss.backward()
    s.optimizer.step()
    s.optimizer.zero_grad()
    s.seen.append(loss.detach())


def scheduled(s: State, x, y):
    train(s, x, y)
    s.scheduler.step()


def scales(s: State, x, y):
    """Has infinite gradients in the fourth step, whose update is skipped."""
    s.calls += 1
    loss = s.loss(s.net(x), y) * (float("inf") if s.calls == 4 else 1)
    s.scaler.scale(loss).backward()
    s.scaler.unscale_(s.optimizer)
    torch.nn.utils.clip_grad_norm_(s.net.parameters(), 0.5)
    s.scaler.step(s.optimizer)
    s.scaler.update()
    s.optimizer.zero_grad()
    s.seen.append(s.scaler.get_scale())


def validates(s: State, x, y):
    train(s, x, y)
    s.net.eval()
    with torch.no_grad():
        s.seen.append(s.loss(s.net(x), y))
    s.net.train()


def reads_loss(s: State, x, y):
    loss = s.loss(s.net(x), y)
    if loss.item() > -1:
        loss.backward()
    s.optimizer.step()
    s.optimizer.zero_grad()


def reads_loss_at_the_end(s: State, x, y):
    loss = s.loss(s.net(x), y)
    loss.backward()
    s.optimizer.step()
    s.optimizer.zero_grad()
    s.seen.append(loss.item())
    s.seen.append(loss.detach() * 2)


def breaks_twice(s: State, x, y):
    loss = s.loss(s.net(x), y)
    loss.backward()
    if len(os.times()) > 0:
        torch.nn.utils.clip_grad_norm_(s.net.parameters(), 0.5)
    s.optimizer.step()
    s.optimizer.zero_grad()
    if loss.item() > -1:
        s.seen.append(loss.detach())


def looks_at_shards(s: State, x, y):
    s.loss(s.net(x), y).backward()
    with torch.no_grad():
        for p in s.net.parameters():
            s.seen.append(p.grad.to_local().norm())
    s.optimizer.step()
    s.optimizer.zero_grad()


def gathers_a_parameter(s: State, x, y):
    train(s, x, y)
    with torch.no_grad():
        s.seen.append(s.net.head.weight.full_tensor() * 2)


def gathers_early(s: State, x, y):
    handle = s.net.unshard(async_op=True)
    handle.wait()
    train(s, x, y)


def regularizes(s: State, x, y):
    loss = s.loss(s.net(x), y) + s.net.blocks[0][0].weight.square().sum().full_tensor()
    loss.backward()
    s.optimizer.step()
    s.optimizer.zero_grad()


def averages(s: State, x, y):
    train(s, x, y)
    with torch.no_grad():
        for p in s.net.parameters():
            p.mul_(0.999)


@dataclass(frozen=True)
class Program:
    """A model and its step.

    Attributes:
        model: makes the sharded model.
        step: the step.
        batch: makes a batch from a generator.
        loss: the loss function.
        optimizer: makes the optimizer.
        eager: why it runs eagerly; "" if it is captured.
        graphs: number of graphs.
        divided: it is captured in parts.
    """

    model: Callable[[], nn.Module]
    step: Callable[..., None] = train
    batch: Callable[..., Any] = _vectors
    loss: Callable[..., torch.Tensor] = square
    optimizer: Callable[..., torch.optim.Optimizer] = partial(torch.optim.AdamW, lr=0.01)
    eager: str = ""
    graphs: int = 1
    divided: bool = False

    def state(self) -> State:
        """Returns the state at the beginning of a training, the same at every call."""
        torch.manual_seed(0)
        net = self.model()
        optimizer = self.optimizer(p for p in net.parameters() if p.requires_grad)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        return State(net, optimizer, self.loss, scheduler=scheduler, scaler=scaler)


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
HALF_REDUCED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
SGD = partial(torch.optim.SGD, lr=0.1)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
FOREACH = partial(torch.optim.AdamW, lr=0.01, foreach=True)

PROGRAMS = {
    "whole": Program(whole, optimizer=SGD),
    "whole, momentum": Program(whole, optimizer=MOMENTUM),
    "blocks": Program(by_block),
    "blocks, foreach": Program(by_block, optimizer=FOREACH),
    "blocks, fused": Program(by_block, optimizer=partial(torch.optim.AdamW, lr=0.01, fused=True)),
    "not resharded": Program(partial(by_block, reshard_after_forward=False), optimizer=SGD),
    "resharded": Program(by_block, optimizer=SGD),
    "clipping": Program(by_block, clips),
    "clipping, foreach": Program(by_block, clips, optimizer=FOREACH),
    "half": Program(partial(by_block, buffers=False, mp_policy=HALF)),
    "half, reduced in half": Program(partial(whole, buffers=False, mp_policy=HALF_REDUCED)),
    "kept gradients": Program(by_block, keeps_gradients, optimizer=MOMENTUM),
    "gradients forgotten first": Program(by_block, forgets_gradients_first),
    "accumulation": Program(by_block, accumulates, graphs=3),
    "half, accumulation": Program(
        partial(by_block, buffers=False, mp_policy=HALF), accumulates, optimizer=MOMENTUM, graphs=3
    ),
    "accumulation inside": Program(by_block, accumulates_inside),
    "accumulated shards": Program(by_block, accumulates_shards),
    "autocast": Program(by_block, autocast),
    "two forwards": Program(by_block, two_forwards),
    "scheduler": Program(by_block, scheduled),
    "scaler": Program(by_block, scales, optimizer=SGD, graphs=2),
    "checkpointing": Program(checkpointed),
    "prefetching": Program(prefetching),
    "frozen": Program(frozen),
    "frozen block": Program(frozen_block, optimizer=SGD),
    "without own parameters": Program(without_own_parameters),
    "tied weights": Program(tied, batch=_tokens, loss=entropy, optimizer=MOMENTUM),
    "loss read at the end": Program(by_block, reads_loss_at_the_end),
    "divided": Program(by_block, breaks_twice, divided=True),
    "divided, foreach": Program(by_block, breaks_twice, optimizer=FOREACH, divided=True),
    "shards": Program(by_block, looks_at_shards),
    "full tensor": Program(by_block, gathers_a_parameter),
    "averages": Program(by_block, averages),
    "validation": Program(by_block, validates, eager="left its parameters gathered"),
    "loss read between": Program(whole, reads_loss, eager="between a forward and the end of its backward"),
    "gathered early": Program(by_block, gathers_early, eager="unshard"),
    "several modules in a group": Program(grouped, eager="several modules"),
    "replicated": Program(replicated, eager="replicates"),
    "hybrid": Program(hybrid),
    "tensor parallel": Program(tensor_parallel),
    "regularized": Program(by_block, regularizes),
    "offloaded": Program(partial(whole, offload_policy=CPUOffloadPolicy(pin_memory=False)), eager="offloaded"),
    "all-reduce hook": Program(hooked, eager="all-reduce hook"),
}
