"""Training steps over ``DistributedDataParallel``, by name."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel


class TinyGPT(nn.Module):
    """Embeds, attends causally, and predicts with the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k, v = (part.view(*x.shape[:2], 2, 4).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
        return self.head(x)


class Partly(nn.Module):
    """Has a layer that it never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        return self.used(x)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def cnn() -> nn.Module:
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    return layers.to(memory_format=torch.channels_last)


def _vectors(generator, rows=3):
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, 2, generator=generator)


def _images(generator, rows=3):
    return torch.randn(rows, 3, 6, 6, generator=generator), torch.randn(rows, 2, generator=generator)


def _tokens(generator, rows=2):
    return torch.randint(11, (rows, 5), generator=generator), torch.randint(11, (rows, 5), generator=generator)


def square(output, target):
    return (output - target).square().mean()


def entropy(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@dataclass
class State:
    """What a step uses and changes.

    Attributes:
        net: the wrapped model.
        optimizer: its optimizer.
        loss: the loss function.
        losses: losses of the steps so far.
        factor: multiplies the loss; guarded.
        calls: number of calls so far.
    """

    net: Any
    optimizer: torch.optim.Optimizer
    loss: Callable[..., torch.Tensor]
    losses: list[torch.Tensor] = field(default_factory=list)
    factor: int = 1
    calls: int = 0

    def tensors(self) -> list[torch.Tensor]:
        """Returns copies of parameters, gradients, buffers, optimizer state and losses."""
        grads = [p.grad for p in self.net.parameters() if p.grad is not None]
        kept = [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        found = (*self.net.parameters(), *self.net.buffers(), *grads, *kept, *self.losses)
        return [copy.deepcopy(tensor.detach()) for tensor in found]


def train(s: State, x, y):
    loss = s.loss(s.net(x), y) * s.factor
    loss.backward()
    s.optimizer.step()
    s.optimizer.zero_grad()
    s.losses.append(loss.detach())


def keeps_gradients(s: State, x, y):
    s.optimizer.zero_grad(set_to_none=False)
    loss = s.loss(s.net(x), y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.net.parameters(), 0.5)
    s.optimizer.step()
    s.losses.append(loss.detach())


def accumulates(s: State, x, y):
    last = s.calls % 3 == 2
    s.calls += 1
    with contextlib.nullcontext() if last else s.net.no_sync():
        loss = s.loss(s.net(x), y) / 3
        loss.backward()
    if last:
        s.optimizer.step()
        s.optimizer.zero_grad()
    s.losses.append(loss.detach())


def accumulates_inside(s: State, x, y):
    with s.net.no_sync():
        for _ in range(2):
            s.loss(s.net(x), y).backward()
    train(s, x * 2, y)


def autocast(s: State, x, y):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = s.loss(s.net(x), y)
    loss.backward()
    s.optimizer.step()
    s.optimizer.zero_grad()
    s.losses.append(loss.detach())


def validates(s: State, x, y):
    train(s, x, y)
    s.net.eval()
    with torch.no_grad():
        s.losses.append(s.loss(s.net(x), y))
    s.net.train()


def two_forwards(s: State, x, y):
    loss = s.loss(s.net(x), y) + s.loss(s.net(x + 1), y)
    loss.backward()
    s.optimizer.step()
    s.optimizer.zero_grad()
    s.losses.append(loss.detach())


def reads_loss(s: State, x, y):
    """Asserts a condition, and branches, on the loss between the forward and its backward."""
    loss = s.loss(s.net(x), y)
    assert loss.item() < 1e6
    total = loss.detach().clone()
    torch.distributed.all_reduce(total)
    if total.item() > 2 * loss.item():
        loss = loss * 2
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.net.parameters(), 0.5)
    s.optimizer.step()
    s.optimizer.zero_grad()
    s.losses.append(loss.detach())


def reads_between_forwards(s: State, x, y):
    first = s.net(x)
    if first.sum() > 0:
        first = first * 2
    loss = s.loss(first, y) + s.loss(s.net(x + 1), y)
    if loss > 0.5:
        loss = loss / 2
    loss.backward()
    s.optimizer.step()
    s.optimizer.zero_grad(set_to_none=False)
    s.losses.append(loss.detach())


class Numbered(nn.Module):
    """Calls what cannot be captured in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        x = self.first(x)
        return self.second(x) + 0 * (len(os.times()) > 0)


class Branching(nn.Module):
    """Branches on a tensor between two layers, which share a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        x = self.norm(self.first(x)) * self.scale
        if x.sum() > 0:
            x = x.relu()
        return self.second(x) * self.scale


class Alternating(nn.Module):
    """Uses one of two layers, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.layers = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 2) for _ in range(2))

    def forward(self, x, which):
        x = self.shared(x)
        return sum(layer(x) for index, layer in enumerate(self.layers) if index in which)


def _used(s: State) -> tuple[int, ...]:
    """Returns the layers that this process uses in this call: both, each rank another one, or all the first."""
    s.calls += 1
    return ((0, 1), (torch.distributed.get_rank() % 2,), (0,))[s.calls % 3]


def uses_in_turn(s: State, x, y):
    loss = s.loss(s.net(x, _used(s)), y)
    loss.backward()
    s.optimizer.step()
    s.optimizer.zero_grad()
    s.losses.append(loss.detach())


