"""Random training over ``DistributedDataParallel``: what processes decide together, and what each decides alone."""

from __future__ import annotations

import contextlib
import gc
import random
import resource
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sidefx_train

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "finds unused": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
    "views, finds unused": {"gradient_as_bucket_view": True, "find_unused_parameters": True},
    "static": {"static_graph": True},
}
"""Options of the wrapper, by name."""


class Layers(nn.Module):
    """Uses some of two layers behind a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.layers = nn.ModuleList(nn.Linear(4, 2) for _ in range(2))

    def forward(self, x, which):
        x = self.norm(self.shared(x))
        return sum(layer(x).tanh() for index, layer in enumerate(self.layers) if index in which)


@dataclass(frozen=True)
class Call:
    """What happens in one call of the step.

    Attributes:
        synchronizes: gradients are reduced; decided together, as is the next.
        validates: a forward without gradients follows.
        rows: size of the batch; decided alone, as is the rest.
        which: layers that take part.
        factor: of the loss.
        trains: the mode of the batch norm.
        lr: a new learning rate.
        plain: the step runs eagerly, whatever is compiled.
    """

    synchronizes: bool
    validates: bool
    rows: int
    which: tuple[int, ...]
    factor: int
    trains: bool
    lr: float
    plain: bool


def schedule(calls: int, rank: int, seed: int, options: dict[str, Any]) -> list[Call]:
    """Returns random calls: equal ones in all processes where they decide together."""
    together, alone = random.Random(seed), random.Random(f"{seed} {rank}")
    found = []
    factor, trains, lr, accumulated = 1, True, 0.05, 0
    for number in range(calls):
        factor = alone.randint(1, 2) if alone.random() < 0.05 else factor
        trains = not trains if alone.random() < 0.05 else trains
        lr = alone.choice([0.05, 0.02]) if alone.random() < 0.05 else lr
        which = alone.choice([(0, 1), (0,), (1,)]) if options.get("find_unused_parameters") else (0, 1)
        accumulated = 0 if not found or found[-1].synchronizes else accumulated + 1
        synchronizes = together.random() > 0.3 or number < 5 or accumulated > 2
        validates = together.random() < 0.1
        found.append(
            Call(
                synchronizes=synchronizes,
                validates=validates,
                rows=alone.choice([2, 3]),
                which=which,
                factor=factor,
                trains=trains,
                lr=lr,
                plain=alone.random() < 0.2,
            )
        )
    return found


class Training:
    """A model, its optimizer, and its step, which zeroes gradients in place or removes them."""

    def __init__(self, rank: int, options: dict[str, Any], keeps: bool, compiled: bool) -> None:
        torch.manual_seed(0)
        self.net = DistributedDataParallel(Layers(), bucket_cap_mb=1e-4, **options)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        self.generator = torch.Generator().manual_seed(rank)
        self.factor, self.keeps = 1, keeps
        self.step = sidefx_train.compile(self.plain, backend="eager", recapture_limit=256) if compiled else self.plain

    def plain(self, x, y, which, synchronizes):
        with contextlib.nullcontext() if synchronizes else self.net.no_sync():
            loss = (self.net(x, which) - y).square().mean() * self.factor
            loss.backward()
        if synchronizes:
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=not self.keeps)
        return loss.detach()

    def run(self, call: Call) -> list[torch.Tensor]:
        """Runs one call, and returns copies of all state."""
        x = torch.randn(call.rows, 4, generator=self.generator)
        y = torch.randn(call.rows, 2, generator=self.generator)
        self.factor = call.factor
        self.net.module.norm.train(call.trains)
        self.optimizer.param_groups[0]["lr"] = call.lr
        step = self.plain if call.plain else self.step
        losses = [step(x, y, call.which, call.synchronizes)]
        if call.validates:
            with torch.no_grad():
                losses.append(self.net(x, (0, 1)).sum())
        grads = [torch.zeros(0) if p.grad is None else p.grad for p in self.net.parameters()]
        kept = [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        return [each.detach().clone() for each in (*losses, *self.net.parameters(), *self.net.buffers(), *grads, *kept)]


def soak(rank: int, name: str, calls: int, seed: int) -> None:
    """Compares eager and captured training after each call.

    Raises:
        AssertionError: they differ, nothing was captured, or memory grows.
    """
    options = OPTIONS[name]
    plan = schedule(calls, rank, seed, options)
    eager, captured = (Training(rank, options, seed % 2 == 1, compiled) for compiled in (False, True))
    early = 0
    differs = "{}, call {} ({}): tensor {} is {}, eager has {}"
    for number, call in enumerate(plan):
        expected, found = eager.run(call), captured.run(call)
        for position, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(a, b), differs.format(name, number, call, position, a, b)
        if number == calls // 2:
            early = _memory()
    report = captured.step.report()
    assert report.replays > calls // 4, str(report)
    assert calls < 1000 or _memory() - early < 20_000, f"{_memory() - early} KiB more\n{report}"


def _memory() -> int:
    """Returns the most memory that this process has used, in KiB."""
    gc.collect()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
