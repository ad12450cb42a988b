"""Embeddings with sparse gradients: everything between the lookup and the sparse update is captured."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train


def trained(wrap, kind, sparse_optimizer):
    torch.manual_seed(0)
    table, head = kind(20, 4, sparse=True), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizers = sparse_optimizer(table.parameters(), lr=0.1), torch.optim.Adam(head.parameters(), lr=0.1)

    def step(tokens, labels):
        rows = table(tokens)
        loss = F.cross_entropy(head(rows if rows.dim() == 2 else rows.mean(1)), labels)
        for each in optimizers:
            each.zero_grad()
        loss.backward()
        for each in optimizers:
            each.step()
        return loss.detach()

    step, results = wrap(step), []
    for i in range(4):
        torch.manual_seed(i)
        results.append(step(torch.randint(0, 20, (8, 3)), torch.randint(0, 2, (8,))))
        grad = table.weight.grad
        results += [torch.tensor(grad.is_coalesced()), grad._indices().clone(), grad._values().clone()]
        results += [p.detach().clone() for p in (*table.parameters(), *head.parameters())]
    return step, results


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.SparseAdam])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_the_rest_of_the_step_is_captured(kind, optimizer):
    _, expected = trained(lambda fn: fn, kind, optimizer)
    step, found = trained(lambda fn: sidefx_train.compile(fn, backend="eager", keep_slower=True), kind, optimizer)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    report = step.report()
    assert not report.fallbacks and report.graph_count == 2, f"{report}"


def test_lookups_without_a_gradient_are_captured_whole():
    table = nn.Embedding(20, 4, sparse=True).requires_grad_(False)
    step = sidefx_train.compile(lambda tokens: table(tokens).sum(), backend="eager", fullgraph=True)
    tokens = torch.tensor([1, 5, 1])
    assert torch.equal(step(tokens), table(tokens).sum())
