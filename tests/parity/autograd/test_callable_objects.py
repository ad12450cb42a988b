"""Objects with a ``__call__`` as hooks and as functions that torch calls: interpreted like functions, at each call."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn
from torch.autograd import graph
from torch.nn import functional as F

from tests.support.parity import Program, batches, parity

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")


class Scales:
    """Counts from an attribute of its class on, and reads another."""

    calls, factor = 0, 2.0

    def __call__(self, *given):
        self.calls += 1
        return given[0] * self.factor


class Looks(Scales):
    def __call__(self, *given):
        self.calls += 1


class ScalesTheGradient(Scales):
    def __call__(self, parameter):
        self.calls += 1
        parameter.grad.mul_(self.factor)


class Layer(nn.Module):
    calls, factor = 0, 2.0

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, x):
        self.calls = self.calls + 1
        return self.inner(x) * self.factor


def of_a_result(called, h, weight):
    h.register_hook(called)
    return h


def of_a_node(called, h, weight):
    h.grad_fn.register_hook(called)
    return h


def of_several(called, h, weight):
    graph.register_multi_grad_hook((h,), called)
    return h


def of_saved_tensors(called, h, weight):
    with graph.saved_tensors_hooks(called, called):
        return h.sin().exp()


def jacobian(called, h, weight):
    return h + torch.autograd.functional.jacobian(called, h, create_graph=True).sum()


def distance(called, h, weight):
    far = F.triplet_margin_with_distance_loss(h, h + 1, h - 1, distance_function=lambda a, b: called(a - b).sum(-1))
    return h + far


def distance_object(called, h, weight):
    return h + F.triplet_margin_with_distance_loss(h, h + 1, h - 1, distance_function=called)


INSIDE = {
    "result": (Scales, of_a_result),
    "node": (Looks, of_a_node),
    "several": (Looks, of_several),
    "saved tensors": (Scales, of_saved_tensors),
    "jacobian": (Scales, jacobian),
    "jacobian of a module": (Layer, jacobian),
    "distance": (Scales, distance),
    "distance of an object": (Scales, distance_object),
}
OUTSIDE = {
    "parameter": (Scales, lambda weight, called: weight.register_hook(called)),
    "accumulated": (ScalesTheGradient, lambda weight, called: weight.register_post_accumulate_grad_hook(called)),
}


def program(kind, use, register=None):
    def make() -> Program:
        layer, called = nn.Linear(3, 4), kind()
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        if register is not None:
            register(layer.weight, called)

        def step(x):
            loss = use(called, layer(x), layer.weight).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach(), called.calls

        return Program(step, batches((2, 3)), (layer, optimizer, called))

    return make


def another_factor(program, index):
    if index == 3:
        program.watch[2].factor = 3.0


@pytest.mark.parametrize("name", INSIDE)
def test_given_to_torch_by_the_step(name):
    parity(program(*INSIDE[name]), steps=6, captures=4, between=another_factor)


@pytest.mark.parametrize("name", OUTSIDE)
def test_registered_before_the_step(name):
    kind, register = OUTSIDE[name]
    parity(program(kind, lambda called, h, weight: h, register), steps=6, captures=4, between=another_factor)


def test_mocks_as_hooks():
    def make() -> Program:
        layer, seen = nn.Linear(3, 4), mock.Mock(return_value=None)
        layer.weight.register_hook(seen)
        layer.register_forward_hook(seen)

        def step(x):
            layer(x).sum().backward()
            return seen.call_count

        return Program(step, batches((2, 3)), (layer,))

    parity(make, steps=4, captures=None, whole=False)
