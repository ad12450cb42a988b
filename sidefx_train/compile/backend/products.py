"""Which library computes each matrix product, chosen by measuring it on this machine.

``torch.mm`` goes to MKL, which on some CPUs leaves half the machine unused; oneDNN computes the same product from the
same plain operands. Each shape and operand layout is timed once per number of threads, as the two divide a product
among threads differently; results are kept on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from sidefx_train import _torch_compat as compat
from sidefx_train.compile.backend.measuring import MEASURES, Task, measured, timings

aten = torch.ops.aten

_library = torch.library.Library("sidefx", "FRAGMENT")
_library.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


def _linear_fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


_library.impl("linear", _linear, "CPU")
torch.library.register_fake("sidefx::linear", _linear_fake, lib=_library)

_SMALLEST = 500_000  # floating-point operations below which a call's own cost decides, and MKL's is lower


def _measure(left: Any, right: Any, threads: int) -> dict[str, float]:
    """Seconds of one product by each library; operands are given as (size, stride)."""

    def candidates() -> dict[str, Callable[[], Any]]:
        x, y = (torch.empty_strided(*layout).uniform_(-1, 1) for layout in (left, right))
        out = torch.empty(x.shape[0], y.shape[1])
        return {"mkl": lambda: torch.mm(x, y, out=out), "onednn": lambda: _linear(x, y.t(), None)}

    return measured(candidates, 2.0 * left[0][0] * left[0][1] * right[0][1], threads)


MEASURES["product"] = _measure


def _candidate(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """(left, right, bias) of a float32 CPU product of static shape."""
    if node.target is aten.mm.default:
        bias, (a, b) = None, node.args
    elif node.target is aten.addmm.default and not node.kwargs and len(node.args) == 3:
        bias, a, b = node.args  # type: ignore[assignment]
        if bias.meta["val"].dim() != 1:  # type: ignore[union-attr]
            return None
    else:
        return None
    for n in (a, b):
        val = n.meta["val"]  # type: ignore[union-attr]
        if val.dtype != torch.float32 or val.device.type != "cpu" or 0 in val.shape:
            return None
        if not all(isinstance(s, int) for s in (*val.shape, *val.stride())):
            return None
    return a, b, bias  # type: ignore[return-value]


def choose_products(module: fx.GraphModule, threads: int) -> str:
    """Rewrites products that oneDNN computes faster with ``threads`` threads; returns a note for the report."""
    if not torch.backends.mkldnn.is_available():
        return ""
    found = [(n, c) for n in module.graph.nodes if n.op == "call_function" and (c := _candidate(n)) is not None]
    asked: dict[fx.Node, str] = {}
    tasks: dict[str, Task] = {}
    for node, (a, b, _) in found:
        left, right = a.meta["val"], b.meta["val"]
        if 2 * left.shape[0] * left.shape[1] * right.shape[1] < _SMALLEST:
            continue
        key = f"{threads}: {tuple(left.shape)} {left.stride()} {tuple(right.shape)} {right.stride()}"
        layouts = [[list(value.shape), list(value.stride())] for value in (left, right)]
        asked[node], tasks[key] = key, ("product", [*layouts, threads])
    known = timings(tasks)
    moved = 0
    for node, (a, b, bias) in found:
        times = known.get(asked.get(node, ""))
        if times is not None and times["onednn"] < 0.95 * times["mkl"]:
            _use_onednn(module.graph, node, a, b, bias)
            moved += 1
    module.recompile()
    return f"{moved} of {len(found)} matrix products by oneDNN" if moved else ""


def _use_onednn(graph: fx.Graph, node: fx.Node, a: fx.Node, b: fx.Node, bias: fx.Node | None) -> None:
    with graph.inserting_before(node):
        weight = graph.call_function(aten.permute.default, (b, [1, 0]))
        weight.meta["val"] = compat.fake_transposed(b.meta["val"])
        product = graph.call_function(torch.ops.sidefx.linear.default, (a, weight, bias))
    product.meta.update(node.meta)
    node.replace_all_uses_with(product)
    graph.erase_node(node)
