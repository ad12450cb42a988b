"""Graphs whose sizes are symbolic run for every size without another compilation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.proxy_tensor import track_tensor_tree
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

from sidefx_train.compile.backend.compile_graph import build
from sidefx_train.compile.backend.inductor_call import undefined_symbols
from sidefx_train.compile.graph.artifacts import GraphInput
from sidefx_train.config import CompileConfig
from tests.support.graphs import Recorder, new_recorder, record


def symbolic_tensor(rec: Recorder, real: torch.Tensor, source: str) -> torch.Tensor:
    """Returns a placeholder whose first size is symbolic."""
    dims = [DimDynamic.DYNAMIC] + [DimDynamic.STATIC] * (real.dim() - 1)
    fake = rec.fake_mode.from_tensor(
        real, source=ConstantSource(source), symbolic_context=StatelessSymbolicContext(dims)
    )
    with rec.fake_mode, torch.no_grad():
        example = fake.detach()
    proxy = rec.tracer.create_proxy("placeholder", source, (), {})
    track_tensor_tree(fake, proxy, constant=None, tracer=rec.tracer)
    rec.inputs.append(GraphInput(proxy.node.name, "tensor", example, source))
    return fake


@pytest.mark.parametrize("backend", ("eager", "aot_eager", "inductor"))
def test_symbolic_batch(backend: str) -> None:
    rec = new_recorder()
    x = symbolic_tensor(rec, torch.randn(6, 5), "x")
    w = rec.tensor(torch.randn(3, 5), "static", "w")
    n = rec.scalar(4, "n")
    lr = rec.scalar(0.5, "lr")

    def fn(x: torch.Tensor, w: torch.Tensor, n: Any, lr: Any) -> Any:
        y = F.linear(x, w)
        rows = y.shape[0]
        w.sub_(y.sum(0).unsqueeze(1) * (lr / rows))
        return y.relu().mean() * n, y.view(rows * 3), n + 1, lr * rows

    executable = build(record(rec, lambda: fn(x, w, n, lr)), CompileConfig(backend=backend))
    for rows in (6, 9, 33):
        data, weight = torch.randn(rows, 5), torch.randn(3, 5)
        mine = weight.clone()
        got = executable.run([data, mine, rows + 2, 0.1 * rows])
        expected = fn(data, weight, rows + 2, 0.1 * rows)
        for g, e in zip([*got, mine], [*expected, weight], strict=True):
            torch.testing.assert_close(g, e)


def test_a_size_that_generated_code_does_not_define_is_found() -> None:
    """Such code is refused when it is made: it would raise when the graph runs, in the middle of a backward."""
    lines = ("def part(u2):", "    # u9", "    return u2", "def call(args):", "    s0, a = args", "    u1 = a.size(0)")
    complete = "\n".join((*lines, "    return empty(s0 + u1, part(3)), 'u8'"))
    assert undefined_symbols(complete) == []
    assert undefined_symbols(complete.replace("u1 = a", "n = a").replace("s0, a", "a")) == ["s0", "u1"]
