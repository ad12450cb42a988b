"""Results of arithmetic without effect have storage of their own under Inductor, as in eager."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

import sidefx_train

RESULTS = {
    "times one": lambda x: x * 1,
    "times one again": lambda x: x * 1,
    "plus zero": lambda x: x + 0,
    "minus zero": lambda x: x - 0,
    "over one": lambda x: x / 1,
    "times ones": lambda x: x * torch.ones(4, 6),
    "plus zeros": lambda x: x + torch.zeros(4, 6),
    "a view of a product": lambda x: (x * torch.ones(4, 6)).t(),
    "a row of a sum": lambda x: (x + torch.zeros(4, 6))[1],
    "of a view": lambda x: x.t() * 1,
    "of a part": lambda x: x[:1] * torch.ones(6),
    "of another result": lambda x: x.sin() * torch.ones(4, 6),
    "expanded": lambda x: x[:1].expand(4, 6) + torch.zeros(4, 6),
    "a power": lambda x: x**1,
    "a copy": lambda x: x.clone(),
    "converted and back": lambda x: x.double().float(),
    "repeated once": lambda x: x.repeat(1, 1),
}


def _storage(tensor):
    return tensor.untyped_storage().data_ptr()


def test_results_share_storage_where_eagers_do():
    def step(x):
        return x.sin(), *(make(x) for make in RESULTS.values())

    names = ["sin", *RESULTS]
    compiled = sidefx_train.compile(step, fullgraph=True)
    for _ in range(3):
        x = torch.randn(4, 6)
        want, have = step(x), compiled(x)
        for name, a, b in zip(names, want, have, strict=True):
            assert torch.allclose(a, b) and a.stride() == b.stride(), name
            assert (_storage(a) == _storage(x)) == (_storage(b) == _storage(x)), f"{name} shares the input's storage"
        for (one, a), (other, b) in combinations(zip(names, have, strict=True), 2):
            assert _storage(a) != _storage(b), f"{one} shares storage with {other}"
    assert compiled.report().replays == 3


def test_a_result_does_not_follow_its_operand():
    weight = torch.nn.Parameter(torch.randn(5))

    def step(x):
        scale = torch.ones(5)
        (weight * x).sum().backward()
        with torch.no_grad():
            kept = weight * scale
        return kept

    compiled = sidefx_train.compile(step, fullgraph=True)
    for _ in range(3):
        kept = compiled(torch.ones(5))
        before = kept.clone()
        with torch.no_grad():
            weight.add_(1.0)
        assert torch.equal(kept, before)


@pytest.mark.parametrize("sizes", [[3, 1, 2, 3], [3, 2, 1, 0, 4], [1, 2, 1]])
def test_a_returned_slice_whose_size_changes_to_one(sizes):
    x = torch.randn(4, 3)

    def step(n):
        return x[:n], x[:, :n]

    compiled = sidefx_train.compile(step, backend="eager")
    for n in sizes:
        for view, wanted in zip(compiled(n), step(n), strict=True):
            assert view._base is x and view.shape == wanted.shape and view.stride() == wanted.stride()
            assert view.equal(wanted)
    assert not compiled.report().fallbacks, f"{compiled.report()}"
