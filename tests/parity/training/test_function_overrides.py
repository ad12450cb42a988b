"""``__torch_function__``: of modes that a step enters, of tensor subclasses, and of objects that are no tensors."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from tests.support.function_overrides import CALLS, Batch, Noting, Plain, Scalar, Scaling, Tagged


def shown(value):
    """Returns everything that a program can compare of a result."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().as_subclass(torch.Tensor)
        return type(value), plain.tolist(), value.requires_grad, {k: shown(v) for k, v in vars(value).items()}
    if isinstance(value, (tuple, list)):
        return [shown(item) for item in value]
    if isinstance(value, Scalar):
        return type(value), shown(value.value)
    return value


def both(step, batches, fullgraph=True):
    """Runs a step over a model eagerly and captured; asserts equal results, calls of overrides and parameters."""
    runs = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        CALLS.clear()
        fn = sidefx_train.compile(step, backend="eager", fullgraph=fullgraph) if captured else step
        made = [shown(fn(model, optimizer, *batch)) for batch in batches()]
        runs.append((made, list(CALLS), shown(list(model.parameters()))))
    assert runs[0] == runs[1]
    return fn.report()


def plain_batches():
    return [(torch.randn(4, 3, generator=torch.Generator().manual_seed(i)),) for i in range(3)]


def tagged_batches():
    return [(Tagged(x, {"weight": 2.0}),) for (x,) in plain_batches()]


def noted(model, optimizer, x):
    with Noting():
        y = F.relu(model(x)) + 1
        z = torch.tensor([1.0, 2.0])
        with Noting():
            y = torch.add(y, z)
        sizes = y.shape, len(y), y[0]
        loss = (1 - y).pow(2).sum()
        loss.backward()
        model.weight.grad = model.weight.grad * 2
        data = y.data
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), data, sizes


def scaled(model, optimizer, x):
    mode = Scaling(3.0)
    with mode:
        y = model(x) + x.sum() * 2
        with torch._C.DisableTorchFunction():
            y = y + 1
        with torch.overrides._pop_mode_temporarily():
            y = y + 2
    loss = y.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), mode.seen


def computed(model, optimizer, x):
    with Noting():
        number = (x * x).sum().item()
        return x * (1 - 0.9**number)


@pytest.mark.parametrize("step", [noted, scaled, computed])
def test_modes_in_the_step(step):
    assert both(step, plain_batches).replays == 3


def test_mode_from_outside():
    mode = Scaling(2.0)
    step = sidefx_train.compile(lambda x: with_mode(mode, x), backend="eager", fullgraph=True)
    for factor in (2.0, 2.0, 5.0):
        mode.factor = factor
        assert step(torch.ones(2)).tolist() == [2 * factor] * 2
    assert mode.seen == 3 and step.report().replays == 3


def with_mode(mode, x):
    with mode:
        return x + 1


def test_mode_that_is_left_by_an_error():
    class Refusing(Noting):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.exp:
                raise ValueError("no exp")
            return super().__torch_function__(func, types, args, kwargs)

    def step(model, optimizer, x):
        try:
            with Refusing():
                torch.exp(x + 1)
        except ValueError as error:
            return x * 2, str(error)

    assert both(step, plain_batches).replays == 3


def test_mode_that_the_step_leaves_entered():
    def step(x):
        Noting().__enter__()
        return x + 1

    compiled = sidefx_train.compile(step, backend="eager")
    CALLS.clear()
    try:
        assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
    finally:
        torch.overrides._pop_mode()
    assert [call[1] for call in CALLS if call[1] == "TensorBase.add"] == ["TensorBase.add"]


def trained(model, optimizer, x):
    y = F.relu(model(x)) + 1
    loss = (1 - y.as_subclass(torch.Tensor)).pow(2).sum() * y.weight
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    new = Tagged(torch.ones(2) * 3, {"a": y.tags["ops"]})
    return loss.detach(), y.detach(), type(y).__name__, isinstance(x, Tagged), x.shape, new.doubled(), new


