"""Autotunes matrix products.

``torch.mm`` calls MKL, which on some CPUs leaves half the machine unused. oneDNN computes the same product from the
same plain operands, and the native module has a kernel with less setup (``native/matmul_kernel.py``), also for
bfloat16. Each dtype, shape and layout of operands is timed once per number of threads, since they divide a product
differently; times are cached on disk.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend.autotune.timing import LARGEST, MEASURES, Task, fastest, measured, timings
from sidefx_train.compile.native import NARROW, products_module
from sidefx_train.compile.ops.registration import define_operator
from sidefx_train.report import ChoiceRecord

aten = torch.ops.aten


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


def _linear_fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


define_operator("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _linear, _linear_fake)


def _define_product(name: str, relu: int) -> None:
    """Defines the native module's product; with ``relu``, negative results become 0."""

    def out_of(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, *, out: Any) -> torch.Tensor:
        native = products_module()
        assert native is not None, "graphs with this product need the native module"
        start = 0 if bias is None else bias.contiguous().data_ptr()
        native.product(*_numbers(a, b, start, out, relu))
        return out  # type: ignore[no-any-return]

    def product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return out_of(a, b, bias, out=a.new_empty(a.shape[0], b.shape[1]))

    def fake(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return a.new_empty(a.shape[0], b.shape[1])

    define_operator(f"{name}(Tensor a, Tensor b, Tensor? bias=None) -> Tensor", product, fake)
    define_operator(f"{name}.out(Tensor a, Tensor b, Tensor? bias=None, *, Tensor(a!) out) -> Tensor(a!)", out_of)


def _numbers(a: torch.Tensor, b: torch.Tensor, bias: int, out: torch.Tensor, relu: int) -> list[int]:
    """Returns the arguments of the native module's product, for matrices or batches of them."""
    batch = [a.shape[0], a.stride(0), b.stride(0)] if a.dim() == 3 else [1, 0, 0]
    sizes, how = [*out.shape[-2:], a.shape[-1]], relu | NARROW * (a.dtype == torch.bfloat16)
    return [a.data_ptr(), *a.stride()[-2:], b.data_ptr(), *b.stride()[-2:], bias, out.data_ptr(), *sizes, how, *batch]


def products_out_of(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """Computes the products of two batches of matrices with the native module."""
    native = products_module()
    assert native is not None, "graphs with this product need the native module"
    native.product(*_numbers(a, b, 0, out, 0))
    return out


def _products_fake(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty(a.shape[0], a.shape[1], b.shape[2])


_define_product("product", 0)
_define_product("product_relu", 1)
define_operator(
    "products(Tensor a, Tensor b) -> Tensor",
    lambda a, b: products_out_of(a, b, out=_products_fake(a, b)),
    _products_fake,
)
define_operator("products.out(Tensor a, Tensor b, *, Tensor(a!) out) -> Tensor(a!)", products_out_of)


def _measure(left: Any, right: Any, threads: int, dtype: str = "float32") -> dict[str, float]:
    """Times one product by each library in seconds, a part of a large one; operands are (size, stride)."""
    sizes = [*left[0], right[0][-1]]
    *batch, height, depth, width = part = _part(sizes)
    if part != sizes:
        left, right = _laid_out([*batch, height, depth], left[1]), _laid_out([*batch, depth, width], right[1])

    def candidates() -> dict[str, Callable[[], Any]]:
        x, y = (_stored(*layout, dtype=getattr(torch, dtype)) for layout in (left, right))
        out = x.new_empty(*x.shape[:-1], y.shape[-1])
        candidates: dict[str, Callable[[], Any]] = {_USUAL[x.dtype]: lambda: torch.matmul(x, y, out=out)}
        able = torch.backends.mkldnn.is_available() and (x.dtype != torch.bfloat16 or compat.multiplies_narrow())
        if able and x.dim() == 2:
            candidates["onednn"] = lambda: _linear(x, y.t(), None)
        native = products_module()
        if native is not None:
            numbers = _numbers(x, y, 0, out, 0)
            candidates["tiles"] = lambda: native.product(*numbers)
        return candidates

    return measured(candidates, 2.0 * math.prod(part), threads)


def _part(sizes: list[int]) -> list[int]:
    """Returns the part of a product to time: number of products, height, depth and width; halves the longest."""
    while 2.0 * math.prod(sizes) > LARGEST and max(sizes) > _SHORTEST:
        longest = sizes.index(max(sizes))
        sizes = [size // 2 if i == longest else size for i, size in enumerate(sizes)]
    return sizes


_SHORTEST = 64
"""Sides of matrices up to this length are timed completely."""


def _laid_out(size: list[int], like: list[int]) -> list[list[int]]:
    """Returns size and stride, contiguous in the order of the strides ``like``."""
    stride, behind = list(like), 1
    for dim in sorted(range(len(size)), key=lambda dim: like[dim]):
        if like[dim]:  # else all indices refer to the same elements
            stride[dim], behind = behind, behind * size[dim]
    return [size, stride]


def _stored(size: list[int], stride: list[int], *, dtype: torch.dtype) -> torch.Tensor:
    """Returns random numbers in a layout, whose elements may overlap."""
    extent = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    return torch.empty(extent, dtype=dtype).uniform_(-1, 1).as_strided(size, stride)


MEASURES["product"] = _measure


def _candidate(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """Returns (left, right, bias) of a CPU product of static shape, all in float32 or all in bfloat16."""
    if node.target in (aten.mm.default, aten.bmm.default):
        bias, (a, b) = None, node.args
    elif node.target is aten.addmm.default and not node.kwargs and len(node.args) == 3:
        bias, a, b = node.args  # type: ignore[assignment]
    else:
        return None
    for n in (a, b) if bias is None else (a, b, bias):
        val = n.meta["val"]  # type: ignore[union-attr]
        if val.dtype not in _USUAL or val.device.type != "cpu":
            return None
        if not all(isinstance(s, int) for s in (*val.shape, *val.stride())) or 0 in val.shape:
            return None
    if bias is not None:
        start, value = bias.meta["val"], b.meta["val"]  # type: ignore[union-attr]
        if start.shape != (value.shape[1],) or start.dtype != value.dtype or not start.is_contiguous():
            return None  # the kernels require contiguous numbers
    return a, b, bias  # type: ignore[return-value]


def choose_products(module: fx.GraphModule, threads: int) -> tuple[str, list[ChoiceRecord]]:
    """Rewrites products that another library than MKL computes faster with ``threads`` threads.

    Returns:
        A note for the report, and the measurements of each distinct product.
    """
    found = [(n, c) for n in module.graph.nodes if n.op == "call_function" and (c := _candidate(n)) is not None]
    asked: dict[fx.Node, str] = {}
    tasks: dict[str, Task] = {}
    work: Counter[str] = Counter()
    kinds: dict[str, tuple[int, torch.dtype]] = {}
    shown: dict[str, str] = {}
    for node, (a, b, _) in found:
        left, right = a.meta["val"], b.meta["val"]
        key = f"{threads}: {tuple(left.shape)} {left.stride()} {tuple(right.shape)} {right.stride()}"
        layouts = [[list(value.shape), list(value.stride())] for value in (left, right)]
        narrow = [] if left.dtype == torch.float32 else [str(left.dtype).removeprefix("torch.")]
        sizes = [*left.shape, right.shape[-1]]
        asked[node] = " ".join([key, *narrow, *(["(a part of it)"] if _part(sizes) != sizes else [])])
        tasks[asked[node]] = ("product", [*layouts, threads, *narrow])
        work[asked[node]] += math.prod(sizes)
        kinds[asked[node]] = left.dim(), left.dtype
        more = [*narrow, *(["(a part of it)"] if _part(sizes) != sizes else [])]
        shown[asked[node]] = " ".join([_in_words(left), "@", _in_words(right), *more])
    tasks = {key: tasks[key] for key, _ in work.most_common()}
    known = timings(tasks)
    won = {kind: Counter[str]() for kind in kinds.values()}
    for key, times in known.items():
        won[kinds[key]][fastest(times, _USUAL[kinds[key][1]])] += work[key] if times else 0
    candidates: dict[str, str] = {}
    for key in tasks:
        usual, others = _USUAL[kinds[key][1]], won[kinds[key]].most_common(1)
        # At the time limit: like most of the work of this kind.
        candidates[key] = fastest(known.get(key, {}), usual) if key in known or not others else others[0][0]
    chosen: Counter[str] = Counter()
    for node, (a, _, _) in found:
        usual, way = _USUAL[a.meta["val"].dtype], candidates[asked[node]]
        operands = _candidate(node)  # current operands: one may be a product that was replaced
        if way == usual or operands is None:
            continue
        chosen[way] += 1
        if way == "onednn":
            _use_onednn(module.graph, node, *operands)
        else:
            _use_tiles(module.graph, node, operands)
    module.recompile()
    notes = [f"{count} of {len(found)} matrix products by {_NAMES[way]}" for way, count in chosen.items()]
    counts = Counter(asked.values())
    return "; ".join(notes), [
        ChoiceRecord(shown[key], counts[key], threads, way, known.get(key, {})) for key, way in candidates.items()
    ]


def _in_words(value: torch.Tensor) -> str:
    """Returns shape and, if not contiguous, strides as text."""
    shape = tuple(value.shape)
    if value.is_contiguous():
        return str(shape)
    if value.mT.is_contiguous():
        return f"{(*shape[:-2], shape[-1], shape[-2])}.mT"
    return f"{shape} strides {value.stride()}"


_USUAL = {torch.float32: "mkl", torch.bfloat16: "torch"}
"""Default kernel of a product by dtype; for bfloat16 torch calls oneDNN."""

_NAMES = {"onednn": "oneDNN", "tiles": "tiles in registers"}


def _use_onednn(graph: fx.Graph, node: fx.Node, a: fx.Node, b: fx.Node, bias: fx.Node | None) -> None:
    with graph.inserting_before(node):
        weight = graph.call_function(aten.permute.default, (b, [1, 0]))
        weight.meta["val"] = compat.fake_transposed(b.meta["val"])
    _replace(graph, node, torch.ops.sidefx.linear.default, (a, weight, bias))


def _use_tiles(graph: fx.Graph, node: fx.Node, operands: tuple[Any, ...]) -> None:
    user = next(iter(node.users), node)
    if node.target is aten.bmm.default:
        _replace(graph, node, torch.ops.sidefx.products.default, operands[:2])
    elif len(node.users) == 1 and user.target is aten.relu.default:
        user.replace_all_uses_with(node)
        graph.erase_node(user)
        _replace(graph, node, torch.ops.sidefx.product_relu.default, operands)
    else:
        _replace(graph, node, torch.ops.sidefx.product.default, operands)


def _replace(graph: fx.Graph, node: fx.Node, target: Any, args: tuple[Any, ...]) -> None:
    with graph.inserting_before(node):
        product = graph.call_function(target, args)
    product.meta.update(node.meta)
    node.replace_all_uses_with(product)
    graph.erase_node(node)
