"""Python code in a backward outside reads the current state: hooks, and backwards of custom functions."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sidefx_train
from sidefx_train.errors import SideFXWarning

SCALE = 1.0


class Settings:
    scale = 1.0


class Slotted:
    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 1.0


class Scaled(torch.autograd.Function):
    """Its backward reads settings that the test changes."""

    @staticmethod
    def forward(ctx, x, settings):
        ctx.settings, ctx.factor = settings, 2.0
        return x * ctx.factor

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor * ctx.settings["scale"], None


class Model(nn.Module):
    def __init__(self, hook):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.hook, self.scale, self.scales, self.settings, self.slotted = hook, 1.0, [1.0], {"scale": 1.0}, Slotted()
        self._hidden, self.current = 1.0, torch.ones(2)

    @property
    def hidden(self):
        return self._hidden

    def by_method(self, grad):
        return grad * self.scale

    def plainly(self, grad):
        return grad.clamp(-0.5, 0.5) * 2

    def forward(self, x):
        y = self.linear(x)
        made = {"scale": 1.0}
        if self.hook == "custom function":
            y = Scaled.apply(y, self.settings)
        elif self.hook == "checkpoint":
            y = y + checkpoint(lambda: torch.tanh(self.linear(x)) * self.scale, use_reentrant=False)
        elif self.hook == "made in the step":
            y.register_hook(lambda grad: grad * made["scale"])
        else:
            y.register_hook(HOOKS[self.hook](self))
        return y * 2, made


def change(model, made):
    global SCALE
    SCALE += 1
    Settings.scale += 1
    model.scale += 1
    model.scales[0] += 1
    model.settings["scale"] += 1
    model.slotted.scale += 1
    model._hidden += 1
    model.current = model.current + 1
    model.training = not model.training
    made["scale"] += 1


def of_a_cell(model):
    factor = 1.0

    def hook(grad):
        return grad * factor

    factor = 3.0
    return hook


HOOKS = {
    "attribute": lambda model: lambda grad: grad * model.scale,
    "method": lambda model: model.by_method,
    "property": lambda model: lambda grad: grad * model.hidden,
    "slot": lambda model: lambda grad: grad * model.slotted.scale,
    "tensor attribute": lambda model: lambda grad: grad * model.current,
    "flag": lambda model: lambda grad: grad * 2 if model.training else grad,
    "list": lambda model: lambda grad: grad * model.scales[0],
    "iteration": lambda model: lambda grad: grad * sum(each for each in model.scales),
    "dict": lambda model: lambda grad: grad * list(model.settings.values())[0],
    "default": lambda model: lambda grad: grad * getattr(model, "missing", 1.0) * model.scale,
    "global": lambda model: lambda grad: grad * SCALE,
    "class attribute": lambda model: lambda grad: grad * Settings.scale,
    "nothing": lambda model: model.plainly,
    "cell": of_a_cell,
}


def history(run, model):
    global SCALE
    SCALE = Settings.scale = 1.0
    results = []
    for _ in range(3):
        output, made = run(torch.ones(4, 3))
        if model.hook != "checkpoint":  # a region must repeat its computation
            change(model, made)
        output.sum().backward()
        results.append([parameter.grad.tolist() for parameter in model.parameters()])
        model.zero_grad()
    return results


@pytest.mark.parametrize("hook", [*HOOKS, "custom function", "checkpoint", "made in the step"])
def test_a_model_compiled_alone(hook):
    results = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = Model(hook)
        run = sidefx_train.compile(model, backend="aot_eager") if compiles else model
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SideFXWarning)
            results.append(history(run, model))
    assert results[0] == results[1]
    report = run.report()
    assert report.replays == 3 and len(report.captures) == 1 and not report.fallbacks, str(report)


@pytest.mark.parametrize("kind", ["forward hook", "both hooks", "full hook", "pre-hook"])
@pytest.mark.every(2)
def test_module_hooks_around_a_break(kind):
    def made():
        torch.manual_seed(0)
        model, log = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2)), []

        def forward_hook(module, args, output):
            os.times()
            log.append("forward")

        def backward_hook(module, grad_input, grad_output):
            if kind == "both hooks":
                os.times()
            log.append([grad if grad is None else grad.tolist() for grad in (*grad_input, *grad_output)])

        for layer in (model[0], model[2]):
            if kind != "full hook":
                layer.register_forward_hook(forward_hook)
            if kind == "pre-hook":
                layer.register_full_backward_pre_hook(lambda module, grads: log.append(grads[0].tolist()))
            else:
                layer.register_full_backward_hook(backward_hook)

        def step(x):
            model(x).pow(2).sum().backward()
            grads = [parameter.grad.tolist() for parameter in model.parameters()]
            model.zero_grad()
            return grads, log[-4:]

        return step

    def run(step):
        generator = torch.Generator().manual_seed(0)
        return [step(torch.randn(4, 3, generator=generator)) for _ in range(3)]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        found = run(sidefx_train.compile(made(), backend="eager"))
    assert found == run(made())
