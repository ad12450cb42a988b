"""Training programs for a device, on which they run eagerly and compiled; simulations place them there themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.support import parity
from tests.support.parity import batches, tokens

Batch = Callable[[int], tuple[Any, ...]]


@dataclass
class Program(parity.Program):
    """A training program.

    Attributes:
        calls: number of calls that show what is meant.
    """

    calls: int = 6


def on(device: str, batch: Batch) -> Batch:
    """Returns the batches on a device."""
    return lambda index: tuple(tensor.to(device) for tensor in batch(index))


def labeled(device: str, rows: int = 8) -> Batch:
    return on(device, batches((rows, 6), classes=3))


def mlp(device: str) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)).to(device)


def trained(net: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, *watch: Any, **more: Any) -> Program:
    """Builds the usual step: cross entropy, backward, update.

    Args:
        net: the model.
        optimizer: updates it.
        batch: inputs and labels of each call.
        watch: further objects to compare.
        more: ``clip``, the largest norm of the gradients; a ``scheduler``, stepped at the end; ``cast``, the dtype of
            an autocast region; a ``scaler``.
    """
    clip, scheduler = more.get("clip"), more.get("scheduler")
    cast, scaler = more.get("cast"), more.get("scaler")

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        with torch.autocast(x.device.type, dtype=cast or torch.bfloat16, enabled=cast is not None):
            loss = F.cross_entropy(net(x).float() if cast else net(x), y)
        (loss if scaler is None else scaler.scale(loss)).backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), clip) if clip else None
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        if scheduler is not None:
            scheduler.step()
        return loss if norm is None else (loss, norm)

    return Program(step, batch, (net, optimizer, *watch))


def mlp_adamw(device: str) -> Program:
    net = mlp(device)
    return trained(net, torch.optim.AdamW(net.parameters(), lr=0.01), labeled(device))


def mlp_adamw_fused(device: str) -> Program:
    net = mlp(device)
    return trained(net, torch.optim.AdamW(net.parameters(), lr=0.01, fused=True), labeled(device))


def mlp_adam_capturable(device: str) -> Program:
    net = mlp(device)
    return trained(net, torch.optim.Adam(net.parameters(), lr=0.01, capturable=True), labeled(device))


def clipped(device: str) -> Program:
    net = mlp(device)
    return trained(net, torch.optim.AdamW(net.parameters(), lr=0.01), labeled(device), clip=0.1)


def mlp_sgd_schedule(device: str) -> Program:
    net = mlp(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return trained(net, optimizer, labeled(device), scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10))


def mlp_fused_schedule(device: str) -> Program:
    net = mlp(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    return trained(net, optimizer, labeled(device), scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))


def scheduled(device: str) -> Program:
    """The learning rate of every step is another, and Python code runs behind the graph."""
    net = mlp(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    return trained(net, optimizer, labeled(device), scheduler=scheduler)


def mlp_rmsprop(device: str) -> Program:
    net = mlp(device)
    return trained(net, torch.optim.RMSprop(net.parameters(), lr=1e-3), labeled(device))


def autocast(device: str) -> Program:
    """Without a norm of bfloat16 by weights of float32, which torch calls on the CPU only."""
    net = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)  # Adam's first step has the sign of a rounded gradient
    return trained(net, optimizer, labeled(device), cast=torch.bfloat16)


def mlp_scaler(device: str) -> Program:
    net = mlp(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10)
    return trained(net, optimizer, labeled(device), scaler, cast=torch.float16, scaler=scaler)


def scaled(device: str, optimizer_of: Callable[..., torch.optim.Optimizer], half: bool = True) -> Program:
    """Gradients that overflow in some steps, whose update the scaler skips."""
    net = mlp(device)
    optimizer = optimizer_of(net.parameters())
    scaler = torch.amp.GradScaler(device, init_scale=2.0**8, growth_interval=2)

    def step(x: Any, y: Any, factor: Any) -> Any:
        with torch.autocast(x.device.type, dtype=torch.float16, enabled=half):
            loss = F.cross_entropy(net(x).float(), y)
        scaler.scale(loss * factor).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    def batch(index: int) -> tuple[Any, ...]:
        factor = torch.tensor(float("inf") if index in (3, 6, 7) else 1.0, device=device)
        return (*labeled(device)(index), factor)

    return Program(step, batch, (net, optimizer, scaler), calls=9)


def mlp_scaler_adamw(device: str) -> Program:
    return scaled(device, lambda params: torch.optim.AdamW(params, lr=0.01))


def ragged(device: str) -> Program:
    net = mlp(device)
    long, short = labeled(device), labeled(device, rows=5)
    program = trained(
        net, torch.optim.SGD(net.parameters(), lr=0.1), lambda index: (short if index in (3, 7) else long)(index)
    )
    program.calls = 8
    return program


def resized(device: str) -> Program:
    """Batches of another size each."""
    program = mlp_adamw(device)
    return Program(program.step, lambda index: labeled(device, 5 + index)(index), program.watch)


def zeroed_after(device: str) -> Program:
    """Gradients are zeroed in place at the end: they are kept."""
    net = mlp(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)

    def step(x: Any, y: Any) -> Any:
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    return Program(step, labeled(device), (net, optimizer))


def from_host(device: str) -> Program:
    """The batch is on the host, and moved in the step."""
    net = mlp(device)
    program = trained(net, torch.optim.SGD(net.parameters(), lr=0.1), labeled("cpu"))

    def step(x: Any, y: Any) -> Any:
        return program.step(x.to(device, non_blocking=True), y.to(device, non_blocking=True))

    return Program(step, program.batch, program.watch)


def logged(device: str) -> Program:
    """The loss is read at every step."""
    net, log = mlp(device), list[float]()
    program = trained(net, torch.optim.SGD(net.parameters(), lr=0.1), labeled(device))

    def step(x: Any, y: Any) -> Any:
        loss = program.step(x, y)
        log.append(loss.item())
        return loss

    return Program(step, program.batch, (*program.watch, log))


def measured(device: str) -> Program:
    """A metric, a log of numbers, and results that leave the step."""
    net = mlp(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    log: dict[str, Any] = {"right": torch.zeros((), device=device), "seen": 0, "losses": []}

    def step(x: Any, y: Any) -> Any:
        made = net(x)
        loss = F.cross_entropy(made, y, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log["right"] += (made.argmax(1) == y).sum()
        log["seen"] += len(y)
        log["losses"].append(loss.item())
        return loss.detach(), made.detach().softmax(1)

    return Program(step, labeled(device), (net, optimizer, log))


def accumulation(device: str) -> Program:
    """An update after every second batch."""
    net = mlp(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    calls = 0

    def step(x: Any, y: Any) -> Any:
        nonlocal calls
        loss = F.cross_entropy(net(x), y) / 2
        loss.backward()
        calls += 1
        if calls % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return Program(step, labeled(device), (net, optimizer), calls=12)


def halves(device: str) -> Program:
    """Two halves of a batch, whose gradients add up."""
    net = mlp(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: Any, y: Any) -> None:
        for half, labels in zip(x.chunk(2), y.chunk(2), strict=True):
            (F.cross_entropy(net(half), labels) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Program(step, labeled(device), (net, optimizer))


def hooks(device: str) -> Program:
    net: Any = mlp(device)
    seen: list[Any] = []
    net[0].weight.register_hook(lambda grad: grad * 0.5)
    net[3].register_forward_hook(lambda module, args, out: seen.append(out.detach().mean()))
    net[3].register_full_backward_hook(lambda *args: seen.append(len(args)))
    return trained(net, torch.optim.SGD(net.parameters(), lr=0.1), labeled(device), seen)


def averaged(device: str) -> Program:
    """Parameters of a second model follow; the learning rate is a tensor."""
    net, average = mlp(device), mlp(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.01))
    program = trained(net, optimizer, labeled(device), average)

    def step(x: Any, y: Any) -> Any:
        loss = program.step(x, y)
        with torch.no_grad():
            for ours, theirs in zip(average.parameters(), net.parameters(), strict=True):
                ours.lerp_(theirs, 0.1)
        return loss

    return Program(step, program.batch, program.watch)


def bfloat16(device: str) -> Program:
    net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)).bfloat16().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

    def step(x: Any, y: Any) -> Any:
        loss = F.cross_entropy(net(x.bfloat16()).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Program(step, on(device, batches((5, 8), classes=4)), (net, optimizer))


def cnn(device: str) -> Program:
    net = nn.Sequential(  # the gradient of a bias in front of the norm would be what rounding makes of 0
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 3),
    ).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    return trained(net, optimizer, on(device, batches((3, 2, 4, 4), classes=3)))


def norms(device: str) -> Program:
    net = nn.Sequential(
        nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.Linear(8, 3)
    ).to(device)
    optimizer = torch.optim.RMSprop(net.parameters(), lr=0.01)
    return trained(net, optimizer, on(device, batches((3, 2, 6), classes=3)))


def dropout(device: str) -> Program:
    net = parity.mlp(dropout=0.5).to(device)
    return trained(net, torch.optim.SGD(net.parameters(), lr=0.1), labeled(device))


class Block(nn.Module):
    """Attention and a multilayer perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Any) -> Any:
        rows, length, _ = x.shape
        parts = self.qkv(self.norm(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, -1))
        return x + self.mlp(self.norm_mlp(x))


