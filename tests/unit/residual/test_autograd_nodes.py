"""Values whose autograd graph is freed: what a program sees of them is what eager shows."""

from __future__ import annotations

import pytest
import torch

from sidefx_train.compile.residual.autograd_nodes import freed


def eager_loss(kind):
    w = torch.ones(2, dtype=kind, requires_grad=True)
    loss = (w * w).sum()
    loss.backward() if kind is torch.float32 else torch.autograd.grad(loss, w, torch.ones((), dtype=kind))
    return loss


def facts(loss):
    node = type(loss.grad_fn).__name__
    with pytest.raises(RuntimeError) as raised:
        loss.backward(torch.ones_like(loss.detach()))
    return (
        loss.tolist(),
        loss.dtype,
        loss.requires_grad,
        loss.is_leaf,
        loss._is_view(),
        loss._version,
        loss.is_conj(),
        node,
        loss.grad_fn.name(),
        str(raised.value),
    )


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kind", [torch.float32, torch.complex64])
def test_a_freed_loss_is_that_of_eager(kind, grad):
    eager = eager_loss(kind)
    value = eager.detach().clone()
    with torch.set_grad_enabled(grad):
        made = freed(value, type(eager.grad_fn).__name__)
    assert torch.is_grad_enabled(), "the mode is left as it was"
    assert facts(made) == facts(eager)
    assert made.data_ptr() == value.data_ptr() and not value.requires_grad


def test_it_has_a_version_counter_of_its_own_with_the_same_count():
    value = torch.ones(2)
    value.add_(1).add_(1)
    made = freed(value, "MulBackward0")
    assert made._version == 2
    value.add_(1)
    assert made._version == 2 and made.detach().tolist() == [4.0, 4.0]


def test_bits_of_a_lazy_conjugate_and_negative_are_kept():
    value = torch.tensor([1 + 2j, 3 - 1j]).conj()
    made = freed(value, "MulBackward0")
    assert made.is_conj() and made.detach().tolist() == value.tolist()
    imaginary = value.imag
    made = freed(imaginary, "MulBackward0")
    assert made.is_neg() and made.detach().tolist() == imaginary.tolist()


def test_each_has_a_node_of_its_own():
    one, other = (freed(torch.ones(()), "MulBackward0") for _ in range(2))
    assert one.grad_fn is not other.grad_fn and type(one.grad_fn) is type(other.grad_fn)


def test_inside_a_transform_of_functions_torch_decides():
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.vmap(lambda x: freed(x, "MulBackward0"))(torch.ones(2))
