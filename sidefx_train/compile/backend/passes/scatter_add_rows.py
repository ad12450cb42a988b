"""Scatter-add of rows by the native module.

The derivative of an embedding, ``index_add`` and the derivative of ``index_select`` are one operation: rows of a matrix
are added to indexed rows of zeros. Inductor's loops process the rows with several threads, and add each number
atomically, which takes several times as long as eager's kernels and has a different summation order each time.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.graph.fx_utils import emit, static_cpu_shape
from sidefx_train.compile.native import rows_module
from sidefx_train.compile.ops.registration import define_operator

aten = torch.ops.aten

_FEWEST = 16384
"""Numbers to add from which a separate kernel is worth it."""

_NARROWEST = 16
"""Minimum of columns: the width of a vector register."""

_LEFT_OUT = -(2**63)
"""Index of a row that is skipped."""

_Parts = tuple[fx.Node, fx.Node | None, fx.Node, fx.Node]
"""What is added to, which rows are added (``None``: all), the indices, and the rows."""


def _sum_rows_out(index: torch.Tensor, values: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    native = rows_module()
    assert native is not None, "graphs with this operator need the native module"
    sizes = (values.shape[0], values.shape[1], out.shape[0])
    if not native.sum_rows(index.data_ptr(), values.data_ptr(), out.data_ptr(), *sizes):
        raise IndexError(f"an index is out of bounds for dimension 0 with size {out.shape[0]}")
    return out


def _sum_rows_fake(index: torch.Tensor, values: torch.Tensor, height: int) -> torch.Tensor:
    return values.new_empty(height, values.shape[1])


def _sum_rows(index: torch.Tensor, values: torch.Tensor, height: int) -> torch.Tensor:
    return _sum_rows_out(index.contiguous(), values.contiguous(), out=_sum_rows_fake(index, values, height))


define_operator("sum_rows(Tensor index, Tensor values, int height) -> Tensor", _sum_rows, _sum_rows_fake)
define_operator("sum_rows.out(Tensor index, Tensor values, *, Tensor(a!) out) -> Tensor(a!)", _sum_rows_out)


_ADDED = {"embedding_dense_backward": 0, "index_put": 2, "index_put_": 2, "index_add": 3, "index_add_": 3}
"""Position of the added rows among the operators' arguments."""


def may_add_rows(graph: fx.Graph) -> bool:
    """Returns True if :func:`sum_rows_natively` may apply to a captured graph."""
    for node in graph.nodes:
        name = node.target._schema.name.split("::")[1] if isinstance(node.target, compat.OpOverload) else ""
        if name in _ADDED and len(node.args) > _ADDED[name]:
            shape = static_cpu_shape(node.args[_ADDED[name]])
            if shape is not None and math.prod(shape) >= _FEWEST:
                return True
    return False


def sum_rows_natively(module: fx.GraphModule, fake_mode: Any, every: bool = False) -> str:
    """Rewrites additions of many rows by index, or ``every`` one; returns a note for the report.

    The native module adds in a fixed order, generated loops in the order of their threads.
    """
    found = [node for node in module.graph.nodes if _parts(node, every) is not None]
    if not found or rows_module() is None:
        return ""
    for node in found:
        parts = _parts(node, every)  # its rows may be the sum of another
        assert parts is not None, f"{node} is not what it was before another sum was rewritten"
        _rewrite(module.graph, node, parts, fake_mode)
    module.graph.lint()
    module.recompile()
    return f"{len(found)} sums of rows by index by the native module"


def _parts(node: fx.Node, every: bool) -> _Parts | None:
    """Returns the operands of such an addition."""
    mask: Any = None
    if node.target is aten.index_put.default and len(node.args) > 3 and node.args[3] is True:
        start, indices, values, _ = node.args
    elif node.target is aten._unsafe_masked_index_put_accumulate.default:
        start, mask, indices, values = node.args
    else:
        return None
    if not isinstance(indices, (list, tuple)) or len(indices) != 1:
        return None
    target, places, added = static_cpu_shape(start), static_cpu_shape(indices[0]), static_cpu_shape(values)
    if not target or not places or not added:  # symbolic, or of no dimension
        return None
    dtype, kind, other = (each.meta["val"].dtype for each in (start, indices[0], values))  # type: ignore[union-attr]
    if dtype != torch.float32 or other != dtype or kind not in (torch.int64, torch.int32):
        return None
    height, row = target[0], target[1:]
    if added != [*places, *row] or height == 0 or math.prod(added) == 0:
        return None
    if not every and (math.prod(row) < _NARROWEST or math.prod(added) < _FEWEST):
        return None
    if mask is not None and static_cpu_shape(mask) != [*places, *(1 for _ in row)]:
        return None
    return start, mask, indices[0], values  # type: ignore[return-value]


def _rewrite(graph: fx.Graph, node: fx.Node, parts: _Parts, fake_mode: Any) -> None:
    start, mask, index, values = parts
    call = partial(emit, graph, fake_mode)
    height, *row = start.meta["val"].shape
    count, columns = math.prod(index.meta["val"].shape), math.prod(row)

    def flat(given: fx.Node, size: list[int]) -> fx.Node:
        if list(given.meta["val"].shape) == size:
            return given
        if not given.meta["val"].is_contiguous():
            given = call(aten.clone.default, given, memory_format=torch.contiguous_format)
        return call(aten.view.default, given, size)

    with graph.inserting_before(node):
        places = flat(index, [count])
        if index.meta["val"].dtype != torch.int64:
            places = call(torch.ops.prims.convert_element_type.default, places, torch.int64)
        if mask is not None:
            none = call(aten.full.default, [], _LEFT_OUT, dtype=torch.int64, device=torch.device("cpu"))
            places = call(aten.where.self, flat(mask, [count]), places, none)
        made = call(torch.ops.sidefx.sum_rows.default, places, flat(values, [count, columns]), height)
        if row != [columns]:
            made = call(aten.view.default, made, [height, *row])
        if not _is_zero(start):
            made = call(aten.add.Tensor, start, made)
    made.meta = {**node.meta, "val": made.meta["val"]}
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _is_zero(node: fx.Node) -> bool:
    return node.target is aten.full.default and node.args[1] == 0
