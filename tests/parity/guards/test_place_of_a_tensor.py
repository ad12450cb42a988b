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


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: type(x.grad_fn).__name__,
        lambda x: x.grad_fn.__class__.__name__,
        lambda x: repr(x.grad_fn).split()[0],
        lambda x: f"{x.grad_fn}".split()[0],
        lambda x: "Mul" in str(type(x.grad_fn)),
        lambda x: type((x + 1).grad_fn.next_functions[0][0]).__name__,
        lambda x: type(x.grad_fn) is type((x * 2).grad_fn),
        lambda x: isinstance(x.grad_fn, torch.autograd.graph.Node),
        lambda x: hasattr(x.grad_fn, "_saved_result"),
        lambda x: x.grad_fn.metadata,
    ],
    ids=["type", "class", "repr", "format", "text of the type", "next", "same type", "isinstance", "saved", "metadata"],
)
def test_a_node_from_before_the_step_is_what_eager_sees(ask):
    """Regression: its class was that of the node which stands for it in the capture."""

    def step(x):
        return ask(x), x.sum()

    compiled = sidefx_train.compile(step, backend="eager", warmup="now", keep_slower=True)
    w = torch.ones(3, requires_grad=True)
    for make in (lambda: w * 2, lambda: w + 1, lambda: w * 3, lambda: w.exp(), lambda: (w * 2)[1:]):
        x = make()
        assert compiled(x)[0] == step(x)[0]
