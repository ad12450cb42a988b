"""Gradients and version counters of many tensors set in one call: as by one statement each, natively and with torch."""

from __future__ import annotations

import weakref

import pytest
import torch

from sidefx_train.compile.native import (
    guards_module,
    increment_versions,
    set_gradients,
    set_many,
    set_versions,
)


class Own(torch.Tensor):
    """A subclass."""


@pytest.fixture(autouse=True, params=["native", "torch"])
def way(request, monkeypatch):
    native = guards_module()
    if request.param == "torch":
        monkeypatch.setattr(set_many, "guards_if_done", lambda: None)
    elif native is None or not native.tensors_readable():
        pytest.skip("the native module cannot read tensors")
    return request.param


def parameters(count=3):
    return tuple(torch.nn.Parameter(torch.ones(2)) for _ in range(count))


@pytest.mark.parametrize("kind", [list, tuple])
def test_gradients_are_the_results_themselves(kind):
    holders, results = parameters(), kind(torch.full((2,), float(i)) for i in range(5))
    kept = results[4]
    holders[1].grad = kept
    set_gradients(holders, results, (0, 4, 2))
    assert [p.grad is results[i] for p, i in zip(holders, (0, 4, 2), strict=True)] == [True] * 3
    old = weakref.ref(results[0])
    set_gradients(holders, [results[3], kept, results[1]], (0, 1, 2))
    assert holders[0].grad is results[3] and holders[1].grad is kept and holders[2].grad is results[1]
    del results
    assert old() is None, "a reference to the gradient before is left"
    holders[0].grad = None
    kept.add_(1)
    assert torch.equal(holders[1].grad, torch.full((2,), 5.0))


def test_an_alias_of_the_gradient_takes_its_place():
    (holder,) = parameters(1)
    holder.grad = torch.ones(2)
    alias = holder.grad.detach()
    set_gradients((holder,), (alias,), (0,))
    assert holder.grad is alias


def test_other_values_are_assigned_as_well():
    holders = parameters(2)
    own = torch.ones(2).as_subclass(Own)
    holders[1].grad = torch.ones(2)
    set_gradients(holders, (own, None), (0, 1))
    assert holders[0].grad is own and holders[1].grad is None


@pytest.mark.parametrize("wrong", [torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(2, device="meta"), 1])
def test_a_gradient_that_does_not_fit_raises_like_an_assignment(wrong):
    with pytest.raises((RuntimeError, TypeError)) as expected:
        parameters(1)[0].grad = wrong
    holders, results = parameters(), [torch.ones(2), wrong, torch.ones(2)]
    with pytest.raises(expected.type) as found:
        set_gradients(holders, results, (0, 1, 2))
    assert str(found.value) == str(expected.value)
    assert holders[0].grad is results[0] and holders[1].grad is None and holders[2].grad is None


def test_versions_are_set_and_shared_with_views():
    tensors = (torch.ones(2), torch.ones(2), torch.nn.Parameter(torch.ones(2)), torch.ones(2).as_subclass(Own))
    view = tensors[1][:1]
    for _ in range(3):
        tensors[0].add_(1)
    set_versions(tensors, (3, 5, 2**32 - 1, 1))
    assert [t._version for t in tensors] == [3, 5, 2**32 - 1, 1] and view._version == 5
    set_versions(list(tensors), (0, 0, 0, 0))
    assert [t._version for t in (*tensors, view)] == [0] * 5


def test_versions_are_incremented_once_for_each_occurrence():
    tensors = [torch.ones(2), torch.nn.Parameter(torch.ones(2)), torch.ones(2).as_subclass(Own)]
    increment_versions(tensors)
    increment_versions((tensors[0], tensors[0]))
    increment_versions(tensors, (2, 1, 2))
    assert [t._version for t in tensors] == [3, 2, 3]


def test_tensors_made_in_inference_mode_have_no_version_counter():
    with torch.inference_mode():
        without = torch.ones(2)
    tensors = (torch.ones(2), without, torch.ones(2))
    with pytest.raises(RuntimeError):
        set_versions(tensors, (1, 1, 1))
    versions = tensors[0]._version, tensors[2]._version
    increment_versions(tensors)
    assert (tensors[0]._version, tensors[2]._version) == (versions[0] + 1, versions[1] + 1)
