"""Sparse gradients that the step, a hook or a later call reads, changes or adds to; what is not captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from tests.support.parity import Program, parity
from tests.support.sparse_gradients import OPTIMIZERS, TABLES, duplicates, numbers, trained, twice, weighted


def looks(table: Any, log: list[Any]) -> None:
    grad = table.weight.grad
    log.append((grad.is_sparse, grad.layout, grad.shape, grad.dtype, grad.dim(), grad.size(), grad.is_leaf))
    log.append((grad.is_coalesced(), grad.sparse_dim(), grad.dense_dim(), grad._nnz(), grad.requires_grad))
    log.append((grad._indices().clone(), grad._values().clone()))


def coalesces(table: Any, log: list[Any]) -> None:
    log.append(table.weight.grad)
    found = table.weight.grad = table.weight.grad.coalesce()
    log.append((found.is_coalesced(), found.indices() + 1, found.values() * 2, found.coalesce() is found))


def scales(table: Any, log: list[Any]) -> None:
    table.weight.grad._values().mul_(0.5)
    log.append(table.weight.grad._version)
    table.weight.grad.mul_(0.5)
    log += [table.weight.grad * 2, -table.weight.grad, table.weight.grad / 3, table.weight.grad.clone()]


def scales_aliases(table: Any, log: list[Any]) -> None:
    """``mul_`` gives a sparse tensor new values, ``div_`` divides those that it has."""
    grad = table.weight.grad
    grad.detach().mul_(0.5)
    grad.data.div_(2.0)
    grad.data.add_(grad.detach())
    log += [grad.clone(), grad.coalesce().mul_(2).is_coalesced(), grad.coalesce().div_(2).is_coalesced()]
    grad.mul_(torch.tensor(0.5))


def made_dense(table: Any, log: list[Any]) -> None:
    log.append(table.weight.grad.to_dense().norm())
    table.weight.grad = table.weight.grad.to_dense()


def summed(table: Any, log: list[Any]) -> None:
    grad = table.weight.grad
    log += [grad + grad, grad.coalesce() + grad, grad.coalesce() + grad.coalesce(), grad - grad * 3]
    log += [table.weight.detach() + grad, torch.add(table.weight.detach(), grad.coalesce(), alpha=0.3)]
    log.append(table.weight.detach().t().contiguous().t() - grad)
    log.append(table.weight.detach().sparse_mask(grad.coalesce()))


def replaces(table: Any, log: list[Any]) -> None:
    grad = table.weight.grad
    table.weight.grad = torch.sparse_coo_tensor(grad._indices(), grad._values().clamp(-1, 1), grad.size())
    log.append(table.weight.grad is grad)


def clips_values(table: Any, log: list[Any]) -> None:
    norm = table.weight.grad._values().norm()
    table.weight.grad._values().mul_((1.0 / (norm + 1e-6)).clamp(max=1.0))
    log.append(norm)


def measures(table: Any, log: list[Any]) -> None:
    for grad in (table.weight.grad, table.weight.grad.detach().coalesce()):
        log += [grad.norm(), grad.norm(1), grad.data.norm(float("inf")), torch.norm(grad, 3), grad.norm(0).item()]
        log += [grad.sum(), grad.sum(dtype=torch.float64), torch.sparse.sum(grad), torch.isnan(grad).any()]


def computes_elements(table: Any, log: list[Any]) -> None:
    for grad in (table.weight.grad, table.weight.grad.detach().coalesce()):
        found = [grad.abs(), grad.sign(), grad.abs().sqrt(), grad**2, grad.square(), grad.pow(3), grad.isinf()]
        found += [grad.tanh(), grad.nan_to_num(1.0), grad.relu(), grad.double(), grad.to(torch.bfloat16)]
        log += [*found, torch.zeros_like(grad), *(each.is_coalesced() for each in found)]


AFTER = {
    "looks": looks,
    "coalesces": coalesces,
    "scales": scales,
    "scales aliases": scales_aliases,
    "dense": made_dense,
    "sums": summed,
    "replaces": replaces,
    "clips values": clips_values,
    "measures": measures,
    "elements": computes_elements,
}


@pytest.mark.parametrize("after", AFTER)
def test_gradients_are_read_and_changed(after: str) -> None:
    parity(trained(twice, after=AFTER[after]), steps=4, captures=1)


def test_an_update_in_a_hook() -> None:
    def make() -> Program:
        table = TABLES["embedding"]()
        updates, log = torch.optim.SGD(table.parameters(), 0.1), []

        def update(weight: torch.Tensor) -> None:
            log.append((weight.grad.is_sparse, weight.grad._nnz()))
            updates.step()
            weight.grad = None

        table.weight.register_post_accumulate_grad_hook(update)

        def step(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            loss = weighted(table(tokens))
            loss.backward()
            return loss.detach()

        return Program(step, numbers, (table, updates, log))

    parity(make, steps=4)


def test_the_indices_are_the_memory_of_the_tokens() -> None:
    """As in eager, where nothing else refers to the gradient."""
    for hook, shared in ((lambda grad: None, True), ([].append, False)):
        table = TABLES["embedding"]()
        table.weight.register_hook(hook)
        step = sidefx_train.compile(lambda x, t=table: weighted(t(x)).backward(), backend="eager", fullgraph=True)
        for run in (step, step, lambda x, t=table: weighted(t(x)).backward()):
            tokens = torch.tensor([1, 5, 1])
            table.weight.grad = None
            run(tokens)
            assert (table.weight.grad._indices().data_ptr() == tokens.data_ptr()) is shared


HOOKS = {
    "looks": lambda grad, log: log.append((grad.is_sparse, grad._indices().clone(), grad._values().sum())),
    "keeps": lambda grad, log: log.append(grad),
    "scales": lambda grad, log: grad * 0.5,
    "coalesces": lambda grad, log: grad.coalesce(),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks(hook: str) -> None:
    parity(trained(duplicates, hook=HOOKS[hook]), steps=4, captures=1)


def test_gradients_asked_for() -> None:
    def make() -> Program:
        table = TABLES["embedding"]()

        def step(tokens: torch.Tensor, labels: torch.Tensor) -> Any:
            (grad,) = torch.autograd.grad(weighted(table(tokens)), table.weight)
            with torch.no_grad():
                table.weight.sub_(grad, alpha=0.1) if len(labels) > 9 else table.weight.add_(grad, alpha=-0.1)
            return grad

        return Program(step, numbers, (table,))

    parity(make, steps=4)


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "SparseAdam"])
def test_gradients_that_stay_between_calls(optimizer: str) -> None:
    """A call adds to the gradient of the calls before; every third one updates."""

    def make() -> Program:
        table, calls = TABLES["embedding"](), [0]
        updates = OPTIMIZERS[optimizer](table.parameters())

        def step(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            loss = weighted(table(tokens))
            loss.backward()
            calls[0] += 1
            if calls[0] % 3 == 0:
                updates.step()
                updates.zero_grad()
            return loss.detach()

        return Program(step, numbers, (table, updates, calls))

    parity(make, steps=9, captures=None, whole=False)


def test_gradients_from_outside() -> None:
    """A gradient in any state at entry is added to, or replaced."""

    def make() -> Program:
        table = TABLES["embedding"]()

        def step(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            loss = weighted(table(tokens))
            loss.backward()
            return loss.detach()

        return Program(step, numbers, (table,))

    def change(program: Program, call: int) -> None:
        (table,) = program.watch
        torch.manual_seed(call)
        if call == 2:
            table.weight.grad = table.weight.grad.coalesce()
        elif call == 4:
            table.weight.grad = torch.randn(20, 4)
        elif call == 6:
            table.weight.grad = torch.randn(20, 4).to_sparse(1)
        elif call == 8:
            table.weight.grad = None
        elif call == 10:
            table.weight.grad.zero_()

    parity(make, steps=12, captures=None, between=change, whole=False)


def tangled(table: Any, tokens: torch.Tensor) -> torch.Tensor:
    return weighted(F.embedding(tokens, table.weight * table.weight, sparse=True))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_sparse_gradient_in_the_backward_of_a_part(backend: str) -> None:
    report = parity(trained(tangled), steps=3, captures=None, whole=False, backend=backend)
    assert not report.fallbacks and {each.code for each in report.breaks} == {"SFX109"}


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("compute", [lambda w: w * 2, lambda w: w * w, lambda w: w.exp() + 1])
def test_a_sparse_gradient_for_a_result(compute: Any, backend: str) -> None:
    """The backward is not compiled for it: its operations run one by one, and the gradient stays sparse."""
    found = []
    for run in (compute, sidefx_train.compile(compute, backend=backend, keep_slower=True)):
        weight = torch.linspace(-1, 1, 18).view(6, 3).requires_grad_()
        F.embedding(torch.tensor([1, 2, 1]), run(weight), sparse=True).square().sum().backward()
        found.append(weight.grad)
    assert found[0].is_sparse and found[1].is_sparse
    assert torch.equal(found[0]._indices(), found[1]._indices())
    torch.testing.assert_close(found[1]._values(), found[0]._values())


def clipped(table: Any, log: list[Any]) -> None:
    nn.utils.clip_grad_norm_(table.parameters(), 1.0)


def shown(table: Any, log: list[Any]) -> None:
    log.append(str(table.weight.grad))


def squared(table: Any, log: list[Any]) -> None:
    log.append(table.weight.grad.pow(2).to_dense())


def written(table: Any, log: list[Any]) -> None:
    grad = table.weight.grad
    for act in (grad.indices, lambda: torch.sparse_coo_tensor(grad._indices(), grad._values()[:2], grad.shape)):
        try:
            log.append(act())
        except RuntimeError as error:
            log.append(str(error))


@pytest.mark.parametrize("after", [clipped, shown, squared, written])
def test_what_else_is_done_with_gradients_runs_natively(after: Callable[..., Any]) -> None:
    parity(trained(duplicates, after=after), steps=3, captures=None, whole=False)


def test_eager_errors() -> None:
    scaled = lambda: nn.Embedding(20, 4, sparse=True, scale_grad_by_freq=True)  # noqa: E731
    parity(trained(duplicates, table=scaled), steps=2, captures=None, whole=False)
    decaying = lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1)  # noqa: E731
    parity(trained(duplicates, decaying), steps=2, captures=None, whole=False)
    parity(trained(duplicates, lambda p: torch.optim.Adam(p, 0.1)), steps=2, captures=None, whole=False)
    dense = lambda grad, log: grad.to_dense()  # noqa: E731
    parity(trained(duplicates, hook=dense), steps=2, captures=None, whole=False)


def test_a_backward_outside() -> None:
    """The gradients leave the captured part, so the lookup runs natively."""

    def make() -> Program:
        table, head = TABLES["embedding"](), nn.Linear(4, 2)

        def step(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(head(table(tokens).mean(1)), labels)

        return Program(step, numbers, (table, head))

    compiled = []

    def trained_outside(wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        program = make()
        table, head = program.watch
        loss_of, found = wrap(program.step), []
        updates = torch.optim.SGD([*table.parameters(), *head.parameters()], 0.1)
        for call in range(4):
            updates.zero_grad()
            loss = loss_of(*numbers(call))
            loss.backward()
            updates.step()
            found += [loss.detach(), table.weight.detach().clone(), table.weight.grad._values()]
        return found

    def wrap(fn: Any) -> Any:
        compiled.append(sidefx_train.compile(fn, backend="eager", keep_slower=True))
        return compiled[-1]

    assert all(map(torch.equal, trained_outside(wrap), trained_outside(lambda fn: fn)))
    report = compiled[0].report()
    assert not report.fallbacks and {each.code for each in report.breaks} == {"SFX109"}
