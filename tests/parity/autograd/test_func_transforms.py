"""``torch.func`` inside a step, and over tensors that exist outside."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from tests.support.parity import Program, batches, mlp, parity
from tests.support.training_steps import trained


def per_sample() -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        params = {name: p.detach() for name, p in model.named_parameters()}

        def loss_of(params, row, label):
            return F.cross_entropy(torch.func.functional_call(model, params, (row[None],)), label[None])

        grads = torch.func.vmap(torch.func.grad(loss_of), (None, 0, 0))(params, x, y)
        for name, p in model.named_parameters():
            p.grad = grads[name].mean(0)
        optimizer.step()
        optimizer.zero_grad()
        return {name: grad.flatten(1).norm(dim=1) for name, grad in grads.items()}

    return Program(step, batches((5, 6), classes=3), (model, optimizer))


def grad_and_value() -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        params = {name: p.detach() for name, p in model.named_parameters()}
        loss_of = lambda params: F.cross_entropy(torch.func.functional_call(model, params, (x,)), y)
        grads, loss = torch.func.grad_and_value(loss_of)(params)
        for name, p in model.named_parameters():
            p.grad = grads[name]
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Program(step, batches((5, 6), classes=3), (model, optimizer))


def ensemble() -> Program:
    models = [mlp() for _ in range(2)]

    def step(x, y):
        params, buffers = torch.func.stack_module_state(models)
        call = lambda params, buffers, x: torch.func.functional_call(models[0], (params, buffers), (x,))
        return torch.func.vmap(call, (0, 0, None))(params, buffers, x).detach()

    return Program(step, batches((5, 6), classes=3), tuple(models))


def with_side_effect() -> Program:
    log = []

    def loss(model, x, y):
        def inner(v):
            log.append(tuple(v.shape))
            return (v**2).sum()

        return F.cross_entropy(model(torch.func.grad(inner)(x)), y)

    return trained(loss, None, log)


def _transforms(model, x, y):
    wave = lambda v: v.sin().sum(0)
    out, pull = torch.func.vjp(torch.sin, x)
    _, push = torch.func.jvp(torch.cos, (x,), (x,))
    extra = torch.func.jacrev(wave)(x).mean() + torch.func.jacfwd(wave)(x).mean()
    extra = (
        extra + torch.func.hessian(lambda v: v.sin().sum())(x[0]).pow(2).mean() + pull(torch.ones_like(out))[0].sum()
    )
    return F.cross_entropy(model(x + push), y) + extra + torch.func.vmap(torch.func.jacrev(model))(x).pow(2).mean()


FUNC = [per_sample, grad_and_value, ensemble, with_side_effect, lambda: trained(_transforms)]


@pytest.mark.parametrize("make", FUNC, ids=lambda make: make.__name__.strip("<>"))
@pytest.mark.every(2)
def test_func(make):
    parity(make, steps=3)


# ---------------------------------------------------------------------- transforms of functions over outside tensors
WEIGHT = torch.arange(1.0, 5.0)


OVER_OUTSIDE = {
    "grad": lambda x, w: torch.func.grad(lambda v: (v * w * WEIGHT).sin().sum())(x),
    "vmap": lambda x, w: torch.func.vmap(lambda v: (v * w * WEIGHT).sin().sum())(x),
    "vmap of grad": lambda x, w: torch.func.vmap(torch.func.grad(lambda v: (v * w * WEIGHT).sin().sum()))(x),
    "vjp": lambda x, w: torch.func.vjp(lambda v: (v * w * WEIGHT).sin(), x)[1](x)[0],
    "jvp": lambda x, w: torch.func.jvp(lambda v: (v * w * WEIGHT).sin(), (x,), (x,))[1] + WEIGHT,
    "jacfwd": lambda x, w: torch.func.jacfwd(lambda v: (v * w * WEIGHT).sin().sum(0))(x),
    "hessian": lambda x, w: torch.func.hessian(lambda v: (v * w * WEIGHT).sin().sum())(x),
}


def trains_on(w, function, lr):
    """Returns a program that trains an outside parameter on ``function(x, w)``."""
    optimizer = torch.optim.SGD([w], lr=lr)

    def step(x):
        found = function(x, w)
        found.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return found.detach()

    return Program(step, batches((3, 4)), (w, optimizer))


@pytest.mark.parametrize("name", OVER_OUTSIDE)
def test_function_over_outside_tensors(name):
    """Their first read is inside the transform, which must not treat their fake tensors as its own tensors."""

    def make() -> Program:
        w = nn.Parameter(torch.linspace(-1, 1, 4))
        return trains_on(w, OVER_OUTSIDE[name], lr=0.1)

    parity(make, steps=3)


OF_ROWS = {
    "layer": lambda row, w: F.linear(row, w, w[:, 0]).tanh().sum(),
    "product": lambda row, w: (row * w).sin().sum(),
    "matrices": lambda row, w: torch.bmm(row[None, None], w.T[None]).tanh().sum(),
    "normalized": lambda row, w: F.layer_norm(row * w, (4,)).square().sum(),
    "sum": lambda row, w: torch.sub(w, row * w, alpha=2).square().sum() + (row - w).exp().sum(),
    "choice": lambda row, w: torch.where(row > 0, row / w, row).sin().sum(),
    "attention": lambda row, w: ((w @ row).softmax(0) @ (w * row)).square().sum(),
}


@pytest.mark.parametrize("transform", [torch.func.hessian, torch.func.jacfwd])
@pytest.mark.parametrize("name", OF_ROWS)
def test_derivatives_of_rows_by_weights_from_outside(name, transform):
    """The tangents of the weights are zeros without memory, and get a batch dimension."""

    def make() -> Program:
        w = nn.Parameter(torch.linspace(-1, 1.5, 12).view(3, 4))
        return trains_on(w, lambda x, w: torch.vmap(transform(lambda row: OF_ROWS[name](row, w)))(x), lr=0.01)

    parity(make, steps=3)


def test_a_product_of_missing_tangents_is_zero():
    """Also where the other factor is infinite."""
    w = torch.tensor([1.0, 2.0, 3.0])

    def step(x):
        return torch.vmap(torch.func.jacfwd(lambda row: row * w))(x)

    x = torch.tensor([[1.0, float("inf"), -1.0], [float("nan"), 0.0, 1.0]])
    captured = sidefx_train.compile(step, backend="eager")
    for _ in range(2):
        assert torch.equal(captured(x), step(x))
    assert torch.equal(step(x), torch.diag(w).expand(2, 3, 3))
    assert captured.report().replays == 2, str(captured.report())


def test_vmap_in_a_new_process():
    """Its rules are registered at first use, which is during the capture."""
    code = (
        "import torch, sidefx_train\n"
        "step = sidefx_train.compile(torch.func.vmap(torch.sin), backend='eager', fullgraph=True, on_failure='raise')\n"
        "assert torch.equal(step(torch.ones(2, 3)), torch.ones(2, 3).sin())\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=300)


@pytest.mark.parametrize(
    "transform",
    [
        lambda fn: torch.func.vmap(torch.func.jacfwd(fn)),
        lambda fn: torch.func.vmap(torch.func.jacrev(torch.func.jacrev(fn))),
        lambda fn: torch.func.vmap(torch.func.grad(fn)),
    ],
    ids=["jacfwd", "jacrev of jacrev", "grad"],
)
def test_parameters_that_are_first_read_inside_transforms(transform):
    """Regression: the hooks of a parameter are guarded where it is read, which failed in forward mode."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def step(x):
        return transform(lambda row: model(row).square().sum())(x)

    captured = sidefx_train.compile(step, backend="eager")
    for seed in range(3):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(captured(x), step(x))
    assert captured.report().replays == 3 and not captured.report().breaks


