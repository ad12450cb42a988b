"""Steps of embeddings with sparse gradients, for several test files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.support.parity import Factory, Program

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "Adagrad with decay": lambda p: torch.optim.Adagrad(p, 0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "SparseAdam": lambda p: torch.optim.SparseAdam([*p], 0.1),
    "maximizing SparseAdam": lambda p: torch.optim.SparseAdam([*p], 0.1, maximize=True),
}

TABLES: dict[str, Callable[[], nn.Module]] = {
    "embedding": lambda: nn.Embedding(20, 4, sparse=True),
    "padding": lambda: nn.Embedding(20, 4, sparse=True, padding_idx=3),
    "bag, mean": lambda: nn.EmbeddingBag(20, 4, sparse=True),
    "bag, sum": lambda: nn.EmbeddingBag(20, 4, sparse=True, mode="sum"),
    "one column": lambda: nn.Embedding(20, 1, sparse=True),
}


def numbers(call: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(call)
    return torch.randint(0, 20, (8, 3), generator=drawn), torch.randint(0, 2, (8,), generator=drawn)


def trained(
    use: Callable[..., torch.Tensor],
    optimizer: Callable[[Any], Any] = OPTIMIZERS["SGD"],
    after: Callable[..., Any] | None = None,
    hook: Callable[..., Any] | None = None,
    table: Callable[[], nn.Module] = TABLES["embedding"],
) -> Factory:
    """Returns a factory of a step with the loss ``use(table, tokens)``, ``after(table, log)`` after the backward."""

    def make() -> Program:
        rows, log = table(), []
        updates = optimizer(rows.parameters())
        if hook is not None:
            rows.weight.register_hook(lambda grad: hook(grad, log))

        def step(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            updates.zero_grad()
            loss = use(rows, tokens)
            loss.backward()
            if after is not None:
                after(rows, log)
            updates.step()
            return loss.detach()

        return Program(step, numbers, (rows, updates, log))

    return make


def weighted(found: torch.Tensor) -> torch.Tensor:
    return (found * torch.arange(1.0, found.numel() + 1).view_as(found) / found.numel()).square().sum()


def duplicates(table: Any, tokens: torch.Tensor) -> torch.Tensor:
    return weighted(table(tokens % 3))


def twice(table: Any, tokens: torch.Tensor) -> torch.Tensor:
    return weighted(table(tokens)) - weighted(table(tokens[:5] // 2))
