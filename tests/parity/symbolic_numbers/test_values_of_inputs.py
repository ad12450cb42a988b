"""Values of inputs that Python needs as numbers: the prologue computes them, the step stays one graph."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sidefx_train
from tests.support.parity import Program, parity, same


class World:
    def __init__(self):
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.optimizer = torch.optim.SGD([*self.layer.parameters(), *self.norm.parameters()], lr=0.1)
        self.log, self.table = [], {}

    def update(self, loss):
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def state(self):
        tensors = [*self.layer.state_dict().values(), *self.norm.state_dict().values()]
        return [t.clone() for t in tensors], list(self.log), dict(self.table)


def split(w, x, t):
    return w.update(sum(part.square().mean() for part in torch.split(w.layer(x), t.tolist())))


def slices(w, x, t):
    h = w.layer(x)
    return w.update(sum(h[i, :n].square().mean() for i, n in enumerate(t.tolist())))


def any_selected(w, x, t):
    h, kept = w.layer(x), torch.arange(6) < t.max() - 2
    return w.update(h[kept].square().mean() if kept.any() else h.sum() * 0)


def returns_early(w, x, t):
    h = w.layer(x)
    if (t > 2).sum() == 0:
        w.log.append("none")
        return h.sum().detach()
    return w.update(h.square().mean())


def pooled(w, x, t):
    rows = torch.repeat_interleave(torch.arange(3), 2)
    out = torch.zeros(int(t.max()) + 3, 4).index_add(0, rows, w.layer(x))
    return w.update(w.norm(out).pow(3).mean())


def key(w, x, t):
    loss = w.update(w.layer(x).mean())
    w.table[int(t.sum()) % 3] = loss
    return w.layer(x).sum().detach()


def iterates(w, x, t):
    h = w.layer(x)
    for n in t:
        h = h * (1 + int(n) / 10)
    return w.update(h.mean())


def sorted_first(w, x, t):
    order = t.sort(descending=True)
    return w.update(w.layer(x)[: order.values[0].item()].mean() * order.indices.tolist()[0])


def repeated(w, x, t):
    for _ in range(t[0]):
        x = w.layer(x)
    return w.update(x.square().mean())


def among(w, x, t):
    return w.update(w.layer(x if 1 in t else -x).mean() * (2 if 2.5 in t else 1))


def equal_tensors(w, x, t):
    return w.update(w.layer(x if torch.equal(t, t.flip(0)) else -x).mean())


LENGTHS = [[1, 2, 3], [2, 2, 2], [3, 2, 1], [2, 1, 3], [1, 1, 4], [2, 2, 2]]


def built_by_writes(w, x, t):
    sizes = torch.empty(3, dtype=torch.int64)
    sizes[0] = t[2]
    sizes[1:].copy_(t[:2])
    return w.update(sum(part.square().mean() for part in torch.split(w.layer(x), sizes.tolist())))


def written_after_it_is_used(w, x, t):
    copied = t.clone()
    most, first = copied.max(), copied[0]
    copied.zero_()
    copied[1] = 3
    h = w.layer(x)[: int(most) + int(first)]  # `first` is a view, and 0 by now
    return w.update(h.square().mean() if copied[1] > 2 else h.sum())


@pytest.mark.parametrize(
    "step",
    [
        built_by_writes,
        written_after_it_is_used,
        split,
        slices,
        any_selected,
        returns_early,
        pooled,
        key,
        iterates,
        sorted_first,
        repeated,
        among,
        equal_tensors,
    ],
    ids=lambda f: f.__name__,
)
def test_one_graph(step):
    expected, world = World(), World()
    captured = sidefx_train.compile(step, backend="eager", rng="eager")
    for i, lengths in enumerate(LENGTHS):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(i))
        wanted = step(expected, x, torch.tensor(lengths))
        assert torch.equal(captured(world, x, torch.tensor(lengths)), wanted)
        same(expected.state(), world.state(), step.__name__, exact=True)
    report = captured.report()
    assert not report.breaks and not report.fallbacks
    assert len(report.captures) <= 5 if step is slices else len(report.captures) <= 3


def test_read_again_after_a_write():
    def step(t):
        before = t.tolist()
        t[0] = 7
        return torch.ones(sum(before)), torch.ones(sum(t.tolist()))

    captured = sidefx_train.compile(step, backend="eager")
    for values in ([1, 2], [3, 1], [0, 4]):
        made = captured(torch.tensor(values))
        assert [len(each) for each in made] == [sum(values), 7 + values[1]]


def test_written_through_another_tensor():
    def step(t, u, x):
        u.add_(1)
        return x[: int(t[0])] * 2, [0] * int(t[0])

    captured = sidefx_train.compile(step, backend="eager")
    memory = torch.tensor([1, 2, 3])
    for t, u, wanted in ((memory[:2], torch.tensor([5]), 1), (memory[:2], memory[:1], 2), (memory[1:], memory[:1], 2)):
        made, listed = captured(t, u, torch.ones(4))
        assert len(made) == len(listed) == wanted


def test_other_tensors_at_the_next_call():
    def step(t, x):
        return [x * n for n in range(int(t.sum()))]

    captured, x = sidefx_train.compile(step, backend="eager"), torch.ones(2)
    given = [torch.tensor([1, 1]), torch.tensor([2]), torch.tensor(1), torch.tensor([1.0, 1.5]), torch.tensor([True])]
    for t in (*given, torch.tensor([[1, 2], [0, 0]]), torch.empty(0, dtype=torch.int64)):
        assert len(captured(t, x)) == len(step(t, x))


def test_a_flag_that_becomes_longer():
    def step(flag, x):
        return x * 2 if flag.numel() == 1 and flag else x * 3

    captured, x = sidefx_train.compile(step, backend="eager"), torch.ones(2)
    for flag in (torch.tensor([True]), torch.tensor([False, True]), torch.tensor([False]), torch.tensor([True])):
        assert torch.equal(captured(flag, x), step(flag, x))


def test_many_decisions_are_left_to_python():
    def step(t, x):
        return x * 2 if int(t.max()) % 20 == x.numel() else x * len(str(int(t.max())) + "." * int(t.max()))

    captured, x = sidefx_train.compile(step, backend="eager"), torch.ones(2)
    for n in range(14):
        assert torch.equal(captured(torch.tensor([n, 0]), x), step(torch.tensor([n, 0]), x))
    assert captured.report().breaks


def test_backward_that_runs_later_reads_the_values_of_then():
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, holder):
            ctx.holder = holder
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * (3 if ctx.holder[0].any() else 5), None

    def gradient(fn):
        flags, x = torch.tensor([True, False]), torch.ones(2, requires_grad=True)
        y = fn(x, [flags])
        flags.zero_()
        y.sum().backward()
        return x.grad

    step = Scaled.apply
    assert torch.equal(gradient(sidefx_train.compile(lambda x, h: step(x, h), backend="eager")), gradient(step))


def test_under_inductor():
    expected, world = World(), World()
    captured = sidefx_train.compile(split, rng="eager")
    for i, lengths in enumerate(LENGTHS[:3]):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(i))
        wanted, made = split(expected, x, torch.tensor(lengths)), captured(world, x, torch.tensor(lengths))
        torch.testing.assert_close(made, wanted)
    assert not captured.report().breaks and not captured.report().fallbacks


def test_padding_mask_from_lengths():
    def step(x, lengths):
        mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]
        return F.softmax(x[:, : mask.shape[1]].masked_fill(~mask, -torch.inf), 1) if not mask.all() else x[:, :0]

    captured = sidefx_train.compile(step, backend="eager")
    for lengths in ([1, 4], [2, 3], [3, 3], [4, 2]):
        x = torch.randn(2, 5)
        assert torch.equal(captured(x, torch.tensor(lengths)), step(x, torch.tensor(lengths)))
    assert not captured.report().breaks


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.every(2)
def test_tensor_as_a_size(dtype):
    """Regression: only int64 tensors were read before the graph; a size of another dtype left Inductor no graph."""

    def step(x, rows):
        groups = rows.max().to(dtype) + 1
        sums = torch.zeros(groups, 2).index_add(0, rows, x)
        return sums.square().mean(), torch.ones(1, 2).expand(groups, 2) + sums

    for backend in ("eager", "inductor"):
        captured = sidefx_train.compile(step, backend=backend, autotune="off")
        for index in range(4):
            given = torch.ones(6, 2), torch.tensor([0, 0, 1, index, 2, index])
            torch.testing.assert_close(captured(*given), step(*given))
        report = captured.report()
        assert not report.breaks and not report.fallbacks
        assert report.graph_count <= 2


@pytest.mark.parametrize(
    "function",
    [math.sqrt, math.cos, math.floor, math.isfinite, lambda t: math.pow(t + 1, 0.5), lambda t: math.atan2(2, t)],
    ids=["sqrt", "cos", "floor", "isfinite", "pow", "atan2"],
)
def test_a_function_of_math_reads_a_tensor(function):
    """A counter of an optimizer that is a tensor, as MADGRAD's: ``math.pow(state["k"] + 1, 0.5)``."""

    def step(weight, count):
        weight.mul_(0.1 + function(count))
        count.add_(1)
        return function(count)

    captured = sidefx_train.compile(step, backend="eager")
    worlds = [(torch.ones(3), torch.tensor([1])) for _ in range(2)]
    for _ in range(20):
        assert step(*worlds[0]) == captured(*worlds[1])
        same(worlds[0], worlds[1], "state", exact=True)
    assert len(captured.report().captures) == 1 and not captured.report().breaks, str(captured.report())


