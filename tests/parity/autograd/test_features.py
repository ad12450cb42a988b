"""Autograd inside a step: custom functions, checkpointing, saved-tensor hooks, torch.autograd.grad and torch.func."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

from tests.support.parity import Program, batches, mlp, parity


def trained(loss_of, model: nn.Module | None = None, *watch) -> Program:
    """Returns a plain training step over ``loss_of(model, x, y)``."""
    model = model if model is not None else mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(x, y):
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Program(step, batches((5, 6), classes=3), (model, optimizer, *watch))


# ---------------------------------------------------------------------- torch.autograd.Function
def saved_and_attributes() -> Program:
    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, k):
            result = torch.exp(x * k)
            ctx.save_for_backward(result)
            ctx.k, ctx.notes = k, {"scale": 1}
            return result

        @staticmethod
        def backward(ctx, grad):
            (result,) = ctx.saved_tensors
            assert ctx.needs_input_grad == (True, False)
            return grad * result * ctx.k * ctx.notes["scale"], None

    return trained(lambda model, x, y: F.cross_entropy(Exp.apply(model(x), 0.3), y))


def setup_context() -> Program:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(x, k):
            return x * x * k, x.sign()

        @staticmethod
        def setup_context(ctx, inputs, output):
            x, k = inputs
            ctx.save_for_backward(x)
            ctx.k = k
            ctx.mark_non_differentiable(output[1])

        @staticmethod
        def backward(ctx, grad, _):
            (x,) = ctx.saved_tensors
            return 2 * grad * x * ctx.k, None

    def loss(model, x, y):
        square, sign = Square.apply(model(x), 0.3)
        assert not sign.requires_grad
        return F.cross_entropy(square + sign, y)

    return trained(loss)


def mark_dirty() -> Program:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            x.mul_(2)
            ctx.mark_dirty(x)
            return x

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    def loss(model, x, y):
        hidden = model(x) * 1.0
        out = Double.apply(hidden)
        assert out is hidden
        return F.cross_entropy(out, y)

    return trained(loss)


def needs_input_grad() -> Program:
    class Mul(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a * b

        @staticmethod
        def backward(ctx, grad):
            a, b = ctx.saved_tensors
            return grad * b if ctx.needs_input_grad[0] else None, grad * a if ctx.needs_input_grad[1] else None

    return trained(lambda model, x, y: F.cross_entropy(Mul.apply(model(x), torch.full((3,), 2.0)), y))


def side_effects() -> Program:
    log, counts = [], {"forward": 0, "backward": 0}

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            log.append("forward")
            counts["forward"] += 1
            ctx.set_materialize_grads(False)
            return x.view_as(x), x.clone()

        @staticmethod
        def backward(ctx, grad, unused):
            log.append(("backward", unused is None))
            counts["backward"] += 10
            return grad

    return trained(lambda model, x, y: F.cross_entropy(Noted.apply(model(x))[0], y), None, log, counts)


def once_differentiable() -> Program:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, grad):
            return grad * 2

    return trained(lambda model, x, y: F.cross_entropy(Twice.apply(model(x)), y))


def custom_autocast() -> Program:
    class Twice(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx, x):
            assert not torch.is_autocast_enabled("cpu")
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, grad):
            return grad * 2

    def loss(model, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(Twice.apply(model(x)), y)

    return trained(loss)


def default_arguments() -> Program:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(x, k=3.0):
            return x * k

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.k = inputs[1]

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.k, None

    return trained(lambda model, x, y: F.cross_entropy(Scaled.apply(model(x)), y))


FUNCTIONS = [
    saved_and_attributes,
    setup_context,
    mark_dirty,
    needs_input_grad,
    side_effects,
    once_differentiable,
    custom_autocast,
    default_arguments,
]


@pytest.mark.parametrize("make", FUNCTIONS, ids=lambda make: make.__name__)
def test_function(make):
    parity(make, steps=4, captures=2)


def test_function_is_guarded():
    """A method that is replaced between two calls is called from then on."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    def other(ctx, grad):
        return grad * 3

    first = Scale.backward

    def make() -> Program:
        Scale.backward = staticmethod(first)
        return trained(lambda model, x, y: F.cross_entropy(Scale.apply(model(x)), y))

    def between(program, index):
        if index == 2:
            Scale.backward = staticmethod(other)

    parity(make, steps=4, captures=2, between=between)


