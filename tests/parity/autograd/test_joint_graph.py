"""Results of a captured function with a live autograd graph: forward and backward joined outside."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from tests.support.joint_graph import compare, data, function, module
from tests.support.parity import Program, batches, mlp

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")


MODELS = {
    "mlp with batch norm": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
    "dropout": lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)),
    "attention": lambda: nn.TransformerEncoderLayer(6, 2, 12, batch_first=True, dropout=0.0),
    "frozen layer": lambda: nn.Sequential(nn.Linear(6, 6).requires_grad_(False), nn.Tanh(), nn.Linear(6, 2)),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", MODELS)
def test_models_alone(name, backend):
    shape = (4, 5, 6) if name == "attention" else (5, 6)
    compare(module(MODELS[name]), data(*shape, grad=True), backend)


def test_model_alone_under_inductor():
    """Without the bias before the batch norm, whose gradient is zero but for rounding."""

    def layers():
        return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    compare(module(layers), data(5, 6, grad=True), "inductor")


def test_training_loop_around_a_compiled_model():
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            return loss, loss.detach()

        def whole(x, y):
            optimizer.zero_grad()
            loss, shown = made.step(x, y)
            loss.backward()
            optimizer.step()
            return shown

        made = Program(step, batches((5, 6), classes=3), (model, optimizer))
        return made

    torch.manual_seed(0)
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        program = make()
        step = sidefx_train.compile(program.step, backend="eager", fullgraph=True) if compiled else program.step
        model, optimizer = program.watch
        seen = []
        for i in range(10):
            optimizer.zero_grad()
            loss, shown = step(*program.batch(i))
            loss.backward()
            optimizer.step()
            seen.append(shown)
        results.append((seen, [p.detach().clone() for p in model.parameters()]))
    for a, b in zip(*results, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Doubling(torch.autograd.Function):
    """Its backward is not the derivative of its forward, to show which one is used."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 + x * 0


def _partly_without_grad(x, w):
    with torch.no_grad():
        scale = (x @ w).abs().mean()
    return (x @ w) * scale


FUNCTIONS = {
    "several outputs": lambda x, w: ((x @ w).relu(), (x * 2).sum(), x.detach() + 1),
    "dict": lambda x, w: {"a": x @ w, "b": (x @ w.t()).sum(0)},
    "detached alias": lambda x, w: ((x @ w).sum(), (x @ w).sum().detach()),
    "no_grad inside": _partly_without_grad,
    "in-place on an intermediate": lambda x, w: (x @ w).mul_(2).add_(1).relu_(),
    "custom function": lambda x, w: Doubling.apply(x @ w) + x,
    "a transposed result": lambda x, w: (x @ w).t(),
    "input unused": lambda x, w: w.sum() * torch.ones(2),
    "a result that does not depend on parameters": lambda x, w: (x * 2, w.detach().sum()),
    "checkpoint": lambda x, w: torch.utils.checkpoint.checkpoint(lambda a: torch.sin(a @ w), x, use_reentrant=False),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name, backend):
    # A backward is traced for a tangent with the layout of its output; eager here gets a contiguous one.
    compare(function(FUNCTIONS[name]), data(5, 6, grad=True), backend, exact=name != "a transposed result")


def test_input_with_a_graph_from_outside():
    """Gradients flow through the captured function into the caller's earlier computation."""

    def make():
        first, second = nn.Linear(6, 6), nn.Linear(6, 2)
        inner = sidefx_train.compile(second, backend="eager", fullgraph=True) if make.compiled else second
        return first, inner, [*first.parameters(), *second.parameters()]

    results = []
    for make.compiled in (False, True):
        torch.manual_seed(0)
        first, second, parameters = make()
        for i in range(3):
            x = data(5, 6)(i)[0]
            second(first(x).relu()).square().sum().backward()
        results.append([p.grad.clone() for p in parameters])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_undefined_and_oddly_laid_out_tangents():
    def run(compiled):
        torch.manual_seed(0)
        w = nn.Parameter(torch.randn(6, 6))
        fn = lambda x: (x @ w, (x * w[0]).sum(1))  # noqa: E731
        call = sidefx_train.compile(fn, backend="aot_eager", fullgraph=True) if compiled else fn
        grads = []
        for tangent in (torch.ones(6, 5).t(), torch.ones(1, 6).expand(5, 6)):
            w.grad = None
            first, _ = call(data(5, 6)(1)[0])
            first.backward(tangent)
            grads.append(w.grad.clone())
        return grads

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


