"""Values and numbers that eager's kernels refuse, and Inductor's decompositions do not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train

NUMBERS = {
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x * 2, beta=-1.0),
    "huber_loss": lambda x: F.huber_loss(x, x * 2, delta=-1.0),
    "celu": lambda x: F.celu(x, 0.0),
}


@pytest.mark.parametrize("operation", list(NUMBERS))
def test_a_number_that_the_kernel_refuses(operation):
    """Regression: the compiled step returned a result."""
    compiled = sidefx_train.compile(NUMBERS[operation], warmup="now")
    with pytest.raises(Exception) as wanted:
        NUMBERS[operation](torch.ones(2, 2))
    for _ in range(2):
        with pytest.raises(type(wanted.value)) as raised:
            compiled(torch.ones(2, 2))
        assert str(raised.value) == str(wanted.value)


def test_classes_and_divisors_that_kernels_refuse():
    """Regression: losses of classes out of range were numbers; a division of integers by zero ended the process."""

    def step(x: torch.Tensor, classes: torch.Tensor, divisors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        quotients = torch.div(torch.tensor([7, -7, 5]), divisors, rounding_mode="trunc")
        return F.multi_margin_loss(x, classes), F.multilabel_margin_loss(x, classes[:, None].expand(3, 4)), quotients

    compiled = sidefx_train.compile(step, warmup="now")
    x, classes, divisors = torch.randn(3, 4), torch.tensor([0, 3, 1]), torch.tensor([2, 2, -3])
    for _ in range(3):
        torch.testing.assert_close(compiled(x, classes, divisors), step(x, classes, divisors))
    for bad in ((x, classes + 2, divisors), (x, classes, divisors * 0)):
        with pytest.raises(RuntimeError) as wanted:
            step(*bad)
        with pytest.raises(RuntimeError) as raised:
            compiled(*bad)
        assert str(raised.value) == str(wanted.value)
    torch.testing.assert_close(compiled(x, classes, divisors), step(x, classes, divisors))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_probabilities_of_a_draw_and_places_of_a_write(backend):
    """Regression: Inductor drew zeros for probabilities of NaN, and did not write where there is no element."""

    def step(x: torch.Tensor, places: torch.Tensor, log: list[int]) -> torch.Tensor:
        log.append(1)
        x.add_(1.0)
        kept = torch.bernoulli(x / 4)
        return x.put_(places % 9, kept).clone()

    compiled, outcomes = sidefx_train.compile(step, backend=backend, rng="eager", warmup="now"), []
    for run in (step, compiled):
        torch.manual_seed(0)
        found: list[object] = []
        for value, place in ((1.0, 0), (2.0, 5), (float("nan"), 1), (1.0, 7), (9.0, 1), (1.5, 3)):
            x, log = torch.full((2, 3), value), []
            try:
                found.append(run(x, torch.tensor([place, 1]), log).tolist())
            except (RuntimeError, IndexError) as error:
                found.append((type(error), str(error)))
            found += [str(x.tolist()), log]
        outcomes.append(found)
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("operation", ["addmm", "addmv"])
def test_a_summand_that_does_not_expand_to_the_product(operation):
    """Regression: the product was expanded to the summand."""
    ones = torch.ones(1, 1)
    given = (torch.ones(5, 1), ones, ones) if operation == "addmm" else (torch.ones(5), ones, ones[0])
    compiled = sidefx_train.compile(lambda *tensors: getattr(torch, operation)(*tensors), warmup="now")
    with pytest.raises(RuntimeError) as wanted:
        getattr(torch, operation)(*given)
    with pytest.raises(RuntimeError) as raised:
        compiled(*given)
    assert str(raised.value) == str(wanted.value)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_probabilities_out_of_range(backend):
    """Regression: without its sigmoid a model trained on NaN, where eager raises before any update."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    other = copy.deepcopy(net)

    def program(net: nn.Module):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            loss = F.binary_cross_entropy(net(x).sigmoid() * scale, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    eager, compiled = program(net), sidefx_train.compile(program(other), backend=backend, warmup="now")
    x, y = torch.randn(8, 4), torch.rand(8, 1)
    for scale, target in ((1.0, y), (1.0, y), (5.0, y), (1.0, y + 2), (0.5, y)):
        if scale > 1 or target is not y:
            for step in (eager, compiled):
                with pytest.raises(RuntimeError, match="should be between 0 and 1"):
                    step(x, target, torch.tensor(scale))
        else:
            torch.testing.assert_close(compiled(x, target, torch.tensor(scale)), eager(x, target, torch.tensor(scale)))
        for own, theirs in zip(
            (*other.parameters(), *other.buffers()), (*net.parameters(), *net.buffers()), strict=True
        ):
            torch.testing.assert_close(own, theirs)
    assert compiled.report().replays >= 3


@pytest.mark.parametrize("size", [5, 7])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_repetitions_that_do_not_add_up(size, backend):
    """Regression: under Inductor, a wrong ``output_size`` gave so many elements."""

    def step(x: torch.Tensor, repeats: torch.Tensor) -> torch.Tensor:
        return torch.repeat_interleave(x * 2, repeats, output_size=size) * 3

    compiled = sidefx_train.compile(step, backend=backend, warmup="now")
    x = torch.randn(3)
    for repeats in (torch.tensor([1, 2, 3]), torch.tensor([1, 2, size - 3]), torch.tensor([-1, 2, size - 1])):
        outcomes = []
        for run in (step, compiled):
            try:
                outcomes.append(str(run(x, repeats).tolist()))
            except RuntimeError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("added", [(2,), (), (2, 3), (2, 1)])
def test_slices_of_another_shape_are_not_added(added):
    """Regression: under Inductor, ``index_add`` expanded them."""

    def step(x: torch.Tensor, rows: torch.Tensor, slices: torch.Tensor) -> torch.Tensor:
        return x.index_add(0, rows, slices) * 2

    compiled = sidefx_train.compile(step, warmup="now")
    with pytest.raises((RuntimeError, IndexError)) as wanted:
        step(torch.ones(3, 2), torch.tensor([0, 2]), torch.ones(added))
    with pytest.raises(type(wanted.value)) as raised:
        compiled(torch.ones(3, 2), torch.tensor([0, 2]), torch.ones(added))
    assert str(raised.value) == str(wanted.value)


def test_places_that_are_not_in_the_memory():
    """Regression: Inductor wrote to other memory, or counted the places from the first element of a part."""

    def step(x: torch.Tensor, stride: int, offset: int | None) -> torch.Tensor:
        return torch.as_strided_scatter(x, torch.ones(2, 2), (2, 2), (stride, 1), offset)

    compiled = sidefx_train.compile(step, warmup="now")
    x = torch.arange(24.0).reshape(4, 6)
    with pytest.raises(RuntimeError, match="out of bounds for storage"):
        compiled(x, 200, 0)
    with pytest.warns(sidefx_train.SideFXWarning, match="outside of a tensor"):
        assert torch.equal(compiled(x[1:, 1:], 3, 1), step(x[1:, 1:], 3, 1))
    for part in (x, x.t(), x[1:, 1:]):
        assert torch.equal(compiled(part, 3, None), step(part, 3, None))
