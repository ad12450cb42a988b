"""A small training, eager or replayed, while the world around it changes."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train

BATCHES = [(torch.randn(4, 6, generator=torch.Generator().manual_seed(i)), torch.arange(4) % 3) for i in range(12)]


class Training:
    """A small training, eager or replayed; the world changes between its calls."""

    def __init__(self, compiled: bool, device: str = "cpu", accumulates: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(device)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.05, fused=True)

        def step(x: Any, y: Any) -> Any:
            if not accumulates:
                self.optimizer.zero_grad()
            loss = F.cross_entropy(self.net(x), y)
            loss.backward()
            if not accumulates:
                self.optimizer.step()
            return loss

        options.setdefault("backend", "aot_eager" if device == "cpu" else "inductor")
        self.step: Any = sidefx_train.compile(step, keep_slower=True, **options) if compiled else step

    @property
    def graph(self) -> Any:
        return self.step.report().captures[-1].cuda_graph

    def values(self) -> list[torch.Tensor]:
        state = [t for each in self.optimizer.state.values() for t in each.values() if isinstance(t, torch.Tensor)]
        grads = [p.grad for p in self.net.parameters() if p.grad is not None]
        return [t.detach().clone() for t in (*self.net.parameters(), *grads, *state)]


def both(between: Any, device: str = "cpu", tolerance: float = 1e-5, **options: Any) -> tuple[Training, Any, Any]:
    """Runs a training eagerly and replayed, with ``between(training, call)`` before every call; compares all values."""
    seen: list[Any] = []
    for compiled in (False, True):
        training = Training(compiled, device, **options)
        kept = []
        for call, batch in enumerate(BATCHES):
            kept.append(between(training, call))
            kept.append(training.step(*(t.to(device) for t in batch)))
        seen.append((kept, training.values()))
    flat = [[*_tensors(kept), *values] for kept, values in seen]
    assert len(flat[0]) == len(flat[1])
    for expected, found in zip(*flat, strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance / 10)
    return training, seen[1][0], seen[0][0]


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value.detach()]
    return [t for each in value for t in _tensors(each)] if isinstance(value, (list, tuple)) else []


USES: dict[str, Any] = {
    "itself": lambda p: p.grad,
    "a_part": lambda p: p.grad[0],
    "an_alias": lambda p: p.grad.detach(),
    "a_view": lambda p: p.grad.view(-1)[:1],
    "saved_by_autograd": lambda p: p.grad * p.grad.new_ones(1).requires_grad_(),  # autograd saves it,
    "weakly": lambda p: weakref.ref(p.grad),
    "its_storage": lambda p: p.grad.untyped_storage(),
}
"""What a program can do with the gradient of a parameter that it keeps beyond the next step."""

CHANGES: dict[str, Any] = {
    "in_place": lambda t: [p.data.mul_(0.5) for p in t.net.parameters()],
    "data": lambda t: [setattr(p, "data", p.data * 0.5) for p in t.net.parameters()],
    "load_model": lambda t: t.net.load_state_dict({k: v * 0.5 for k, v in t.net.state_dict().items()}),
    "load_optimizer": lambda t: t.optimizer.load_state_dict(t.optimizer.state_dict()),
    "lr": lambda t: t.optimizer.param_groups[0].update(lr=0.01),
    "betas": lambda t: t.optimizer.param_groups[0].update(betas=(0.5, 0.9)),
    "state_in_place": lambda t: [each["exp_avg"].zero_() for each in t.optimizer.state.values()],
    "state": lambda t: [each.update(exp_avg=each["exp_avg"] * 0.1) for each in t.optimizer.state.values()],
    "vector": lambda t: torch.nn.utils.vector_to_parameters(
        torch.nn.utils.parameters_to_vector(t.net.parameters()).detach() * 0.9, t.net.parameters()
    ),
    "zeroed_gradients": lambda t: t.optimizer.zero_grad(set_to_none=False),
    "frozen": lambda t: t.net[0].weight.requires_grad_(False),
}
"""Changes of the world between two steps."""
