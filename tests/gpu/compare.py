"""Runs a program of :mod:`tests.support.device_programs` eagerly and compiled, and compares what it leaves."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import sidefx_train
from tests.support.device_programs import Program


def tensors_of(value: Any, name: str = "") -> dict[str, Any]:
    """Returns the tensors and numbers in nested state, by name."""
    if isinstance(value, nn.Module):
        found = tensors_of(value.state_dict(), f"{name}net.")
        grads = {f"{key}.grad": p.grad for key, p in value.named_parameters()}
        return found | tensors_of(grads, f"{name}net.")
    if isinstance(value, (torch.optim.Optimizer, torch.amp.GradScaler)):
        return tensors_of(value.state_dict(), f"{name}{type(value).__name__}.")
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in tensors_of(item, f"{name}{key}.").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for i, item in enumerate(value) for k, v in tensors_of(item, f"{name}{i}.").items()}
    return {name: value.detach().clone() if isinstance(value, torch.Tensor) else value}


def course(make: Callable[[str], Program], device: str, compiled: dict[str, Any] | None) -> tuple[dict[str, Any], Any]:
    """Returns the losses of all steps, read at the end, with all state; and the compiled step."""
    torch.manual_seed(0)
    program = make(device)
    step: Any = program.step if compiled is None else sidefx_train.compile(program.step, keep_slower=True, **compiled)
    torch.manual_seed(5)
    random.seed(5)
    losses = [step(*program.batch(index)) for index in range(program.calls)]
    return tensors_of(losses, "loss.") | tensors_of(program.watch), step


def check(make: Callable[[str], Program], device: str, tolerance: float, **options: Any) -> Any:
    """Compares a compiled program with eager; returns the compiled step.

    Raises:
        AssertionError: a value differs by more than ``tolerance``, relative to its largest element.
    """
    want, _ = course(make, device, None)
    have, step = course(make, device, options)
    assert have.keys() == want.keys()
    for name, expected in want.items():
        found = have[name]
        if not isinstance(expected, torch.Tensor):
            ok = found == expected if not isinstance(expected, float) else abs(found - expected) <= tolerance + 1e-6
            assert ok, f"{name}: {found} instead of {expected}"
            continue
        assert (found.dtype, found.shape, found.device) == (expected.dtype, expected.shape, expected.device), name
        if not tolerance:
            assert torch.equal(found, expected), f"{name} differs by {(found - expected).abs().max()}"
        elif expected.numel():
            limit = tolerance * max(1e-3, expected.double().abs().max().item())
            off = (found.double() - expected.double()).abs().max().item()
            assert off <= limit, f"{name} differs by {off}, more than {limit}"
    return step
