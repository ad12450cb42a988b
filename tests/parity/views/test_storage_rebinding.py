"""Tensors that a step gives another storage (``.data =``, ``set_``, ``resize_`` past its end): captured as in eager.

Compared after every call: values, layouts, versions, shared memory, identity, gradients and errors.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import sidefx_train
from sidefx_train.errors import SideFXError
from tests.parity.views.storage_data_cases import CASES, linear
from tests.parity.views.storage_resize_cases import LEFT  # it adds to CASES

TAKEN_APART = {"decayed_before_a_fused_update"}
"""In functional graphs, a fused update of tensors in the step's own memory is done by tensor operations."""


def tensors_in(value, found):
    if isinstance(value, torch.Tensor):
        found.append(value)
        if value.is_leaf and value.grad is not None:
            found.append(value.grad)
    elif isinstance(value, nn.Module):
        tensors_in([*value.parameters(), *value.buffers()], found)
    elif isinstance(value, torch.optim.Optimizer):
        tensors_in([*value.state.values()], found)
    elif isinstance(value, SimpleNamespace):
        tensors_in(vars(value), found)
    elif isinstance(value, dict):
        tensors_in([*value.values()], found)
    elif isinstance(value, (list, tuple)):
        for item in value:
            tensors_in(item, found)
    return found


def facts(value, gradients_counted):
    """Returns for every tensor values, layout, type, autograd, version, and positions of equal and aliased ones."""
    tensors = tensors_in(value, [])
    places = [t.untyped_storage()._cdata for t in tensors]
    gradients = {id(t.grad) for t in tensors if t.is_leaf and t.grad is not None}
    return [
        (
            t.detach().clone(),
            (type(t), t.dtype, tuple(t.shape), t.stride(), t.storage_offset()),
            (t.requires_grad, t.is_leaf, t._is_view()),
            t._version if gradients_counted or id(t) not in gradients else None,
            [i for i, other in enumerate(tensors) if other is t],
            [i for i, place in enumerate(places) if place == t.untyped_storage()._cdata],
        )
        for t in tensors
    ]


def run(make, backend, **options):
    torch.manual_seed(0)
    state, step, args, *after = make()
    called = step if backend is None else sidefx_train.compile(step, backend=backend, **options)
    found, kept = [], []
    for i in range(1, 6):
        given = args(i)
        try:
            result = called(*given)
            for follow in after:
                follow(result, given)
        except (RuntimeError, TypeError) as error:
            result = f"{type(error).__name__}: {error}"
        kept.append((given, result))
        texts = [part for part in (result if isinstance(result, tuple) else (result,)) if isinstance(part, str)]
        found.append((texts, facts((state, copy.copy(kept)), backend != "inductor" and not after)))
    return found, called


def compared(make, backend, **options):
    close = backend == "inductor" or (backend == "aot_eager" and make.__name__ in TAKEN_APART)
    same = torch.allclose if close else torch.equal
    wanted, _ = run(make, None)
    found, called = run(make, backend, **options)
    for call, ((texts, want), (said, have)) in enumerate(zip(wanted, found, strict=True)):
        assert said == texts, f"call {call}"
        assert len(have) == len(want), f"call {call}"
        for i, (a, b) in enumerate(zip(want, have, strict=True)):
            where = f"call {call}, tensor {i}"
            assert a[0].shape == b[0].shape and same(a[0], b[0]), f"{where}: {b[0]}, eager has {a[0]}"
            if None in (a[3], b[3]):
                a, b = (*a[:3], None, *a[4:]), (*b[:3], None, *b[4:])
            assert b[1:] == a[1:], where
    return called


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(3)
def test_captured_and_as_in_eager(name, backend):
    step = compared(CASES[name], backend, fullgraph=True, on_failure="raise")
    assert step.report().replays == 5 and len(step.report().captures) <= 3


@pytest.mark.parametrize("name", [name for i, name in enumerate(CASES) if i % 4 == 1])
@pytest.mark.every(4)
def test_under_inductor(name):
    assert compared(CASES[name], "inductor", fullgraph=True, on_failure="raise").report().replays == 5


@pytest.mark.parametrize("name", LEFT)
def test_left_to_eager_by_name(name):
    code, make = LEFT[name]
    report = compared(make, "aot_eager").report()
    assert code in {item.code for item in (*report.breaks, *report.fallbacks)}


def test_growth_has_a_symbolic_size():
    """A buffer and a queue that get longer with every call are not captured at each."""
    for name in ("a_growing_buffer", "a_growing_queue"):
        torch.manual_seed(0)
        state, step, args = CASES[name]()
        captured = sidefx_train.compile(step, backend="aot_eager", fullgraph=True, on_failure="raise")
        for i in range(1, 30):
            captured(*args(i))
        assert len(captured.report().captures) == 2, name


def test_a_branch_of_cond_is_refused():
    t = torch.ones(3)

    def step(x):
        def yes(v):
            t.data = v * 2
            return v + 1

        return torch.cond(x.sum() > 0, yes, lambda v: v - 1, (x,))

    captured = sidefx_train.compile(step, backend="aot_eager", fullgraph=True, on_failure="raise")
    with pytest.raises(SideFXError, match="storage"):
        captured(torch.ones(3))
    assert torch.equal(t, torch.ones(3))


def test_a_step_that_raises_leaves_the_memory():
    model = linear()

    def step(x, index):
        model.weight.data = model.weight.data * 0.5
        return model.weight[index].detach()

    captured = sidefx_train.compile(step, backend="aot_eager")
    captured(torch.ones(3), torch.tensor([1]))
    before = model.weight.detach().clone()
    with pytest.raises(IndexError):
        captured(torch.ones(3), torch.tensor([7]))
    assert torch.equal(model.weight, before * 0.5), "run again eagerly, once"


def test_swapped_tensors():
    """Torch swaps no tensors that have weak references: a capture keeps none."""

    def run(compiled):
        a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))

        def step(x):
            torch.utils.swap_tensors(a, b)
            return (a * x).sum().detach()

        def used(x):
            return (a * x).sum().detach()

        step, used = (compiled(fn) for fn in (step, used))
        found = []
        for _ in range(3):
            found += [used(torch.ones(3)), step(torch.ones(3)), a.detach().clone(), b.detach().clone()]
            torch.utils.swap_tensors(a, b)
        return found

    wanted = run(lambda fn: fn)
    for want, have in zip(wanted, run(lambda fn: sidefx_train.compile(fn, backend="aot_eager")), strict=True):
        assert torch.equal(want, have)


def test_requires_grad_by_a_number_that_changes():
    model, state = linear(), SimpleNamespace(calls=0)

    def step(x):
        state.calls += 1
        model.weight.requires_grad_(state.calls % 2 == 0)
        model.bias.requires_grad = state.calls % 2 == 1
        model(x).sum().backward()
        return x * 2

    captured = sidefx_train.compile(step, backend="aot_eager", fullgraph=True, on_failure="raise")
    for call in range(1, 6):
        captured(torch.ones(2, 3))
        assert (model.weight.requires_grad, model.bias.requires_grad) == (call % 2 == 0, call % 2 == 1)
    assert torch.equal(model.weight.grad, torch.full((3, 3), 4.0)) and torch.equal(
        model.bias.grad, torch.full((3,), 6.0)
    )
