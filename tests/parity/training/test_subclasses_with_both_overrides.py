"""Tensor subclasses with a ``__torch_dispatch__`` and a ``__torch_function__``: weights for quantized training."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import sidefx_train
from tests.support.parity import Program, parity
from tests.support.tensor_subclasses import Pair, pair

aten = torch.ops.aten
TOLD: list[str] = []
"""Functions that :class:`Weight` was told of."""
SETTINGS = {"notes": False, "factor": 2.0}
"""Whether it notes them, and what :class:`TimesInput` multiplies with."""


def name_of(func):
    owner = getattr(func, "__self__", None)
    return f"{getattr(owner, '__name__', '')} {func.__name__}"


class TimesInput(torch.autograd.Function):
    """A linear layer that multiplies its input with a number."""

    @staticmethod
    def forward(ctx, x, weight, bias=None):
        held = weight.held if isinstance(weight, Weight) else weight
        ctx.factor = SETTINGS["factor"]
        ctx.save_for_backward(x, held)
        return (x * ctx.factor) @ held.t() + (0 if bias is None else bias)

    @staticmethod
    def backward(ctx, gradient):
        x, held = ctx.saved_tensors
        return (gradient @ held) * ctx.factor, gradient.t() @ (x * ctx.factor), gradient.sum(0)


class Weight(torch.Tensor):
    """A weight whose linear layers are computed by :class:`TimesInput`."""

    @staticmethod
    def __new__(cls, held):
        layout = (held.shape, held.stride(), held.storage_offset())
        return torch.Tensor._make_wrapper_subclass(cls, *layout, dtype=held.dtype, device=held.device)

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if SETTINGS["notes"]:
            TOLD.append(name_of(func))
        if func is F.linear:
            return TimesInput.apply(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def inner(value):
            return value.held if isinstance(value, Weight) else value

        made = func(*pytree.tree_map(inner, args), **pytree.tree_map(inner, kwargs or {}))
        if func is aten.copy_.default:
            return args[0]
        if func in (aten.t.default, aten.detach.default, aten.clone.default, aten.empty_like.default):
            return pytree.tree_map_only(torch.Tensor, Weight, made)
        return made


def model_of_weights():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(Weight(layer.weight.detach()))
    return model


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "adamw_foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
}


def training(optimizer):
    """Returns a factory of a step that returns what its weights were told of."""

    def make():
        model = model_of_weights()
        updates = OPTIMIZERS[optimizer](model.parameters())

        def step(x):
            TOLD.clear()
            updates.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            updates.step()
            return loss.detach(), list(TOLD)

        return Program(step, lambda index: (torch.randn(5, 4),), (model, updates))

    return make


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training(optimizer, backend):
    parity(training(optimizer), steps=4, captures=2, backend=backend)  # without gradients, and with them


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_it_is_told_of(optimizer, monkeypatch):
    monkeypatch.setitem(SETTINGS, "notes", True)
    parity(training(optimizer), steps=4, captures=None)  # how long the list is at first is a guard


def test_what_its_python_reads_is_guarded(monkeypatch):
    def change(made, index):
        monkeypatch.setitem(SETTINGS, "factor", 1.0 + index // 2)

    parity(training("sgd"), steps=6, captures=3, between=change)


def test_another_function_between_calls(monkeypatch):
    def other(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    weight = nn.Parameter(Weight(torch.randn(3, 4)))
    step = sidefx_train.compile(lambda x: F.linear(x, weight), backend="eager")
    x = torch.randn(5, 4)
    for _ in range(2):
        assert torch.equal(step(x), (x * 2) @ weight.held.t())
    monkeypatch.setattr(Weight, "__torch_function__", classmethod(other))
    for _ in range(2):
        assert torch.equal(step(x), x @ weight.held.t())


class Delegating(Pair):
    """Told of every function, and calls that of its base class."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        TOLD.append(name_of(func))
        return super().__torch_function__(func, types, args, kwargs or {})


def told_of(x):
    TOLD.clear()
    y = torch.relu(x + 1).sum(0)
    made = Delegating(y.a, y.b)
    return made * 2, y.shape, made.requires_grad, list(TOLD)


def test_the_function_of_the_base_class():
    made = lambda: Program(told_of, lambda index: (pair(3, 3, seed=index, cls=Delegating),))  # noqa: E731
    parity(made, steps=3, captures=1)


def overridden(x, y):
    ask = torch.overrides.has_torch_function
    unary, variadic = torch.overrides.has_torch_function_unary, torch.overrides.has_torch_function_variadic
    with torch._C.DisableTorchFunctionSubclass():
        off = ask((x, y)), unary(x), variadic(y, x)
    return ask((x, y)), ask([y]), unary(x), unary(y), variadic(y, x), off


def test_whether_a_class_overrides_functions():
    made = lambda: Program(overridden, lambda index: (pair(3, 3, cls=Delegating), torch.ones(2)))  # noqa: E731
    parity(made, steps=3, captures=1)


def test_a_backward_outside_runs_eagerly():
    model, x = model_of_weights(), torch.randn(5, 4)
    step = sidefx_train.compile(lambda x: model(x).sum(), backend="eager")
    found = []
    for run in (step, lambda x: model(x).sum()):
        model.zero_grad()
        run(x).backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *found))
    assert {each.code for each in step.report().fallbacks} == {"SFX107"}
