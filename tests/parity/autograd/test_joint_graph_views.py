"""Views among the results of a captured function with a live autograd graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sidefx_train
from tests.support.joint_graph import BACKENDS, compare, data, function

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")


VIEWS = {
    "of one another": lambda x, w: (lambda y: (y, y.view(-1), y[1:3]))(x @ w),
    "of what nothing else refers to": lambda x, w: (lambda y: (y[0], y.t()))(x @ w),
    "of a parameter": lambda x, w: (w.t(), (x @ w).sum()),
    "of an input and of a view": lambda x, w: (x.view(6, 5).t()[1], x @ w),
    "detached": lambda x, w: (lambda y: (y, y.detach()[0], y.view(-1).detach()))(x @ w),
    "several at once": lambda x, w: (*(x @ w).split(2), *w.unbind()),
    "complex": lambda x, w: (torch.view_as_real(torch.fft.fft(x @ w)), torch.fft.fft(x @ w).imag),
    "written through a view": lambda x, w: (lambda y: (y[0].mul_(2), y)[1:])(x @ w),
    "metadata mutated in place": lambda x, w: ((x @ w).view(-1, 2).t_(), (x @ w).clone().unsqueeze_(0)),
}


def facts(outs, given):
    """Returns the facts that later operations on the outputs would see: bases, memory, versions, history."""
    base = [next((i for i, t in enumerate((*outs, *given)) if t is out._base), out._base is not None) for out in outs]
    memory = [[a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for b in (*outs, *given)] for a in outs]
    names = [out.grad_fn.name() if out._is_view() and out.grad_fn is not None else None for out in outs]
    return base, memory, names, [(out.stride(), out.storage_offset(), out._version, out.requires_grad) for out in outs]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.covering(1)
def test_views_that_leave(name, backend):
    seen = []
    for compiled in (False, True):
        torch.manual_seed(0)
        w = nn.Parameter(torch.randn(6, 6))
        fn = lambda x: VIEWS[name](x, w)  # noqa: E731
        call = sidefx_train.compile(fn, backend=backend, fullgraph=True, on_failure="raise") if compiled else fn
        for i in range(2):
            x = data(5, 6, grad=True)(i)[0]
            outs = call(x)
            seen.append(facts(outs, (x, w)))
    assert seen[:2] == seen[2:]
    # Gradients of several views are added in another layout than eager's, and a matrix product then rounds differently.
    compare(function(VIEWS[name]), data(5, 6, grad=True), backend, exact=False)


def test_in_place_changes_of_views_that_left():
    def run(compiled):
        torch.manual_seed(0)
        w = nn.Parameter(torch.randn(6, 6))
        fn = lambda x: (lambda y: (y, y[0], y.detach()[1], w.t()))(x @ w)  # noqa: E731
        call = sidefx_train.compile(fn, backend="aot_eager", fullgraph=True) if compiled else fn
        y, row, detached, transposed = call(data(5, 6)(1)[0])
        row.mul_(2)
        detached.zero_()
        said = []
        one = torch.ones_like(y)
        for change in (
            lambda: transposed.add_(1),
            lambda: y.split(2)[0].add_(1),
            lambda: y.backward(torch.ones_like(y)),
        ):
            try:
                change()
            except RuntimeError as error:
                said.append(str(error).replace("_CapturedPartBackward", "MmBackward0"))
        return y.detach(), row.detach(), w.grad, y._version, row._version, said

    for want, have in zip(run(False), run(True), strict=True):
        assert torch.equal(want, have) if isinstance(want, torch.Tensor) else want == have


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_view_made_by_a_custom_function_is_not_replayed(backend):
    class Transposed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.t()

        @staticmethod
        def backward(ctx, grad):
            return 3 * grad.t()

    for fn in (lambda x, w: Transposed.apply(x @ w), lambda x, w: Transposed.apply(w)[0]):
        compare(function(fn), data(5, 6, grad=True), backend, whole=False, exact=False)


def test_a_detached_alias_shares_memory_and_version():
    w = nn.Parameter(torch.randn(6, 6))

    def fn(x):
        loss = (x @ w).sin()
        return loss, loss.detach()

    for call in (fn, sidefx_train.compile(fn, backend="eager", fullgraph=True)):
        out, detached = call(data(5, 6)(1)[0])
        assert out.data_ptr() == detached.data_ptr() and not detached.requires_grad
        before = out._version
        detached.zero_()
        assert out._version == before + 1 and out.abs().sum() == 0
