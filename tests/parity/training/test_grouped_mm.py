"""Grouped matrix products, as in mixtures of experts, in the layouts and types that CPU kernels support."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.parity import Program, parity

grouped = getattr(nn.functional, "grouped_mm", torch._grouped_mm)


class Experts(nn.Module):
    """Tokens sorted by expert go through the expert's two layers; widths that need padded rows are among them."""

    def __init__(self, experts: int, width: int, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, hidden, width, dtype=dtype) * 0.2)
        self.down = nn.Parameter(torch.randn(experts, width, hidden, dtype=dtype) * 0.2)

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(grouped(x, self.up.transpose(1, 2), offs=ends))
        return grouped(hidden, self.down.transpose(1, 2), offs=ends)


def mixture(width: int, hidden: int, dtype: torch.dtype) -> Program:
    model = Experts(3, width, hidden, dtype)
    router = nn.Linear(width, 3).to(dtype)
    optimizer = torch.optim.SGD([*model.parameters(), *router.parameters()], lr=0.1)

    def step(x):
        chosen = router(x).argmax(1)
        order = chosen.argsort(stable=True)
        counts = (chosen[:, None] == torch.arange(3)).sum(0)
        ends = counts.cumsum(0).to(torch.int32)
        made = model(x[order], ends)
        loss = made.float().pow(2).mean() + made.stride(0) * router(x).float().pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach(), made.stride()

    def batch(index: int) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(index)
        return (torch.randn(8, width, dtype=dtype),)

    return Program(step, batch, (model, router, optimizer))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("hidden", [16, 8])
def test_experts(hidden, dtype):
    assert parity(lambda: mixture(16, hidden, dtype), backend="aot_eager", fullgraph=True).replays == 10


def test_experts_on_inductor():
    parity(lambda: mixture(8, 16, torch.float32), backend="inductor", fullgraph=True)


@pytest.mark.parametrize(
    ("a", "b"), [((12, 8), (3, 8, 6)), ((3, 4, 8), (3, 8, 6)), ((3, 4, 8), (8, 12)), ((8, 12), (12, 8))]
)
def test_layouts(a, b):
    """Rows of a result start at multiples of 16 bytes, also where that leaves gaps."""

    def make() -> Program:
        weight = torch.randn(*b[:-2], b[-1], b[-2])
        ends = None if len(a) == len(b) == 3 else torch.tensor([4, 8, 12], dtype=torch.int32)

        def step(x):
            second = weight.transpose(-1, -2) if len(b) == 3 else weight.t().contiguous()
            first = x if len(b) == 3 or len(a) == 3 else x.t().contiguous().t()
            with torch.no_grad():  # the kernels refuse gradients of rows with gaps
                made = grouped(first, second, offs=ends)
            return made, made.stride()

        def batch(index: int) -> tuple[torch.Tensor, ...]:
            torch.manual_seed(index)
            return (torch.randn(a),)

        return Program(step, batch, (weight,))

    parity(make, backend="aot_eager", fullgraph=True)