class Gpt(nn.Module):
    """A language model; the matrix of its embedding is that of its output, too."""

    def __init__(self, width: int, blocks: int, drop: float) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(11, width), nn.Embedding(6, width)
        self.blocks = nn.Sequential(*(Block(width, 2) for _ in range(blocks)), nn.Dropout(drop))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.token.weight

    def forward(self, ids: Any) -> Any:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.blocks(x))


def language_model(device: str, width: int = 8, blocks: int = 1, drop: float = 0.0, **options: Any) -> Program:
    net = Gpt(width, blocks, drop).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, **options)

    def step(ids: Any, following: Any) -> Any:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(net(ids).flatten(0, 1), following.flatten())
        loss.backward()
        optimizer.step()
        return loss

    return Program(step, on(device, tokens(11, 2, 6)), (net, optimizer))


def gpt(device: str) -> Program:
    return language_model(device)


def gpt_fused(device: str) -> Program:
    return language_model(device, width=32, blocks=2, fused=True)


def gpt_dropout(device: str) -> Program:
    return language_model(device, width=32, blocks=2, drop=0.1, fused=True)


class Recurrent(nn.Module):
    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.layer = kind(3, 4, batch_first=True, **options)
        self.head = nn.Linear(8 if options.get("bidirectional") else 4, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.layer(x)[0][:, -1])


