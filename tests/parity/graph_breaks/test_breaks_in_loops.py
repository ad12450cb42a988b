"""Breaks inside loops: the iterator goes on where the native instruction left it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.graph_breaks import in_parts, outside, trained
from tests.support.parity import Program, batches, parity

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")


@pytest.mark.parametrize("iterable", ["range", "list", "enumerate", "zip", "dict"])
@pytest.mark.every(2)
def test_break_inside_for(iterable):
    def items(state):
        names = state["names"]
        if iterable == "range":
            return range(3)
        if iterable == "list":
            return names
        if iterable == "enumerate":
            return enumerate(names)
        if iterable == "zip":
            return zip(names, range(3), strict=True)
        return {name: 1 for name in names}.items()

    def after(loss, log, state):
        total = 0.0
        for item in items(state):
            total += outside(loss)
            log.append((item, total))
        else:
            log.append("end")
        return loss * total

    in_parts(trained(after, lambda: {"calls": 0, "names": ["a", "b", "c"]}))


def test_break_in_a_loop_over_an_iterator_that_is_held():
    def after(loss, log, state):
        items = iter(state["names"])
        log.append(next(items))
        for item in items:
            for i in range(2):
                log.append((item, i, outside(loss)))
            if item == "b":
                break
        log.append(list(items))
        return loss

    in_parts(trained(after, lambda: {"calls": 0, "names": ["a", "b", "c", "d"]}))


@pytest.mark.parametrize("rounds", ["range", "enumerate", "tensors"])
def test_a_long_loop_with_a_break_shares_its_parts(rounds):
    def after(loss, log, state):
        total = loss
        for item in {"range": range(40), "enumerate": enumerate("x" * 40), "tensors": list(loss * torch.ones(40))}[
            rounds
        ]:
            total = total + (item if rounds == "tensors" else 1)
            log.append((item, outside(total)))
            total = total * 0.5
        return total

    report = in_parts(trained(after))
    assert sum(part.graph_count for part in report.parts) <= 8, [(p.name, p.graph_count) for p in report.parts]
    assert any(b.code == "SFX113" for part in report.parts for b in part.breaks)


def test_a_loop_over_modules_with_a_break():
    def make():
        layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(20))
        seen = []

        def step(x, y):
            with torch.no_grad():
                for layer in layers:
                    x = layer(x).relu()
                    seen.append(outside(x.sum()))
            return x

        return Program(step, batches((5, 6), classes=3), (layers, seen))

    in_parts(make)


def test_a_list_changed_while_it_is_walked_over():
    def after(loss, log, state):
        names = ["a", "b"]
        for name in names:
            log.append((name, outside(loss)))
            if len(names) < 4:
                names.append(name * 2)
        return loss

    in_parts(trained(after))


def test_epochs_over_minibatches_share_their_parts():
    """The variables of both loops are inputs from the start, and both loops go on natively once the inner one does."""

    def make() -> Program:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)

        def step(x, y):
            seen = []
            for epoch in range(4):
                stop = False
                for start in range(0, 16, 4):
                    error = model(x[start : start + 4]).squeeze(1) - y[start : start + 4]
                    distance = error.abs().mean().item()
                    seen.append((epoch, start, distance))
                    if distance > 1e3:
                        stop = True
                        break
                    loss = error.square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                if stop:
                    break
            return seen

        return Program(step, batches((16, 4), (16,)), (model, optimizer))

    report = parity(make, steps=4, captures=None, whole=False)
    assert report.graph_count <= 10, f"{report}"
