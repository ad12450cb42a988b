"""What a step asks of a tensor that size, strides and dtype do not tell: a tensor with another answer is captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sidefx_train

ROOT = torch.arange(24.0)


def with_gradient():
    leaf = torch.ones(4, 3, requires_grad=True)
    leaf.grad = torch.full((4, 3), 2.0)
    return leaf


def leaf():
    return torch.ones(4, 3, requires_grad=True)


def computed():
    return torch.ones(4, 3, requires_grad=True) * 2


def second_of_two():
    return torch.ones(2, 4, 3, requires_grad=True).unbind(0)[1]


def first_of_two():
    return torch.ones(2, 4, 3, requires_grad=True).unbind(0)[0]


def whole():
    return torch.arange(12.0)


def part():
    return ROOT[:12]


def later_part():
    return ROOT[2:14]


READS: dict[str, tuple[Any, Any, Any]] = {
    "is a leaf": (lambda t: t.is_leaf, computed, leaf),
    "gradient": (lambda t: None if t.grad is None else t.grad.sum().item(), computed, with_gradient),
    "gradient of a leaf": (lambda t: t.grad is None, leaf, with_gradient),
    "history": (lambda t: t.grad_fn is None, leaf, computed),
    "output of its node": (lambda t: t.output_nr, first_of_two, second_of_two),
    "base": (lambda t: t._base is None, whole, part),
    "is a view": (lambda t: t._is_view(), whole, part),
    "offset": (lambda t: t.storage_offset(), part, later_part),
    "offset of a view": (lambda t: t[1:].storage_offset(), part, later_part),
    "offset by the class": (torch.Tensor.storage_offset, part, later_part),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("read", READS)
def test_it_is_guarded(read, backwards):
    ask, *makers = READS[read]
    step = sidefx_train.compile(lambda t: (ask(t), t.detach() * 2), backend="eager")
    for make in (makers[::-1] if backwards else makers) * 2:
        tensor = make()
        answer, doubled = step(tensor)
        assert answer == ask(tensor) and torch.equal(doubled, tensor.detach() * 2)
    assert step.report().replays == 4, step.report()