def recurrent(device: str, kind: Any, **options: Any) -> Program:
    """Recurrent layers; with oneDNN off, the CPU runs their operations one by one, as a GPU without cuDNN does."""
    net = Recurrent(kind, **options).to(device)
    return trained(net, torch.optim.SGD(net.parameters(), lr=0.1), on(device, batches((2, 2, 3), classes=3)))


def lstm(device: str) -> Program:
    return recurrent(device, nn.LSTM)


def embedding(device: str) -> Program:
    """Gradients of rows of a table, of which some are read more than once, and of elements picked by index."""
    table = nn.Embedding(7, 4, padding_idx=0).to(device)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.5)

    def batch(index: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, 7, (3, 5), generator=generator), torch.randint(0, 4, (3, 5, 1), generator=generator)

    def step(ids: Any, picked: Any) -> Any:
        rows = table(ids)
        loss = rows.gather(2, picked).pow(2).mean() + rows[ids[:, 0] % 3].sin().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Program(step, on(device, batch), (table, optimizer))


def sorted_sums(device: str) -> Program:
    net = nn.Linear(6, 6).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: Any) -> Any:
        made = net(x)
        loss = made.cumsum(1).pow(2).mean() + made.sort(1)[0][:, :2].mean() + torch.logcumsumexp(made, 1).mean()
        loss = loss + made.topk(2)[0].mean() + made.std()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Program(step, on(device, batches((5, 6))), (net, optimizer))


INTERPRETED = (mlp_adamw, gpt, cnn, lstm, embedding, dropout, autocast, clipped, halves)
"""Programs whose kernels are interpreted in every run of the tests."""

MORE_INTERPRETED = (norms, scheduled, averaged, hooks, measured, sorted_sums, bfloat16, resized)
"""The same in slow tests: they prove less."""

REPLAYED = (
    mlp_adamw_fused, mlp_adamw, mlp_adam_capturable, clipped, mlp_sgd_schedule, mlp_fused_schedule, mlp_rmsprop,
    autocast, mlp_scaler, mlp_scaler_adamw, ragged, zeroed_after, from_host, logged, accumulation, hooks, cnn, gpt,
    gpt_fused, gpt_dropout, lstm,
)  # fmt: skip
"""Programs that are replayed, on a device, and by a recorder of the host."""
