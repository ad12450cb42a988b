"""Conditions of a step on the value of a one-element outside tensor: the prologue evaluates them, also comparisons."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import sidefx_train
from sidefx_train.compile.capture.world.symbolic_numbers import scalar_tensors
from tests.support.parity import Program, batches, mlp, parity
from tests.support.training_steps import trained

# ---------------------------------------------------------------------- conditions of a step on its counter
DECISIONS = {
    "equal": lambda count: count == 0,
    "greater": lambda count: count > 2,
    "at_most": lambda count: count <= 2,
    "from_the_right": lambda count: 2 < count,
    "every_third": lambda count: count % 3 == 0,
    "halves": lambda count: count // 2 >= 1,
    "one_more": lambda count: count + 1 > 2,
    "twice": lambda count: count * 2 - 1 > 3,
    "detached": lambda count: count.detach() > 2,
    "copied": lambda count: count.clone() > 2,
    "negated": lambda count: ~(count > 2),
    "logical": lambda count: torch.logical_not(count > 2),
    "combined": lambda count: (count > 1) & (count < 4),
    "either": lambda count: (count < 1) | (count > 3),
    "any": lambda count: (count > 2).any(),
    "viewed": lambda count: count.view(1) > 2,
    "reading": lambda count: (count > 2).item(),
    "number": lambda count: int(count % 4) > 2,
    "itself": lambda count: count == count.clone(),
    "constant": lambda count: count == torch.tensor(3),
}


class Counting(nn.Module):
    """Doubles its output if ``decide`` is true, evaluated before or after the count is incremented."""

    def __init__(self, decide, late: bool, count: torch.Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(0) if count is None else count)
        self.layer = nn.Linear(6, 3)
        self.decide, self.late = decide, late

    def forward(self, x):
        decided = self.decide(self.count) if not self.late else None
        self.count += 1
        if self.late:
            decided = self.decide(self.count)
        return self.layer(x) * (2 if decided else 1)


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", DECISIONS)
@pytest.mark.covering(1)
def test_decided_by_a_count(name, late):
    def make() -> Program:
        return trained(lambda model, x, y: F.cross_entropy(model(x), y), Counting(DECISIONS[name], late))

    def between(program, index):
        if index == 6:
            program.watch[0].count.fill_(1)

    parity(make, steps=9, captures=None, between=between)


@pytest.mark.parametrize("threshold", [0.1, 0.3, 1 / 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fractions_are_compared_as_the_kernel_does(threshold, dtype):
    """A number compared with a float32 tensor is rounded to float32 first: ``torch.tensor(0.1) == 0.1``."""

    def step(x, share):
        return (x * 2 if share == threshold else x), (x + 1 if share > threshold else x)

    shares = [torch.tensor(value, dtype=dtype) for value in (threshold, 0.2, threshold, 0.5)]
    parity(lambda: Program(step, lambda i: (torch.ones(3), shares[i % 4])), steps=8, captures=None)


def test_decided_inside_a_device_context():
    """``with torch.device`` applies to the tensors the step creates, not to the numbers in its conditions."""

    def step(x, share):
        with torch.device("meta"):
            return x * 2 if share > 0.1 else x

    shares = [torch.tensor(value) for value in (0.1, 0.2, 0.0)]
    parity(lambda: Program(step, lambda i: (torch.ones(3), shares[i % 3])), steps=6, captures=None)


def test_two_flags_and_a_limit():
    def step(x, on, off, count, limit):
        x = x * 2 if on & ~off else x
        return -x if count < limit else x

    def batch(i):
        return torch.ones(3), torch.tensor(i % 2 == 0), torch.tensor(i % 3 == 0), torch.tensor(i), torch.tensor(4)

    parity(lambda: Program(step, batch), steps=8, captures=None)


@pytest.mark.parametrize(
    ("function", "buffers"),
    [
        (get_ema_multi_avg_fn(0.9), False),
        (get_ema_multi_avg_fn(0.9), True),
        (get_swa_multi_avg_fn(), False),
        (None, False),
    ],
    ids=["ema", "ema_of_buffers", "swa_at_once", "swa"],
)
def test_averaged_weights(function, buffers):
    """``AveragedModel`` evaluates ``n_averaged == 0`` once, and ``n_averaged > 0`` in all later calls."""

    def make() -> Program:
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        average = AveragedModel(model, multi_avg_fn=function, use_buffers=buffers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            return loss.detach()

        return Program(step, batches((5, 6), classes=3), (model, average, optimizer))

    parity(make, steps=6, captures=3)


# ---------------------------------------------------------------------- conditions that the prologue cannot evaluate
def changed_after_it_was_asked(count):
    decided = count > 2
    decided.logical_not_()
    return decided


def changed_by_a_product(count):
    count.mul_(2)
    return count > 4


def changed_through_a_view(count):
    count.view(1).mul_(2)
    return count.detach() > 4


def of_a_fraction(count):
    return count > 2.5


def of_other_elements(count):
    return count.expand(3).sum() > 6


LEFT = (changed_after_it_was_asked, changed_by_a_product, changed_through_a_view, of_a_fraction, of_other_elements)


@pytest.mark.parametrize("decide", LEFT, ids=lambda decide: decide.__name__)
def test_left_to_a_break(decide):
    def make() -> Program:
        return trained(lambda model, x, y: F.cross_entropy(model(x), y), Counting(decide, False))

    report = parity(make, steps=7, captures=None, whole=False)
    assert {found.code for found in report.breaks} == {"SFX101"}


def test_asked_before_the_count_goes_on_and_looked_at_after():
    """A comparison keeps its value; a view of the count has the current one."""

    def make() -> Program:
        model, count = mlp(), torch.tensor(0)

        def loss_of(model, x, y):
            first, seen = count == 1, count.detach()
            count.add_(1)
            loss = F.cross_entropy(model(x), y)
            loss = loss * 2 if first else loss
            return loss * 3 if seen == 3 else loss

        return trained(loss_of, model, count)

    parity(make, steps=6, captures=None)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_of_a_count_are_rounded_as_the_kernel_does(dtype, backend):
    """Sums of fractions, and products."""

    def make():
        total, product, seen = torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype), []

        def step(x, factor):
            total.add_(0.1)
            product.mul_(factor)
            seen.append((total.item(), product.item()))
            return x * (1 - total.item()), x * (1 - product.item())

        return Program(step, lambda index: (torch.ones(3), 0.9 + index / 100), (total, product, seen))

    parity(make, steps=5, captures=2, backend=backend)


@pytest.mark.parametrize("foreach", [False, True])
def test_counters_that_an_optimizer_keeps_on_its_device(foreach, monkeypatch):
    """As on a GPU, where ASGD reads its state at every update, the first included."""
    monkeypatch.setattr(scalar_tensors, "_readable", scalar_tensors.is_read_on_host)

    def make():
        model = mlp()
        optimizer = torch.optim.ASGD(model.parameters(), lr=0.1, t0=2.0, foreach=foreach)

        def step(x, y):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

        return Program(step, batches((5, 6), classes=3), (model, optimizer))

    parity(make, steps=6, captures=None)


# ---------------------------------------------------------------------- numbers of copies that are written to


def _through_data(x):
    t = x.clone()
    t.data.mul_(3)
    return t.item() > 2 * x.item(), t


def _through_a_view(x):
    t = x.clone()
    t.view(1)[0] = 9.0
    return t.item(), t


def _detached(x):
    t = x.clone()
    u = t.detach()
    u.add_(1)
    v = t.clone()
    t.add_(1)
    return t.item(), u.item(), v.item()


def _several(x):
    t = x.clone()
    torch._foreach_add_([t, x], 1)
    torch._foreach_mul_([t], 5)
    return t.item(), x.item(), t


def _result(x):
    t = x + 1
    t.view(1).mul_(2)
    s = t * 3
    t.zero_()
    return s.item(), t.item(), t


def _bits(x):
    bits = x.view(torch.int32).item()
    t = x.clone()
    v = t.view(torch.int32)
    v.add_(1)
    x.view(torch.int32).add_(1)
    return bits, t.item(), v.item(), x.item()


def _written_constant(x):
    step = torch.tensor(2.0)
    step.view(1)[0] = 5.0
    torch._foreach_add_([x], step)
    return x.item()


def _read_between_writes(x):
    """Regression: ``x.data`` has a version counter of its own, by which fake tensors decide that they know a number."""
    total = torch.zeros(())
    data = total.data
    read = [data.item()]
    for _ in range(3):
        total.add_(x)
        read.append(data.item())
    return read


def _copied_to_itself(x):
    t = x.data
    x.add_(0.5)
    t.copy_(t)
    x.add_(t.item())
    return t.item(), x.item()


def _sizes_after_writes(x):
    t = torch.ones(4) * x
    data = t.data
    before = data.nonzero().shape[0], data.unique().shape[0], t[data > 0].shape[0]
    t.view(4)[:2] = torch.tensor([0.0, -1.0])
    return before, data.nonzero().shape[0], data.unique().shape[0], t[data > 0].shape[0]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "step",
    [_through_data, _through_a_view, _detached, _several, _result, _bits, _written_constant]
    + [_read_between_writes, _copied_to_itself, _sizes_after_writes],
)
def test_numbers_after_writes_through_other_tensors(step, backend):
    compiled = sidefx_train.compile(step, backend=backend, warmup="now", verify=0)
    for start in (3.0, 3.0, 4.5):
        ours, theirs = torch.tensor(start), torch.tensor(start)
        assert compiled(ours) == step(theirs)
        assert torch.equal(ours, theirs)
    assert compiled.report().replays == 3


def _counted(x):
    x.add_(1)
    x.sub_(3)
    return x.item(), x.item() > -1.9, x.clone()


def _copied_and_counted(x):
    t = x + 1
    return t.item(), t


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("step", [_counted, _copied_and_counted])
def test_sums_with_integers_are_rounded_as_the_kernel_does(step, backend):
    """Fractions, and integers that float32 does not have; small integers need no break."""
    compiled = sidefx_train.compile(step, backend=backend, warmup="now", verify=0)
    for start in (3.0, 2.0**24, 0.1, 2.0**24 - 2, 5.0, 0.3):
        assert compiled(torch.tensor(start)) == step(torch.tensor(start))
    assert compiled.report().replays == 6 and len(compiled.report().captures) <= 3


def _generated(x):
    """A linear congruential generator."""
    x.mul_(1103515245).add_(12345)
    t = x * 3 + 1
    return x.item(), t.item(), bool(t > 0), x.clone()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("step", [_counted, _copied_and_counted, _generated])
def test_integers_overflow_as_in_the_kernel(step, dtype, backend):
    compiled = sidefx_train.compile(step, backend=backend, warmup="now", verify=0)
    for start in (3, torch.iinfo(dtype).max, 5, torch.iinfo(dtype).min + 1, 2**30):
        assert compiled(torch.tensor(start, dtype=dtype)) == step(torch.tensor(start, dtype=dtype))
    assert compiled.report().replays == 5
