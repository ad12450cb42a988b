"""Connectionist temporal classification is part of the graph, whichever form its lengths have."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train

TIME, BATCH, CLASSES, LONGEST = 30, 4, 12, 9
INPUTS, LENGTHS = [30, 25, 28, 30], [9, 4, 1, 7]


@pytest.fixture
def given():
    torch.manual_seed(0)
    net = nn.Linear(6, CLASSES).double()
    return net, torch.randn(TIME, BATCH, 6).double(), torch.randint(1, CLASSES, (BATCH, LONGEST))


def flat(targets, lengths=LENGTHS):
    return torch.cat([row[:n] for row, n in zip(targets, lengths, strict=True)])


CALLS = {
    "tensors": lambda lp, t: F.ctc_loss(lp, t, torch.tensor(INPUTS), torch.tensor(LENGTHS)),
    "small integers": lambda lp, t: F.ctc_loss(lp, t.int(), torch.tensor(INPUTS).int(), torch.tensor(LENGTHS).int()),
    "lists": lambda lp, t: F.ctc_loss(lp, t, INPUTS, LENGTHS),
    "tuples by name": lambda lp, t: F.ctc_loss(lp, t, target_lengths=tuple(LENGTHS), input_lengths=tuple(INPUTS)),
    "targets in a row": lambda lp, t: F.ctc_loss(lp, flat(t), torch.tensor(INPUTS), torch.tensor(LENGTHS)),
    "in a row, and lists": lambda lp, t: F.ctc_loss(lp, flat(t), INPUTS, LENGTHS, reduction="sum"),
    "each": lambda lp, t: F.ctc_loss(lp, t, INPUTS, LENGTHS, reduction="none").square().sum(),
    "another blank": lambda lp, t: F.ctc_loss(lp, t - 1, torch.tensor(INPUTS), torch.tensor(LENGTHS), CLASSES - 1),
    "infinite": lambda lp, t: F.ctc_loss(lp, t, [30, 25, 28, 2], LENGTHS, zero_infinity=True),
    "a module": lambda lp, t: nn.CTCLoss(zero_infinity=True)(lp, t, torch.tensor(INPUTS), torch.tensor(LENGTHS)),
    "one sequence": lambda lp, t: F.ctc_loss(lp[:, 0], t[0], torch.tensor(30), torch.tensor(9)),
    "torch's own": lambda lp, t: torch.ctc_loss(lp, t, INPUTS, LENGTHS, 0, 1, False),
}


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.every(3)
def test_losses_and_gradients(name, backend, given):
    net, x, targets = given

    def step():
        net.zero_grad()
        loss = CALLS[name](net(x).log_softmax(-1), targets)
        loss.backward()
        return loss.detach()

    want = [step(), *(p.grad.clone() for p in net.parameters())]
    compiled = sidefx_train.compile(step, backend=backend, fullgraph=True)
    for _ in range(2):
        have = [compiled(), *(p.grad for p in net.parameters())]
        for a, b in zip(have, want, strict=True):
            torch.testing.assert_close(a, b, **({"rtol": 0, "atol": 0} if backend == "eager" else {}))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("in_a_row", [False, True], ids=["", "targets in a row"])
def test_lengths_in_tensors_change_without_a_capture(backend, in_a_row, given):
    net, x, targets = given

    def step(t, lengths):
        loss = F.ctc_loss(net(x).log_softmax(-1), t, torch.tensor(INPUTS), lengths)
        return loss, *torch.autograd.grad(loss, list(net.parameters()))

    compiled = sidefx_train.compile(step, backend=backend, fullgraph=True)
    for lengths in ([9, 4, 1, 7], [1, 1, 2, 1], [8, 9, 9, 9], [5, 5, 6, 5]):
        t = flat(targets, [5, 5, 6, 5]) if in_a_row else targets
        used = [5, 5, 6, 5] if in_a_row and sum(lengths) != 21 else lengths
        for a, b in zip(compiled(t, torch.tensor(used)), step(t, torch.tensor(used)), strict=True):
            torch.testing.assert_close(a, b)
    assert len(compiled.report().captures) == 1


def test_a_tensor_and_a_list_are_refused_as_in_eager(given):
    net, x, targets = given

    def step():
        return F.ctc_loss(net(x).log_softmax(-1), targets, torch.tensor(INPUTS), LENGTHS)

    with pytest.raises(TypeError, match="invalid combination of arguments"):
        sidefx_train.compile(step)()


@pytest.mark.slow
def test_lengths_in_lists_that_change(given):
    net, x, targets = given
    compiled = sidefx_train.compile(lambda lengths: F.ctc_loss(net(x).log_softmax(-1), targets, INPUTS, lengths))
    for lengths in ([9, 4, 1, 7], [1, 1, 2, 1], [9, 4, 1, 7]):
        torch.testing.assert_close(compiled(lengths), F.ctc_loss(net(x).log_softmax(-1), targets, INPUTS, lengths))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_lengths_that_are_refused_raise_before_anything_is_written(backend, given):
    net, x, targets = given
    seen = torch.zeros(())

    def step(lengths):
        seen.add_(1)
        loss = F.ctc_loss(net(x).log_softmax(-1), targets, torch.tensor(INPUTS), lengths)
        loss.backward()
        return loss.detach()

    compiled = sidefx_train.compile(step, backend=backend, fullgraph=True)
    compiled(torch.tensor(LENGTHS))
    with pytest.raises(RuntimeError) as told:
        step(torch.tensor([LONGEST + 1, 1, 1, 1]))
    assert seen == 2
    before = [p.grad.clone() for p in net.parameters()]
    with pytest.raises(RuntimeError) as have:
        compiled(torch.tensor([LONGEST + 1, 1, 1, 1]))
    assert str(have.value) == str(told.value) and seen == 3
    assert all(torch.equal(p.grad, b) for p, b in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_of_lengths_that_change_are_one_graph(kind, backend):
    def step(x, targets, lengths, target_lengths):
        x = x.clone().requires_grad_()
        loss = F.ctc_loss(x.log_softmax(2), targets, lengths, target_lengths)
        loss.backward()
        return x.grad, loss.detach()

    compiled = sidefx_train.compile(step, backend=backend, fullgraph=True, keep_slower=True)
    torch.manual_seed(0)
    for i in range(6):
        lengths = kind([10 - i % 3, 9 - i % 4, 10]), kind([3 + i % 2, 4, 5 - i % 3])
        x, targets = torch.randn(10, 3, 6), torch.randint(1, 6, (3, 5))
        torch.testing.assert_close(compiled(x, targets, *lengths), step(x, targets, *lengths))
    assert len(compiled.report().captures) <= 2
