"""The work of a capture, of a graph and of a replay is linear in the size of the model, not quadratic."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train

HOME = str(Path(sidefx_train.__file__).parent)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.linear = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.drop(F.gelu(self.linear(self.norm(x))))


def training(depth: int) -> Callable[[], Any]:
    """Returns a step with one operation of each kind per layer or per parameter."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(4) for _ in range(depth)], nn.Linear(4, 3))
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    logs: dict[str, Any] = {}

    def step() -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(weight, 0.1)
        logs["norms"] = {name: weight.grad.norm() for name, weight in model.named_parameters()}
        return loss.detach()

    return step


def _calls(run: Callable[[], Any]) -> Counter[str]:
    """Counts the calls of each function of the library, and of C functions."""
    found: Counter[str] = Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        if event in ("call", "c_call") and frame.f_code.co_filename.startswith(HOME):
            found[f"{frame.f_code.co_filename[len(HOME) :]} {frame.f_code.co_qualname}"] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def _captured_and_replayed(depth: int) -> tuple[Counter[str], Counter[str]]:
    step = training(depth)
    step()  # creates the optimizer's state
    compiled = sidefx_train.compile(step, backend="aot_eager", fullgraph=True)
    found = _calls(compiled), _calls(compiled)
    assert compiled.report().replays == 2
    return found


def test_four_times_the_layers_are_four_times_the_work() -> None:
    _captured_and_replayed(1)  # imports and fills caches
    few, many = _captured_and_replayed(2), _captured_and_replayed(8)
    for before, after in zip(few, many, strict=True):
        assert sum(after.values()) < 4.3 * sum(before.values())
        excess = {name: (before[name], n) for name, n in after.items() if n > 4.5 * before[name] + 200}
        assert not excess
