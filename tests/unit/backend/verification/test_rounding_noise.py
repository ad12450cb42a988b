"""Noise of the size of rounding errors: on what rounds, not on what selects."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from sidefx_train.compile.backend.verification.rounding_noise import Noisy

aten = torch.ops.aten


def of_largest(x):
    """The derivative of ``amax``: gradients go to the elements that equal it."""
    doubled = aten.mul.Tensor(x, 3.3)
    return aten.sum.default(aten.eq.Tensor(doubled, aten.amax.default(doubled, [0, 1], True)))


def of_a_pool(x):
    doubled = aten.mul.Tensor(x, 3.3)
    pooled = aten.max_pool2d_with_indices.default(aten.view.default(doubled, [1, 1, 4, 4]), [4, 4])
    return aten.sum.default(aten.eq.Tensor(doubled, aten.view.default(pooled[0], [])))


def of_a_sort(x):
    doubled = aten.mul.Tensor(x, 3.3)
    return aten.sum.default(aten.eq.Tensor(doubled, aten.select.int(aten.sort.default(doubled, 0)[0], 0, 3)))


@pytest.mark.parametrize("function, count", [(of_largest, 1), (of_a_pool, 1), (of_a_sort, 4)])
def test_selected_elements_keep_their_values(function, count):
    """Regression: no element equalled the maximum, gradients were 0 / 0, and no noise explained a right graph."""
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    for seed in range(3):
        assert Noisy(fx.symbolic_trace(function), seed).run(x) == count


def test_products_are_moved():
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    module = fx.symbolic_trace(lambda x: aten.mul.Tensor(x, 3.3))
    moved = [Noisy(module, seed).run(x.clone()) for seed in range(2)]
    assert not torch.equal(moved[0], moved[1])
    torch.testing.assert_close(moved[0], x * 3.3, rtol=1e-5, atol=1e-5)


def test_a_bias_before_batch_norm_explains_sums_made_one_after_the_other():
    """Its gradient is zero but for rounding. Equal gradients, as those behind a mean, are all rounded alike."""
    x = torch.randn(8, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    grad = torch.full_like(x, 1e-4) * (x > 0)
    mean, inverse = x.mean((0, 2, 3)), 1 / (x.var((0, 2, 3), correction=0) + 1e-5).sqrt()

    def before_the_norm(x, grad, mean, inverse):
        made = aten.native_batch_norm_backward.default(
            grad, x, None, None, None, mean, inverse, True, 1e-5, [True, False, False]
        )
        return aten.sum.dim_IntList(made[0], [0, 2, 3])

    terms = grad.transpose(0, 1).reshape(4, -1)
    serial = terms.reshape(4, 8, -1).cumsum(2)[..., -1].sum(1)
    error = (serial.double() - terms.double().sum(1)) * inverse
    module = fx.symbolic_trace(before_the_norm)
    right = module(x, grad, mean, inverse).double()
    noise = max(float((Noisy(module, seed).run(x, grad, mean, inverse) - right).norm()) for seed in range(3))
    assert float(error.norm()) < 8 * noise < 1e-3 * float(terms.sum(1).norm())


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_squares_keep_their_sign(sign):
    """A square root of what noise made negative is NaN, and a run with NaN tells nothing."""

    def mean_of_squares(x):
        return aten.avg_pool2d.default(aten.mul.Tensor(aten.mul.Tensor(x, x), sign), [1, 1])

    x = torch.cat([torch.zeros(50), torch.full((50,), 1e-9), torch.ones(50)]).reshape(1, 1, 10, 15)
    for seed in range(3):
        moved = Noisy(fx.symbolic_trace(mean_of_squares), seed).run(x)
        assert (moved * sign >= 0).all() and torch.equal(moved == 0, x == 0)
        assert not torch.equal(moved, mean_of_squares(x))


def test_a_sum_that_cancels_is_moved_from_zero():
    mixed = torch.tensor([1.0, -1.0] * 50)
    assert Noisy(fx.symbolic_trace(lambda x: aten.sum.default(x)), 0).run(mixed) != 0


MOVING_AVERAGES = {
    "addcmul": lambda old, new: aten.addcmul.default(aten.mul.Tensor(old, 0.99), new, new, value=0.01),
    "in place": lambda old, new: aten.addcmul_.default(aten.mul_.Tensor(old, 0.99), new, new, value=0.01),
    "foreach": lambda old, new: aten._foreach_addcmul.Scalar([aten.mul.Tensor(old, 0.99)], [new], [new], 0.01)[0],
    "lerp": lambda old, new: aten.lerp.Scalar(old, aten.mul.Tensor(new, new), 0.01),
    "add": lambda old, new: aten.add.Tensor(aten.mul.Tensor(old, 0.99), aten.mul.Tensor(new, new), alpha=0.01),
}


@pytest.mark.parametrize("name", MOVING_AVERAGES)
def test_moving_averages_of_squares_stay_squares(name):
    """Regression: noise of the size of the largest made the smallest negative, and their roots no numbers; no noise
    explained another rounding of a gradient in a direction that has almost none."""
    module = fx.symbolic_trace(MOVING_AVERAGES[name])
    new = torch.tensor([1.0, 1e-7, -1e-9, 0.0])
    for seed in range(3):
        moved = Noisy(module, seed).run(torch.tensor([2.0, 1e-14, 0.0, 0.0]), new.clone())
        assert (moved >= 0).all() and moved[3] == 0
        assert abs(moved[1] - 1e-14) > 1e-10, "a small one is moved by what the largest is rounded"


DIFFERENCES = {
    "addcmul": lambda old, new: aten.addcmul.default(old, new, new, value=-1.0),
    "lerp": lambda old, new: aten.lerp.Scalar(old, new, 2.0),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_differences_may_become_negative(name):
    """Terms cancel, so that what is zero may be rounded to either side."""
    module = fx.symbolic_trace(DIFFERENCES[name])
    old = torch.tensor([2.0, 2e-8, 2e-8, 2e-8])
    new = (old / 2 if name == "lerp" else old.sqrt()) + torch.tensor([0.5 if name == "lerp" else -0.5, 0, 0, 0])
    moved = [Noisy(module, seed).run(old.clone(), new.clone()) for seed in range(4)]
    assert any((each < 0).any() for each in moved)
