"""Training programs for a device: each is built twice, and run eagerly and compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class Program:
    """A training program.

    Attributes:
        step: the training step, called with a batch.
        batches: the batches, one per call.
        state: objects whose tensors are compared after the last step.
    """

    step: Callable[..., Any]
    batches: list[tuple[Any, ...]]
    state: list[Any] = field(default_factory=list)


def _labels(device: str, steps: int = 6, rows: int = 8) -> list[tuple[Any, ...]]:
    make = torch.Generator().manual_seed(1)
    return [
        (torch.randn(rows, 16, generator=make).to(device), torch.randint(0, 4, (rows,), generator=make).to(device))
        for _ in range(steps)
    ]


def _images(device: str) -> list[tuple[Any, ...]]:
    make = torch.Generator().manual_seed(2)
    return [
        (torch.randn(4, 3, 8, 8, generator=make).to(device), torch.randint(0, 4, (4,), generator=make).to(device))
        for _ in range(6)
    ]


def _tokens(device: str) -> list[tuple[Any, ...]]:
    make = torch.Generator().manual_seed(3)
    return [(torch.randint(0, 50, (2, 16), generator=make).to(device),) for _ in range(6)]


def _mlp(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)).to(device)


def _trained(net: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any], **more: Any) -> Program:
    clip, scheduler = more.get("clip"), more.get("scheduler")
    cast, scaler = more.get("cast"), more.get("scaler")

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        with torch.autocast(x.device.type, dtype=cast or torch.bfloat16, enabled=cast is not None):
            loss = F.cross_entropy(net(x), y)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        if scheduler is not None:
            scheduler.step()
        return loss

    return Program(step, batches, [net, optimizer])


def mlp_adamw_fused(device: str) -> Program:
    net = _mlp(device)
    return _trained(net, torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True), _labels(device))


def mlp_adamw(device: str) -> Program:
    net = _mlp(device)
    return _trained(net, torch.optim.AdamW(net.parameters(), lr=1e-2), _labels(device), clip=1.0)


def mlp_adam_capturable(device: str) -> Program:
    net = _mlp(device)
    return _trained(net, torch.optim.Adam(net.parameters(), lr=1e-2, capturable=True), _labels(device))


def mlp_sgd_schedule(device: str) -> Program:
    net = _mlp(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return _trained(
        net, optimizer, _labels(device), scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    )


def mlp_fused_schedule(device: str) -> Program:
    net = _mlp(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    return _trained(net, optimizer, _labels(device), scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))


def mlp_rmsprop(device: str) -> Program:
    net = _mlp(device)
    return _trained(net, torch.optim.RMSprop(net.parameters(), lr=1e-3), _labels(device))


def mlp_autocast(device: str) -> Program:
    net = _mlp(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)  # Adam's first step has the sign of a rounded gradient
    return _trained(net, optimizer, _labels(device), cast=torch.bfloat16)


def mlp_scaler(device: str) -> Program:
    net = _mlp(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10)
    return _trained(net, optimizer, _labels(device), cast=torch.float16, scaler=scaler)


def scaled(device: str, optimizer_of: Callable[..., torch.optim.Optimizer], steps: int = 9) -> Program:
    """Gradients that overflow in some steps, whose update the scaler skips."""
    net = _mlp(device)
    optimizer = optimizer_of(net.parameters())
    scaler = torch.amp.GradScaler(device, init_scale=2.0**8, growth_interval=2)

    def step(x: Any, y: Any, factor: Any) -> Any:
        with torch.autocast(x.device.type, dtype=torch.float16):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss * factor).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    factors = [torch.tensor(float("inf") if index in (3, 6, 7) else 1.0, device=device) for index in range(steps)]
    batches = [(*batch, factor) for batch, factor in zip(_labels(device, steps), factors, strict=True)]
    return Program(step, batches, [net, optimizer, scaler])


def mlp_scaler_adamw(device: str) -> Program:
    return scaled(device, lambda params: torch.optim.AdamW(params, lr=1e-2))


def ragged(device: str) -> Program:
    net = _mlp(device)
    batches = [*_labels(device, 3), *_labels(device, 1, rows=5), *_labels(device, 3), *_labels(device, 1, rows=5)]
    return _trained(net, torch.optim.SGD(net.parameters(), lr=0.1), batches)


def zeroed_after(device: str) -> Program:
    """Gradients are zeroed in place at the end: they are kept."""
    net = _mlp(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)

    def step(x: Any, y: Any) -> Any:
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    return Program(step, _labels(device), [net, optimizer])


def from_host(device: str) -> Program:
    """The batch is on the host, and moved in the step."""
    net = _mlp(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: Any, y: Any) -> Any:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return Program(step, _labels("cpu"), [net, optimizer])


def logged(device: str) -> Program:
    """The loss is read at every step."""
    net = _mlp(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    log: list[float] = []

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        log.append(loss.item())
        return loss

    return Program(step, _labels(device), [net, optimizer, log])


def accumulation(device: str) -> Program:
    net = _mlp(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
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

    return Program(step, _labels(device, 12), [net, optimizer])


def hooks(device: str) -> Program:
    net = _mlp(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen: list[Any] = []
    net[0].weight.register_hook(lambda grad: grad * 0.5)
    net[3].register_forward_hook(lambda module, args, out: seen.append(out.detach().mean()))
    program = _trained(net, optimizer, _labels(device))
    program.state.append(seen)
    return program


def cnn(device: str) -> Program:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 4),
    ).to(device)
    return _trained(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), _images(device))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Any) -> Any:
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.norm2(x))


class _Gpt(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, 32), nn.Embedding(16, 32)
        self.blocks = nn.Sequential(_Block(32, 2), nn.Dropout(drop), _Block(32, 2), nn.LayerNorm(32))

    def forward(self, tokens: Any) -> Any:
        at = torch.arange(tokens.shape[1], device=tokens.device)
        return self.blocks(self.tokens(tokens) + self.places(at)) @ self.tokens.weight.t()


def _language_model(device: str, drop: float) -> Program:
    torch.manual_seed(0)
    net = _Gpt(drop).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)

    def step(tokens: Any) -> Any:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        return loss

    return Program(step, _tokens(device), [net, optimizer])


def gpt(device: str) -> Program:
    return _language_model(device, 0.0)


def gpt_dropout(device: str) -> Program:
    return _language_model(device, 0.1)


def recurrent(device: str, kind: Any, **options: Any) -> Program:
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = kind(16, 16, batch_first=True, **options)
            self.head = nn.Linear(32 if options.get("bidirectional") else 16, 4)

        def forward(self, x: Any) -> Any:
            return self.head(self.layer(x.view(-1, 4, 16))[0][:, -1])

    net = Net().to(device)
    batches = [(x.repeat(1, 4), y) for x, y in _labels(device)]
    return _trained(net, torch.optim.SGD(net.parameters(), lr=0.1), batches)


def lstm(device: str) -> Program:
    return recurrent(device, nn.LSTM)


PROGRAMS = [
    mlp_adamw_fused, mlp_adamw, mlp_adam_capturable, mlp_sgd_schedule, mlp_fused_schedule, mlp_rmsprop, mlp_autocast,
    mlp_scaler, mlp_scaler_adamw, ragged, zeroed_after, from_host, logged, accumulation, hooks, cnn, gpt, gpt_dropout,
    lstm,
]  # fmt: skip