def attributes(model, optimizer, x):
    x.tags["seen"] = x.tags.get("seen", 0) + 1
    x.add_(1)
    x.note = "note"
    del x.note
    x.__dict__["kept"] = 5
    y = x.view(-1)
    return x, y, x.grad, x.requires_grad, x[0], x.data, {**x.__dict__}["kept"], torch.stack([x, x]), x.max(0)


def mixed(model, optimizer, x):
    with Noting():
        y = x * 2
    with torch._C.DisableTorchFunctionSubclass():
        z = x * 2
    return y, z, torch.cat([z, y]), Plain(torch.ones(2)) + 1, x.new_zeros(2), torch.zeros_like(x)


@pytest.mark.parametrize("step", [trained, attributes, mixed])
def test_tensor_subclass(step):
    assert both(step, tagged_batches).replays == 3


def test_class_of_the_argument_is_guarded():
    step = sidefx_train.compile(lambda x: x * 2, backend="eager", fullgraph=True)
    for value in (Tagged(torch.ones(2)), torch.ones(2), Plain(torch.ones(2)), Tagged(torch.ones(3), {"a": 1})):
        results = []
        for fn in (step, lambda x: x * 2):
            CALLS.clear()
            made = fn(value)
            seen = list(CALLS)
            results.append((shown(made), seen))
        assert results[0] == results[1]
    assert step.report().replays == 4


def test_tensor_subclass_over_a_break():
    def step(model, optimizer, x):
        y = x * 2
        runs_natively(y)
        return y + x

    report = both(step, tagged_batches, fullgraph=False)
    assert report.breaks and report.replays == 3


def runs_natively(value):
    CALLS.append((sys.getswitchinterval(), type(value), value.numpy().tolist()))


def test_other_objects():
    def step(model, optimizer, x):
        product = torch.mul(x, Scalar(torch.full((3,), 2.0)))
        return product, torch.stack([Scalar(x), Scalar(x)]), F.linear(x, Scalar(torch.ones(2, 3)))

    assert both(step, plain_batches).replays == 3


def test_sequences_that_are_no_tensors():
    def step(model, optimizer, x):
        rows = Batch(x)
        return torch.stack([rows[:2], rows[1:3]]), torch.add(rows, 1), len(rows)

    assert both(step, plain_batches).replays == 3


def test_what_is_left_to_eager():
    def codes(fn, *args):
        step = sidefx_train.compile(fn, backend="eager")
        step(*args)
        report = step.report()
        return {found.code for found in (*report.breaks, *report.fallbacks)}

    class Slotted(torch.Tensor):
        __slots__ = ("extra",)

    class Shaped(torch.Tensor):
        @property
        def shape(self):
            return (7,)

    weight = torch.ones(3, requires_grad=True)
    assert codes(lambda x: x * 2, torch.ones(2).as_subclass(Slotted)) == {"SFX109"}
    assert codes(lambda x: x * 2, torch.ones(2).as_subclass(Shaped)) == {"SFX109"}
    assert codes(lambda x: x * 2, torch.ones(2).as_subclass(Plain).requires_grad_()) == {"SFX109"}
    assert codes(lambda x: nn.Parameter(x), Plain(torch.ones(2))) == {"SFX109"}
    assert codes(lambda x: weight * x, Plain(torch.ones(3))) == {"SFX107"}


class Weight:
    """No tensor: ``float`` and ``int`` call its own methods, and ask nobody."""

    def __init__(self):
        self.value = 1.0

    def __float__(self):
        return self.value

    def __int__(self):
        return int(self.value)

    def __bool__(self):
        return self.value > 2


class AskedWeight(Weight):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return NotImplemented


@pytest.mark.parametrize("convert", [float, int, bool])
@pytest.mark.parametrize("inside_mode", [False, True])
def test_conversions_of_other_objects_are_guarded(convert, inside_mode):
    """Regression: the conversion ran natively, and its result was a constant of the graph."""
    weight = AskedWeight() if not inside_mode else Weight()

    def step(x):
        with Noting() if inside_mode else torch.enable_grad():
            number = convert(weight)
        return x * (number + 1)

    compiled = sidefx_train.compile(step, backend="eager", fullgraph=True)
    for weight.value in (1.0, 1.0, 3.0, 2.0):
        assert torch.equal(compiled(torch.ones(2)), step(torch.ones(2)))
