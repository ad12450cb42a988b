"""Tensors with unbacked sizes, in the operations of a training step and of the residual backward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from tests.support.parity import Program, batches, mlp, parity
from tests.support.training_steps import trained

BACKENDS = ("eager", "inductor")


def chosen(x, y):
    """Returns the rows of one label: another number of them in every batch, none in some."""
    return x[y == 1]


def products(x, y):
    rows = chosen(x, y)
    return rows @ rows.t(), torch.bmm(rows[:, :, None], rows[:, None, :]), torch.addmm(rows.sum(0), rows, x.t() @ x)


def written(x, y):
    rows = chosen(x, y)
    rows.add_(1)
    return rows


def written_through_a_view(x, y):
    rows = chosen(x, y)
    rows.t().mul_(2)
    return rows, rows.sum(0)


def written_through_an_expanded_view(x, y):
    rows = chosen(x, y)
    rows.unsqueeze(0).expand(1, -1, -1).add_(1)
    return rows


def sorted_rows(x, y):
    rows = chosen(x, y)
    return rows[rows[:, 0].argsort()], torch.arange(rows.shape[0]), rows / (rows.shape[0] + 1)


FUNCTIONS = (products, written, written_through_a_view, written_through_an_expanded_view, sorted_rows)


def with_backends(functions, under_inductor):
    """Returns the pairs of a function and a backend; under Inductor, one function of each kind is not slow."""
    return [
        pytest.param(fn, backend, marks=pytest.mark.slow if late else (), id=f"{fn.__name__}-{backend}")
        for fn in functions
        for backend in BACKENDS
        for late in [backend == "inductor" and fn not in under_inductor]
    ]


@pytest.mark.parametrize(
    ("function", "backend"), with_backends(FUNCTIONS, (products, written_through_a_view, sorted_rows))
)
@pytest.mark.every(2)
def test_functions_of_chosen_rows(function, backend):
    parity(lambda: Program(function, batches((9, 6), classes=3)), steps=4, backend=backend)


# ---------------------------------------------------------------------- trained through
def mean_over_rows(model, x, y):
    return model(chosen(x, y)).square().sum() / x.shape[0]


def entropy_of_rows(model, x, y):
    keep = x[:, 0] > -10
    return F.cross_entropy(model(x[keep]), y[keep])


def written_rows(model, x, y):
    rows = chosen(x, y)
    rows.mul_(0.5)
    return model(rows).sum()


LOSSES = (mean_over_rows, entropy_of_rows, written_rows)


@pytest.mark.parametrize(("loss_of", "backend"), with_backends(LOSSES, (entropy_of_rows,)))
@pytest.mark.every(2)
def test_trained_on_chosen_rows(loss_of, backend):
    parity(lambda: trained(loss_of), steps=4, backend=backend)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_each_expert_gets_its_rows(backend):
    def make() -> Program:
        experts, gate = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 3)
        optimizer = torch.optim.SGD([*experts.parameters(), *gate.parameters()], lr=0.1)

        def step(x, y):
            weights = gate(x).softmax(-1)
            best, out = weights.argmax(-1), torch.zeros_like(x)
            for number, expert in enumerate(experts):
                rows = torch.where(best == number)[0]
                out.index_add_(0, rows, expert(x[rows]) * weights[rows, number, None])
            loss = F.mse_loss(out, x.flip(0))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Program(step, batches((8, 6), classes=3), (experts, gate, optimizer))

    parity(make, steps=5, backend=backend)


@pytest.mark.parametrize(("loss_of", "backend"), with_backends(LOSSES, (written_rows,)))
def test_backward_of_chosen_rows_outside(loss_of, backend):
    """The backward graph gets the rows as an input: there, their count is the size of an input, not unbacked."""
    torch.manual_seed(0)
    model = mlp()
    copied = copy.deepcopy(model)
    compiled = sidefx_train.compile(lambda x, y: loss_of(model, x, y), backend=backend, fullgraph=True)
    batch = batches((9, 6), classes=3)
    for index in range(4):
        x, y = batch(index)
        loss, want = compiled(x, y), loss_of(copied, x, y)
        assert loss.requires_grad
        loss.backward()
        want.backward()
        got = [loss.detach(), *(p.grad for p in model.parameters())]
        for have, like in zip(got, [want.detach(), *(p.grad for p in copied.parameters())], strict=True):
            torch.testing.assert_close(have, like, rtol=1e-5, atol=1e-6)
    assert sidefx_train.explain(compiled).fallback_count == 0


@pytest.mark.slow
def test_chosen_rows_next_to_a_convolution():
    """Inductor changes convolution layouts and the strides of later views, but not for unbacked sizes."""

    def make() -> Program:
        model = nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Linear(8, 6))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, y):
            rows = torch.where(y == 1)[0]
            loss = (model(x)[None, rows].reshape(-1, 6) + x[rows]).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Program(step, batches((8, 6), classes=3), (model, optimizer))

    parity(make, steps=4, backend="inductor", autotune="off")


# ---------------------------------------------------------------------- masks that depend on no input
def _off_diagonal():
    return ~torch.eye(6, dtype=torch.bool)


def _written_mask():
    mask = torch.eye(6, dtype=torch.bool)
    mask[0] = True
    return mask


MASKS = {
    "off the diagonal": _off_diagonal,
    "triangle": lambda: torch.ones(6, 6).triu(1).bool(),
    "rows": lambda: torch.arange(6) % 2 == 0,
    "nothing": lambda: torch.zeros(6, 6, dtype=torch.bool),
    "written": _written_mask,
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("make_mask", MASKS.values(), ids=MASKS)
def test_elements_of_a_constant_mask(make_mask, transposed):
    def make() -> Program:
        weight = torch.randn(6, 6, requires_grad=True)

        def step(x):
            scores = (x @ weight).t() if transposed else x @ weight
            picked = scores[make_mask()]
            weight.grad = None
            (picked.square().sum() + scores.sum()).backward()
            return picked.detach()

        return Program(step, lambda i: (torch.randn(6, 6),), (weight,))

    parity(make, steps=3)


@pytest.mark.slow
def test_a_constant_mask_has_a_known_number_of_elements():
    """Regression: under Inductor the contrastive loss of SimCLR did not compile."""

    def make() -> Program:
        front = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, 2, 1), torch.nn.Flatten())
        model = torch.nn.Sequential(front, torch.nn.Linear(64, 5))

        def step(a, b):
            views = torch.cat([model(a), model(b)])
            scores = (views @ views.T)[~torch.eye(len(views), dtype=torch.bool)].view(len(views), -1)
            loss = torch.nn.functional.cross_entropy(scores, torch.arange(len(views)) // 2)
            model.zero_grad()
            loss.backward()
            return loss.detach()

        return Program(step, lambda i: (torch.randn(3, 3, 8, 8), torch.randn(3, 3, 8, 8)), (model,))

    parity(make, steps=2, backend="inductor")
