"""Products with sparse matrices, from outside or made in the step, are captured; most of the rest runs natively."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from tests.support.parity import Program, parity

LAYOUTS = ["coalesced", "uncoalesced", "csr"]


def graph(layout: str, size: int = 20, seed: int = 0) -> torch.Tensor:
    """Returns a random sparse matrix of shape (size, size)."""
    drawn = torch.Generator().manual_seed(seed)
    indices = torch.randint(0, size, (2, 4 * size), generator=drawn)
    made = torch.sparse_coo_tensor(indices, torch.rand(4 * size, generator=drawn), (size, size))
    if layout == "uncoalesced":
        return made
    return made.coalesce() if layout == "coalesced" else made.coalesce().to_sparse_csr()


def trained(use: Any, layout: str = "coalesced") -> Any:
    """Returns a factory of a training step with the hidden values ``use(matrix, hidden, log)``."""

    def make() -> Program:
        torch.manual_seed(0)
        net, matrix, log = nn.Linear(4, 4), graph(layout), []
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = use(matrix, net(x), log).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Program(step, lambda call: (torch.randn(20, 4),), (net, optimizer, log))

    return make


PRODUCTS = {
    "operator": lambda a, h, log: a @ h,
    "mm": lambda a, h, log: a.mm(h),
    "torch.mm": lambda a, h, log: torch.mm(a, h),
    "spmm": lambda a, h, log: torch.spmm(a, h),
    "sparse.mm": lambda a, h, log: torch.sparse.mm(a, h),
    "vector": lambda a, h, log: a @ h[:, 1],
    "transposed": lambda a, h, log: a.t() @ (a @ h),
    "twice transposed": lambda a, h, log: a.t().t() @ h,
    "columns first": lambda a, h, log: a @ h.t().contiguous().t(),
    "to_dense": lambda a, h, log: a.to_dense() @ h + a.t().to_dense() @ h,
    "no grad": lambda a, h, log: h * torch.sigmoid((a @ h).detach()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("product", PRODUCTS)
def test_products(product: str, layout: str) -> None:
    parity(trained(PRODUCTS[product], layout), steps=4)


def test_a_graph_network_under_inductor() -> None:
    def make() -> Program:
        torch.manual_seed(0)
        first, second, matrix = nn.Linear(8, 16), nn.Linear(16, 3), graph("coalesced")
        net = nn.ModuleList([first, second])
        optimizer = torch.optim.Adam(net.parameters(), 0.01)
        labels = torch.randint(0, 3, (20,))

        def step(x: torch.Tensor) -> float:
            optimizer.zero_grad()
            hidden = torch.relu(torch.spmm(matrix, first(x)))
            loss = F.cross_entropy(torch.spmm(matrix, second(hidden))[:10], labels[:10])
            loss.backward()
            optimizer.step()
            return loss.item()

        return Program(step, lambda call: (torch.randn(20, 8),), (net, optimizer))

    parity(make, steps=6, backend="inductor")


def penalty(matrix: Any, hidden: torch.Tensor, log: list[Any]) -> torch.Tensor:
    (found,) = torch.autograd.grad((matrix @ hidden).square().sum(), hidden, create_graph=True)
    return hidden + found.square().sum()


def facts(matrix: Any, hidden: torch.Tensor, log: list[Any]) -> torch.Tensor:
    log.append((matrix.shape, matrix.dtype, matrix.layout, matrix.is_sparse, isinstance(matrix, torch.Tensor)))
    return matrix @ hidden / matrix.shape[0]


def without_some_edges(matrix: Any, hidden: torch.Tensor, log: list[Any]) -> torch.Tensor:
    """Drops edges at random, as LightGCN does."""
    if matrix.layout is torch.sparse_csr:
        rows = torch.arange(20).repeat_interleave(matrix.crow_indices().diff(), output_size=matrix._nnz())
        indices, values = torch.stack([rows, matrix.col_indices()]), matrix.values()
    elif matrix.is_coalesced():
        indices, values = matrix.indices(), matrix.values()
    else:
        indices, values = matrix._indices(), matrix._values()
    kept = values * (torch.rand(matrix._nnz()) > 0.3)
    log.append((matrix.size(0), matrix.size()))
    return torch.sparse_coo_tensor(indices, kept / 0.7, matrix.size()) @ hidden


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "use", [penalty, facts, without_some_edges], ids=["second derivative", "facts", "dropped edges"]
)
def test_more_in_one_graph(use: Any, layout: str) -> None:
    parity(trained(use, layout), steps=4)


def caught(matrix: Any, hidden: torch.Tensor, log: list[Any]) -> torch.Tensor:
    for wrong in (hidden[:7], hidden.double()):
        try:
            matrix @ wrong
        except RuntimeError as error:
            log.append(str(error))
    return hidden


def coalesced(matrix: Any, hidden: torch.Tensor, log: list[Any]) -> torch.Tensor:
    for made in (matrix.coalesce(), matrix.t().coalesce()):
        log.append((made.is_coalesced(), made.indices().clone(), made.values().clone(), made._nnz(), made.shape))
        hidden = made @ hidden + made.coalesce().t() @ hidden
    return hidden


@pytest.mark.parametrize("layout", ["coalesced", "uncoalesced"])
def test_coalesced_matrices(layout: str) -> None:
    parity(trained(coalesced, layout), steps=4)


def test_a_matrix_that_is_coalesced_leaves() -> None:
    made = sidefx_train.compile(lambda a: a.coalesce(), backend="eager", fullgraph=True)
    few = torch.sparse_coo_tensor([[1], [2]], [3.0], (4, 4), is_coalesced=False)
    for matrix in (graph("uncoalesced"), graph("uncoalesced", seed=1), few):
        found, expected = made(matrix), matrix.coalesce()
        assert found.is_coalesced() and not matrix.is_coalesced()
        assert torch.equal(found.indices(), expected.indices()) and torch.equal(found.values(), expected.values())


NATIVE = {
    "addmm": lambda a, h, log: torch.addmm(h, a, h),
    "scaled": lambda a, h, log: (a * 2) @ h,
    "dense first": lambda a, h, log: h.t() @ a,
    "two matrices": lambda a, h, log: torch.sparse.mm(a, a) @ h,
    "text": lambda a, h, log: log.append(str(a)) or a @ h,
    "errors": caught,
    "reads of the transposed": lambda a, h, log: h * len(a.t()._values()) if a.is_sparse else (a + a) @ h,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("use", NATIVE)
def test_other_uses_run_natively(use: str, layout: str) -> None:
    report = parity(trained(NATIVE[use], layout), steps=4, captures=None, whole=False)
    assert {each.code for each in report.breaks} == {"SFX109"} and not report.fallbacks


def test_a_buffer_of_a_module() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("graph", graph("coalesced"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = first = self.linear(x)
            for _ in range(3):
                hidden = 0.9 * torch.sparse.mm(self.graph, hidden) + 0.1 * first
            return hidden

    def make() -> Program:
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = net(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Program(step, lambda call: (torch.randn(20, 4),), (net.linear, optimizer))

    parity(make, steps=4)


def test_values_written_through_the_matrix() -> None:
    def make() -> Program:
        matrix, values = graph("coalesced"), None
        values = matrix._values()

        def step(x: torch.Tensor) -> torch.Tensor:
            before = matrix @ x
            matrix.values().mul_(0.9)
            matrix._values()[0] = 3.0
            return before + matrix @ x

        return Program(step, lambda call: (torch.randn(20, 4),), (values,))

    parity(make, steps=4, captures=None, whole=False)


def test_matrices_of_other_sizes_are_one_graph() -> None:
    held: dict[str, Any] = {}

    def make() -> Program:
        torch.manual_seed(0)
        net = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            matrix = held["a"]
            loss = (matrix @ net(x)).square().mean() + (matrix.t() @ x).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Program(step, lambda call: (torch.randn(20 + call, 4),), (net,))

    def other(program: Program, call: int) -> None:
        held["a"] = graph("coalesced", 20 + call, call)

    parity(make, steps=12, captures=3, between=other)


def test_matrix_changes_between_calls() -> None:
    """Values are read at every call; another layout, a lost order or a gradient is another case."""
    held: dict[str, Any] = {}

    def make() -> Program:
        torch.manual_seed(0)
        net = nn.Linear(4, 4)
        held["a"] = graph("coalesced")
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = (held["a"] @ net(x)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Program(step, lambda call: (torch.randn(20, 4),), (net, optimizer))

    def change(program: Program, call: int) -> None:
        if call == 9:
            held["a"].requires_grad_(True)
        elif call in (3, 5, 7):
            held["a"] = graph({3: "uncoalesced", 5: "csr", 7: "coalesced"}[call], seed=call)
        else:
            held["a"]._values().mul_(0.9) if held["a"].is_sparse else held["a"].values().mul_(0.9)

    parity(make, steps=11, captures=None, between=change, whole=False)


@pytest.mark.parametrize("when", ["before", "after", "between"])
def test_values_that_the_step_writes(when: str) -> None:
    """A matrix over a tensor that the step writes in place sees what is written."""

    def make() -> Program:
        torch.manual_seed(0)
        net, values = nn.Linear(4, 4), torch.rand(30)
        matrix = torch.sparse_coo_tensor(torch.randint(0, 20, (2, 30)), values, (20, 20))
        assert matrix._values().data_ptr() == values.data_ptr()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            if when == "before":
                values.mul_(0.9)
            hidden = matrix @ net(x)
            if when == "between":
                values.mul_(0.9)
                hidden = matrix @ hidden.detach()
            loss = (hidden * net.weight.sum()).square().mean()
            if when == "after":
                values.add_(0.1)
            optimizer.zero_grad()
            if when == "before" or when == "between":
                loss.backward()
            optimizer.step()
            return loss.detach()

        return Program(step, lambda call: (torch.randn(20, 4),), (net, optimizer, values))

    parity(make, steps=5, captures=None, whole=False)


def confusion(indices: Any, values: Any, x: Any, log: list[Any]) -> torch.Tensor:
    counts = torch.sparse_coo_tensor(indices, torch.ones_like(indices[0]), (20, 20)).to_dense()
    log.append((counts.sum().item(), counts.dtype))
    return counts.to(x.dtype) @ x


MADE = {
    "product": lambda i, v, x, log: torch.sparse_coo_tensor(i, v, (20, 20)) @ x,
    "size by name": lambda i, v, x, log: torch.sparse.mm(torch.sparse_coo_tensor(i, v, size=(20, 20)), x),
    "transposed": lambda i, v, x, log: torch.sparse_coo_tensor(i, v, (20, x.shape[0])).t() @ x,
    "dense": lambda i, v, x, log: torch.sparse_coo_tensor(i, v, torch.Size([20, 20])).t().to_dense() @ x,
    "confusion matrix": confusion,
}


@pytest.mark.parametrize("how", MADE)
def test_matrices_made_in_the_step(how: str) -> None:
    def make() -> Program:
        torch.manual_seed(0)
        net, log = nn.Linear(4, 4), []
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def step(indices: torch.Tensor, values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            loss = MADE[how](indices, values, net(x), log).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        def batch(call: int) -> tuple[torch.Tensor, ...]:
            return torch.randint(0, 20, (2, 60 + call)), torch.rand(60 + call), torch.randn(20, 4)

        return Program(step, batch, (net, optimizer, log))

    parity(make, steps=6, captures=3)


@pytest.mark.parametrize("how", ["returned", "kept over a break", "wrong", "of another class"])
def test_what_becomes_of_a_matrix_made_in_the_step(how: str) -> None:
    def make() -> Program:
        torch.manual_seed(0)
        net, log = nn.Linear(4, 4), []

        def step(indices: torch.Tensor, values: torch.Tensor, x: torch.Tensor) -> Any:
            made = torch.sparse_coo_tensor(indices, values, (20, 20) if how != "wrong" else (20, -1 + len(log)))
            hidden = made @ net(x)
            if how == "kept over a break":
                log.append(str(hidden.sum() > 0) * 2 if hidden.sum() > 0 else "no")
                return (made.t() @ hidden).detach()
            if how == "of another class":
                return [(made * 2).to_dense(), made.coalesce().to_dense(), hidden.detach()]
            outside = made.t() if how == "returned" else made
            values.mul_(2)
            return [outside._indices(), outside._values(), outside.shape, outside.is_coalesced(), hidden.detach()]

        def batch(call: int) -> tuple[torch.Tensor, ...]:
            return torch.randint(0, 20, (2, 60)), torch.rand(60), torch.randn(20, 4)

        return Program(step, batch, (net, log))

    parity(make, steps=4, captures=None, whole=False)


def test_a_returned_matrix() -> None:
    """The matrix is over the memory of the program's values, as in eager."""

    def step(indices: torch.Tensor, values: torch.Tensor, x: torch.Tensor) -> Any:
        made = torch.sparse_coo_tensor(indices, values, (20, 20))
        return made, made.t(), made @ x

    captured = sidefx_train.compile(step, backend="eager", fullgraph=True)
    for _ in range(3):
        indices, values, x = torch.randint(0, 20, (2, 60)), torch.rand(60), torch.randn(20, 4)
        made, transposed, product = captured(indices, values, x)
        assert torch.equal(product, made @ x) and torch.equal(transposed.to_dense(), made.to_dense().t())
        assert made._values().data_ptr() == values.data_ptr() and not made.is_coalesced()
        assert made.layout is torch.sparse_coo and made.shape == (20, 20) and not made.requires_grad