def test_causal_masks_of_changing_lengths():
    """``nn.Transformer`` compares a mask with the causal one, and passes the answer on: the prologue knows it."""

    def make() -> Program:
        model = nn.Transformer(8, 2, 1, 1, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(source, target):
            n = target.shape[0]
            mask = (torch.triu(torch.ones(n, n)) == 1).transpose(0, 1)
            mask = mask.float().masked_fill(mask == 0, float("-inf")).masked_fill(mask == 1, 0.0)
            unmasked = torch.zeros(source.shape[0], source.shape[0]).type(torch.bool)
            optimizer.zero_grad()
            loss = model(source, target, unmasked, mask).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Program(step, lambda i: (torch.randn(4 + i % 3, 2, 8), torch.randn(5 + i % 2, 2, 8)), [model])

    parity(make, steps=6, captures=2)


@pytest.mark.parametrize(
    "decides",
    [
        lambda w: torch.isclose(w, torch.ones(())).any(),
        lambda w: torch.allclose(w, torch.zeros(3)),
        lambda w: ((w * 2 - 1).abs() < 1.5).all(),
        lambda w: w.norm() > 1.5,
        lambda w: w.square().mean().sqrt() > 1,
        lambda w: F.softplus(w[0]) > 1,
        lambda w: (w.sigmoid().clamp(0, 0.7) * torch.arange(3)).sum() > 1.5,
    ],
    ids=["isclose", "allclose", "bounds", "norm", "root mean square", "softplus", "weighted"],
)
@pytest.mark.parametrize("region", ["", "autocast"])
def test_branches_on_arithmetic_with_a_few_floats(decides, region):
    """Regression: only arithmetic with one float was repeated before the graph; others ended a part of the step."""

    def step(weight, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(region)):
            loss = (weight * x).square().sum() if decides(weight) else (weight - x).square().sum()
        loss.backward()
        with torch.no_grad():
            weight.sub_(weight.grad, alpha=0.1)
        weight.grad = None
        return loss.detach()

    captured = sidefx_train.compile(step, backend="eager", fullgraph=True)
    worlds = [torch.full((3,), 1.0, requires_grad=True) for _ in range(2)]
    taken = set()
    for i in range(12):
        x = torch.tensor([0.0, 3.0, -2.0]).roll(i // 2) * (-1) ** i
        taken.add(bool(decides(worlds[0])))
        assert torch.equal(step(worlds[0], x), captured(worlds[1], x))
        assert torch.equal(*worlds)
    assert len(captured.report().captures) == len(taken)
