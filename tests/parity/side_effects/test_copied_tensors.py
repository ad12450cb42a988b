"""Tensors copied in the step by ``copy.deepcopy`` and ``copy.copy``: the capture must not copy itself with them."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch

import sidefx_train

COPIES_OF_WHAT_HANGS_ON_A_FAKE_TENSOR = """
import copy, gc
import torch
import sidefx_train
from torch.multiprocessing.reductions import StorageWeakRef

made = []
begin, end = StorageWeakRef.__init__, StorageWeakRef.__del__

def __init__(self, storage):
    begin(self, storage)
    made.append(self.cdata)

def __del__(self):
    assert self.cdata in made, "a reference that nobody took is let go of"
    made.remove(self.cdata)
    end(self)

StorageWeakRef.__init__, StorageWeakRef.__del__ = __init__, __del__

def step(x):
    scale = torch.tensor(2.0)  # a constant of the fake mode, which refers weakly to its storage
    return copy.deepcopy(x) * scale

compiled = sidefx_train.compile(step, backend="eager")
for _ in range(3):
    compiled(torch.ones(3))
    gc.collect()
"""


def test_nothing_of_the_capture_is_copied():
    """References to storages that were released twice crashed the process at some later line."""
    done = subprocess.run(
        [sys.executable, "-c", COPIES_OF_WHAT_HANGS_ON_A_FAKE_TENSOR], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "nobody took" not in done.stderr, "let go of a storage twice"


def deep(x):
    made = copy.deepcopy(x)
    made.add_(1)
    return x, made, made._version


def transposed(x):
    return copy.deepcopy(x.t().clone()), copy.deepcopy(torch.arange(6.0).view(2, 3).t())


def in_containers(x):
    made = copy.deepcopy({"a": x, "b": [x, x * 2], "c": 1})
    made["a"].add_(1)
    return made, made["a"] is made["b"][0]


def made_in_the_step(x):
    leaf = copy.deepcopy(torch.ones(2, 3, requires_grad=True))
    (leaf * x).sum().backward()
    return leaf.grad, leaf.is_leaf


class Holder:
    def __init__(self, tensor):
        self.tensor = tensor


def in_an_object(x):
    made = copy.deepcopy(Holder(x))
    made.tensor.mul_(3)
    return x, made.tensor


def same(got, expected):
    """Compares values, strides, versions and which results share memory."""
    flat, wanted = torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(expected)
    assert len(flat) == len(wanted)
    for one, other in zip(flat, wanted, strict=True):
        if not isinstance(other, torch.Tensor):
            assert one == other
            continue
        assert torch.equal(one, other) and one.stride() == other.stride() and one._version == other._version
        assert one.requires_grad == other.requires_grad and one.__dict__ == other.__dict__
        assert one.untyped_storage().nbytes() == other.untyped_storage().nbytes()
    held = [[t.untyped_storage().data_ptr() for t in ts if isinstance(t, torch.Tensor)] for ts in (flat, wanted)]
    assert [[a == b for a in held[0]] for b in held[0]] == [[a == b for a in held[1]] for b in held[1]]


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fn", [deep, transposed, in_containers, made_in_the_step, in_an_object])
def test_deep_copies_are_captured(fn, backend):
    compiled = sidefx_train.compile(fn, backend=backend, fullgraph=True)
    for seed in range(3):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))
        same(compiled(x.clone()), fn(x.clone()))


def views(x):
    made = copy.deepcopy([x, 1, x.view(-1)])
    made[0].add_(1)
    return made


def part(x):
    return copy.deepcopy(x[1:])


def with_a_gradient(x):
    leaf = torch.ones(2, 3, requires_grad=True)
    (leaf * x).sum().backward()
    return copy.deepcopy(leaf).grad


def with_attributes(x):
    made = torch.zeros(2)
    made.names_of_mine = ["a"]
    return copy.deepcopy(made).names_of_mine


def memo_of_the_step(x):
    memo = {}
    one, other = copy.deepcopy(x, memo), copy.deepcopy(x.view(-1), memo)
    one.add_(1)
    return one, other, len(memo) > 2


def by_the_method(x):
    return x.__deepcopy__({}) * 2


def shallow(x):
    made = copy.copy(x)
    made.add_(1)
    return x, made * 2


@pytest.mark.parametrize(
    "fn", [views, part, with_a_gradient, with_attributes, memo_of_the_step, by_the_method, shallow]
)
def test_other_copies_are_left_to_python(fn):
    compiled = sidefx_train.compile(fn, backend="eager")
    for seed in range(3):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))
        same(compiled(x.clone()), fn(x.clone()))
    assert {record.code for record in compiled.report().breaks} == {"SFX104"}


def test_a_tensor_that_gets_attributes_later():
    def step(x):
        return copy.deepcopy(x)

    compiled = sidefx_train.compile(step, backend="eager")
    compiled(torch.ones(3))
    named = torch.ones(3)
    named.names_of_mine = ["a"]
    made = compiled(named)
    assert made.names_of_mine == ["a"] and made.names_of_mine is not named.names_of_mine


def test_arguments_that_come_to_share_memory():
    def step(x, y):
        one, other = copy.deepcopy([x, y])
        one.add_(1)
        return one, other

    compiled = sidefx_train.compile(step, backend="eager")
    same(compiled(torch.ones(3), torch.ones(3)), step(torch.ones(3), torch.ones(3)))
    assert not compiled.report().breaks
    x, again = torch.ones(3), torch.ones(3)
    same(compiled(x, x.view(-1)), step(again, again.view(-1)))
    assert compiled.report().breaks
    before = compiled.report().replays
    same(compiled(torch.ones(3), torch.ones(3)), step(torch.ones(3), torch.ones(3)))
    assert compiled.report().replays == before + 1


def test_the_state_of_a_model_as_the_best_so_far():
    """Parameters that come to share memory after the capture share it in the copy, too."""
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, best = torch.nn.Linear(2, 2), {}
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x, model=model, best=best, optimizer=optimizer):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            best["state"] = copy.deepcopy(model.state_dict())
            best["state"]["bias"].add_(1)
            return [value.clone() for value in best["state"].values()]

        run = sidefx_train.compile(step, backend="eager") if compiled else step
        made = [run(torch.ones(1, 2)) for _ in range(3)]
        model.bias.data = model.weight.data[0]
        made += [run(torch.ones(1, 2)) for _ in range(2)]
        assert best["state"]["bias"].data_ptr() == best["state"]["weight"].data_ptr()
        model.bias.data = torch.ones(2)
        made.append(run(torch.ones(1, 2)))
        results.append([made, list(model.parameters()), list(best["state"].values())])
    assert str(results[0]) == str(results[1])
    assert run.report().replays >= 4
