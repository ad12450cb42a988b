"""Programs over views in which a captured step once differed from eager: cases of the alias fuzzer, shortened."""

from __future__ import annotations

import warnings

import pytest
import torch

import sidefx_train
from sidefx_train.errors import SideFXWarning
from tests.fuzz.alias_run import check, source_of
from tests.parity.views import alias_cases, alias_cases_autograd

PROGRAMS = {**alias_cases.PROGRAMS, **alias_cases_autograd.PROGRAMS}

UNDER_INDUCTOR = (
    "gradients of arguments that are views of one another",
    "data of an argument, written",
    "data of an argument, transposed",
    "metadata of a view of an argument mutated",
    "the metadata of a base mutated after its view was made",
    "written under two layouts, in the middle of memory",
    "views with autograd off and on",
    "a non-leaf changed in place with gradients",
    "an argument resized within its memory",
    "a result resized to that of another",
    "parts of an argument that autograd does not take for views",
    "such parts of a non-leaf, and a view of one",
    "a view that leaves, made between two uses",
    "two views that leave, and uses before, between and after",
    "a view squeezed before what the backward needs was written",
    "a negative view, resized and written",
    "views of one part, one made by way of another",
    "gates of which one result is made past the other",
    "lists of tensors, written",
    "lists of tensors that share memory, written",
)
"""One program of each kind: mutations of data and layout, several views of one tensor, and their later uses."""


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.every(2)
def test_program(name, backend):
    check(source_of(PROGRAMS[name]), backend)


def test_an_empty_view_is_where_it_is_whatever_was_captured_before():
    """Torch's cache of fake tensors loses the base of an empty view."""

    def step(x):
        return x.view(0), x.view(0).view_as(x), x * 2

    for _ in range(3):
        call = sidefx_train.compile(step, backend="aot_eager", fullgraph=True, on_failure="raise")
        given = torch.tensor(1.5).reshape(-1)[2:7]
        want, have = step(given), call(given)
        places = [(out.storage_offset(), out.stride(), out._base is given._base) for out in want]
        assert places == [(out.storage_offset(), out.stride(), out._base is given._base) for out in have]


@pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")
@pytest.mark.parametrize("name", UNDER_INDUCTOR)
@pytest.mark.every(10)
def test_program_under_inductor(name):
    """Metadata equals eager's there too; values and gradients are close."""
    assert check(source_of(PROGRAMS[name]), "inductor", close=True).replays == 3


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("read", [False, True])
def test_a_view_that_eager_refuses_raises(backend, read):
    """Fake tensors accept some views of expanded memory that eager refuses; unused results are in no graph."""

    def step(x):
        flat = x.T.unsqueeze(0).expand(2, 1, 4).view(-1)
        return flat * 2 if read else x

    def said(run):
        with pytest.raises(RuntimeError, match="view size is not compatible") as caught:
            run(torch.ones(4, 1))
        return str(caught.value)

    compiled = sidefx_train.compile(step, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        assert said(compiled) == said(step) == said(compiled)


def test_a_gradient_keeps_the_strides_that_a_tangent_of_another_layout_gives_it():
    """``empty_like`` of a fake tensor chooses other strides for dimensions of size 1 than its kernel."""

    def step(x):
        out = x.t()
        tangent = torch.empty_like(out.detach())
        return torch.autograd.grad(out, x, tangent.copy_(torch.ones(2, 1)))[0]

    x = torch.ones(1, 2, requires_grad=True)
    captured = sidefx_train.compile(step, backend="aot_eager", fullgraph=True, on_failure="raise")
    assert [captured(x).stride() for _ in range(3)] == [step(x).stride()] * 3
