"""User attributes that steps set, read and delete on tensors from outside."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
from torch import nn

import sidefx_train
from sidefx_train.errors import SideFXWarning


def set_again(model, x, log):
    model.weight.seen = x.sum()
    model.weight.count = 3
    return model(x)


def counted(model, x, log):
    for parameter in model.parameters():
        parameter.count = getattr(parameter, "count", 0) + 1
        log.append(parameter.count)
    return model(x)


def branched(model, x, log):
    if hasattr(model.weight, "flag") and model.weight.flag:
        x = x * 2
    return model(x)


def deleted(model, x, log):
    model.weight.first, model.weight.second = 1, 2
    model.weight.third = [1]
    del model.weight.first
    if hasattr(model.weight, "flag"):
        del model.weight.flag
    try:
        del model.weight.missing
    except AttributeError:
        log.append("missing")
    model.weight.first = 4
    return x


def on_an_argument(model, x, log):
    x.tag = ["a", model]
    x.tag.append(x)
    log.append(x.tag[1] is model and x.tag[2] is x)
    return x * 2


def lists(model, x, log):
    model.weight.history.append(len(model.weight.history))
    model.weight.partner = model.bias
    log.append(model.weight.partner is model.bias)
    return x


def over_breaks(model, x, log):
    model.weight.seen = x * 2
    os.times()
    log.append(model.weight.seen.sum().item())
    model.weight.seen = model.weight.seen + 1
    os.times()
    del model.weight.history
    return x


def by_a_hook(model, x, log):
    for parameter in model.parameters():
        parameter.sample = None
    model(x).pow(2).sum().backward()
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.sub_(0.1 * parameter.sample)
    model.zero_grad()
    return x


def with_a_history(model, x, log):
    model.weight.penalty = model.weight.pow(2).sum()
    loss = model(x).sum() + model.weight.penalty
    loss.backward()
    model.weight.penalty = model.weight.penalty.detach()
    return loss.detach()


def taken_back(model, x, log):
    before = model.weight.history
    model.weight.history = 5
    model.weight.history = before
    return x


STEPS = (
    set_again, counted, branched, deleted, on_an_argument, lists, over_breaks, by_a_hook, with_a_history, taken_back,
)  # fmt: skip


def _shown(value, depth=0):
    if isinstance(value, torch.Tensor) and depth < 3:
        return (
            value.tolist(),
            {name: _shown(item, depth + 1) for name, item in vars(value).items()},
            value.requires_grad,
        )
    if isinstance(value, (list, tuple)):
        return [_shown(item, depth + 1) for item in value]
    return value if type(value) in (int, float, str, bool, type(None)) else type(value).__name__


def _sample(module, grad_input, grad_output):
    for parameter in module.parameters():
        parameter.sample = grad_output[0].mean() * torch.ones_like(parameter)


def _history(step, compiles):
    torch.manual_seed(0)
    model, log, history = nn.Linear(3, 2), [], []
    if step is by_a_hook:
        model.register_full_backward_hook(_sample)
    run = sidefx_train.compile(step, backend="eager") if compiles else step
    for call in range(5):
        model.weight.flag, model.weight.history = call > 2, [call]
        if call == 4:
            model.weight.count = 100
        x = torch.ones(4, 3) * call
        history.append((_shown(run(model, x, log)), _shown(x), *map(_shown, model.parameters()), list(log)))
    return history, run


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_attributes_of_tensors_are_left_as_in_eager(step):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        found, run = _history(step, True)
        assert repr(found) == repr(_history(step, False)[0])
    report = run.report()
    assert report.replays == 5 and not report.fallbacks, str(report)


NAMES = ("fake_mode", "constant", "real_tensor", "pytype", "item_memo", "get_nested_int", "grad_fn", "tolist", "other")


def _has(x):
    made = x * 2
    return [hasattr(made, name) for name in NAMES], getattr(made, "constant", 7), made


def _lists(x):
    return dir(x), dir(x * 2), dir(torch.nn.Parameter(x))


def _sets(x):
    made = x * 2
    made.constant = 3
    return made.constant + made


@pytest.mark.parametrize("step", [_has, _lists, _sets])
@pytest.mark.filterwarnings("ignore::sidefx_train.SideFXWarning")
def test_attributes_that_only_fake_tensors_have(step):
    """Regression: a tensor of the step had them."""
    compiled = sidefx_train.compile(step, backend="eager")
    for i in range(2):
        x = torch.full((3,), float(i))
        assert repr(compiled(x)) == repr(step(x))
    assert compiled.report().replays == 2
