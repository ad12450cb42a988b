"""Views of tensors that are transposed in place later: each gradient element has the position it has in memory.

Autograd finds a view's position in the gradient of its base by strides for outside tensors. For fake tensors it replays
the view on that gradient, which by then has the new layout of the base: a row of a transposed matrix became its column.
"""

from __future__ import annotations

import pytest
import torch

import sidefx_train

W = torch.arange(16.0).reshape(4, 4)


def transposed_and_written(x):
    base = x * 1
    row = base[0]
    base.t_()
    row.mul_(2)
    return (base * W).sum()


def transposed_and_read(x):
    base = x * 1
    row = base[0]
    base.transpose_(0, 1)
    return (row * W[1]).sum()


def transposed_and_written_itself(x):
    base = x * 1
    row = base[0]
    base.t_()
    base.mul_(W)
    return (row * W[1]).sum()


def a_view_of_a_view(x):
    base = x * 1
    part = base[1:].view(-1)[1:4]
    base.t_()
    part.exp_()
    return (base * W).sum()


def unsqueezed(x):
    base = x * 1
    row = base[0]
    base.unsqueeze_(0)
    row.mul_(2)
    return (base * W).sum()


def squeezed(x):
    base = (x * 1).unsqueeze(0).clone()
    only = base[0]
    base.squeeze_(0)
    only.mul_(2)
    return (base * W).sum()


def begins_to_require(x):
    base = torch.ones(4, 4)
    row = base[0]
    base.t_()
    row.mul_(x[1])
    return (base * W).sum()


def resized(x):
    base = torch.ones(4, 4)
    row = base[1]
    base.resize_(2, 6)
    row.mul_(x[1])
    return (base * W.view(-1)[:12].view(2, 6)).sum()


def unseen(x):
    base = x * 1
    row = base[0]
    with torch.no_grad():
        base.t_()
    row.mul_(2)
    return (base * W).sum()


def several(x):
    base = x * 1
    row, other = base[0], (x * 2)[1]
    base.t_()
    torch._foreach_mul_([row, other], 2)
    return (base * W).sum() + other.sum()


def storage_replaced(x):
    base = x * 1
    row = base[0]
    base.data = torch.ones(4, 4).t()
    row.mul_(2)
    return (row * W[1]).sum()


def of_another_type(x):
    base = torch.view_as_complex(x.view(4, 2, 2)).clone()
    row = base[0]
    base.t_()
    row.mul_(2)
    return (torch.view_as_real(base).reshape(4, 4) * W).sum()


def transposed_back(x):
    base = x * 1
    row = base[0]
    base.t_()
    base.t_()
    row.mul_(2)
    return (base * W).sum()


def made_after_the_metadata_mutation(x):
    base = x * 1
    before = base[0].sum()
    base.t_()
    row = base[0]
    row.mul_(2)
    return (base * W).sum() * before


def read_without_gradients(x):
    base = torch.arange(16.0).view(4, 4)
    row = base[0]
    base.t_()
    return (x[1] * row).sum()


TRANSPOSED = [
    transposed_and_written,
    transposed_and_read,
    transposed_and_written_itself,
    a_view_of_a_view,
    unsqueezed,
    squeezed,
    begins_to_require,
    resized,
    unseen,
    several,
    storage_replaced,
    of_another_type,
    made_after_the_metadata_mutation,
]
PLAIN = [transposed_back, read_without_gradients]


def argument():
    made = torch.arange(16.0).reshape(4, 4).cos().requires_grad_() * 1.5
    made.retain_grad()
    return made


def behind(step):
    """Returns the gradient of a step that returns its loss, or autograd's error."""
    x = argument()
    try:
        step(x).backward()
    except RuntimeError as error:
        return str(error)
    return x.grad


def within(step):
    def whole(x):
        step(x).backward()

    return whole


def gradient(whole):
    """Returns the gradient of a step that runs its own backward, or autograd's error."""
    x = argument()
    try:
        whole(x)
    except RuntimeError as error:
        return str(error)
    return x.grad


def alike(want, have):
    return want == have if isinstance(want, str) or isinstance(have, str) else torch.equal(want, have)


@pytest.mark.parametrize("step", TRANSPOSED + PLAIN, ids=lambda step: step.__name__)
def test_the_gradient_behind_the_step(step):
    compiled = sidefx_train.compile(step, backend="aot_eager")
    for _ in range(2):
        assert alike(behind(step), behind(compiled))


@pytest.mark.parametrize("step", TRANSPOSED + PLAIN, ids=lambda step: step.__name__)
def test_the_gradient_within_the_step(step):
    whole = within(step)
    compiled = sidefx_train.compile(whole, backend="aot_eager")
    for _ in range(2):
        assert alike(gradient(whole), gradient(compiled))


@pytest.mark.parametrize("step", PLAIN, ids=lambda step: step.__name__)
def test_metadata_mutations_that_hide_nothing_are_captured(step):
    compiled = sidefx_train.compile(step, backend="aot_eager")
    compiled(argument())
    assert compiled.report().graph_count == 1


def history(x):
    base = x * 1
    row = base[0]
    base.t_()
    row.backward(W[1])


def asked_for(x):
    base = x * 1
    row = base[0]
    base.t_()
    (grad,) = torch.autograd.grad(row, x, W[1])
    x.grad = grad


@pytest.mark.parametrize("whole", [history, asked_for], ids=lambda step: step.__name__)
def test_a_history_that_no_operation_asks_for(whole):
    compiled = sidefx_train.compile(whole, backend="aot_eager")
    for _ in range(2):
        assert alike(gradient(whole), gradient(compiled))


def test_metadata_of_a_result_of_unsafe_split_mutated_to_fewer_elements():
    """Eager's gradient raises, because the base of the written view is too small for it."""

    def step(x):
        conjugate = x.conj()
        view = conjugate.transpose(0, -1)
        x.as_strided_((2,), (1,))
        view.neg_()
        return conjugate

    compiled = sidefx_train.compile(step, backend="aot_eager")
    said = []
    for run in (step, compiled):
        x = torch.arange(12.0).reshape(3, 4).sin().requires_grad_()
        with pytest.raises(RuntimeError) as caught:
            run(x.unsafe_split(2)[0]).sum().backward()
        said.append(str(caught.value))
    assert said[0] == said[1]
