"""Random training programs with hooks on parameters, on shared tensors and on the nodes that accumulate gradients.

python -m tests.fuzz.accumulation FIRST COUNT [BACKEND]
"""

from __future__ import annotations

import random
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import graph
from torch.nn import functional as F

import sidefx_train

KINDS = ("tensor", "scale", "post", "node_pre", "node_post", "node_scale", "multi", "multi_any", "release")


class Net(nn.Module):
    """Layers with or without shared parameters."""

    def __init__(self, draw: Callable[[int], int]) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 2)
        self.norm = nn.LayerNorm(5) if draw(2) else nn.Identity()
        self.scale = nn.Parameter(torch.rand(5))
        self.again, self.tied, self.unused = draw(2), draw(3) == 0, draw(3) == 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.norm(self.first(x)))
        h = h * self.scale + (h @ self.second.weight if self.tied else 0)
        for _ in range(1 + self.again):
            h = F.silu(self.second(h))
        return self.last(h) if not self.unused else h[:, :2] @ self.last.weight[:, :2]


class Program:
    """One run of a program.

    Args:
        seed: seed of the program.
        wrap: captures a function, or returns it unchanged.
    """

    def __init__(self, seed: int, wrap: Callable[[Any], Any]) -> None:
        torch.manual_seed(seed)
        draw = random.Random(seed).randrange
        self.draw, self.log, self.handles = draw, list[Any](), list[tuple[str, Any, Any]]()
        self.net = Net(draw)
        self.parameters = list(self.net.parameters())
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05)
        self.shape, self.accumulate, self.brk = draw(3), draw(3) == 0, draw(4) == 0
        self.plan = [(draw(6), draw(len(KINDS)), draw(100), draw(100)) for _ in range(1 + draw(4))]
        self.forward = wrap(self._forward) if self.shape == 1 else self._forward
        self.model = wrap(self.net) if self.shape == 2 else self.net
        self.step = wrap(self._step) if self.shape == 0 else self._step

    def _note(self, what: str, value: torch.Tensor) -> None:
        self.log.append((what, round(value.detach().double().sum().item(), 4) + 0.0))

    def _register(self, kind: str, which: int, how: int) -> Any:
        p = self.parameters[which % len(self.parameters)]
        name = f"{kind} {which % len(self.parameters)}"
        if kind == "tensor":
            return p.register_hook(lambda grad: self.log.append(name))
        if kind == "scale":
            return p.register_hook(lambda grad: grad * 0.5)
        if kind == "post":
            return p.register_post_accumulate_grad_hook(lambda p: self.log.append((name, p.grad is not None)))
        if kind == "release":
            return p.register_post_accumulate_grad_hook(lambda p: self._release(p))
        if kind.startswith("multi"):
            some = [q for i, q in enumerate(self.parameters) if (how >> (i % 6)) & 1 or q is p]
            if kind == "multi":
                return graph.register_multi_grad_hook(
                    some, lambda grads: self.log.append(len([g for g in grads if g is not None]))
                )
            return graph.register_multi_grad_hook(some, lambda grad: self.log.append(tuple(grad.shape)), mode="any")
        edge = how % 2
        node = graph.get_gradient_edge(p).node if edge else p.expand_as(p).grad_fn.next_functions[0][0]
        if kind == "node_pre":
            handle = node.register_prehook(lambda grads: self.log.append(name))
        elif kind == "node_scale":
            handle = node.register_prehook(lambda grads: (grads[0] * 0.25,))
        else:
            handle = node.register_hook(lambda _, grads: self.log.append((name, len(grads), p.grad is not None)))
        return node, handle  # the hook is removed when the node is freed

    def _release(self, p: torch.Tensor) -> None:
        p.data.add_(p.grad, alpha=-0.01)
        p.grad = None

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).square().mean()

    def _step(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.forward(x)
        if self.brk and float(loss.detach()) > -1:
            self.log.append("break")
        if not self.accumulate:
            self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def run(self) -> tuple[list[torch.Tensor], list[Any]]:
        """Returns all losses, parameters and gradients, and the log of the hooks."""
        seen = []
        for turn in range(6):
            for when, kind, which, how in self.plan:
                if when == turn:
                    handle = self._register(KINDS[kind], which, how)
                    self.handles.append((KINDS[kind], handle, how))
                elif when + 2 == turn and how % 4 == 0:
                    for _, handle, number in self.handles:
                        if number == how:
                            (handle[1] if isinstance(handle, tuple) else handle).remove()
            self.log.append(f"turn {turn}")
            torch.manual_seed(turn)
            seen.append(self.step(torch.randn(3, 4)))
        seen += [p.detach().clone() for p in self.parameters]
        return seen + [p.grad for p in self.parameters], self.log


def difference(seed: int, backend: str = "eager") -> tuple[str, list[Any]]:
    """Returns the difference between eager and captured, and the steps."""
    steps: list[Any] = []

    def wrap(fn: Any) -> Any:
        steps.append(sidefx_train.compile(fn, backend=backend))
        return steps[-1]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcomes = []
        for each in (lambda fn: fn, wrap):
            try:
                outcomes.append(Program(seed, each).run())
            except Exception as error:
                outcomes.append(([], [f"{type(error).__name__}: {str(error)[:200]}"]))
    (want, said), (have, heard) = outcomes
    if said != heard:
        at = next((i for i, (a, b) in enumerate(zip(said, heard, strict=False)) if a != b), min(len(said), len(heard)))
        return f"hooks: {heard[max(0, at - 2) : at + 4]}, eager {said[max(0, at - 2) : at + 4]}", steps
    for i, (a, b) in enumerate(zip(want, have, strict=True)):
        if (a is None) != (b is None):
            return f"{i}: {b if b is None else 'some'}, eager {a if a is None else 'some'}", steps
        if a is not None and not torch.allclose(a, b, rtol=1e-5, atol=1e-6):
            return f"{i} is off by {(a - b).abs().max().item():.2g}", steps
    return "", steps


def main() -> None:
    first, count, backend = int(sys.argv[1]), int(sys.argv[2]), (sys.argv[3:] or ["eager"])[0]
    began, wrong, captured, reasons = time.time(), 0, 0, dict[str, int]()
    for seed in range(first, first + count):
        found, steps = difference(seed, backend)
        for step in steps:
            captured += step.report().replays > 0
            for each in (*step.report().breaks, *step.report().fallbacks):
                text = f"{each.code} {each.reason[:110]}"
                reasons[text] = reasons.get(text, 0) + 1
        if found:
            wrong += 1
            made = Program(seed, lambda fn: fn)
            plan = [(when, KINDS[kind], which % len(made.parameters), how) for when, kind, which, how in made.plan]
            print(
                f"--- seed {seed}: {found}\n  shape {made.shape} break {made.brk} accumulate {made.accumulate} {plan}"
            )
    print(f"{count} programs from seed {first}, {captured} captured, {wrong} differ, {time.time() - began:.0f} s")
    for text, number in sorted(reasons.items(), key=lambda item: -item[1])[:20]:
        print(f"{number:5} {text}")


if __name__ == "__main__":
    main()
