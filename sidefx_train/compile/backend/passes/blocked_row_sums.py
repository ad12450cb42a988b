"""Blocked row sums: sums over all rows of a matrix are computed block by block.

Inductor's loop for such a sum processes sixteen columns at a time, one cache line of each row: in a large matrix that
is a page of memory per line. With a few rows per block, all their columns are read before the next rows.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import fx

from sidefx_train.compile.graph.fx_utils import emit

aten = torch.ops.aten

_FEWEST = 1 << 20
"""Elements of a matrix from which its rows are divided: smaller ones fit in a nearby cache."""

_FEWEST_AGAIN = 1 << 18
"""The same limit for a matrix of such sums."""

_NARROWEST = 16
"""Minimum of columns: the width of a vector register."""

_BLOCKS = (8, 16, 12, 10, 20, 24, 32)
"""Rows of a block, best first; the first that divides the rows is used."""


def sum_by_blocks(module: fx.GraphModule, fake_mode: Any) -> str:
    """Rewrites sums over all dimensions but the last of large tensors; returns a note for the report."""
    found = [(n, block) for n in module.graph.nodes if (block := _block(n)) is not None]
    for node, block in found:
        _divide(module.graph, node, block, fake_mode)
    if found:
        module.graph.lint()
        module.recompile()
    return f"{len(found)} sums over rows block by block" if found else ""


def _block(node: fx.Node) -> int | None:
    """Returns the rows of a block if a node is such a sum."""
    if node.target is not aten.sum.dim_IntList or node.kwargs or len(node.args) > 3:
        return None
    given = node.args[0]
    value = given.meta.get("val") if isinstance(given, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or not value.dtype.is_floating_point:
        return None
    sizes, dims = value.shape, node.args[1]
    if value.dim() < 2 or not all(isinstance(size, int) for size in sizes) or not value.is_contiguous():
        return None
    if not isinstance(dims, (list, tuple)) or sorted(dim % value.dim() for dim in dims) != list(range(value.dim() - 1)):
        return None
    if sizes[-1] < _NARROWEST or value.numel() < _FEWEST:
        return None
    rows = math.prod(sizes[:-1])
    return next((block for block in _BLOCKS if rows % block == 0 and rows > block), None)


def _divide(graph: fx.Graph, node: fx.Node, block: int, fake_mode: Any) -> None:
    (given, *_), result = node.args, node.meta["val"]
    columns = given.meta["val"].shape[-1]  # type: ignore[union-attr]
    rows = given.meta["val"].numel() // columns  # type: ignore[union-attr]

    call = partial(emit, graph, fake_mode)
    narrow = result.dtype in (torch.bfloat16, torch.float16)
    with graph.inserting_before(node):
        sums: fx.Node = given  # type: ignore[assignment]
        # Intermediate sums are not rounded to a narrow dtype.
        wide = {"dtype": torch.float32} if narrow else {}
        while True:
            blocks = call(aten.view.default, sums, [rows // block, block, columns])
            sums = call(aten.sum.dim_IntList, blocks, [1], **wide)
            rows //= block
            if rows % block or rows <= block or rows * columns < _FEWEST_AGAIN:
                break
        made = call(aten.sum.dim_IntList, sums, [0], **wide)
        if made.meta["val"].shape != result.shape:  # keepdim
            made = call(aten.view.default, made, list(result.shape))
        if narrow:
            made = call(torch.ops.prims.convert_element_type.default, made, result.dtype)
    made.meta = {**node.meta, "val": made.meta["val"]}
    node.replace_all_uses_with(made)
    graph.erase_node(node)
