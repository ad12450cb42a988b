"""Tensors made of Python numbers that change with every call: the numbers are inputs of one graph."""

from __future__ import annotations

import pytest
import torch

import sidefx_train
from tests.support.symbolic_numbers import Space, graphs_for


def make():
    return Space(x=torch.arange(6.0), count=0, rate=0.5)


def of_counters(space, k):
    space.count += 1
    nested = torch.tensor([[space.count, 1], [2, space.count * 2]])
    return torch.tensor(space.count) + space.x, torch.tensor([space.count, True]), nested, torch.tensor((space.count,))


def of_floats(space, k):
    space.rate *= 1.1
    double = torch.tensor(space.rate, dtype=torch.float64)
    return torch.tensor(space.rate), torch.as_tensor([space.rate, 1]), double, torch.asarray(space.rate)


def large_integers(space, k):
    space.count += 1
    return torch.tensor(2**40 + space.count), torch.tensor([2**62 - space.count])


def by_other_names(space, k):
    x = space.x
    like = x.new_tensor([k, 1.5]), x.new_tensor(k), x.new_tensor([k], dtype=torch.long), x.long().new_tensor([k, 2])
    return like, torch.Tensor([k]), torch.FloatTensor([k, 2]), torch.LongTensor([k]), torch.DoubleTensor([[k], [1]])


def normalised_returns(space, k):
    """REINFORCE."""
    total, returns = 0.0, []
    space.rate *= 0.99
    for reward in (1.0, 2.0, space.rate):
        total = reward + 0.99 * total
        returns.insert(0, total)
    values = torch.tensor(returns)
    return (values - values.mean()) / (values.std() + 1e-8)


def of_tensors(space, k):
    x = space.x * k
    return torch.tensor([x.sum(), 2.0]), torch.tensor([x[0].double(), k]), torch.tensor([x.max().half()])


def differentiated_leaf(space, k):
    weight = torch.tensor([k * 0.5], requires_grad=True)
    (weight * weight).sum().backward()
    return weight.grad, weight.is_leaf


def filled(space, k):
    space.count += 1
    return torch.full((2,), space.count), torch.full((space.count,), 1.0), torch.arange(0, space.count)


@pytest.mark.parametrize(
    "step",
    [
        of_counters,
        of_floats,
        large_integers,
        by_other_names,
        normalised_returns,
        of_tensors,
        differentiated_leaf,
        filled,
    ],
    ids=lambda step: step.__name__,
)
def test_changing_numbers_take_no_further_capture(step):
    assert graphs_for(step, make) == 2


def narrow(space, k):
    return torch.tensor(k, dtype=torch.uint8), torch.tensor([k > 3, True]), torch.tensor(k, dtype=torch.bool)


def cut_off(space, k):
    space.rate += 0.7
    return torch.tensor(space.rate, dtype=torch.int32), torch.arange(0, space.rate), int(space.rate) * space.x


def with_gradients(space, k):
    weight = (space.x * k).requires_grad_()
    return torch.tensor([(weight * 2).detach().sum(), k]), torch.zeros(2).to("meta").device


def elsewhere(space, k):
    with torch.device("meta"):
        return torch.tensor([k, 2.0]).device


@pytest.mark.parametrize("step", [narrow, cut_off, with_gradients, elsewhere], ids=lambda step: step.__name__)
def test_other_numbers_become_what_eager_makes_of_them(step):
    assert graphs_for(step, make, 5) >= 1


def test_tensors_whose_values_torch_needs_break_the_step_there():
    def step(space, k):
        made = space.leaf * k
        return torch.tensor([made.sum(), made.max()]) * 2

    assert graphs_for(step, lambda: Space(leaf=torch.ones(3, requires_grad=True)), 4) >= 1


def test_sizes_as_a_tensor():
    step = sidefx_train.compile(lambda x: torch._shape_as_tensor(x) + x.dim(), backend="eager", fullgraph=True)
    for size in (3, 4, 5):
        assert step(torch.ones(size, 2)).tolist() == [size + 2, 4]
    assert len(step.report().captures) == 2
    assert step(torch.ones(())).shape == (0,)


def test_number_of_several_elements():
    step = sidefx_train.compile(lambda x: float(x), backend="eager", fullgraph=True)
    for bad in (torch.ones(2), torch.ones(0)):
        with pytest.raises(ValueError, match="only one element"):
            step(bad)
    assert step(torch.ones(1)) == 1.0


MAKERS = {
    "tensor": lambda x, k, t: torch.tensor([[k, 1], [2, k * 2]]),
    "one number": lambda x, k, t: torch.tensor([[[t]]]),
    "tuples": lambda x, k, t: torch.as_tensor([(k, 1), (2, 3)], dtype=torch.float32),
    "of items": lambda x, k, t: torch.tensor([[x.sum().item()], [t]]),
    "Tensor": lambda x, k, t: torch.Tensor([[t]]),
    "new_tensor": lambda x, k, t: x.new_tensor([[t, 1]]),
    "new": lambda x, k, t: x.new([[t, 1], [2, k]]),
    "with gradients": lambda x, k, t: torch.tensor([[t]], requires_grad=True),
}


@pytest.mark.parametrize("make_tensor", MAKERS.values(), ids=MAKERS)
def test_tensors_of_nested_lists_are_no_views(make_tensor):
    def run(wrap):
        space = Space(count=0, rate=0.5)

        def step(x):
            space.count += 1
            space.rate *= 1.5
            return make_tensor(x, space.count, space.rate)

        step = wrap(step)
        made = [step(torch.ones(3) * place) for place in range(5)]
        return step, [(each, each._is_view(), each.is_leaf, each.detach_().requires_grad) for each in made]

    step, found = run(lambda fn: sidefx_train.compile(fn, backend="eager", fullgraph=True))
    _, wanted = run(lambda fn: fn)
    assert str(found) == str(wanted)
    assert len(step.report().captures) == 1
