"""Embeddings with sparse gradients: forward, backward and the update of the rows are one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from tests.support.parity import Factory, Program, parity
from tests.support.sparse_gradients import OPTIMIZERS, TABLES, duplicates, numbers, trained, twice, weighted

STATE_OF_FIRST_STEP = {"SparseAdam", "maximizing SparseAdam"}
"""Their first step creates state, and is another graph."""


def two_optimizers(
    table: Callable[[], nn.Module], optimizer: Callable[[Any], Any], set_to_none: bool = True
) -> Factory:
    def make() -> Program:
        rows = table()
        head = nn.Sequential(nn.Linear(rows.embedding_dim, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizers = optimizer(rows.parameters()), torch.optim.Adam(head.parameters(), 0.1)

        def step(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            found = rows(tokens)
            loss = F.cross_entropy(head(found if found.dim() == 2 else found.mean(1)), labels)
            for each in optimizers:
                each.zero_grad(set_to_none=set_to_none)
            loss.backward()
            for each in optimizers:
                each.step()
            return loss.detach()

        return Program(step, numbers, (rows, head, *optimizers))

    return make


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.every(2)
def test_a_step_is_one_graph(table: str, optimizer: str) -> None:
    captures = (2 if optimizer in STATE_OF_FIRST_STEP else 1) + (table == "padding") * 2
    parity(two_optimizers(TABLES[table], OPTIMIZERS[optimizer]), steps=6, captures=captures)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("table", ["padding", "bag, sum"])
@pytest.mark.every(3)
def test_compiling_backends(table: str, optimizer: str, backend: str) -> None:
    parity(two_optimizers(TABLES[table], OPTIMIZERS[optimizer]), steps=5, captures=4, backend=backend)


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "SparseAdam"])
def test_gradients_set_to_zero(optimizer: str) -> None:
    """The old gradients are emptied; the new ones are added to them."""
    parity(two_optimizers(TABLES["embedding"], OPTIMIZERS[optimizer], set_to_none=False), steps=6, captures=3)


def expanded(table: Any, tokens: torch.Tensor) -> torch.Tensor:
    return table(tokens).sum() + 2 * table(tokens + 0).sum()


def accumulated(table: Any, tokens: torch.Tensor) -> torch.Tensor:
    weighted(table(tokens[:3])).backward()
    return weighted(table(tokens[3:]))


def also_dense(table: Any, tokens: torch.Tensor) -> torch.Tensor:
    return weighted(table(tokens)) + table.weight.square().sum()


def dense_before(table: Any, tokens: torch.Tensor) -> torch.Tensor:
    table.weight.square().sum().backward()
    return weighted(table(tokens))


def sparse_before(table: Any, tokens: torch.Tensor) -> torch.Tensor:
    weighted(table(tokens)).backward()
    return table.weight.square().sum()


USES = {
    "duplicates": duplicates,
    "tied uses": twice,
    "tied uses, sum": expanded,
    "two backwards": accumulated,
    "dense gradients too": also_dense,
    "dense gradients before": dense_before,
    "dense gradients after": sparse_before,
    "one token": lambda table, tokens: weighted(table(tokens[0, 0])),
    "two tokens": lambda table, tokens: weighted(table(tokens[0, :2])),
    "function": lambda table, tokens: weighted(F.embedding(tokens, table.weight, sparse=True)),
    "functional bag": lambda table, tokens: weighted(F.embedding_bag(tokens, table.weight, sparse=True)),
    "scores": lambda table, tokens: weighted(table(tokens)) + (table.weight.detach() @ table(tokens[0]).t()).sum(),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad"])
def test_uses(use: str, optimizer: str) -> None:
    parity(trained(USES[use], OPTIMIZERS[optimizer]), steps=4, captures=1)


@pytest.mark.parametrize("use", ["tied uses", "tied uses, sum", "two backwards"])
def test_uses_with_sparse_adam(use: str) -> None:
    parity(trained(USES[use], OPTIMIZERS["SparseAdam"]), steps=4, captures=2)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2 if grad.is_sparse else grad


def written_after(table: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The indices of the gradient are the tokens, in their memory."""
    weighted(table(tokens)).backward()
    tokens.add_(1).remainder_(20)
    return torch.zeros((), requires_grad=True) * 1


def kept_output(table: Any, tokens: torch.Tensor) -> torch.Tensor:
    found = table(tokens)
    found.retain_grad()
    weighted(found).backward()
    table.weight.grad._values().mul_(0.5)
    return (found.grad.sum() * 0).requires_grad_()


