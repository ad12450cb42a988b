"""Derivatives of derivatives through captured functions: penalties on gradients, Hessians, inner loops of training."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import functional
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import sidefx_train
from tests.support.graph_breaks import outside

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")

BACKENDS = ["eager", "aot_eager", "inductor"]


def compare(program, backend="eager", **options):
    """Compares the tensors and other values of ``program(wrap)``, eager and captured."""
    outcomes = []
    for wrap in (lambda fn: fn, lambda fn: sidefx_train.compile(fn, backend=backend, **options)):
        torch.manual_seed(0)
        outcomes.append(program(wrap))
    tolerance = 1e-5 if backend == "inductor" else 1e-9
    for number, (want, have) in enumerate(zip(*outcomes, strict=True)):
        if isinstance(want, torch.Tensor):
            assert have is not None, f"{number}: no gradient"
            assert torch.allclose(want, have, rtol=tolerance, atol=tolerance), f"{number}: {have}, eager has {want}"
        else:
            assert want == have, f"{number}: {have}, eager has {want}"


def net(*sizes):
    layers = [layer for a, b in zip(sizes, sizes[1:], strict=False) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double()


def numbers(*shape, grad=False):
    return torch.randn(*shape, dtype=torch.float64).requires_grad_(grad)


def of_a_model(wrap):
    model, x = net(4, 8, 1), numbers(5, 4, grad=True)
    (grad,) = torch.autograd.grad(wrap(model)(x).sum(), x, create_graph=True)
    (grad.norm(dim=1) - 1).square().mean().backward()
    return [p.grad for p in model.parameters()]


def through_an_inner_loop(wrap):
    x = numbers(6, 4)
    loss = wrap(lambda a, b: (torch.tanh(x @ a.t()) @ b.t()).square().mean())
    first = now = [numbers(5, 4, grad=True), numbers(1, 5, grad=True)]
    for _ in range(3):
        grads = torch.autograd.grad(loss(*now), now, create_graph=True)
        now = [p - 0.1 * g for p, g in zip(now, grads, strict=True)]
    return torch.autograd.grad(loss(*now), first)


def forces(wrap):
    model = net(3, 6, 1)
    energy = wrap(lambda at: model(at).sum(0) + (at.unsqueeze(0) - at.unsqueeze(1)).square().sum(-1).add(1).log().sum())
    at = numbers(4, 3, grad=True)
    total = energy(at)
    (force,) = torch.autograd.grad(total.sum(), at, create_graph=True)
    (force.square().sum() + total.sum()).backward()
    return [at.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize(
    ("program", "backend"),
    [
        pytest.param(program, backend, marks=pytest.mark.slow if late else (), id=f"{program.__name__}-{backend}")
        for program in (of_a_model, through_an_inner_loop, forces)
        for backend in BACKENDS
        for late in [backend == "inductor" and program is not through_an_inner_loop]  # the deepest of them
    ],
)
@pytest.mark.every(4)
def test_programs_that_train_on_gradients(program, backend):
    compare(program, backend)


LAYERS = {
    "convolution": lambda: nn.Sequential(nn.Conv1d(2, 3, 3, padding=1), nn.Softplus(), nn.Conv1d(3, 1, 3)),
    "batch norm": lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(2), nn.Sigmoid(), nn.Linear(5, 2)),
    "layer norm": lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 2)),
    "group norm": lambda: nn.Sequential(nn.GroupNorm(2, 2), nn.SiLU(), nn.Linear(6, 2)),
    "dropout": lambda: nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.4), nn.Mish(), nn.Linear(5, 2)),
    "in place": lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 5), nn.ELU(inplace=True)),
    "bilinear": lambda: _Twice(nn.Bilinear(6, 6, 4)),
    "recurrent": lambda: _First(nn.GRUCell(6, 5)),
    "pooling": lambda: nn.Sequential(nn.Linear(6, 6), nn.AvgPool1d(2), nn.MaxPool1d(2, 1)),
}


class _First(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        state = None
        for each in x.unbind(1):
            state = self.cell(each, state)
        return state


class _Twice(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x, x.softmax(-1))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.every(2)
def test_layers(name):
    def program(wrap):
        model, x = LAYERS[name]().double(), numbers(3, 2, 6, grad=True)
        call, seen = wrap(model), []
        for turn in range(2):
            torch.manual_seed(turn)
            out = call(x)
            grads = torch.autograd.grad(out.sin().sum(), [x, *model.parameters()], create_graph=True)
            sum(g.square().sum() for g in grads).backward()
            seen += [*grads, x.grad.clone(), *(p.grad for p in model.parameters())]
        return [t if t is None else t.detach() for t in seen]

    compare(program, fullgraph=True, on_failure="raise")


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            constant = 3 * x
        return constant * x * grad


class Estimated(torch.autograd.Function):
    """Its backward reads a tensor that is neither argument nor result, and is not the derivative of the forward."""

    @staticmethod
    def forward(ctx, x, y):
        made = x.tanh() * y
        ctx.save_for_backward(made, x.tanh(), y)
        return made

    @staticmethod
    def backward(ctx, grad):
        made, t, y = ctx.saved_tensors
        return grad * (1 - t * t) * y, grad * made


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad


def _hooked(x, w):
    h = (x @ w).sin()
    h.register_hook(lambda grad: grad * 3)
    return (h * x).exp()


FUNCTIONS = {
    "custom": lambda x, w: Cube.apply(x @ w).sin(),
    "custom, saving more": lambda x, w: Estimated.apply(x @ w, x).cos(),
    "constant": lambda x, w: (x @ w.detach()) * (x @ w).detach().sin() * w,
    "autograd off": lambda x, w: x.sin() * torch.no_grad()(torch.matmul)(x, w) @ w,
    "hook inside": _hooked,
    "checkpoint": lambda x, w: checkpoint(lambda t: (t @ w).sin() * t, x @ w, use_reentrant=False),
    "views": lambda x, w: (x @ w).view(2, 8)[:, ::2].t().square().sum(0) @ w[:2],
    "result saved": lambda x, w: (x @ w).tanh().softmax(0),
    "written": lambda x, w: (x @ w).mul_(2).sin_() * x,
    "written in part": lambda x, w: torch.zeros_like(w).index_copy_(0, torch.tensor([1, 3]), (x @ w)[:2].sin()) @ w,
    "branches that meet": lambda x, w: (lambda a, b: (a + b) * (a - b))(*(x @ w).sin().chunk(2, 1)),
    "complex": lambda x, w: torch.fft.rfft(x @ w).abs().square() @ w[:3],
    "linear algebra": lambda x, w: torch.linalg.cholesky(w @ w.t() + 5 * torch.eye(4).double()) @ torch.linalg.qr(x).Q,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_third_derivatives(name):
    def program(wrap):
        x, w = numbers(4, 4, grad=True), numbers(4, 4, grad=True)
        out = wrap(FUNCTIONS[name])(x, w)
        one = torch.autograd.grad(out.sin().sum(), [x, w], create_graph=True)
        two = torch.autograd.grad(sum(g.sin().sum() for g in one), [x, w], create_graph=True)
        (sum(g.sin().sum() for g in two) + out.sum()).backward()
        return [t.detach() for t in (*one, *two)] + [x.grad, w.grad]

    compare(program, fullgraph=True, on_failure="raise")


def test_only_some_gradients_are_asked_for():
    def program(wrap):
        x, y, w = (numbers(3, 3, grad=True) for _ in range(3))
        a, b = wrap(lambda x, y, w: ((x @ w).sin() * y, (y @ w).cos()))(x, y, w)
        (one,) = torch.autograd.grad(a.sum(), x, create_graph=True)
        two = torch.autograd.grad(one.square().sum(), [y, x], create_graph=True)
        three = torch.autograd.grad(b.sum() + one.sum(), [w], retain_graph=True)
        none = torch.autograd.grad(b.sum(), [x, y], create_graph=True, allow_unused=True)
        return [t if t is None else t.detach() for t in (one, *two, *three, *none)]

    compare(program)


def test_a_function_whose_first_argument_needs_no_gradient():
    """Regression: the derivative needed a tensor that only an unasked part of the backward reads: SFX107."""

    def program(wrap):
        x, y, w = numbers(3, 3, grad=True), numbers(3, 3), numbers(3, 3, grad=True)
        out = wrap(lambda x, y: x @ Estimated.apply(y, w).clone().mul_(2).sin_())(x, y)
        one = torch.autograd.grad(out.square().mean(), [x, w], create_graph=True)
        two = torch.autograd.grad(one[0].norm(), [x, w])
        return [t.detach() for t in (*one, *two)]

    compare(program, fullgraph=True, on_failure="raise")


def test_tangents_are_differentiated():
    def program(wrap):
        x, w, tangent = (numbers(3, 3, grad=True) for _ in range(3))
        (grad,) = torch.autograd.grad(wrap(lambda x: (x @ w).tanh())(x), x, tangent, create_graph=True)
        (grad.square().sum() + w.sum()).backward()
        return [grad.detach(), x.grad, w.grad, tangent.grad]

    compare(program)


@pytest.mark.parametrize("ask", ["hessian", "hvp", "vhp", "jvp", "vjp", "jacobian"])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.covering(1)
def test_torch_autograd_functional(ask, backend):
    def program(wrap):
        w, x = numbers(3, 3), numbers(3)
        if ask in ("hessian", "hvp", "vhp"):
            call = wrap(lambda x: (x @ w).sin().square().sum())
        else:
            call = wrap(lambda x: (x @ w).sin())
        made = (
            getattr(functional, ask)(call, x)
            if ask in ("hessian", "jacobian")
            else getattr(functional, ask)(call, x, x)
        )
        return made if isinstance(made, tuple) else [made]

    compare(program, backend)


def test_gradients_of_an_outer_graph():
    """Inputs that receive gradients are non-leaf tensors; some are not saved."""

    def program(wrap):
        w, x = numbers(3, 3, grad=True), numbers(3, 3, grad=True)
        h = (x @ w).tanh()
        k = h + x
        out = wrap(lambda h, k: (h * 2 + 1, (k + h).sin()))(h, k)
        grads = torch.autograd.grad(sum(o.square().sum() for o in out), [h, w], create_graph=True)
        sum(g.square().sum() for g in grads).backward()
        return [*(g.detach() for g in grads), w.grad, x.grad]

    compare(program)


def test_hooks_are_called_as_often_as_in_eager():
    def program(wrap):
        log = []
        x, w = numbers(3, 3, grad=True), numbers(3, 3, grad=True)
        w.register_hook(lambda grad: log.append(f"w {grad.sum():.8f}"))
        x.register_hook(lambda grad: log.append(f"x {grad.sum():.8f}"))
        w.register_post_accumulate_grad_hook(lambda p: log.append(f"accumulated {p.grad.sum():.8f}"))
        out = wrap(lambda x: (x @ w).tanh())(x)
        out.register_hook(lambda grad: log.append(f"out {grad.sum():.8f}"))
        (grad,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
        (grad.square().sum() + out.sum()).backward()
        return [sorted(log), x.grad, w.grad]

    compare(program)


def test_python_in_a_hook_runs_once_for_each_backward():
    def program(wrap):
        log = []
        x, w = numbers(3, 3, grad=True), numbers(3, 3, grad=True)

        def fn(x):
            h = (x @ w).sin()
            h.register_hook(lambda grad: log.append("hook"))
            return h * h

        (grad,) = torch.autograd.grad(wrap(fn)(x).sum(), x, create_graph=True)
        grad.square().sum().backward()
        return [log, x.grad, w.grad]

    compare(program)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_over_a_break(backend):
    def program(wrap):
        model, seen = net(3, 4, 1), []

        def step(x):
            x = x.clone().requires_grad_()
            y = model(x).square().sum()
            outside(y)
            grads = torch.autograd.grad(y, [x, *model.parameters()], create_graph=True)
            outside(grads[0].sum())
            (model(x).mean() + sum(g.square().sum() for g in grads)).backward()
            return y.detach()

        call = wrap(step)
        for _ in range(3):
            model.zero_grad()
            seen += [call(numbers(5, 3)), *(p.grad.clone() for p in model.parameters())]
        return seen

    compare(program, backend)


def test_saved_tensor_changed_before_the_backward_raises():
    def program(wrap):
        said = []
        for change in (lambda x, w, out: w.mul_(2), lambda x, w, out: out.mul_(2), lambda x, w, out: None):
            x, w = numbers(3, 3, grad=True), numbers(3, 3, grad=True)
            out = wrap(lambda x, w: (x @ w).tanh())(x, w)
            (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            with torch.no_grad():
                change(x, w, out)
            try:
                grad.square().sum().backward()
                said.append(w.grad)
            except RuntimeError as error:
                said.append("modified by an inplace operation" in str(error))
        return said

    compare(program)


def test_what_cannot_be_differentiated_twice_says_so():
    call = sidefx_train.compile(lambda x: Once.apply(x).sin(), backend="eager", fullgraph=True)
    x, w = numbers(3, grad=True), numbers(3, grad=True)
    (grad,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
    assert torch.equal(grad.detach(), 3 * x * x * (x**3).cos())
    with pytest.raises(sidefx_train.errors.SideFXError, match="once_differentiable"):
        (grad.sum() + w.sum()).backward()
    (grad,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
    with pytest.raises(sidefx_train.errors.SideFXError, match="once_differentiable"):
        torch.autograd.grad(grad.sum(), x)


def test_formulas_that_go_by_a_factorization_say_so():
    call = sidefx_train.compile(torch.linalg.solve, backend="eager", fullgraph=True)
    a, b = numbers(3, 3, grad=True), numbers(3, 3, grad=True)
    (grad,) = torch.autograd.grad(call(a, b).sum(), a, create_graph=True)
    with pytest.raises(sidefx_train.errors.SideFXError, match="factorization"):
        grad.square().sum().backward()


def test_the_first_derivative_saves_nothing_more():
    def held(x, w):
        return sidefx_train.compile(lambda x: (x @ w).sin() * 2, backend="eager")(x).grad_fn._raw_saved_tensors

    x, w = numbers(3, 3, grad=True), numbers(3, 3, grad=True)
    assert len(held(x, w)) == 3, "eager saves two arguments of the product and that of the sine"


def test_a_loss_of_a_gradient_trains():
    def program(wrap):
        model = net(4, 8, 1)
        optimizer, seen = torch.optim.Adam(model.parameters(), lr=0.05), []
        call = wrap(model)
        for _ in range(4):
            x = numbers(6, 4, grad=True)
            out = call(x)
            (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = F.mse_loss(grad, x.detach().sin()) + out.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.detach())
        return [*seen, *(p.detach() for p in model.parameters())]

    compare(program)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.every(2)
def test_batches_of_gradients(backend):
    def program(wrap):
        w, x = numbers(3, 3), numbers(3, grad=True)
        call = wrap(lambda x: (x @ w).tanh() * x)
        batched = torch.autograd.grad(call(x), x, numbers(5, 3), is_grads_batched=True)
        scalar = wrap(lambda x: (x @ w).sin().square().sum())
        return [
            *batched,
            functional.jacobian(call, x.detach(), vectorize=True),
            functional.hessian(scalar, x.detach(), vectorize=True),
        ]

    compare(program, backend)
