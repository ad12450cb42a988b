"""Derivatives of ``prod`` and of selected elements, which torch computes otherwise for fake tensors."""

from __future__ import annotations

import pytest
import torch

import sidefx_train

PROGRAMS = {
    "over all": lambda x: x.prod().sin(),
    "over rows": lambda x: x.prod(1).sin(),
    "keepdim": lambda x: x.prod(0, keepdim=True).sin(),
    "in float64": lambda x: x.prod(1, dtype=torch.float64),
    "inside grad": lambda x: torch.func.grad(lambda y: y.prod(0).sin().sum())(x) * x,
    "inside vmap": lambda x: torch.func.vmap(lambda y: y.prod(0))(x),
    "largest": lambda x: x.max(),
    "complex": lambda x: torch.view_as_real(torch.complex(x, x.sin()).prod(1)),
}


def gradients(loss, function, zeros):
    generator = torch.Generator().manual_seed(zeros)
    found = []
    for _ in range(3):
        x = torch.randn(4, 7, generator=generator)
        x.view(-1)[3 : 3 + zeros] = 0
        x.requires_grad_()
        found.append(function(loss, x))
    return found


def step(loss, x):
    loss(x).sum().backward()
    return x.grad


@pytest.mark.parametrize("zeros", [0, 1, 2])
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_eagers(name, zeros):
    captured = sidefx_train.compile(step, backend="eager", fullgraph=True)
    for have, want in zip(
        gradients(PROGRAMS[name], captured, zeros), gradients(PROGRAMS[name], step, zeros), strict=True
    ):
        assert torch.equal(have, want)
    assert len(captured.report().captures) == 1


def test_zeros_come_and_go():
    captured = sidefx_train.compile(step, backend="eager", fullgraph=True)
    for zeros in (0, 2, 1, 0, 10):
        for name in ("over all", "over rows"):
            have = gradients(PROGRAMS[name], captured, zeros)
            assert all(map(torch.equal, have, gradients(PROGRAMS[name], step, zeros)))


def test_two_zeros_beside_an_infinity():
    x = torch.tensor([0.0, torch.inf, 0.0, 2.0])
    want = step(torch.prod, x.clone().requires_grad_())
    assert not want.any()
    captured = sidefx_train.compile(step, backend="eager", fullgraph=True)
    assert torch.equal(captured(torch.prod, x.clone().requires_grad_()), want)


def second(x):
    (first,) = torch.autograd.grad(x.prod(1).sin().sum(), x, create_graph=True)
    first.pow(2).sum().backward()
    return first.detach(), x.grad


@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_second_derivatives(zeros):
    x = torch.randn(4, 7, dtype=torch.float64)
    x[0, :zeros] = 0
    want = second(x.clone().requires_grad_())
    captured = sidefx_train.compile(second, backend="eager", fullgraph=True)
    have = captured(x.clone().requires_grad_())
    assert torch.equal(have[0], want[0])
    torch.testing.assert_close(have[1], want[1])


def test_second_derivatives_of_a_captured_loss():
    """The captured backward is differentiated: what is not taken must not make NaN."""
    model = sidefx_train.compile(lambda x: x.prod(1).sin().sum(), backend="eager")
    for zeros in (0, 1, 2):
        x = torch.randn(4, 7, dtype=torch.float64)
        x[0, :zeros] = 0
        found = []
        for loss in (model, lambda x: x.prod(1).sin().sum()):
            leaf = x.clone().requires_grad_()
            (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
            first.pow(2).sum().backward()
            found.append(leaf.grad)
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("zeros", [0, 1])
def test_inductor(zeros):
    captured = sidefx_train.compile(step, fullgraph=True)
    have = gradients(PROGRAMS["over rows"], captured, zeros)
    for a, b in zip(have, gradients(PROGRAMS["over rows"], step, zeros), strict=True):
        torch.testing.assert_close(a, b)


PRODUCTS = {
    "operator": lambda a, b: a @ b,
    "matmul": torch.matmul,
    "method": lambda a, b: a.matmul(b),
    "linalg": torch.linalg.matmul,
    "reversed": lambda a, b: b.__rmatmul__(a),
    "packet": torch.ops.aten.matmul,
}


@pytest.mark.parametrize("trained", ["none", "batch", "one"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_batch_times_one_matrix(name, trained):
    """Eager multiplies batches, unless the one matrix needs a gradient; both round differently."""

    def step(batch, one):
        made = PRODUCTS[name](batch, one), PRODUCTS[name](one, batch)
        leaves = [each for each in (batch, one) if each.requires_grad]
        return *(torch.autograd.grad(sum(map(torch.sum, made)), leaves) if leaves else ()), *map(torch.detach, made)

    captured = sidefx_train.compile(step, backend="eager", on_failure="raise")
    torch.manual_seed(0)
    for _ in range(5):
        batch, one = (torch.rand(4, 3, 3), torch.rand(1, 3, 3))
        batch.requires_grad_(trained == "batch")
        one.requires_grad_(trained == "one")
        for found, wanted in zip(captured(batch, one), step(batch, one), strict=True):
            assert torch.equal(found, wanted)