# ---------------------------------------------------------------------- checkpointing and random states
@pytest.mark.parametrize("preserve", [True, False], ids=["preserved", "redrawn"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
def test_checkpoint(reentrant, preserve):
    """Dropout inside draws the same numbers again; the segment's Python runs twice, as in eager."""

    def make() -> Program:
        model, runs = mlp(dropout=0.5), [0]

        def segment(x):
            runs[0] += 1
            return model(x)

        def loss(model, x, y):
            x = x.clone().requires_grad_()
            out = checkpoint(segment, x, use_reentrant=reentrant, preserve_rng_state=preserve)
            return F.cross_entropy(F.dropout(out, 0.2), y)

        return trained(loss, model, runs)

    parity(make, steps=4, captures=2)


def test_nested_checkpoints():
    def make() -> Program:
        inner, model = mlp(6, 8, 6, dropout=0.3), mlp(dropout=0.3)

        def outer(x):
            return F.dropout(model(checkpoint(inner, x, use_reentrant=False)), 0.2)

        def loss(model, x, y):
            return F.cross_entropy(F.dropout(checkpoint(outer, x, use_reentrant=False), 0.1), y)

        return trained(loss, model)

    parity(make, steps=4, captures=2)


def test_checkpoint_sequential():
    def make() -> Program:
        return trained(lambda model, x, y: F.cross_entropy(checkpoint_sequential(model, 2, x, use_reentrant=False), y))

    parity(make, steps=4)


def test_checkpoint_inductor():
    def make() -> Program:
        model = mlp(dropout=0.5)
        return trained(lambda model, x, y: F.cross_entropy(checkpoint(model, x, use_reentrant=False), y), model)

    parity(make, steps=4, backend="inductor", rng="eager")


def test_random_state_set_again():
    """A state saved in the step gives the same numbers again, and the generator ends in eager's state."""

    def make() -> Program:
        after = []

        def loss(model, x, y):
            state = torch.get_rng_state()
            a = torch.empty(5, 6).uniform_(-1, 1).mul_(3)
            torch.set_rng_state(state)
            b = torch.empty(5, 6).uniform_(-1, 1)
            with torch.random.fork_rng(devices=[]):
                c = torch.rand(3)
            return F.cross_entropy(model(x + a - b), y) + (torch.rand(3) - c).sum() + c.sum()

        program = trained(loss, None, after)
        step = program.step
        program.step = lambda x, y: step(x, y)
        return program

    def between(program, index):
        if index:
            program.watch[2].append(torch.get_rng_state().sum())

    parity(make, steps=4, between=between)


def refused(loss_of, code: str, words: str, model: nn.Module | None = None) -> None:
    """Checks that the step is not captured whole, for this reason, and that its result equals eager's."""
    report = parity(lambda: trained(loss_of, model), steps=4, captures=None, whole=False)
    assert (code, words) in {(found.code, found.reason) for found in report.breaks}, report.breaks


def test_random_state_left_set_back():
    def loss(model, x, y):
        with torch.random.fork_rng(devices=[]):
            noise = torch.randn(5, 6)
        return F.cross_entropy(model(x + noise), y)

    refused(loss, "SFX110", "leaves the random state set back to an earlier one")


def test_other_draw_after_random_state():
    def loss(model, x, y):
        with torch.random.fork_rng(devices=[]):
            noise = torch.randn(5, 6)
        return F.cross_entropy(model(F.dropout(x + noise)), y)

    refused(loss, "SFX110", "draws with bernoulli_ after a random state was set, but drew otherwise before")


def test_seed_inside():
    def loss(model, x, y):
        torch.manual_seed(3)
        return F.cross_entropy(model(x + torch.rand(5, 6)), y)

    refused(loss, "SFX110", "seeds the random generator inside the step")


def test_selective_checkpoint_is_refused():
    def loss(model, x, y):
        contexts = lambda: create_selective_checkpoint_contexts([torch.ops.aten.mm.default])
        return F.cross_entropy(checkpoint(model, x, use_reentrant=False, context_fn=contexts), y)

    refused(loss, "SFX111", "enters _CachingTorchDispatchMode, a TorchDispatchMode")


# ---------------------------------------------------------------------- hooks on saved tensors, nodes and tensors
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


# ---------------------------------------------------------------------- torch.func
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


@pytest.mark.parametrize("name", OVER_OUTSIDE)
def test_function_over_outside_tensors(name):
    """Their first read is inside the transform, which must not treat their fake tensors as its own tensors."""

    def make() -> Program:
        w = nn.Parameter(torch.linspace(-1, 1, 4))
        optimizer = torch.optim.SGD([w], lr=0.1)

        def step(x):
            found = OVER_OUTSIDE[name](x, w)
            found.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            return found.detach()

        return Program(step, batches((3, 4)), (w, optimizer))

    parity(make, steps=3)


def test_vmap_in_a_new_process():
    """Its rules are registered at first use, which is during the capture."""
    code = (
        "import torch, sidefx_train\n"
        "step = sidefx_train.compile(torch.func.vmap(torch.sin), backend='eager', fullgraph=True, on_failure='raise')\n"
        "assert torch.equal(step(torch.ones(2, 3)), torch.ones(2, 3).sin())\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=300)
