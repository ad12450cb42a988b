"""Hooks of the nodes that accumulate gradients, and the order in which hooks of parameters are called."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import graph

import sidefx_train

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")


def by_edge(p):
    return graph.get_gradient_edge(p).node


def by_view(p):
    return p.expand_as(p).grad_fn.next_functions[0][0]


def several(m, log, _):
    return graph.register_multi_grad_hook(list(m.parameters()), lambda grads: log.append(len(grads)))


def any_of_several(m, log, _):
    return graph.register_multi_grad_hook(list(m.parameters()), lambda grad: log.append(grad.shape), mode="any")


def in_front(m, log, node_of):
    node = node_of(m[0].weight)
    log.append(node)
    return node.register_prehook(lambda grads: (grads[0] * 0.5,))


def behind(m, log, node_of):
    node, weight = node_of(m[0].weight), m[0].weight
    log.append(node)
    return node.register_hook(lambda _, grads: log.append((grads[0].sum().item() > 0, weight.grad is not None)))


def train(wrap, register, node_of, when):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer, log, handles, losses = torch.optim.SGD(model.parameters(), lr=0.1), [], [], []

    def step(x, turn):
        if when == "inside" and turn == 0:
            handles.append(register(model, log, node_of))
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    call = wrap(step)
    if when == "before":
        handles.append(register(model, log, node_of))
    for turn in range(5):
        if when == "between" and turn == 2:
            handles.append(register(model, log, node_of))
        if turn == 4:
            handles[0].remove()
        losses.append(float(call(torch.randn(3, 4), turn)))
    return losses, [entry for entry in log if not hasattr(entry, "next_functions")], call


@pytest.mark.parametrize("when", ["before", "between", "inside"])
@pytest.mark.parametrize("node_of", [by_edge, by_view])
@pytest.mark.parametrize("register", [several, any_of_several, in_front, behind])
@pytest.mark.covering(1)
def test_hooks_are_called(register, node_of, when):
    want = train(lambda fn: fn, register, node_of, when)
    have = train(lambda fn: sidefx_train.compile(fn, backend="eager"), register, node_of, when)
    assert want[:2] == have[:2]
    if register is not any_of_several and when != "inside":
        assert have[2].report().fallback_count == 0 and not have[2].report().breaks, "captured whole"


def test_hooks_die_with_their_node():
    def run(wrap):
        weight, log = nn.Parameter(torch.ones(3)), []

        def step(x):
            weight.grad = None
            (weight * x).sum().backward()
            return weight.grad.clone()

        call, seen = wrap(step), []
        node = by_edge(weight)
        node.register_prehook(lambda grads: log.append("hook") or (grads[0] * 2,))
        for turn in range(5):
            if turn == 3:
                del node
            seen.append(call(torch.full((3,), 1.0 + turn)).tolist())
        return seen, log

    assert run(lambda fn: fn) == run(lambda fn: sidefx_train.compile(fn, backend="eager"))


def test_other_hooks_cause_no_recapture():
    weight = nn.Parameter(torch.ones(3))
    call = sidefx_train.compile(lambda x: (weight * x).sum().backward(), backend="eager")
    for _ in range(6):
        weight.grad = None
        call(torch.ones(3))
        other = torch.ones(2, requires_grad=True).sin()
        other.grad_fn.register_hook(lambda *grads: None)
        other.sum().backward()
    assert call.report().graph_count == 1 and call.report().replays == 6


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x):
        h = torch.tanh(self.a(self.norm(x)))
        return self.b(h) @ self.a.weight + self.norm(self.b(h.sin()))


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook", "node"])
@pytest.mark.parametrize("whole", [False, True], ids=["model alone", "over a break"])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.covering(1)
def test_hooks_run_in_eager_order(kind, whole, backend):
    def run(wrap):
        torch.manual_seed(0)
        model, log, kept = Tied(), [], []
        for name, p in model.named_parameters():
            if kind == "node":
                kept.append(by_edge(p))
                kept[-1].register_hook(lambda *_, name=name: log.append(name))
            else:
                getattr(p, kind)(lambda value, name=name: log.append(name))

        def step(x):
            out = model(x).sum()
            if float(out.detach()) < 1e9:
                log.append("break")
            out.backward()

        if whole:
            call = wrap(step)
        else:
            inner = wrap(model)

            def call(x):
                inner(x).sum().backward()

        for _ in range(2):
            call(torch.ones(2, 4))
        return log

    assert run(lambda fn: fn) == run(lambda fn: sidefx_train.compile(fn, backend=backend))


def test_hooks_that_read_other_gradients():
    """As in training without stored gradients: each update depends on the norms of all gradients before it."""

    def run(wrap):
        torch.manual_seed(0)
        model, total = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), [0.0]

        def hook(p):
            total[0] += float(p.grad.norm())
            p.data.add_(p.grad, alpha=-0.1 / total[0])
            p.grad = None

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(hook)
        wrap(model)(torch.ones(5, 3)).square().sum().backward()
        return [p.detach().clone() for p in model.parameters()]

    for a, b in zip(run(lambda fn: fn), run(lambda fn: sidefx_train.compile(fn, backend="eager")), strict=True):
        assert torch.equal(a, b)