def checkpointed(table: Any, tokens: torch.Tensor) -> torch.Tensor:
    return weighted(torch.utils.checkpoint.checkpoint(table, tokens, use_reentrant=False))


def weighted_bag(table: Any, tokens: torch.Tensor) -> torch.Tensor:
    weights = (tokens / 20.0).requires_grad_()
    return weighted(F.embedding_bag(tokens, table.weight, mode="sum", sparse=True, per_sample_weights=weights))


def of_an_intermediate(table: Any, tokens: torch.Tensor) -> torch.Tensor:
    return weighted(F.embedding(tokens, -table.weight * 3, sparse=True))


MORE = {
    "written after": (written_after, TABLES["embedding"]),
    "kept output": (kept_output, TABLES["embedding"]),
    "checkpointed": (checkpointed, TABLES["embedding"]),
    "weighted bag": (weighted_bag, TABLES["embedding"]),
    "of an intermediate": (of_an_intermediate, TABLES["embedding"]),
    "custom function": (lambda t, x: weighted(F.embedding(x, Doubled.apply(t.weight), sparse=True)), TABLES["padding"]),
    "padded bag": (lambda t, x: weighted(t(x)), lambda: nn.EmbeddingBag(20, 4, sparse=True, padding_idx=2)),
    "limited norm": (lambda t, x: weighted(t(x)), lambda: nn.Embedding(20, 4, sparse=True, max_norm=1.0)),
    "bfloat16": (lambda t, x: t(x).square().sum(), lambda: nn.Embedding(20, 4, sparse=True, dtype=torch.bfloat16)),
    "float64": (lambda t, x: weighted(t(x)), lambda: nn.Embedding(20, 4, sparse=True, dtype=torch.float64)),
    "int32": (lambda t, x: weighted(t(x.int())), TABLES["embedding"]),
    "no tokens": (lambda t, x: t(x[:0]).sum() + t(x[:1, :1]).sum(), TABLES["embedding"]),
}


@pytest.mark.parametrize("use", MORE)
def test_more_uses(use: str) -> None:
    parity(trained(*MORE[use][:1], table=MORE[use][1]), steps=4, captures=2)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
def test_foreach(optimizer: Any) -> None:
    parity(trained(duplicates, lambda p: optimizer(p, 0.1, foreach=True)), steps=3)


def test_momentum() -> None:
    """The momentum buffer is a sparse tensor, too."""
    for how in ({}, {"nesterov": True}, {"dampening": 0.1}):
        momentum = lambda p, how=how: torch.optim.SGD(p, 0.1, momentum=0.9, **how)  # noqa: E731
        parity(trained(duplicates, momentum), steps=6, captures=4)


def test_batches_of_other_sizes() -> None:
    def make() -> Program:
        table = TABLES["bag, sum"]()
        updates = torch.optim.Adagrad(table.parameters(), 0.1)

        def step(tokens: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            updates.zero_grad()
            loss = weighted(table(tokens, offsets))
            loss.backward()
            updates.step()
            return loss.detach()

        def batch(call: int) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.randint(0, 20, (12 + 3 * call,)), torch.tensor([0, 3, 3, 7])

        return Program(step, batch, (table, updates))

    parity(make, steps=6, captures=3)


def test_batches_of_padding() -> None:
    def make() -> Program:
        table = TABLES["padding"]()
        updates = torch.optim.SparseAdam([*table.parameters()], 0.1)

        def step(tokens: torch.Tensor) -> torch.Tensor:
            updates.zero_grad()
            loss = weighted(table(tokens))
            loss.backward()
            updates.step()
            return loss.detach()

        rows = ([1, 2, 3], [3, 5, 6], [3, 3, 3], [3, 3, 5], [5, 3, 5], [7, 8, 9], [3, 3, 3])
        return Program(step, lambda call: (torch.tensor(rows[call]),), (table, updates))

    parity(make, steps=7, captures=None, whole=False)


def test_lookups_without_a_gradient_are_captured_whole() -> None:
    table = nn.Embedding(20, 4, sparse=True).requires_grad_(False)
    step = sidefx_train.compile(lambda tokens: table(tokens).sum(), backend="eager", fullgraph=True)
    tokens = torch.tensor([1, 5, 1])
    assert torch.equal(step(tokens), table(tokens).sum())
