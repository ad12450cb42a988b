"""Wrapper subclasses in a backward that runs outside: arguments, parameters, results, and values in between."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import sidefx_train
from sidefx_train.errors import SideFXError
from tests.support.tensor_subclasses import CALLS, Counted, Quantized, paired

WHOLE = {"backend": "eager", "fullgraph": True, "on_failure": "raise"}


def random(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def two(seed, inner=False, grad=True):
    parts = random(seed, 3, 4), random(seed + 50, 3, 4)
    if inner:  # as a program that makes it of leaves, and of a value with a history
        first = parts[0].requires_grad_()
        return TwoTensor(first, first.clone() + 1)
    return TwoTensor(*parts).requires_grad_(grad)


def plain(seed):
    return random(seed, 4).requires_grad_()


def nested(seed):
    return TwoTensor(two(seed, grad=False), two(seed + 7, grad=False)).requires_grad_()


def shown(value):
    """Returns what may be compared of tensors, also of those inside others."""
    if isinstance(value, TwoTensor):
        grad = shown(value.grad) if value.is_leaf else None
        return "two", shown(value.a), shown(value.b), value.stride(), value.requires_grad, value.is_leaf, grad
    if isinstance(value, torch.Tensor):
        grad = shown(value.grad) if value.is_leaf else None
        return value.tolist(), value.stride(), value.requires_grad, grad
    return tuple(map(shown, value)) if isinstance(value, (tuple, list)) else value


class Wrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return TwoTensor(x.clone(), x * 2)

    @staticmethod
    def backward(ctx, grad):
        return grad.a + grad.b


class Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.a + x.b

    @staticmethod
    def backward(ctx, grad):
        return TwoTensor(grad.clone(), grad * 2)


def clone_and_view(t):
    y = t.clone()
    return y.view(y.shape[1], y.shape[0])


def several_results(t):
    y = t * 2
    return y, y.exp(), t.sin(), t


def written_result(t):
    return (t * 2).mul_(3)


def written_argument(t, u):
    u.mul_(2)
    return t * u


STEPS = {
    "sizes": (lambda t: t * t.size()[0], [two]),
    "over leaves": (lambda t: (t * t).sin(), [lambda seed: two(seed, inner=True)]),
    "used twice": (lambda t: t.sin() * t.cos() + t * t, [two]),
    "two": (lambda t, u: t * u + u, [two, lambda seed: two(seed + 9)]),
    "with a plain tensor": (lambda t, w: (t * w).exp(), [two, plain]),
    "without gradient": (lambda t, w: t * w, [lambda seed: two(seed, grad=False), plain]),
    "clone and view": (clone_and_view, [two]),
    "several results": (several_results, [two]),
    "inner tensor": (lambda t: (t.sin(), t.a * 2), [lambda seed: two(seed, inner=True)]),
    "written result": (written_result, [two]),
    "written argument": (written_argument, [two, lambda seed: two(seed + 9, grad=False)]),
    "made inside": (lambda w: Wrap.apply(w) * 3, [plain]),
    "made and unwrapped": (lambda w: Unwrap.apply((Wrap.apply(w) * 3).sin()) * w, [plain]),
    "unwrapped": (lambda t: Unwrap.apply(t * 2).sin(), [two]),
    "nested": (lambda t: t * t + 1, [nested]),
}


def history(run, makers):
    found = []
    for i in range(3):
        args = [make(i) for make in makers]
        results = run(*args)
        results = results if isinstance(results, tuple) else (results,)
        for result in results:
            if not result.is_leaf:
                result.sum().backward(retain_graph=True)
        found.append(shown((results, args)))
    return found


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.every(2)
def test_a_backward_outside(name):
    step, makers = STEPS[name]
    captured = sidefx_train.compile(step, **WHOLE)
    assert history(captured, makers) == history(step, makers)
    assert captured.report().replays == 3 and len(captured.report().captures) == 1


def test_parameters_are_trained():
    def trained(compiles):
        torch.manual_seed(0)
        weight = nn.Parameter(TwoTensor(torch.randn(4, 3), torch.randn(4, 3)))
        bias = nn.Parameter(torch.randn(3))
        optimizer = torch.optim.SGD([weight, bias], lr=0.1)

        def loss(x):
            return torch.tanh(x @ weight + bias).pow(2)

        run = sidefx_train.compile(loss, **WHOLE) if compiles else loss
        for i in range(3):
            run(random(i, 2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return shown((weight, bias))

    assert trained(True) == trained(False)


def test_quantized_weights_under_plain_results():
    weight = nn.Parameter(Quantized.of(torch.randn(3, 3)))
    step = sidefx_train.compile(lambda x: (x @ weight).sum(), **WHOLE)
    for seed in range(2):
        x = random(seed, 3, 3)
        step(x).backward()
        assert torch.equal(weight.grad, x.sum(0)[:, None].expand(3, 3))
        weight.grad = None
    assert step.report().replays == 2


def test_under_inductor():
    step, makers = STEPS["with a plain tensor"]
    captured = sidefx_train.compile(step, fullgraph=True, on_failure="raise")
    (t, w), (u, v) = ([make(0) for make in makers] for _ in range(2))
    captured(t, w).sum().backward()
    step(u, v).sum().backward()
    torch.testing.assert_close((t.grad.a, t.grad.b, w.grad.a), (u.grad.a, u.grad.b, v.grad.a))


@pytest.mark.parametrize("changes", ["argument", "result"])
def test_a_change_of_what_the_backward_reads_raises(changes):
    def step(t):
        return (t * t).relu()

    for run in (step, sidefx_train.compile(step, **WHOLE)):
        t = two(0)
        result = run(t)
        with torch.no_grad():
            (t if changes == "argument" else result).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


def test_what_raises_instead():
    """A gradient of another class, and a second derivative."""
    step = sidefx_train.compile(lambda t: (t * t).sin(), **WHOLE)
    t = two(0)
    with pytest.raises(SideFXError, match="a gradient of a TwoTensor is a Tensor"):
        step(t).backward(torch.ones(3, 4))
    (grad,) = torch.autograd.grad(step(t).sum(), t, create_graph=True)
    assert shown(grad.detach()) == shown(torch.autograd.grad((t * t).sin().sum(), t)[0])
    with pytest.raises(SideFXError, match="it passes through a TwoTensor"):
        grad.sum().backward()


@pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")
def test_effects_of_its_python_are_left_to_eager():
    def seen(compiles):
        torch.manual_seed(0)
        model = paired(nn.Linear(3, 3), Counted)
        CALLS.clear()
        run = sidefx_train.compile(model, backend="eager") if compiles else model
        for i in range(2):
            run(random(i, 2, 3)).sum().backward()
        return list(CALLS), [parameter.grad.a.tolist() for parameter in model.parameters()]

    assert seen(True) == seen(False)


def test_gradients_do_not_share_memory():
    """The engine adds to a gradient in place: neither the given gradient nor another one may change."""

    def step(t, u):
        return t + u, t.clone()

    def results(run):
        t, u, given = two(0), two(1), two(2, grad=False)
        total, copy = run(t, u)
        for result in (total, copy, total):
            result.backward(given, retain_graph=True)
        return shown((t, u, given))

    assert results(sidefx_train.compile(step, **WHOLE)) == results(step)
