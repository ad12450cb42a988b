"""Results whose values are equal have storage of their own, as in eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import sidefx_train


def zeroed(x: Any) -> Any:
    tensors = [x + 1, x + 2, x.repeat(2)]
    torch._foreach_zero_(tensors)
    return tensors


def filled(x: Any) -> Any:
    return torch.full((4,), 2.0), torch.full((4,), 2.0), torch.full((2, 2), 2.0).view(4)


def same_sums(x: Any) -> Any:
    return x + 1, (x + 1).view(2, -1), x * 2, x * 2


def aliases(x: Any) -> Any:
    made = x + 1
    return made, made.view(2, -1), made.detach()


def joined(x: Any) -> Any:
    return torch.cat([x, x]), torch.stack([x, x])  # two views of one product of Inductor's


def parts(x: Any) -> Any:
    return x.sort().values, x.sort().values, x.sin().split(2)[0], x.sin()[:2]


@pytest.mark.parametrize("step", [zeroed, filled, same_sums, aliases, joined, parts])
def test_who_writes_one_result_changes_what_eager_changes(step):
    def written(results: Any) -> list[Any]:
        for number, result in enumerate(results):
            result.flatten()[0] += 10 ** (number + 1)
        return [result.tolist() for result in results]

    x = torch.arange(4.0)
    assert written(sidefx_train.compile(step)(x)) == written(step(x))


def test_gradients_of_zeros_are_tensors_of_their_own():
    """Regression: layers of one size shared a gradient after ``zero_grad(set_to_none=False)`` in the first step."""
    runs = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=True)

        def step(x: Any, net: Any = net, optimizer: Any = optimizer) -> Any:
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            return loss.detach()

        run = sidefx_train.compile(step, keep_slower=True) if compiled else step
        losses = [run(torch.full((2, 4), float(call))) for call in range(4)]
        gradients = {p.grad.untyped_storage().data_ptr() for p in net.parameters()}
        assert len(gradients) == len(list(net.parameters()))
        runs.append(torch.stack(losses))
    torch.testing.assert_close(*runs)
    assert not run.report().breaks


def snapshot_and_history(x: Any, old: Any, older: Any) -> Any:
    older.copy_(old)
    old.t().copy_(x.t())
    x.mul_(3)


def rotated(x: Any, y: Any, z: Any) -> Any:
    first = x.clone()
    x.copy_(y)
    y.copy_(z)
    z.copy_(first)


def parts_of_another(x: Any, y: Any, z: Any) -> Any:
    one, two = x.chunk(2)
    z[:1].copy_(one)
    x.mul_(3)
    y[1:] = two
    z[1] = y[0]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("step", [snapshot_and_history, rotated, parts_of_another])
def test_an_input_gets_the_old_value_of_another(step, backend):
    """Regression: the copy was removed, and the other input was written first."""
    mine, yours = ([torch.arange(4.0).view(2, 2) + 10 * i for i in range(3)] for _ in range(2))
    compiled = sidefx_train.compile(step, backend=backend, verify=0)
    for _ in range(2):
        step(*mine)
        compiled(*yours)
        assert all(map(torch.equal, mine, yours)), (mine, yours)


def test_the_reference_with_random_numbers_writes_in_the_same_order():
    """Regression: with ``rng="fast"`` the reference of the comparison was as wrong as the compiled graph."""

    def step(x: Any, y: Any, z: Any) -> Any:
        rotated(x, y, z)
        return torch.nn.functional.dropout(x, 0.5)

    mine, yours = ([torch.arange(4.0).view(2, 2) + 10 * i for i in range(3)] for _ in range(2))
    compiled = sidefx_train.compile(step, rng="fast")
    for _ in range(2):
        step(*mine)
        compiled(*yours)
        assert all(map(torch.equal, mine, yours)), (mine, yours)
    assert not compiled.report().fallbacks, compiled.report().fallbacks
