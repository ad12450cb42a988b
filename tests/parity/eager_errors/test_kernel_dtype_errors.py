"""Types that eager's kernels refuse: fake tensors accept many of them, and unused operations are in no graph."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn import functional as F

import sidefx_train
from sidefx_train.errors import SideFXWarning


def ones(*shape):
    return torch.ones(*shape)


def doubles(*shape):
    return torch.ones(*shape, dtype=torch.float64)


def ints(*shape):
    return torch.zeros(*shape, dtype=torch.int64)


REFUSED = {
    "matrices of two types": lambda: doubles(2, 3) @ ones(3, 2),
    "large matrices of two types": lambda: doubles(600, 600) @ ones(600, 600),
    "a matrix of integers": lambda: ints(2, 3) @ ones(3, 2),
    "matrix and vector": lambda: torch.mv(doubles(2, 3), ones(3)),
    "addmm": lambda: torch.addmm(doubles(2, 2), ones(2, 3), ones(3, 2)),
    "linear": lambda: F.linear(doubles(2, 3), ones(2, 3)),
    "the bias of linear": lambda: F.linear(ones(2, 3), ones(2, 3), doubles(2)),
    "batch norm": lambda: F.batch_norm(doubles(4, 2), ones(2), ones(2)),
    "layer norm": lambda: F.layer_norm(doubles(4, 2), (2,), ones(2), ones(2)),
    "group norm": lambda: F.group_norm(doubles(4, 2), 1, ones(2), ones(2)),
    "class weights": lambda: F.cross_entropy(ones(2, 3), ints(2), doubles(3)),
    "binary cross entropy": lambda: F.binary_cross_entropy(ones(2) * 0.5, doubles(2)),
    "cdist": lambda: torch.cdist(doubles(2, 3), ones(2, 3)),
    "index_add": lambda: torch.zeros(3).index_add(0, ints(1), doubles(1)),
    "index_copy": lambda: torch.zeros(3).index_copy(0, ints(1), doubles(1)),
    "index_put": lambda: torch.zeros(3).index_put((ints(1),), doubles(1)),
    "grid_sample": lambda: F.grid_sample(doubles(1, 1, 4, 4), ones(1, 2, 2, 2), align_corners=False),
    "cross": lambda: torch.linalg.cross(doubles(2, 3), ones(2, 3)),
    "softmax of integers": lambda: ints(2).softmax(0),
    "std of integers": lambda: ints(2).std(),
    "gelu of integers": lambda: F.gelu(ints(2)),
    "bits of floats": lambda: ones(2) & ones(2),
    "unfold of integers": lambda: F.unfold(ints(1, 1, 4, 4), 2),
    "bilinear interpolation of integers": lambda: F.interpolate(ints(1, 1, 4, 4), scale_factor=2, mode="bilinear"),
    "polar": lambda: torch.polar(ones(2), doubles(2)),
    "a cell of two types": lambda: torch.gru_cell(doubles(1, 2), ones(1, 2), ones(6, 2), ones(6, 2)),
}
TAKEN = {
    "sum of two types": lambda: ones(2) + doubles(2),
    "where": lambda: torch.where(ones(3) > 0, ones(3), doubles(3)),
    "cat": lambda: torch.cat([ones(2), doubles(2)]),
    "embedding": lambda: F.embedding(ints(2), ones(3, 3)),
    "cross entropy": lambda: F.cross_entropy(ones(2, 3), ints(2)),
    "gather": lambda: ones(2, 3).gather(1, ints(2, 1)),
    "one hot": lambda: F.one_hot(ints(2), 4),
    "cumsum of truth values": lambda: (ones(3) > 0).cumsum(0),
    "floor division of integers": lambda: (ints(3) + 7) // (ints(3) + 2),
    "masked fill": lambda: ones(3).masked_fill(ones(3) > 0, -1.0),
    "multi-head attention": lambda: F.scaled_dot_product_attention(
        ones(1, 2, 3, 4), ones(1, 2, 3, 4), ones(1, 2, 3, 4), ones(3, 3) > 0
    ),
    "embedding bag": lambda: F.embedding_bag(ints(2, 2), ones(3, 3)),
    "unique": lambda: torch.bincount(ints(3), minlength=2),
    "scatter": lambda: torch.zeros(3).scatter_add(0, ints(2), ones(2)),
    "the two greatest integers": lambda: (ints(3) + 1).topk(2).values,
    "the second integer": lambda: (ints(3) + 1).kthvalue(2).values,
    "the two greatest, with out=": lambda: torch.topk(ones(3), 2, out=(torch.empty(2), ints(2)))[0],
    "index write": lambda: torch.zeros(3).index_put((ints(2),), ones(2), accumulate=True),
}


def _said(run):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        x, found = run(torch.ones(2))
    return x.tolist(), found


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.covering(1)
def test_the_error_is_eagers(name, backend):
    """The step catches it, and nothing reads the operation's result."""

    def step(x):
        try:
            REFUSED[name]()
        except RuntimeError as error:
            return x * 2, str(error)
        return x, "taken"

    assert _said(step)[1] != "taken", "eager takes it"
    assert _said(sidefx_train.compile(step, backend=backend)) == _said(step)


@pytest.mark.parametrize("name", TAKEN)
def test_types_that_go_together_are_captured(name):
    def step(x):
        return x * 2, TAKEN[name]()

    compiled = sidefx_train.compile(step, backend="eager", fullgraph=True)
    expected, found = step(torch.ones(2))[1], compiled(torch.ones(2))[1]
    assert torch.equal(found, expected) and found.dtype == expected.dtype