# ---------------------------------------------------------------------- torch.autograd.Function inside a transform
class Cube(torch.autograd.Function):
    calls: list[str] = []

    @staticmethod
    def forward(x):
        Cube.calls.append("forward")
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        Cube.calls.append("backward")
        return 3 * ctx.saved_tensors[0] ** 2 * grad

    @staticmethod
    def jvp(ctx, tangent):
        Cube.calls.append("jvp")
        return 3 * ctx.saved_tensors[0] ** 2 * tangent

    @staticmethod
    def vmap(info, in_dims, x):
        Cube.calls.append(f"vmap {info.batch_size} {in_dims}")
        return Cube.apply(x), in_dims[0]


class Generated(Cube):
    generate_vmap_rule = True
    vmap = staticmethod(torch.autograd.Function.vmap)


CUSTOM = [
    lambda x: torch.func.grad(lambda x: Cube.apply(x).sum())(x),
    lambda x: torch.func.vmap(Cube.apply, in_dims=1)(x),
    lambda x: torch.func.vmap(torch.func.grad(lambda x: Generated.apply(x).sum()))(x),
    lambda x: torch.func.jvp(Generated.apply, (x,), (x.cos(),)),
    lambda x: torch.func.jacfwd(Generated.apply)(x[0]),
    lambda x: torch.func.jacrev(Generated.apply)(x[0]),
    lambda x: torch.func.hessian(lambda x: Cube.apply(x).sum())(x[0]),
    lambda x: torch.func.vjp(Cube.apply, x)[1](x.sin()),
]


@pytest.mark.parametrize("function", CUSTOM, ids=range(len(CUSTOM)))
def test_custom_function_in_a_transform(function):
    def outcome(wrap):
        Cube.calls = []
        step = wrap(function)
        return [step(torch.arange(6.0).view(2, 3) + call) for call in range(2)], Cube.calls

    wanted, have = outcome(lambda f: f), outcome(lambda f: sidefx_train.compile(f, backend="eager", fullgraph=True))
    torch.testing.assert_close(have[0], wanted[0], rtol=0, atol=0)
    assert have[1] == wanted[1]