def test_backward_twice_and_through_the_gradient():
    w = nn.Parameter(torch.randn(6, 6))
    call = sidefx_train.compile(lambda x: (x @ w).sin().sum(), backend="eager", fullgraph=True)
    x = data(5, 6)(1)[0]
    out = call(x)
    out.backward(retain_graph=True)
    once = w.grad.clone()
    out.backward()
    assert torch.equal(w.grad, once + once)
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()
    out = call(x)
    (gradient,) = torch.autograd.grad(out, w, create_graph=True)
    w.grad = None
    gradient.sum().backward()
    (expected,) = torch.autograd.grad((x @ w).sin().sum(), w, create_graph=True)
    assert torch.allclose(w.grad, torch.autograd.grad(expected.sum(), w)[0])


def test_outputs_without_anything_in_common_are_differentiated_separately():
    def two(x, y):
        return (x * x.sin()).sum(), (y * y.cos()).sum()

    call = sidefx_train.compile(two, backend="aot_eager", fullgraph=True, on_failure="raise")
    for _ in range(2):
        x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
        first, second = call(x, y)
        first.backward()
        assert y.grad is None, "the second output has not been differentiated yet"
        second.backward()
        for given, fn in ((x, torch.sin), (y, torch.cos)):
            copied = given.detach().clone().requires_grad_()
            (copied * fn(copied)).sum().backward()
            assert torch.equal(given.grad, copied.grad)


def test_saved_tensor_changed_outside_raises_in_the_backward():
    for compiled in (False, True):
        w = nn.Parameter(torch.randn(6, 6))
        fn = lambda x: (x @ w).sin()  # noqa: E731
        call = sidefx_train.compile(fn, backend="eager", fullgraph=True) if compiled else fn
        out = call(data(5, 6, grad=True)(1)[0])
        with torch.no_grad():
            w.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        y = (
            (lambda x: (x @ w).exp())
            if not compiled
            else sidefx_train.compile(lambda x: (x @ w).exp(), backend="eager")
        )
        made = y(data(5, 6, grad=True)(1)[0])
        with torch.no_grad():
            made.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            made.sum().backward()


def test_grad_mode_decides():
    model = mlp()
    call = sidefx_train.compile(model, backend="eager", fullgraph=True)
    x = data(5, 6)(0)[0]
    assert call(x).requires_grad
    with torch.no_grad():
        assert not call(x).requires_grad
    assert call(x).requires_grad
    model.requires_grad_(False)
    assert not call(x).requires_grad
    assert torch.equal(call(x), model(x))


def test_leaf_or_not_is_looked_at():
    """A step that ran backward into a leaf must not be replayed for an input with a history."""

    def step(x):
        (x * 3).sum().backward()

    call = sidefx_train.compile(step, backend="eager")
    leaf = torch.ones(3, requires_grad=True)
    call(leaf)
    assert torch.equal(leaf.grad, torch.full((3,), 3.0))
    base = torch.ones(3, requires_grad=True)
    call(base * 2)
    assert torch.equal(base.grad, torch.full((3,), 6.0))


def test_what_an_unused_output_depends_on_gets_no_gradient():
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    fn = lambda x: ((x * first).sum(), (x * second).sum(), (first * second).sum())  # noqa: E731
    for call in (fn, sidefx_train.compile(fn, backend="aot_eager", fullgraph=True)):
        first.grad = second.grad = None
        a, _, c = call(torch.arange(3.0))
        a.backward(retain_graph=True)
        assert second.grad is None and first.grad.tolist() == [0, 1, 2]
        c.backward()
        assert second.grad.tolist() == [1, 1, 1] and first.grad.tolist() == [1, 2, 3]


def test_numbers_of_the_data_that_leave_and_that_the_backward_needs():
    class Picked(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            few, many = (x > 0.5).nonzero().shape[0], (x > 0).nonzero().shape[0]
            picked = x[x > 0].unsqueeze(1) * self.weight
            return picked.mean(0).expand(many, 3).reshape(-1) * few, few + 1

    model, found, wanted = Picked(), [], []
    compiled = sidefx_train.compile(model, backend="aot_eager")
    for run, results in ((model, wanted), (compiled, found)):
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            output, number = run(torch.randn(8, generator=generator))
            output.sum().backward()
            results.append((output.tolist(), number, model.weight.grad.tolist()))
            model.weight.grad = None
    assert found == wanted
    assert compiled.report().replays == 3, str(compiled.report())
