"""Hooks on tensors, modules and optimizers, and their side effects."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from tests.support.parity import Program, batches, mlp, parity


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_tensor_hook_on_an_intermediate(backend):
    """The hook appends the gradient's norm to a list and halves the gradient; a counter is read next step."""

    def make() -> Program:
        first, second = nn.Linear(6, 8), nn.Linear(8, 3)
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        norms: list[torch.Tensor] = []
        state = {"calls": 0}

        def step(x, y):
            hidden = torch.relu(first(x))

            def halve(grad):
                norms.append(grad.norm())
                state["calls"] += 1
                return grad * 0.5

            hidden.register_hook(halve)
            loss = F.cross_entropy(second(hidden) * (1 + state["calls"]), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return Program(step, batches((5, 6), classes=3), (first, second, optimizer, norms, state))

    parity(make, backend=backend)


def test_hook_removed_inside_the_step():
    def make() -> Program:
        first, second = nn.Linear(6, 8), nn.Linear(8, 3)
        seen: list[str] = []

        def step(x, y):
            hidden = torch.relu(first(x))
            handle = hidden.register_hook(lambda grad: seen.append("removed"))
            hidden.register_hook(lambda grad: seen.append("kept"))
            handle.remove()
            loss = F.cross_entropy(second(hidden), y)
            loss.backward()
            first.zero_grad(), second.zero_grad()
            return loss.detach()

        return Program(step, batches((5, 6), classes=3), (first, second, seen))

    parity(make)


def test_module_hooks():
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        log: list[object] = []
        model[0].register_forward_pre_hook(lambda module, args: log.append("pre"))
        model[0].register_forward_hook(lambda module, args, out: log.append(("forward", out.shape[0])))
        model[0].register_forward_hook(lambda module, args, out: out * 2)
        model[3].register_full_backward_hook(lambda module, gin, gout: log.append(gout[0].norm()))
        model[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        model[0].bias.register_post_accumulate_grad_hook(lambda p: log.append("accumulated"))

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return Program(step, batches((5, 6), classes=3), ([*model.parameters()], optimizer, log))

    parity(make)


def test_optimizer_step_hooks():
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        log: list[str] = []
        optimizer.register_step_pre_hook(lambda o, args, kwargs: log.append("before"))
        optimizer.register_step_post_hook(lambda o, args, kwargs: log.append("after"))

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return Program(step, batches((5, 6), classes=3), ([*model.parameters()], log))

    parity(make)


def test_effects_in_a_submodule():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()
            self.calls = 0
            self.outputs = []
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            self.calls += 1
            self.seen += x.shape[0]
            out = self.body(x)
            self.outputs.append(out.detach().mean())
            return out

    def make() -> Program:
        model = Counting()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return Program(step, batches((5, 6), classes=3), (model, optimizer))

    parity(make)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.filterwarnings("ignore::sidefx_train.SideFXWarning")
def test_hook_on_a_leaf_that_leaves_the_step(register):
    """Regression: the leaf left the step without its hook."""

    def step(calls):
        leaf = torch.zeros(2, requires_grad=True)
        getattr(leaf, register)(lambda *_: calls.append(1))
        return leaf

    calls: list[int] = []
    for run in (step, sidefx_train.compile(step, backend="eager")):
        run(calls).sum().backward()
    assert calls == [1, 1]
