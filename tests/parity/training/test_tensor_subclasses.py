"""Tensor subclasses with a ``__torch_dispatch__``, as parameters, state, arguments and results of a step."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import sidefx_train
from tests.support.parity import Program, batches, parity
from tests.support.tensor_subclasses import CALLS, FACTOR, Counted, Pair, Quantized, pair, paired

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "adamw_foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
}


def program(body, optimizer="sgd", cls=Pair):
    """Returns a factory of a step ``body(model, optimizer, x, y)`` over pairs."""

    def make():
        model = paired(nn.Linear(4, 3), cls)
        updates = OPTIMIZERS[optimizer](model.parameters())

        def batch(index):
            return pair(5, 4, seed=index, cls=cls), pair(5, 3, seed=50 + index, cls=cls)

        return Program(lambda x, y: body(model, updates, x, y), batch, (model, updates))

    return make


def train(model, optimizer, x, y):
    loss = F.mse_loss(torch.relu(model(x)), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.every(3)
def test_training(optimizer):
    def change(made, index):
        made.watch[1].param_groups[0]["lr"] = 0.1 / (index + 1)

    captures = 1 if optimizer in ("sgd", "foreach") else 2  # without state, and with it
    parity(program(train, optimizer), steps=4, captures=captures, between=change)


def clipped(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = ((model(x) - y) ** 2).mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss


def accumulated(model, optimizer, x, y):
    for part in (x, x * 2):
        F.mse_loss(model(part), y).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def checkpointed(model, optimizer, x, y):
    hidden = checkpoint(lambda value: torch.relu(model(value)), x, use_reentrant=False)
    F.mse_loss(hidden, y).backward()
    optimizer.step()
    optimizer.zero_grad()
    return hidden.detach(), hidden.shape


def hooked(model, optimizer, x, y):
    handle = model.weight.register_hook(lambda gradient: gradient * 2)
    F.mse_loss(model(x), y).backward()
    handle.remove()
    optimizer.step()
    optimizer.zero_grad()


def inner_tensors(model, optimizer, x, y):
    F.mse_loss(model(x), y).backward()
    gradient = model.weight.grad
    optimizer.zero_grad()
    return gradient, gradient.a.sum(), model.weight.a + 1, x.tag


def written(model, optimizer, x, y):
    with torch.no_grad():
        model.weight.copy_(model.weight * 0.5)
        model.bias.zero_()
        x.add_(1).mul_(y.sum())
    return x


def replaced(model, optimizer, x, y):
    x.a = x.a * 2
    x.note = "seen"
    model.last = x * 1
    return x


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


def own_function(model, optimizer, x, y):
    F.mse_loss(Product.apply(x, model.weight), y).backward()
    optimizer.step()
    optimizer.zero_grad()


BODIES = (clipped, accumulated, checkpointed, hooked, inner_tensors, written, replaced, own_function)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
@pytest.mark.every(2)
def test_step(body):
    parity(program(body), steps=3, captures=2)


def test_torchs_own_subclass():
    def make():
        model = nn.Linear(4, 3)
        for name, parameter in list(model.named_parameters()):
            setattr(model, name, nn.Parameter(TwoTensor(parameter.detach().clone(), parameter.detach() * 2)))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        plain = batches((5, 4), (5, 3))

        def batch(index):
            return tuple(TwoTensor(value, value + 1) for value in plain(index))

        return Program(lambda x, y: train(model, optimizer, x, y), batch, (model, optimizer))

    parity(make, steps=3, captures=2)


def test_a_pair_of_pairs():
    def nested(value):
        return Pair(Pair(value.clone(), value * 2), Pair(value + 1, value * 3))

    def make():
        model = nn.Linear(4, 3)
        for name, parameter in list(model.named_parameters()):
            setattr(model, name, nn.Parameter(nested(parameter.detach())))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plain = batches((5, 4), (5, 3))
        return Program(
            lambda x, y: train(model, optimizer, x, y), lambda i: tuple(map(nested, plain(i))), (model, optimizer)
        )

    parity(make, steps=3)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("trains", [True, False], ids=["trained", "frozen"])
def test_quantized_weights(backend, trains):
    def make():
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        for layer in (model[0], model[2]):
            layer.weight = nn.Parameter(Quantized.of(layer.weight.detach()), requires_grad=trains)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)

        def step(x, y):
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return Program(step, batches((5, 4), (5, 3)), (model, optimizer))

    parity(make, steps=3, captures=2, backend=backend)


def test_inductor():
    parity(program(train), steps=2, backend="inductor")


def test_buffers_and_results():
    def make():
        model = nn.Module()
        model.register_buffer("mean", pair(4))

        def step(x):
            with torch.no_grad():
                model.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
                return model.mean, x, model.mean - x, x[0].clone()

        return Program(step, lambda index: (pair(5, 4, seed=index),), (model,))

    parity(make, steps=3)


def test_results_that_existed_are_the_same_objects():
    model, x = paired(nn.Linear(4, 3)), pair(5, 4)
    step = sidefx_train.compile(lambda x: (model.weight, x, x.a, x * 2), backend="eager", fullgraph=True)
    for _ in range(2):
        weight, given, inner, made = step(x)
        assert weight is model.weight and given is x and inner is x.a
        assert type(made) is Pair and made.tag == "x" and torch.equal(made.b, x.b * 2)


def test_a_second_backward_raises_as_in_eager():
    def step(model, x):
        loss = (model(x) ** 2).mean()
        loss.backward()
        return loss

    model = paired(nn.Linear(4, 3))
    found = []
    for fn in (step, sidefx_train.compile(step, backend="eager", fullgraph=True)):
        with pytest.raises(RuntimeError) as raised:
            fn(model, pair(5, 4)).backward()
        found.append(str(raised.value))
    assert found[0] == found[1]


# ---------------------------------------------------------------------- the subclass's own Python
def noted(run, model, optimizer, calls):
    """Returns what the class noted in each call."""
    CALLS.clear()
    found = []
    for index in range(calls):
        run(model, optimizer, pair(5, 4, seed=index, cls=Counted), pair(5, 3, seed=index, cls=Counted))
        found.append(list(CALLS))
    return found


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_effects_of_its_python_are_kept(optimizer):
    model = paired(nn.Linear(4, 3), Counted)
    other = copy.deepcopy(model)
    step = sidefx_train.compile(train, backend="eager", fullgraph=True, on_failure="raise", keep_slower=True)
    want = noted(train, model, OPTIMIZERS[optimizer](model.parameters()), 3)
    have = noted(step, other, OPTIMIZERS[optimizer](other.parameters()), 3)
    assert want[0] and have == want
    assert sidefx_train.explain(step).fallback_count == 0


def test_a_number_that_the_step_computes():
    """Regression: trial calls, which find out what C++ code does with such a number, wrote to the argument itself."""

    def make():
        CALLS.clear()
        steps = torch.tensor(1.0)

        def step(x):
            steps.add_(1)
            x.mul_(1 - 0.1 * steps.item())
            return x.lerp(x * 2, 1 / steps.item())

        return Program(torch.no_grad()(step), lambda index: (pair(3, seed=index, cls=Counted),), (CALLS, steps))

    parity(make, steps=3)


@pytest.mark.slow
def test_its_python_runs_only_during_the_capture():
    runs = []

    def watch(frame, event, arg):
        if event == "call" and frame.f_code is Pair.__torch_dispatch__.__func__.__code__:
            runs.append(str(frame.f_locals["func"]))

    make = program(train, "adam")()
    step = sidefx_train.compile(make.step, backend="eager", fullgraph=True, keep_slower=True)
    calls = [make.batch(index) for index in range(4)]
    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        for call in calls:
            step(*call)
    finally:
        sys.setprofile(before)
    assert not runs, "the interpreter runs it, and nothing else does"
    assert sidefx_train.explain(step).replays == 4


def test_what_its_python_reads_is_guarded():
    step = sidefx_train.compile(torch.relu, backend="eager", fullgraph=True, keep_slower=True)
    x = pair(3, 3, cls=Counted)
    for factor in (1.0, 3.0, 3.0, 1.0):
        FACTOR[0] = factor
        assert torch.equal(step(x).a, x.a.relu() * factor)
    FACTOR[0] = 1.0
    assert len(sidefx_train.explain(step).captures) == 2


def test_attributes_and_inner_tensors_are_guarded():
    def read(x):
        return x.a.to(torch.float64).sum() + len(x.tag)

    step = sidefx_train.compile(read, backend="eager", fullgraph=True, keep_slower=True)
    x = pair(3, 3)
    assert torch.equal(step(x), read(x))
    x.tag = "longer"
    assert torch.equal(step(x), read(x))
    x.a = x.a.to(torch.float16)
    assert torch.equal(step(x), read(x))
    x.a = torch.randn(2, 2)
    assert torch.equal(step(x), read(x))
    assert len(sidefx_train.explain(step).captures) == 4


def test_a_parameter_whose_class_changes():
    model, x = paired(nn.Linear(4, 3), Counted), pair(5, 4)
    step = sidefx_train.compile(lambda x: torch.relu(model(x)).detach(), backend="eager", keep_slower=True)
    FACTOR[0] = 2.0
    for cls in (Counted, Pair):
        model.weight.__class__ = cls
        x.__class__ = model.bias.__class__ = cls
        assert torch.equal(step(x).a, torch.relu(model(x)).a)
    FACTOR[0] = 1.0


# ---------------------------------------------------------------------- what stays eager, by name
class OwnSizes(Pair):
    @staticmethod
    def __new__(cls, a, b, tag="x"):
        policy = {"dispatch_sizes_strides_policy": "sizes"}
        return torch.Tensor._make_wrapper_subclass(cls, a.size(), dtype=a.dtype, device=a.device, **policy)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.sym_size.default, torch.ops.aten.size.default):
            return args[0].a.size()
        return super().__torch_dispatch__(func, types, args, kwargs)


class Undispatched(Pair):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.relu.default:
            with torch._C._DisableTorchDispatch():
                args[0].a.add_(1)
        return super().__torch_dispatch__(func, types, args, kwargs)


def refused(step, code, words, batch=lambda index: (pair(3, 3, seed=index),)):
    report = parity(lambda: Program(step, batch), steps=3, captures=None, whole=False)
    assert (code, words) in {(found.code, found.reason) for found in report.breaks}, report.breaks


@pytest.mark.parametrize(
    ("cls", "code", "words"),
    [
        (OwnSizes, "SFX109", "x is a OwnSizes, a tensor subclass that computes its sizes, device or layout itself"),
        (Undispatched, "SFX111", "disables __torch_dispatch__"),
    ],
    ids=["sizes", "undispatched"],
)
def test_classes_that_are_refused(cls, code, words):
    refused(lambda x: torch.relu(x), code, words, lambda index: (pair(3, 3, seed=index, cls=cls),))


def test_a_view_is_captured_and_not_written():
    parity(lambda: Program(lambda x: x * 2, lambda i: (pair(3, 3, seed=i).t(),)), steps=3, captures=1)
    words = "changes x, a tensor subclass that is a view, in place"
    refused(lambda x: x.mul_(2) * 1, "SFX109", words, lambda index: (pair(3, 3, seed=index).t(),))


def test_a_result_that_aliases_an_argument_is_refused():
    words = "a Pair, a tensor subclass that shares storage with another, leaves the step"
    refused(lambda x: x.detach(), "SFX107", words)


def test_a_hook_that_stays():
    model = paired(nn.Linear(3, 3))
    step = sidefx_train.compile(lambda: model.weight.register_hook(lambda gradient: gradient), backend="eager")
    for calls in (1, 2):
        step()
        assert len(model.weight._backward_hooks) == calls
    assert not sidefx_train.explain(step).fallbacks
