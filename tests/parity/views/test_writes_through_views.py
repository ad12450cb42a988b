"""Writes through each kind of view, to memory with infinities and large numbers, which no difference survives."""

from __future__ import annotations

import math

import pytest
import torch

import sidefx_train
from sidefx_train.errors import SideFXWarning

pytestmark = pytest.mark.filterwarnings(f"ignore::{SideFXWarning.__module__}.{SideFXWarning.__qualname__}")

VIEWS = {
    "expanded to its own shape": lambda b: b.expand(4, 6),
    "expanded to sizes of -1": lambda b: b.expand(-1, -1),
    "expanded as another": lambda b: b.expand_as(torch.zeros(4, 6)),
    "expanded by a dimension": lambda b: b.expand(1, 4, 6),
    "a row expanded to itself": lambda b: b[:1].expand(1, 6),
    "an item of an expansion": lambda b: b[1].expand(1, 6)[0],
    "integers over an expansion": lambda b: b.expand(4, 6).view(torch.int32),
    "broadcast to its own shape": lambda b: b.broadcast_to((4, 6)),
    "broadcast with another": lambda b: torch.broadcast_tensors(b, torch.zeros(6))[0],
    "windows": lambda b: b.unfold(0, 2, 2),
    "windows with gaps": lambda b: b.unfold(0, 1, 2),
    "windows and a rest": lambda b: b.unfold(1, 4, 4),
    "windows that overlap": lambda b: b.unfold(1, 3, 1),
    "windows transposed": lambda b: b.unfold(0, 2, 2).transpose(0, 1),
    "an item": lambda b: b[1],
    "every second row": lambda b: b[::2],
    "columns": lambda b: b[:, 1:4],
    "the last column": lambda b: b[..., -1],
    "a new dimension": lambda b: b[None],
    "transposed": lambda b: b.t(),
    "flat": lambda b: b.view(-1),
    "of other sizes": lambda b: b.reshape(2, -1),
    "unflattened": lambda b: b.unflatten(0, (2, 2)),
    "a diagonal": lambda b: b.diagonal(1),
    "strided": lambda b: b.as_strided((2, 2), (6, 2), 1),
    "strided with overlaps": lambda b: b.as_strided((3, 2), (1, 1)),
    "narrowed": lambda b: b.narrow(1, -2, 2),
    "a chunk": lambda b: b.chunk(2)[1],
    "a split": lambda b: b.tensor_split(2, 1)[1],
    "one of several": lambda b: b.unbind(0)[2],
    "integers": lambda b: b.view(torch.int32),
    "squeezed": lambda b: b[:, None].squeeze(1),
    "detached": lambda b: b.detach(),
}
OF_COMPLEX = {
    "the real part": lambda c: c.real,
    "the imaginary part": lambda c: c.imag,
    "a conjugate": lambda c: c.conj(),
    "the real part of a conjugate": lambda c: c.conj().real,
    "the imaginary part of a conjugate": lambda c: c.conj().imag,
    "both parts": lambda c: torch.view_as_real(c),
    "expanded": lambda c: c.expand(4, 6),
}
WRITES = (lambda v: v.fill_(1.5), lambda v: v.mul_(3), lambda v: v.copy_(torch.full(v.shape, 0.1)))


def memory():
    values = [1e8, math.inf, -math.inf, 1e-8, -0.0, 3.0, 7e20, 0.1]
    return torch.tensor(values * 3).reshape(4, 6).clone()


def complex_memory():
    return torch.complex(memory(), memory().flip(0))


def check(view, write, make):
    def own(x):
        made = x * 1
        part = view(made)
        write(part)
        return made, part * 1

    def given(x):
        part = view(x)
        write(part)
        return x * 1, part * 1

    for step in (own, given):
        mine, yours = make(), make()
        want = step(mine)
        have = sidefx_train.compile(step, backend="aot_eager", warmup="now", verify=0)(yours)
        for a, b in zip((*want, mine), (*have, yours), strict=True):
            torch.testing.assert_close(b, a, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("view", VIEWS)
def test_a_write_through_a_view(view):
    for write in WRITES:
        check(VIEWS[view], write, memory)


@pytest.mark.parametrize("view", OF_COMPLEX)
def test_a_write_through_a_view_of_complex_numbers(view):
    for write in WRITES:
        check(OF_COMPLEX[view], write, complex_memory)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_expansions_of_a_size_that_changes(backend):
    def step(x):
        made = x * 1
        every = made.expand(-1, -1)
        every.fill_(1.5)
        made.expand(x.shape[0], -1).add_(1)
        made.expand_as(x)[0] = 7
        made.expand(1, -1, -1).mul_(2)
        return made, every

    compiled = sidefx_train.compile(step, backend=backend, warmup="now", verify=0)
    for size in (3, 4, 5, 6):
        x = torch.full((size, 4), math.inf)
        for a, b in zip(step(x), compiled(x), strict=True):
            assert torch.equal(a, b)
    assert len(compiled.report().captures) == 2


PARTS = {
    "unbind": lambda x: x.unbind(-1),
    "split": lambda x: x.split(1, -1),
    "chunk": lambda x: x.chunk(2, -1),
    "tensor_split": lambda x: x.tensor_split(2, -1),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("parts", PARTS)
def test_parts_of_a_size_that_changes(parts, masked):
    """Regression: a write to one that ``unbind`` made was captured for each size; for a size from data not at all."""

    def step(x):
        x = x[x[:, 0] > 0.3] * 1.5 if masked else x * 1.5
        first, second = PARTS[parts](x)
        first.clamp_(0, 0.5)
        second.mul_(2)
        return x.sum(0)

    compiled = sidefx_train.compile(step, backend="aot_eager")
    for n in (4, 5, 6, 9):
        x = torch.rand(n, 2, generator=torch.Generator().manual_seed(n))
        x[:2, 0] = 0.9
        assert compiled(x).equal(step(x))
    report = compiled.report()
    assert report.replays == 4 and len(report.captures) <= 2 and not report.breaks