def uses_in_turn_and_keeps(s: State, x, y):
    s.optimizer.zero_grad(set_to_none=False)
    loss = s.loss(s.net(x, _used(s)), y)
    loss.backward()
    s.optimizer.step()
    s.losses.append(loss.detach())


def zeroes_first(s: State, x, y):
    s.optimizer.zero_grad()
    loss = s.loss(s.net(x), y)
    loss.backward()
    s.optimizer.step()
    s.losses.append(loss.detach())


def halving_hook(state, bucket):
    """A communication hook of the program's own."""
    bucket.buffer().mul_(0.5)
    return default_hooks.allreduce_hook(state, bucket)


def begins_natively(s: State, x, y):
    if len(os.times()) > 0:
        train(s, x, y)


@dataclass(frozen=True)
class Program:
    """A model and its step.

    Attributes:
        model: makes the model.
        batch: makes a batch from a generator.
        step: the step.
        loss: the loss function.
        options: of the wrapper.
        hook: a communication hook.
        eager: why it runs eagerly; "" if it is captured.
        graphs: number of graphs.
        divided: it is captured in parts.
    """

    model: Callable[[], nn.Module]
    batch: Callable[..., Any]
    step: Callable[..., None] = train
    loss: Callable[..., torch.Tensor] = square
    options: dict[str, Any] = field(default_factory=dict)
    hook: Any = None
    eager: str = ""
    graphs: int = 1
    divided: bool = False

    def state(self, adaptive: bool = True) -> State:
        """Returns the state at the beginning of a training, the same at every call.

        Args:
            adaptive: the optimizer divides by the size of gradients: where they are rounding noise around zero, as
                those of a key's bias, so are its updates.
        """
        torch.manual_seed(0)
        net = DistributedDataParallel(self.model(), **self.options)
        if self.hook is not None:
            net.register_comm_hook(None, self.hook)
        maker = partial(torch.optim.AdamW, lr=0.01) if adaptive else partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        return State(net, maker(net.parameters()), self.loss)


MANY = {"bucket_cap_mb": 1e-4}
"""Buckets of one or two parameters."""
FINDS_UNUSED = {"find_unused_parameters": True, **MANY}
VIEWS = {"gradient_as_bucket_view": True, **MANY}

PROGRAMS = {
    "mlp": Program(mlp, _vectors),
    "many buckets": Program(mlp, _vectors, options=MANY),
    "batch norm": Program(cnn, _images),
    "batch norm, many buckets": Program(cnn, _images, options=MANY),
    "own buffers": Program(cnn, _images, options={"broadcast_buffers": False}),
    "tied weights": Program(TinyGPT, _tokens, loss=entropy, options=MANY),
    "kept gradients": Program(cnn, _images, keeps_gradients),
    "accumulation": Program(cnn, _images, accumulates, graphs=3),
    "accumulation inside": Program(mlp, _vectors, accumulates_inside, options=MANY),
    "autocast": Program(mlp, _vectors, autocast),
    "validation": Program(cnn, _images, validates),
    "two forwards": Program(mlp, _vectors, two_forwards),
    "fp16 hook": Program(mlp, _vectors, options=MANY, hook=default_hooks.fp16_compress_hook),
    "mean hook": Program(mlp, _vectors, hook=default_hooks.allreduce_hook),
    "other hook": Program(mlp, _vectors, hook=halving_hook, eager="halving_hook"),
    "all used": Program(mlp, _vectors, options=FINDS_UNUSED),
    "unused": Program(Partly, _vectors, options=FINDS_UNUSED, divided=True),
    "used in turn": Program(Alternating, _vectors, uses_in_turn, options=FINDS_UNUSED, divided=True),
    "unused, kept gradients": Program(Alternating, _vectors, uses_in_turn_and_keeps, options=FINDS_UNUSED, graphs=3),
    "accumulation, finding unused": Program(mlp, _vectors, accumulates, options=FINDS_UNUSED, graphs=3),
    "bucket views": Program(mlp, _vectors, options=VIEWS),
    "bucket views, kept": Program(cnn, _images, keeps_gradients, options=VIEWS),
    "bucket views, zeroed first": Program(mlp, _vectors, zeroes_first, options=VIEWS),
    "bucket views, accumulation": Program(mlp, _vectors, accumulates, options=VIEWS, graphs=3),
    "static graph": Program(mlp, _vectors, options={"static_graph": True}),
    "static graph, unused": Program(Partly, _vectors, options={"static_graph": True, **MANY}),
    "break in the model": Program(Numbered, _vectors, divided=True, options=MANY),
    "branch in the model": Program(Branching, _vectors, divided=True),
    "branch in the model, accumulation": Program(Branching, _vectors, accumulates_inside, divided=True, options=MANY),
    "branch in the model, finding unused": Program(Branching, _vectors, divided=True, options=FINDS_UNUSED),
    "break before": Program(mlp, _vectors, begins_natively, divided=True),
    "loss read between": Program(cnn, _images, reads_loss, divided=True, options=MANY),
    "loss read between, views": Program(mlp, _vectors, reads_loss, divided=True, options=VIEWS),
    "loss read between, fp16 hook": Program(
        mlp, _vectors, reads_loss, hook=default_hooks.fp16_compress_hook, divided=True
    ),
    "read between forwards": Program(cnn, _images, reads_between_forwards, divided=True),
    "loss read, finding unused": Program(mlp, _vectors, reads_loss, options=FINDS_UNUSED, eager="whose parameters"),
}
