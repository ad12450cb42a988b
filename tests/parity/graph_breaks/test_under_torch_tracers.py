"""Compiled steps under torch's own tracers, and tensors whose storage is freed: eager's outcome, no crash."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo  # registers torch.ops.inductor.resize_storage_bytes_

import sidefx_train

BACKENDS = ["eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("captured", [False, True])
def test_traced_by_jit(backend, captured):
    step = sidefx_train.compile(lambda x: x.sin() + 1, backend=backend)
    if captured:
        step(torch.randn(3))
    traced = torch.jit.trace(step, (torch.ones(3),))
    x = torch.full((3,), 2.0)
    torch.testing.assert_close(traced(x), x.sin() + 1)
    torch.testing.assert_close(step(x), x.sin() + 1)
    assert step.report().replays >= captured


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("within", ["eager", "compiled"])
def test_in_a_branch_of_cond(backend, captured, within):
    sine, cosine = (sidefx_train.compile(fn, backend=backend) for fn in (lambda x: x.sin(), lambda x: x.cos()))
    x = torch.ones(2)
    if captured:
        sine(x), cosine(x)

    def branch(x, flag):
        return torch.cond(flag, sine, cosine, (x,))

    if within == "compiled":
        branch = torch.compile(branch, backend="eager", fullgraph=True)
    for flag in (True, False, True):
        torch.testing.assert_close(branch(x, torch.tensor(flag)), x.sin() if flag else x.cos())
    torch.testing.assert_close(sine(x), x.sin())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["operator", "storage"])
def test_a_freed_storage_is_allocated_and_written(backend, how):
    def step(a):
        if how == "operator":
            torch.ops.inductor.resize_storage_bytes_(a, 32)
        else:
            a.untyped_storage().resize_(32)
        with torch.no_grad():
            a.copy_(torch.ones(8))
        return a + 1

    captured = sidefx_train.compile(step, backend=backend)
    for _ in range(3):
        a = torch.zeros(8, requires_grad=True)
        a.untyped_storage().resize_(0)
        assert captured(a).tolist() == [2.0] * 8
        assert a.untyped_storage().nbytes() == 32
        assert a.tolist() == [1.0] * 8


def test_under_compiled_autograd():
    """Backwards of the capture run in the engine, and so does the one outside that is captured."""
    weight = torch.ones(3, requires_grad=True)

    def doubled(x):
        y = weight * x
        y.register_hook(lambda grad: grad * 2)
        return y

    def step(x):
        doubled(x).sum().backward()

    whole, forward = (sidefx_train.compile(fn, backend="eager", fullgraph=True) for fn in (step, doubled))
    with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
        for i in range(3):
            whole(torch.full((3,), float(i)))
            forward(torch.full((3,), float(i))).sum().backward()
    assert torch.equal(weight.grad, torch.full((3,), 12.0))
    assert not whole.report().fallbacks and not forward.report().fallbacks


def test_a_function_that_torch_compile_skips_after_a_reset():
    def step(x):
        return torch.compiler.disable(lambda y: y * 2)(x)

    torch._dynamo.reset()  # forgets that there was such a function
    compiled = sidefx_train.compile(step, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
