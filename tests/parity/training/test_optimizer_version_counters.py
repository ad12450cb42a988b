"""Version counters of parameters, gradients and optimizer state, which autograd uses to detect writes."""

from __future__ import annotations

import itertools

import pytest
import torch

import sidefx_train

_OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {}),
    "SGD with momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "SGD with Nesterov momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "Adam": (torch.optim.Adam, {}),
    "AdamW": (torch.optim.AdamW, {}),
}
_WAYS = {
    "default": {},
    "foreach": {"foreach": True},
    "plain": {"foreach": False},
    "fused": {"fused": True},
}
_ORDERS = ("none before", "zeros before", "none after", "clipped")


def _versions(name, way, order, backend):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    make, options = _OPTIMIZERS[name]
    optimizer = make(model.parameters(), lr=0.1, **options, **_WAYS[way])

    def step(x):
        if order != "none after":
            optimizer.zero_grad(set_to_none=order != "zeros before")
        loss = model(x).square().mean()
        loss.backward()
        if order == "clipped":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if order == "none after":
            optimizer.zero_grad()
        return loss.detach()

    called = step if backend is None else sidefx_train.compile(step, backend=backend)
    draws = torch.Generator().manual_seed(1)
    found = []
    for _ in range(3):
        called(torch.randn(5, 4, generator=draws))
        for label, parameter in model.named_parameters():
            found.append((label, parameter._version))
            found.append((f"{label}.grad", None if parameter.grad is None else parameter.grad._version))
            state = optimizer.state[parameter].items()
            found += [(f"{label}.{key}", held._version) for key, held in state if isinstance(held, torch.Tensor)]
    if backend is not None:
        assert called.report().replays == 3
    return found


def _case(name, way, backend):
    """With aot_eager, which takes longest, all but one optimizer run only in ``make slow``."""
    late = backend == "aot_eager" and name != "AdamW"
    return pytest.param(name, way, backend, marks=pytest.mark.slow if late else (), id=f"{name}-{way}-{backend}")


_CASES = [_case(*case) for case in itertools.product(_OPTIMIZERS, _WAYS, ["eager", "aot_eager", "inductor"])]


@pytest.mark.parametrize(("name", "way", "backend"), _CASES)
@pytest.mark.every(8)
def test_versions(name, way, backend):
    for order in _ORDERS if backend != "inductor" else ("none before",):
        assert _versions(name, way, order, backend) == _versions(name, way, order, None), order
