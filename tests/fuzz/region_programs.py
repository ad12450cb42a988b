"""Random training of deep stacks of equal or nearly equal blocks through the default backend, against float64.

Such graphs are lowered by repeated regions. The number of a program decides on its blocks, shared weights, what differs
between layers, on the optimizer with its groups, and on what is done around it. Every call begins with eager's state;
it may lead a multiple of eager's own error away from float64.

    python -m tests.fuzz.region_programs FIRST COUNT [FILE]     FILE keeps results, to which another process compares
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, ExponentialLR

import sidefx_train
from tests.fuzz.compare import Differs

FACTOR, FLOOR = 30.0, 3e-5
"""Largest error as a multiple of float32's error against float64, and the error always allowed, relative in norm."""

CALLS = 3
LENGTH = 3

_OPERATIONS = (
    "linear", "linear", "linear", "activation", "activation", "norm", "batch_norm", "dropout", "attention", "gate",
    "scale", "constant", "running", "history", "count", "lookup", "noise", "residual", "residual",
)  # fmt: skip
_OF_IMAGES = ("conv", "conv", "activation", "batch_norm", "scale", "constant", "dropout", "residual", "gate")
_OPTIMIZERS = ("SGD", "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "ASGD",
               "Adafactor")  # fmt: skip


class Block(nn.Module):
    """A few operations on tokens, or on images."""

    def __init__(self, operations: list[str], width: int, place: int, constant: float, activation: str) -> None:
        super().__init__()
        self.operations, self.place, self.constant, self.activation = operations, place, constant, activation
        self.norm = nn.LayerNorm(width, eps=1e-5 * constant) if "norm" in operations else None
        self.linear = nn.Linear(width, width) if "linear" in operations else None
        self.qkv = nn.Linear(width, 3 * width, bias=False) if "attention" in operations else None
        self.conv = nn.Conv2d(width, width, 3, padding=1) if "conv" in operations else None
        cls = nn.BatchNorm2d if "conv" in operations else nn.BatchNorm1d
        self.batch_norm = cls(width, momentum=0.1 * constant) if "batch_norm" in operations else None
        self.scale = nn.Parameter(torch.rand(width) + 0.5) if "scale" in operations else None
        self.table = nn.Embedding(5, width) if "lookup" in operations else None
        self.register_buffer("running", torch.zeros(width) if "running" in operations else None)
        self.register_buffer("history", torch.zeros(3, width) if "history" in operations else None)
        self.register_buffer("count", torch.zeros(()) if "count" in operations else None)

    def forward(self, x: torch.Tensor, gates: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        entered = x
        for operation in self.operations:
            x = getattr(self, f"_{operation}")(x, gates, at)
        return x + entered * 0.5

    def _linear(self, x: Any, *_: Any) -> Any:
        return self.linear(x)

    def _activation(self, x: Any, *_: Any) -> Any:
        return getattr(F, self.activation)(x)

    def _norm(self, x: Any, *_: Any) -> Any:
        return self.norm(x)

    def _batch_norm(self, x: Any, *_: Any) -> Any:
        return self.batch_norm(x) if x.dim() == 4 else self.batch_norm(x.flatten(0, 1)).view_as(x)

    def _dropout(self, x: Any, *_: Any) -> Any:
        return F.dropout(x, 0.1 * self.constant)

    def _attention(self, x: Any, *_: Any) -> Any:
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def _conv(self, x: Any, *_: Any) -> Any:
        return self.conv(x)

    def _gate(self, x: Any, gates: Any, _: Any) -> Any:
        return x * gates[self.place] + gates[-self.place]

    def _scale(self, x: Any, *_: Any) -> Any:
        return x * (self.scale if x.dim() == 3 else self.scale.view(-1, 1, 1))

    def _constant(self, x: Any, *_: Any) -> Any:
        return x * self.constant + 0.1

    def _residual(self, x: Any, *_: Any) -> Any:
        return x + torch.tanh(x)

    def _noise(self, x: Any, *_: Any) -> Any:
        return x + 0.1 * torch.randn_like(x)

    def _lookup(self, x: Any, _: Any, at: Any) -> Any:
        return x + self.table(at)

    def _running(self, x: Any, *_: Any) -> Any:
        with torch.no_grad():
            self.running.lerp_(x.mean((0, 1)).to(self.running.dtype), 0.1)
        return x - self.running

    def _history(self, x: Any, *_: Any) -> Any:
        x = x + 0.1 * self.history[0] * self.history[-1].cos()
        with torch.no_grad():
            self.history[1:] = self.history[:-1].clone()
            self.history[0] = x.mean((0, 1))
        return x

    def _count(self, x: Any, *_: Any) -> Any:
        self.count.add_(1)
        return x * (1 + 0.1 / self.count)


class Program:
    """A model with its optimizer and its step.

    Args:
        seed: number of the program.
        dtype: of parameters and batches.
    """

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        torch.manual_seed(seed)
        draw = random.Random(seed)
        chance = lambda share: draw.random() < share  # noqa: E731
        self.dtype, self.width, self.images = dtype, draw.choice((4, 6, 8, 16)), chance(0.2)
        depth, activation = draw.randint(5, 9), draw.choice(("gelu", "silu", "tanh", "relu", "elu", "softplus"))
        operations = [draw.choice(_OF_IMAGES if self.images else _OPERATIONS) for _ in range(draw.randint(2, 5))]
        operations.insert(draw.randint(0, len(operations)), "conv" if self.images else "linear")
        varied = draw.choice((0.0, 0.0, 0.2, 1.0))
        constants = [1.0 + (0.1 * i if chance(varied) else 0) for i in range(depth)]
        if chance(0.15):
            other = [op for op in operations if op != "dropout"] + ["activation"]
            kinds = [operations if i % 2 else other for i in range(depth)]
        else:
            kinds = [operations] * depth
        self.model = nn.Module()
        self.model.blocks = nn.ModuleList(
            Block(kinds[i], self.width, i, constants[i], activation) for i in range(depth)
        )
        self.model.gates = nn.Parameter(torch.rand(depth))
        self.head = self.model.head = nn.Linear(self.width, 3)
        self.model.to(dtype)
        self._tie(draw, chance)
        if self.images and chance(0.5):
            self.model.to(memory_format=torch.channels_last)
        self.layers = [i for i in range(depth) if not (chance(0.1) and i)]
        self.optimizer, self.text = self._optimizer(draw, chance)
        self.ema = [p.detach().clone() for p in self.model.parameters()] if chance(0.4) else []
        self.snapshot = [p.detach().clone() for p in self.model.parameters()] if chance(0.25) else []
        self.slow = [p.detach().clone() for p in self.model.parameters()] if chance(0.15) else []
        self.sharpness, self.accumulate, self.autocast = chance(0.15), chance(0.2), chance(0.08)
        self.clip, self.decay = (1.0, 0.9) if chance(0.4) else (0.0, 0.9)
        self.by_value = chance(0.3)
        self.schedule: Any = None
        if chance(0.4):
            self.schedule = draw.choice((
                lambda o: ExponentialLR(o, 0.9), lambda o: CosineAnnealingWarmRestarts(o, 3),
            ))(self.optimizer)  # fmt: skip
        self.numbers, self.sizes = chance(0.5), [3] * CALLS if chance(0.85) else [3, 5, 4]
        self.changes = random.Random(seed + 1)
        self.text = f"{depth} x {operations}, {self.text}, " + ", ".join(
            name for name in ("ema", "snapshot", "slow", "sharpness", "accumulate", "autocast", "clip", "schedule",
                              "numbers", "images") if getattr(self, name)
        )  # fmt: skip

    def _tie(self, draw: random.Random, chance: Any) -> None:
        blocks, name = self.model.blocks, "conv" if self.images else "linear"
        if chance(0.15):
            getattr(blocks[-1], name).weight = getattr(blocks[0], name).weight
        if chance(0.15):
            for block in blocks:
                getattr(block, name).bias = getattr(blocks[0], name).bias
        if chance(0.1) and blocks[0].running is not None:
            for block in blocks:
                block.running = blocks[0].running

    def _optimizer(self, draw: random.Random, chance: Any) -> tuple[torch.optim.Optimizer, str]:
        name = draw.choice(_OPTIMIZERS)
        options: dict[str, Any] = {"lr": 0.01, "weight_decay": draw.choice((0.0, 0.01))}
        how = draw.choice(({}, {"foreach": False}, {"foreach": False}, {"foreach": True}))
        if name in ("SGD", "Adam", "AdamW", "Adagrad") and chance(0.2):
            how = {"fused": True}
        if name == "SGD" and chance(0.6):
            options |= {"momentum": 0.9, "nesterov": chance(0.3)}
        if name in ("Adam", "AdamW"):
            options["amsgrad"] = chance(0.3)
        if name in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax"):
            options["eps"] = 1e-3  # gradients that are only rounding errors would become steps of full size
        if name == "RMSprop":
            options |= {"momentum": draw.choice((0.0, 0.5)), "centered": chance(0.3), "eps": 1e-3}
        if name == "Adafactor":
            how = {key: value for key, value in how.items() if key != "fused"}
        options["maximize"] = chance(0.15)
        parameters = list(self.model.parameters())
        groups: Any = parameters
        if chance(0.4):
            some = draw.choice((2, len(self.model.blocks)))
            groups = [{"params": parameters[i::some], "lr": 0.01 * (i + 1)} for i in range(some)]
            if chance(0.5):
                groups[0]["weight_decay"] = 0.1
        made = getattr(torch.optim, name)(groups, **options, **how)
        return made, f"{name}({options | how}, {len(made.param_groups)} groups)"

    def loss(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        for i in self.layers:
            x = self.model.blocks[i](x, self.model.gates, at)
        x = x.mean((2, 3)) if self.images else x.mean(1)
        return F.cross_entropy(self.head(x), at[:, 0] % 3)

    def step(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """One training step."""
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast and self.dtype is torch.float32):
            loss = self.loss(x, at)
        loss.backward()
        parameters = list(self.model.parameters())
        if self.sharpness:
            with torch.no_grad():
                kept = [p.clone() for p in parameters]
                for p in parameters:
                    if p.grad is not None:
                        p.add_(p.grad, alpha=0.05)
            self.optimizer.zero_grad()
            self.loss(x, at).backward()
            with torch.no_grad():
                for p, old in zip(parameters, kept, strict=True):
                    p.copy_(old)
        if self.accumulate:
            (self.loss(x * 0.5, at) / 2).backward()
        if self.clip:
            (nn.utils.clip_grad_value_ if self.by_value else nn.utils.clip_grad_norm_)(parameters, self.clip)
        with torch.no_grad():
            for old, p in zip(self.snapshot, parameters, strict=False):
                old.copy_(p)
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        with torch.no_grad():
            for mean, p in zip(self.ema, parameters, strict=False):
                mean.mul_(self.decay).add_(p, alpha=1 - self.decay)
            for slow, p in zip(self.slow, parameters, strict=False):
                slow.lerp_(p, 0.5)
                p.copy_(slow)
        return loss.detach()

    def change(self, call: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Changes numbers before a call; returns its batch."""
        if self.numbers and call:
            for group in self.optimizer.param_groups:
                group["lr"] = 0.01 * self.changes.uniform(0.5, 1.5)
                group["weight_decay"] = group["weight_decay"] * self.changes.uniform(0.8, 1.2)
            self.decay, self.clip = self.changes.uniform(0.5, 0.95), self.clip and self.changes.uniform(0.5, 1.5)
        draw = torch.Generator().manual_seed(call)
        size = self.sizes[call]
        shape = (size, self.width, 6, 6) if self.images else (size, LENGTH, self.width)
        x = torch.randn(shape, generator=draw)
        return x.to(self.dtype), torch.randint(0, 5, (size, LENGTH), generator=draw)

    def state(self) -> list[torch.Tensor]:
        """Returns all tensors that a step reads and writes."""
        kept = [self.optimizer.state.get(p, {}) for group in self.optimizer.param_groups for p in group["params"]]
        held = [each[key] for each in kept for key in sorted(each) if isinstance(each[key], torch.Tensor)]
        return [*self.model.parameters(), *self.model.buffers(), *self.ema, *self.snapshot, *self.slow, *held]


def check(seed: int, backend: str = "inductor", verify: bool = False, **options: Any) -> tuple[Any, list[Any]]:
    """Runs a program; returns the captured step and the numbers that it computed.

    Raises:
        Differs: a step is off by far more than eager; the message describes the program.
    """
    wide, plain, mine = Program(seed, torch.float64), Program(seed, torch.float32), Program(seed, torch.float32)
    chosen: dict[str, Any] = {"rng": "eager", "autotune": "off", "keep_slower": True, "warmup": "now"}
    if not verify:
        chosen["verify"] = 0
    step = sidefx_train.compile(mine.step, backend=backend, **chosen, **options)
    if seed % 4:  # else the state of the optimizer is created in the first captured call
        for program in (wide, plain, mine):
            program.step(*program.change(0))
    seen: list[Any] = []
    for call in range(CALLS):
        begin = [tensor.detach().clone() for tensor in plain.state()]
        made = []
        for program, run in ((wide, wide.step), (plain, plain.step), (mine, step)):
            with torch.no_grad():
                for tensor, value in zip(program.state(), begin, strict=True):
                    tensor.copy_(value)
            batch = program.change(call)
            torch.manual_seed(call)
            loss = run(*batch)
            made.append([loss, *program.state(), torch.rand(1, dtype=torch.float32)])
        for i, (a, b, c) in enumerate(zip(*made, strict=True)):
            seen.append(c.detach().double().flatten()[:3].tolist())
            size = a.double().norm().item() + 1e-3
            off, usual = (_distance(a, each) / size for each in (c, b))
            if not off <= FACTOR * usual + (FLOOR if not plain.autocast else 0.03):
                what = (
                    "the loss" if i == 0 else "the next random number" if i == len(made[0]) - 1 else f"tensor {i - 1}"
                )
                raise Differs(
                    f"program {seed}, call {call}: {what} of shape {tuple(a.shape)} is off by {off:.2g}, eager by "
                    f"{usual:.2g}\n{plain.text}"
                )
    report = step.report()
    bad = [each for each in (*report.fallbacks, *report.breaks) if each.code in ("SFX201", "SFX204", "SFX205")]
    bad += [note for capture in report.captures for note in capture.notes if "failed" in note]
    if bad:
        raise Differs(f"program {seed}: {bad[0]}\n{plain.text}")
    return step, seen


def _distance(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """Returns the norm of the difference; infinite if not the same numbers are NaN."""
    if not torch.equal(wanted.isnan(), found.isnan()):
        return float("inf")
    return (wanted.double() - found.double()).nan_to_num().norm().item()


def divided(step: Any) -> bool:
    """Returns True if a graph of a step was lowered by regions."""
    return any("regions of" in note for capture in step.report().captures for note in capture.notes)


def main() -> None:
    first, count = int(sys.argv[1]), int(sys.argv[2])
    file = sys.argv[3] if len(sys.argv) > 3 else ""
    known: dict[str, Any] = {}
    if file and os.path.exists(file):
        with open(file, encoding="utf-8") as text:
            known = json.load(text)
    began, wrong, by_regions, cached = time.time(), 0, 0, 0
    warnings.simplefilter("ignore")
    for seed in range(first, first + count):
        try:
            step, seen = check(seed, verify=seed % 4 == 0)
            by_regions += divided(step)
            if (seed - first) % 10 == 9:
                print(f"{seed + 1 - first} programs, {by_regions} by regions, {time.time() - began:.0f} s", flush=True)
            cached += any("from the cache" in note for capture in step.report().captures for note in capture.notes)
            if known.setdefault(str(seed), repr(seen)) != repr(seen):
                raise Differs(f"program {seed}: other results than in the process before")
        except Differs as error:
            wrong += 1
            print(error, flush=True)
        except Exception as error:
            wrong += 1
            print(f"program {seed}: {type(error).__name__}: {str(error)[:300]}\n{Program(seed, torch.float32).text}")
    if file:
        with open(file, "w", encoding="utf-8") as text:
            json.dump(known, text)
    seconds = time.time() - began
    print(f"{count} programs, {by_regions} by regions, {cached} from the cache, {wrong} differ, {seconds:.0f} s")


if __name__ == "__main__":
    main()
