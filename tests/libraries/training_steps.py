"""What the training steps of :mod:`programs` and :mod:`optimizers` are made of: their registry, batches, a plain step.

``PROGRAMS`` maps ``library.what`` to a function that returns a :class:`Program`. Libraries are imported by the function
that needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass
class Program:
    """A training step.

    Attributes:
        step: called with each batch.
        batch: returns the arguments of a call, by its number.
        module: what is trained, and compared.
    """

    step: Callable[..., Any]
    batch: Callable[[int], tuple[Any, ...]]
    module: nn.Module


Make = Callable[[], Program]
Loss = Callable[..., torch.Tensor]

PROGRAMS: dict[str, Make] = {}


def program(make: Make) -> Make:
    """Registers a function named ``library__what``."""
    PROGRAMS[make.__name__.replace("__", ".")] = make
    return make


def normal(number: int, *sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(number))


def images(number: int, *sizes: int) -> torch.Tensor:
    return torch.rand(*sizes, generator=torch.Generator().manual_seed(number))


def words(number: int, *sizes: int) -> torch.Tensor:
    return torch.randint(1, 64, sizes, generator=torch.Generator().manual_seed(number))


def trained(module: nn.Module, loss_of: Loss, batch: Callable[[int], tuple[Any, ...]], **options: Any) -> Program:
    """Returns a plain training step over ``loss_of(*batch)`` with Adam."""
    options.setdefault("lr", 1e-3)
    optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], **options)

    def step(*args: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(*args)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return Program(step, batch, module)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4))


def classes(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    return normal(i, 8, 16), torch.arange(8) % 4
