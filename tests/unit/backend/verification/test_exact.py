"""A graph in float64: supported graphs, random draws, and refused graphs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from sidefx_train.compile.backend.verification.exact import CannotRunExactly, Exact, widened


def both(fn, *args):
    """Returns the results of a function, and of its graph in float64."""
    graph = make_fx(fn)(*args)
    torch.manual_seed(3)
    want = fn(*args)
    torch.manual_seed(3)
    return want, Exact(graph).run(*widened(list(args)))


def test_nothing_is_rounded_on_the_way():
    x = torch.tensor([1e8, 1.0, -1e8])
    want, exact = both(lambda x: ((x[0] + x[1]) + x[2]).bfloat16().float(), x)
    assert float(want) == 0.0 and float(exact) == 1.0 and exact.dtype == torch.float64


def test_inputs_that_share_memory_still_do():
    base = torch.arange(12.0).reshape(3, 4)
    args = [base.t(), base[1:], torch.arange(3), 2.5]
    transposed, rows, integers, number = widened(args)
    assert transposed.stride() == (1, 4) and rows.storage_offset() == 4 and rows.dtype == torch.float64
    rows.zero_()
    assert transposed[:, 1:].abs().sum() == 0 and base[1:].sum() > 0
    assert integers.dtype == torch.int64 and integers is not args[2] and number == 2.5


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.bernoulli(x),
        lambda x: x * torch.rand_like(x),
        lambda x: F.dropout(x, 0.5),
        lambda x: x.clone().normal_(),
        lambda x: torch.randn(3, 4) + x,
    ],
    ids=["bernoulli", "rand_like", "dropout", "normal_", "randn"],
)
def test_the_same_numbers_are_drawn(draw):
    want, exact = both(draw, torch.rand(3, 4, generator=torch.Generator().manual_seed(0)))
    assert exact.dtype == torch.float64
    torch.testing.assert_close(exact.float(), want)


def test_what_reads_bits_is_not_run():
    graph = make_fx(lambda x: x.view(torch.int32) + 1)(torch.ones(3))
    with pytest.raises(CannotRunExactly):
        Exact(graph).run(*widened([torch.ones(3)]))


def test_inputs_of_several_types_in_one_memory_are_not_taken():
    numbers = torch.ones(4)
    with pytest.raises(CannotRunExactly, match="several types"):
        widened([numbers, numbers.view(torch.int32)])
