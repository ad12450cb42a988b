"""Writes whose operands overlap: eager's error, or the result of eager's kernel; never that of a functional graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sidefx_train
from sidefx_train.errors import SideFXWarning

pytestmark = pytest.mark.filterwarnings(f"ignore::{SideFXWarning.__module__}.{SideFXWarning.__qualname__}")


def fresh():
    return torch.arange(12.0).view(4, 3)


def square(x):
    return x.view(-1)[:9].view(3, 3)


LEFT_TO_EAGER = {
    "a row": lambda x: x.add_(x[1]),
    "shifted": lambda x: x[1:].add_(x[:-1]),
    "shifted columns": lambda x: x[:, :2].mul_(x[:, 1:]),
    "assigned": lambda x: x[1:].copy_(x[:-1]),
    "transposed": lambda x: square(x).copy_(square(x).t()),
    "expanded": lambda x: x[0].expand(2, 3).add_(1),
    "expanded and filled": lambda x: x[0].expand(2, 3).fill_(1),
    "windows": lambda x: x.view(-1).unfold(0, 2, 1).mul_(2),
    "its own source": lambda x: x.index_add_(0, torch.tensor([0, 1, 2, 3]), x),
    "matrix product": lambda x: torch.mm(square(x), square(x), out=square(x)),
    "product of what is written": lambda x: torch.addmm(square(x), square(x), square(x), out=square(x)),
    "in a list": lambda x: torch._foreach_add_([x[1:]], [x[:-1]]),
    "several at once, with a factor": lambda x: torch._foreach_addcmul_([x[0], x[:2]], [x[1], x[:2]], [x[1], x[:2]]),
    "in another type": lambda x: x.view(-1)[1:4].copy_(x.view(torch.int32).view(-1)[:3]),
}
CAPTURED = {
    "itself": lambda x: x.add_(x),
    "itself as a view": lambda x: x.add_(x.view(4, 3)),
    "other rows": lambda x: x[2:].copy_(x[:2]),
    "other columns": lambda x: x[:, ::2].mul_(x[:, 1:2]),
    "into itself": lambda x: torch.sin(x, out=x),
    "product added to what is written": lambda x: torch.addmm(x, torch.eye(4), fresh(), beta=0.5, out=x),
    "products of a batch": lambda x: torch.baddbmm(x[None], torch.eye(4)[None], fresh()[None], beta=0.0, out=x[None]),
    "vector added to what is written": lambda x: torch.addmv(x[0], torch.eye(3), x[1], out=x[0]),
    "several at once": lambda x: torch._foreach_add_([x[0], x[:2]], 1),
    "one read by the next": lambda x: torch._foreach_mul_([x[0], x[1]], [x[1], x[0]]),
    "several without overlap": lambda x: torch._foreach_mul_([x[0], x[1]], [x[0], x[2]]),
}


def outcome(call, x):
    try:
        call(x)
    except RuntimeError as error:
        return str(error), x
    return "", x


def compared(write, backend):
    def step(x):
        write(x)
        return x.sum()

    call = sidefx_train.compile(step, backend=backend)
    for _ in range(2):
        want, have = outcome(step, fresh()), outcome(call, fresh())
        assert want[0] == have[0] and torch.equal(want[1], have[1])
    return call.report()


@pytest.mark.parametrize("name", LEFT_TO_EAGER)
def test_an_order_of_elements_is_left_to_eager(name):
    assert {item.code for item in compared(LEFT_TO_EAGER[name], "aot_eager").breaks} == {"SFX108"}


@pytest.mark.parametrize("name", CAPTURED)
def test_elements_on_their_own_are_captured(name):
    report = compared(CAPTURED[name], "aot_eager")
    assert report.replays == 2 and not report.breaks and not report.fallbacks


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_arguments_that_overlap(backend):
    def step(x, y):
        x.add_(y)
        return x.sum()

    call = sidefx_train.compile(step, backend=backend)
    for part in (lambda x: x[1], lambda x: x[1].clone(), lambda x: x):
        (a, b) = fresh(), fresh()
        assert outcome(lambda x: step(x, part(x)), a)[0] == outcome(lambda x: call(x, part(x)), b)[0]
        assert torch.equal(a, b)


def test_sizes_that_change_are_guarded():
    def step(x, n):
        x[:n].mul_(x[-2:].sum(0))
        x[:2].add_(x[-2:])
        return x.sum()

    call = sidefx_train.compile(step, backend="aot_eager")
    for rows in (4, 5, 6, 3, 7, 2):
        (a, b) = (torch.arange(3.0 * rows).view(rows, 3) for _ in range(2))
        assert outcome(lambda x: step(x, 2), a)[0] == outcome(lambda x: call(x, 2), b)[0]
        assert torch.equal(a, b)
    assert call.report().replays > 0


@pytest.mark.parametrize(
    ("backend", "when"),
    [
        pytest.param(backend, when, marks=pytest.mark.slow if backend == "inductor" and when != 1 else ())
        for backend in ("eager", "aot_eager", "inductor")
        for when in (0, 1, 2)
    ],
)
def test_a_parameter_comes_to_share_the_memory_of_what_is_read(backend, when):
    """``parameter.data = tensor`` between two calls: a tensor read after the update must still be read after it."""

    def course(compiled):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = {"shown": torch.ones(2), "sum": None}

        def step(x):
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            state["sum"] = state["shown"].sum()
            return loss.detach()

        run = sidefx_train.compile(step, backend=backend) if compiled else step
        seen = []
        for call in range(5):
            if call >= when:
                model.bias.data = state["shown"]
            seen.append((run(torch.ones(4, 3)), state["sum"].clone(), state["shown"].clone()))
        return seen

    torch.testing.assert_close(course(True), course(False))
