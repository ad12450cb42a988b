"""Functions of TorchScript in a step: their operations are part of the graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from tests.support.parity import parity
from tests.support.training_steps import trained

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@torch.jit.script
def gated(x: torch.Tensor, bias: torch.Tensor, scale: float = 1.7):
    return torch.sigmoid(x * scale + bias) * x


@torch.jit.script
def summed(rows: list[torch.Tensor], times: int):
    total = torch.zeros_like(rows[0])
    for _ in range(times):
        for row in rows:
            total += row
    return total, rows


@torch.jit.script
def noisy(x: torch.Tensor):
    return F.dropout(x, 0.5, True)


@torch.jit.script
def decides(x: torch.Tensor):
    if bool(x.sum() > 0):
        return x
    return -x


@torch.jit.script
def by_curvature(x: torch.Tensor, k: torch.Tensor, count: torch.Tensor):
    if bool(torch.all(k.sign() == 0)):
        return x
    for i in range(int(count.max())):
        x = x.tan() if bool((k > 0).all()) else x.tanh() + i
    return x


@torch.jit.script
def prints(x: torch.Tensor):
    print("seen")
    return x * 2


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bias, self.gate = nn.Linear(6, 3), nn.Parameter(torch.full((3,), 0.3)), gated

    def forward(self, x):
        return noisy(self.gate(self.linear(x), self.bias, scale=0.9))


def test_in_training():
    step = lambda model, x, y: F.cross_entropy(model(x), y)
    parity(lambda: trained(step, Gated()), steps=3)


def test_traced_function_and_lists():
    twice = torch.jit.trace(lambda x: x * 2 + 1, torch.ones(3))
    rows = [torch.ones(3), torch.ones(3)]

    def step(x, times):
        total, given = summed([x, *rows], times)
        return twice(total), given

    compiled = sidefx_train.compile(step, backend="eager", fullgraph=True)
    for i in range(3):
        rows[0] += 1
        x = torch.full((3,), float(i))
        (total, given), (expected, kept) = compiled(x, 2), step(x, 2)
        assert torch.equal(total, expected) and len(given) == len(kept)
    assert len(compiled.report().captures) == 1


@pytest.mark.parametrize(("fn", "code"), [(decides, "SFX101"), (prints, "SFX103")])
def test_what_is_not_recorded(fn, code, capfd):
    compiled = sidefx_train.compile(lambda x: fn(x) + 1, backend="eager")
    for sign in (1.0, -1.0):
        x = torch.full((100,), sign)  # more than the prologue sums
        assert torch.equal(compiled(x), fn(x) + 1)
    assert [found.code for found in compiled.report().breaks] == [code]
    if fn is prints:
        assert capfd.readouterr().out == "seen\n" * 4


def test_values_of_inputs_that_it_reads_are_guarded():
    """Regression: such a function ended a part of the step."""
    k, count = torch.tensor([-1.0]), torch.tensor([1, 2])

    def step(model, x, y):
        return F.cross_entropy(by_curvature(model(x), k, count), y)

    program = trained(step, nn.Linear(6, 3))
    eager_program = trained(step, nn.Linear(6, 3))
    eager_program.watch[0].load_state_dict(program.watch[0].state_dict())
    captured = sidefx_train.compile(program.step, backend="eager", fullgraph=True)
    for i, (curvature, most) in enumerate([(-1, 2), (-1, 2), (1, 2), (-1, 3), (0, 1), (1, 2), (-1, 2)]):
        k.fill_(curvature)
        count.fill_(most)
        assert torch.equal(captured(*program.batch(i)), eager_program.step(*program.batch(i))), i
    assert len(captured.report().captures) == 4 and captured.report().replays == 7


def test_an_error_is_that_of_eager():
    compiled = sidefx_train.compile(lambda x: gated(x, torch.ones(7)), backend="eager")
    with pytest.raises(RuntimeError, match="must match the size"):
        compiled(torch.ones(3))


def test_the_function_is_guarded():
    chosen = [gated]
    compiled = sidefx_train.compile(lambda x: chosen[0](x, x), backend="eager", fullgraph=True)
    x = torch.ones(3)
    assert torch.equal(compiled(x), gated(x, x))
    chosen[0] = torch.jit.trace(lambda x, y: x - 2 * y, (x, x))
    assert torch.equal(compiled(x), -x)
