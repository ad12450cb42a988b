"""Which library computes each matrix product, chosen by measuring it on this machine.

``torch.mm`` goes to MKL, which on some CPUs leaves half the machine unused; oneDNN computes the same product from the
same plain operands. Each shape and operand layout is timed once per number of threads, as the two divide a product
among threads differently; results are kept on disk.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from sidefx_train import _torch_compat as compat
from sidefx_train.cache import cache_dir
from sidefx_train.compile.native import cpu_description

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
_CLEARLY = 1.5  # times slower than the fastest: no further turns
_BUDGET = 1.0  # seconds of measuring in one compilation


class Timings:
    """Seconds of each candidate by shape, in memory and on disk."""

    def __init__(self) -> None:
        self.path = cache_dir() / f"products_{cpu_description()}.json"
        try:
            self.known: dict[str, dict[str, float]] = json.loads(self.path.read_text())
        except (OSError, ValueError):
            self.known = {}
        self.dirty = False

    def save(self) -> None:
        if self.dirty:
            try:
                temporary = self.path.with_suffix(".tmp")
                temporary.write_text(json.dumps(self.known, indent=1))
                temporary.replace(self.path)
            except OSError:
                return  # a read-only cache folder costs a measurement per process, nothing else
            self.dirty = False


@lru_cache(maxsize=1)
def timings() -> Timings:
    return Timings()


def _operand(val: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype).uniform_(-1, 1)


def measured(make: Callable[[], dict[str, Callable[[], Any]]], flops: float, threads: int) -> dict[str, float]:
    """Seconds of each of several functions that compute the same, run on real tensors with ``threads`` threads.

    The shortest of a few runs of each, in turns, so that a busy moment of the machine meets all of them. What
    is decided after two turns is not measured further.

    Args:
        make: gives the functions, by name.
        flops: floating-point operations of one call: small ones are repeated.
        threads: how many the step will have.
    """
    # One thread's own time is not stretched by other processes; with several, waiting for each other is part of it.
    clock = time.thread_time if threads == 1 else time.perf_counter
    runs = max(1, int(3e7 / flops))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with compat.outside_tracing(), torch.no_grad():
            functions = make()
            best = dict.fromkeys(functions, float("inf"))
            for turn in range(6):
                if turn >= 2 and max(best.values()) > _CLEARLY * min(best.values()):
                    break
                for name, function in functions.items():
                    function()
                    start = clock()
                    for _ in range(runs):
                        function()
                    best[name] = min(best[name], (clock() - start) / runs)
            return best
    finally:
        torch.set_num_threads(before)


def _measure(a: torch.Tensor, b: torch.Tensor, threads: int) -> dict[str, float]:
    def candidates() -> dict[str, Callable[[], Any]]:
        x, y = _operand(a), _operand(b)
        out = torch.empty(a.shape[0], b.shape[1])
        return {"mkl": lambda: torch.mm(x, y, out=out), "onednn": lambda: _linear(x, y.t(), None)}

    return measured(candidates, 2.0 * a.shape[0] * a.shape[1] * b.shape[1], threads)


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
    known = timings()
    start = time.perf_counter()
    moved = total = 0
    for node in list(module.graph.nodes):
        found = _candidate(node) if node.op == "call_function" else None
        if found is None:
            continue
        a, b, bias = found
        left, right = a.meta["val"], b.meta["val"]
        total += 1
        if 2 * left.shape[0] * left.shape[1] * right.shape[1] < _SMALLEST:
            continue
        key = f"{threads}: {tuple(left.shape)} {left.stride()} {tuple(right.shape)} {right.stride()}"
        if key not in known.known:
            if time.perf_counter() - start > _BUDGET:
                continue
            known.known[key] = _measure(left, right, threads)
            known.dirty = True
        if known.known[key]["onednn"] < 0.95 * known.known[key]["mkl"]:
            _use_onednn(module.graph, node, a, b, bias)
            moved += 1
    known.save()
    module.recompile()
    return f"{moved} of {total} matrix products by oneDNN" if moved else ""


def _use_onednn(graph: fx.Graph, node: fx.Node, a: fx.Node, b: fx.Node, bias: fx.Node | None) -> None:
    with graph.inserting_before(node):
        weight = graph.call_function(aten.permute.default, (b, [1, 0]))
        weight.meta["val"] = compat.fake_transposed(b.meta["val"])
        product = graph.call_function(torch.ops.sidefx.linear.default, (a, weight, bias))
    product.meta.update(node.meta)
    node.replace_all_uses_with(product)
    graph.erase_node(node)
