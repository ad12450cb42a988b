"""Captured functions with a live autograd graph, compared with eager: values and gradients for each input."""

from __future__ import annotations

import copy

import torch
from torch import nn

import sidefx_train
from tests.support.parity import seed

BACKENDS = ["eager", "aot_eager", "inductor"]


def compare(make, inputs, backend="eager", steps=3, whole=True, exact=None):
    """Runs ``make() -> (module or function, parameters)`` eagerly and compiled: values and gradients for each input.

    ``inputs(i)`` returns the arguments of call ``i``; those that require grad are compared too.
    """
    exact = backend != "inductor" if exact is None else exact
    strict = {"fullgraph": True, "on_failure": "raise"} if whole else {}
    outcomes = []
    for compiled in (False, True):
        seed(0)
        fn, parameters = make()
        call = sidefx_train.compile(fn, backend=backend, **strict) if compiled else fn
        seen = []
        for i in range(steps):
            args = inputs(i)
            seed(100 + i)
            out = call(*args)
            flat = [t for t in (out.values() if isinstance(out, dict) else out if isinstance(out, tuple) else (out,))]
            loss = sum((t * torch.linspace(0.5, 2, t.numel()).view(t.shape)).sum() for t in flat if t.requires_grad)
            for p in parameters:
                p.grad = None
            loss.backward()
            grads = [p.grad for p in parameters] + [a.grad for a in args if isinstance(a, torch.Tensor) and a.is_leaf]
            seen.append(([t.detach().clone() for t in flat], [t.requires_grad for t in flat], copy.deepcopy(grads)))
            with torch.no_grad():
                for p in parameters:
                    if p.grad is not None:
                        p -= 0.1 * p.grad
        outcomes.append(seen)
        report = call.report() if compiled else None
    for i, (want, have) in enumerate(zip(*outcomes, strict=True)):
        assert want[1] == have[1], f"call {i}: requires_grad {have[1]}, eager {want[1]}"
        for kind, a, b in (("value", want[0], have[0]), ("gradient", want[2], have[2])):
            for k, (x, y) in enumerate(zip(a, b, strict=True)):
                assert (x is None) == (y is None), f"call {i}: {kind} {k}: {x} and {y}"
                if x is not None:
                    assert x.shape == y.shape and x.stride() == y.stride(), f"call {i}: {kind} {k}: layout"
                    if not exact:
                        assert (x - y).norm() <= 1e-5 * max(1.0, x.norm()), f"call {i}: {kind} {k}: {x} and {y}"
                    else:
                        assert torch.equal(x, y), f"call {i}: {kind} {k}: {x} and {y}"
    if whole:
        assert report.fallback_count == 0 and report.graph_count == 1, str(report)
    return report


def data(*shape, grad=False):
    def inputs(i):
        return (torch.randn(*shape, generator=torch.Generator().manual_seed(i)).requires_grad_(grad),)

    return inputs


def module(build):
    def make():
        made = build()
        return made, list(made.parameters())

    return make


def function(fn):
    def make():
        weight = nn.Parameter(torch.randn(6, 6))
        return (lambda x: fn(x, weight)), [weight]

    return make
