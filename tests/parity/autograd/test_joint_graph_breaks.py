"""Breaks before the backward: autograd flows through the parts of the step."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import sidefx_train
from tests.support.graph_breaks import outside
from tests.support.parity import Program, batches, mlp, parity

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")


def broken_step(forward):
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        log: list[object] = []

        def step(x, y):
            log.append("start")
            loss = forward(model, x, y, log)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.append("end")
            return loss.detach()

        return Program(step, batches((5, 6), classes=3), (model, optimizer, log))

    return make


def _break_on_loss(model, x, y, log):
    loss = F.cross_entropy(model(x), y)
    if loss > 1.05:
        log.append("high")
        loss = loss * 2
    return loss


def _break_in_the_middle(model, x, y, log):
    hidden = model[0](x)
    log.append(outside(hidden.sum()))
    for layer in list(model)[1:]:
        hidden = layer(hidden)
    return F.cross_entropy(hidden, y)


@pytest.mark.parametrize("forward", [_break_on_loss, _break_in_the_middle])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_autograd_flows_through_breaks(forward, backend):
    report = parity(broken_step(forward), whole=False, captures=None, backend=backend)
    assert report.breaks and report.fallback_count == 0, str(report)
    for part in report.parts:
        assert part.fallback_count == 0, str(part)
    assert report.graph_count >= 3, str(report)


def test_autograd_flows_through_breaks_under_inductor():
    report = parity(broken_step(_break_in_the_middle), whole=False, captures=None, backend="inductor", steps=4)
    assert report.breaks and report.fallback_count == 0, str(report)


def test_gradients_are_added_before_they_are_differentiated():
    """Regression: blocks whose attention is kept beyond the break. What the parts of the backward that begin at shared
    values share in turn, ``x.tanh()``, was differentiated once for each."""

    def make() -> Program:
        torch.manual_seed(0)
        weights = [torch.randn(8, 8, requires_grad=True) for _ in range(2)]
        kept: list[torch.Tensor] = []

        def block(x, weight):
            hidden = x @ weight
            attention = hidden.softmax(-1)
            kept.append(attention)
            return attention * hidden + x

        def step(x):
            kept.clear()
            found = block(block(x.tanh(), weights[0]), weights[1])
            outside(0)
            found.square().mean().backward()
            kept[:] = [each.detach() for each in kept]

        return Program(step, lambda i: tuple(t.requires_grad_() for t in batches((16, 6, 8))(i)), weights)

    report = parity(make, whole=False, captures=None, steps=3)
    assert report.breaks and report.fallback_count == 0, str(report)


def _hook_behind_a_break(x, w, log):
    hidden = x * w
    loss = (hidden * hidden).sum()
    if x.sum() > 100:
        log.append("high")
    hidden.register_hook(lambda grad: log.append(grad.sum().item()) or grad * 2)
    loss.backward()


def _retained_behind_a_break(x, w, log):
    hidden = x * w
    if x.sum() > 100:
        log.append("high")
    hidden.retain_grad()
    log.append(hidden.retains_grad)
    (hidden * hidden).sum().backward()
    log.append(hidden.grad.tolist())


def _retained_before_a_break(x, w, log):
    hidden = x * w
    hidden.retain_grad()
    (hidden * hidden).sum().backward()
    if x.sum() > 100:
        log.append("high")
    log.append(hidden.grad.tolist())
    hidden.grad = None
    if x.sum() > 101:
        log.append("higher")
    log.append(hidden.grad)


def _hook_removed_behind_a_break(x, w, log):
    hidden = x * w
    if x.sum() > 100:
        log.append("high")
    handle = hidden.register_hook(lambda grad: log.append("never") or grad * 2)
    loss = (hidden * hidden).sum()
    handle.remove()
    loss.backward()


@pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")
@pytest.mark.parametrize(
    "step",
    [_hook_behind_a_break, _retained_behind_a_break, _retained_before_a_break, _hook_removed_behind_a_break],
)
def test_watching_gradients_across_breaks(step):
    def states(compiled):
        w = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        run = sidefx_train.compile(step, backend="eager") if compiled else step
        log: list[object] = []
        for value in (0.5, 0.25, 50.0):
            w.grad = None
            run(torch.full((3,), value), w, log)
            log.append(w.grad.tolist())
        if compiled:
            assert run.report().replays == 3, run.report()
        return log

    assert states(True) == states(False)
