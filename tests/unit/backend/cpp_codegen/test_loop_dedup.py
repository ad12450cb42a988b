"""Equal loops are generated once, and equal Inductor's code for each of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from sidefx_train.compile.backend import inductor_call
from sidefx_train.compile.backend.cpp_codegen import build_library
from sidefx_train.compile.backend.cpp_codegen.loop_dedup import LoopDedup
from tests.support.disk_cache import new_cache


class Block(nn.Module):
    """Norms, attention written as its formula, and other layers: reductions, local buffers, in-place writes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.first(x)).chunk(3, -1)
        x = x + torch.softmax(q @ k.transpose(1, 2) / 4, -1) @ v
        return x + self.down(F.gelu(self.up(self.second(x))))


class Network(nn.Module):
    def __init__(self, width: int, counts: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(8, width)
        self.blocks, self.head = nn.ModuleList(Block(width) for _ in range(3)), nn.Linear(width, 5)
        self.norms = nn.ModuleList(nn.BatchNorm1d(7) for _ in range(2 * counts))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        for norm in self.norms:
            x = norm(x)
        return self.head(x.tanh()).mean(1)


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Records the generator used in each lowering, and the kernels of each."""
    new_cache(tmp_path, monkeypatch)
    found: list[Any] = []
    build = build_library.build_library

    def noted(caller: str, kernels: str, *rest: Any) -> str:
        found.append((caller, kernels))
        return build(caller, kernels, *rest)

    monkeypatch.setattr(inductor_call, "build_library", noted)
    yield found


def _trained(width: int, dtype: torch.dtype = torch.float32, counts: bool = True) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Network(width, counts).to(dtype)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    ids, y = torch.randint(0, 8, (4, 7)), torch.randint(0, 5, (4,))

    def step() -> torch.Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(ids).float(), y)
        loss.backward()
        opt.step()
        return loss.detach()

    compiled = sidefx_train.compile(step, autotune="off", fullgraph=True)
    losses = [compiled() for _ in range(3)]
    assert not any("failed" in note for note in compiled.report().captures[0].notes)
    return [*losses, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize(
    ("width", "counts"),
    [
        pytest.param(32, True, id="whole vectors-counters", marks=pytest.mark.slow),
        pytest.param(20, False, id="rests-"),
        pytest.param(32, False, id="whole vectors-", marks=pytest.mark.slow),
        pytest.param(20, True, id="rests-counters", marks=pytest.mark.slow),
    ],
)
def test_the_code_is_what_inductor_generates(
    width: int, counts: bool, seen: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inductor_call, "may_fork", lambda: False)  # code generated in a fork is not counted here
    reused: list[int] = []
    generating = LoopDedup.generating

    def counted(loops: LoopDedup, before: Callable[..., None]) -> Callable[..., None]:
        method = generating(loops, before)

        def codegen_nodes(*given: Any) -> None:
            method(*given)
            reused.append(loops.reused)

        return codegen_nodes

    monkeypatch.setattr(LoopDedup, "generating", counted)
    alike = _trained(width, counts=counts)
    monkeypatch.setattr(LoopDedup, "generating", lambda loops, before: before)
    new_cache(tmp_path / "other", monkeypatch)
    each = _trained(width, counts=counts)
    assert max(reused) >= 9, "the layers repeat each other, in 48 loops: a layer norm and what follows it are one"
    assert all(torch.equal(a, b) for a, b in zip(alike, each, strict=True))
    if not counts:  # an argument that is read and then written has two names; either may be used
        (caller, kernels), (other_caller, other_kernels) = seen
        assert kernels == other_kernels and _calls(caller) == _calls(other_caller)


def _calls(caller: str) -> list[str]:
    """Returns the calls of a caller; how often it declares a list of sizes depends on the torch version."""
    lines = [line for line in caller.splitlines() if not re.search(r"constexpr int64_t \*?int_array", line)]
    return [re.sub(r"int_array_\d+", "sizes", line) for line in lines]


@pytest.mark.slow
def test_small_types_are_left_to_inductor(seen: list[Any]) -> None:
    results = _trained(32, torch.bfloat16, counts=False)
    assert all(result.isfinite().all() for result in results)


def test_loops_that_differ_are_generated_separately(seen: list[Any]) -> None:
    """Equal operations with another constant, another index, or another type."""

    def step(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b, c = x.mm(x) * 2, x.mm(x).mm(x) * 3, x.mm(x).t() * 2
        return (
            torch.sin(a),
            torch.sin(b),
            torch.sin(c),
            torch.sin(a * 1.0),
            n * 2,
            n.double() * 2,
            (x * 0.0),
            (x * -0.0),
        )

    x, n = torch.randn(8, 8), torch.arange(6)
    compiled = sidefx_train.compile(step, autotune="off", fullgraph=True)
    for mine, eager in zip(compiled(x, n), step(x, n), strict=True):
        torch.testing.assert_close(mine, eager)
        assert torch.equal(mine.signbit(), eager.signbit())
