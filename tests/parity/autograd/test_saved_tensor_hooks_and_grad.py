"""Hooks on saved tensors and nodes, and ``torch.autograd.grad``, inside a step."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tests.support.parity import Program, batches, mlp, parity
from tests.support.training_steps import trained


def test_saved_tensors_hooks():
    def make() -> Program:
        packed = {"pack": 0, "unpack": 0}

        def pack(tensor):
            packed["pack"] += 1
            return (tensor, 2)

        def unpack(pair):
            packed["unpack"] += 1
            return pair[0]

        def loss(model, x, y):
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                return F.cross_entropy(model(x), y)

        return trained(loss, None, packed)

    parity(make, steps=4, captures=2)


def test_save_on_cpu():
    def loss(model, x, y):
        with torch.autograd.graph.save_on_cpu():
            return F.cross_entropy(model(x), y)

    parity(lambda: trained(loss), steps=4)


def test_node_hook():
    def make() -> Program:
        log = []

        def loss(model, x, y):
            hidden = model(x)
            hidden.grad_fn.register_hook(lambda inputs, outputs: log.append(len(inputs)))
            hidden.register_hook(lambda grad: grad * 2)
            return F.cross_entropy(hidden, y)

        return trained(loss, None, log)

    parity(make, steps=4)


# ---------------------------------------------------------------------- torch.autograd.grad
def penalty(model, x, y):
    x = x.clone().requires_grad_()
    loss = F.cross_entropy(model(x).tanh(), y)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + grad.pow(2).sum()


def test_gradient_penalty():
    parity(lambda: trained(penalty), steps=4)


def test_grad_by_hand():
    def make() -> Program:
        model = mlp()

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            grads = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, grad in zip(model.parameters(), grads):
                    p -= 0.1 * grad
            return loss.detach()

        return Program(step, batches((5, 6), classes=3), (model,))

    parity(make, steps=4)


def test_grad_of_unused():
    def loss(model, x, y):
        loss = F.cross_entropy(model(x), y)
        extra = torch.zeros(2, requires_grad=True)
        none, grad = torch.autograd.grad(loss, [extra, model[0].weight], allow_unused=True, retain_graph=True)
        assert none is None
        return loss + grad.pow(2).sum().detach()

    parity(lambda: trained(loss), steps=4)
