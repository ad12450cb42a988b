"""Measures the cost of guards, and its growth with the number of parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from sidefx_train.compile.api import compile_step
from sidefx_train.compile.native import guards_module

_LAYERS = (5, 50)


@dataclass(frozen=True)
class GuardCost:
    """Time to check every guard of a step over ``nn.Linear`` layers with AdamW, and to fetch its inputs.

    Attributes:
        parameters: number of parameters of the two measured steps; each has three state tensors.
        seconds: seconds per call, for each.
    """

    parameters: tuple[int, int]
    seconds: tuple[float, float]

    @property
    def per_parameter(self) -> float:
        """Seconds per additional parameter."""
        (few, many), (fast, slow) = self.parameters, self.seconds
        return (slow - fast) / (many - few)

    def __str__(self) -> str:
        (few, many), (fast, slow) = self.parameters, self.seconds
        return (
            f"guards: {fast * 1e6:.1f} us for {few} parameters with AdamW, {slow * 1e6:.1f} us for {many}; "
            f"{self.per_parameter * 1e9:.0f} ns for each further one"
        )


def guard_cost() -> GuardCost:
    """Measures the guards of a shallow and of a deep step; waits until the native ones are built."""
    guards_module()
    found = [_seconds(layers) for layers in _LAYERS]
    return GuardCost((2 * _LAYERS[0], 2 * _LAYERS[1]), (found[0], found[1]))


def _seconds(layers: int) -> float:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = compile_step(step, backend="eager", fullgraph=True)
    x = torch.ones(4, 8)
    compiled(x)
    return float(min(compiled.dispatch_seconds(x)["guards"] for _ in range(5)))