def test_checked_matrices_are_torchs() -> None:
    """With torch's check of indices, a wrong one raises where it is made."""

    def step(indices: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        try:
            return torch.sparse_coo_tensor(indices, torch.ones(3), (4, 4)) @ x
        except RuntimeError as error:
            return x + len(str(error))

    captured = sidefx_train.compile(step, backend="eager")
    indices, x = torch.tensor([[0, 1, 9], [0, 1, 2]]), torch.ones(4, 2)
    with torch.sparse.check_sparse_tensor_invariants():
        assert torch.equal(captured(indices, x), step(indices, x))
        assert torch.equal(captured(indices, x), step(indices, x))


def attention(matrix: Any, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weights of the edges depend on the nodes, as in graph attention networks."""
    indices = matrix._indices()
    scores = torch.exp(torch.tanh((hidden[indices[0]] * hidden[indices[1]]).sum(1) * weights.mean()))
    made = torch.sparse_coo_tensor(indices, scores, (20, 20))
    return (made @ hidden) / (made @ torch.ones(20, 1))


def repeated(matrix: Any, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    made = torch.sparse_coo_tensor(matrix._indices(), weights * 0.1, (20, 20))
    return made.t() @ torch.sparse.mm(made, torch.spmm(made, hidden)) + (made @ hidden[:, 0]).unsqueeze(1)


def in_no_grad(matrix: Any, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        fixed = torch.sparse_coo_tensor(matrix._indices(), weights, (20, 20))
    learned = torch.sparse_coo_tensor(matrix._indices(), weights, (20, 20))
    with torch.no_grad():
        more = learned @ hidden
    assert learned.requires_grad and not fixed.requires_grad
    return fixed @ hidden + more


LEARNED = {
    "product": lambda a, h, w: torch.sparse_coo_tensor(a._indices(), w, (20, 20)) @ h,
    "sparse.mm": lambda a, h, w: torch.sparse.mm(torch.sparse_coo_tensor(a._indices(), w, (20, 20)), h),
    "transposed": lambda a, h, w: torch.sparse_coo_tensor(a._indices(), w, (20, 20)).t() @ h,
    "vector": lambda a, h, w: torch.sparse_coo_tensor(a._indices(), w.exp(), (20, 20)) @ h[:, 1],
    "dense": lambda a, h, w: torch.sparse_coo_tensor(a._indices(), w, (20, 20)).t().to_dense() @ h,
    "fixed factor": lambda a, h, w: torch.sparse_coo_tensor(a._indices(), w, (20, 20)) @ h.detach(),
    "attention": attention,
    "repeated": repeated,
    "in no_grad": in_no_grad,
}


def learning(use: Any) -> Any:
    def make() -> Program:
        torch.manual_seed(0)
        net, matrix, weights = nn.Linear(4, 4), graph("uncoalesced"), nn.Parameter(torch.rand(80))
        optimizer = torch.optim.SGD([*net.parameters(), weights], 0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = use(matrix, net(x), weights).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Program(step, lambda call: (torch.randn(20, 4),), (net, weights, optimizer))

    return make


@pytest.mark.parametrize("use", LEARNED)
def test_values_that_are_learned(use: str) -> None:
    parity(learning(LEARNED[use]), steps=4)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("use", ["attention", "repeated"])
def test_learned_values_under_compilers(use: str, backend: str) -> None:
    parity(learning(LEARNED[use]), steps=4, backend=backend)


def learned_coalesced(matrix: Any, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(matrix._indices(), weights, (20, 20)).coalesce() @ hidden


def learned_values(matrix: Any, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    made = torch.sparse_coo_tensor(matrix._indices(), weights, (20, 20))
    made._values().mul_(2) if hidden.shape[0] > 30 else None
    return made @ hidden * (made.grad_fn is not None) + made._values().sum()


def second_derivative(matrix: Any, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    made = torch.sparse_coo_tensor(matrix._indices(), weights, (20, 20))
    (found,) = torch.autograd.grad((made @ hidden).square().sum(), hidden, create_graph=True)
    return hidden + found.square().sum()


@pytest.mark.parametrize("use", [learned_coalesced, learned_values, second_derivative])
def test_other_uses_of_learned_values(use: Any) -> None:
    parity(learning(use), steps=3, captures=None, whole=False)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_indices_of_coalesced_duplicates(backend):
    """The kernel's indices have gaps: there were more of them before equal ones were added."""

    def step(places, values):
        made = torch.sparse_coo_tensor(places, values, (4, 5)).coalesce()
        return made.indices()[1] * 10 + made.indices()[0], made.values() * 2

    captured = sidefx_train.compile(step, backend=backend)
    for _ in range(3):
        given = torch.tensor([[3, 0, 3, 1, 0, 2], [4, 1, 4, 0, 1, 3]]), torch.randn(6)
        for have, want in zip(captured(*given), step(*given), strict=True):
            torch.testing.assert_close(have, want)
