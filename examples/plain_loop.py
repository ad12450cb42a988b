"""Any function can be captured: here a training loop written by hand, with the side effects people write."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train


def main(steps: int = 200, backend: str = "inductor") -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=50, gamma=0.5)
    history: list[torch.Tensor] = []
    stats = {"steps": 0}

    @sidefx_train.compile(backend=backend)
    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        history.append(loss.detach())  # kept, in order, with this step's value
        stats["steps"] += 1  # never makes the step be captured again
        return loss.detach()

    for _ in range(steps):
        x = torch.randn(64, 2)
        y = (x[:, 0] * x[:, 1] > 0).long()  # which quadrants: not linearly separable
        train_step(x, y)
        scheduler.step()  # the learning rate is an input of the graph

    print(sidefx_train.explain(train_step))
    losses = [loss.item() for loss in history]
    print(f"{stats['steps']} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
