"""Backwards for gradients of any layout.

A backward is captured with gradients that are laid out like the results. What autograd passes to it later may have
other strides, and what the capture did not record because of the strides has to be done: a view that needs a copy, and
``contiguous()`` before a kernel that reads its arguments as if they were.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.graph.strided_layout import hinted_layout

aten = torch.ops.aten

_CONTIGUOUS_FIRST: dict[Any, tuple[int, ...]] = {
    aten.native_group_norm_backward.default: (0, 1),
    aten.view_as_complex.default: (0,),
    aten.as_strided.default: (0,),
}
"""Operators, with the positions of arguments for which autograd's formulas call ``contiguous()``.

Results of other kernels of the CPU did not depend on the layout of gradients when all of torch's list were tried."""


def for_any_layout(module: fx.GraphModule) -> fx.GraphModule:
    """Returns the same graph for inputs of other strides.

    Views become copies where needed, and arguments of kernels contiguous, as in eager. Operators of the program are in
    no such graph: their backward is called as Python.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
        for position in _CONTIGUOUS_FIRST.get(node.target, ()):
            given = node.args[position]
            with graph.inserting_before(node):
                node.update_arg(position, _in_format_of(graph, given, _format_for(node)))
    return compat.late_module(module, graph)


def _format_for(node: fx.Node) -> torch.memory_format | None:
    """Returns the memory format in which a kernel gets such an argument in eager."""
    if node.target is aten.native_group_norm_backward.default:
        x = _like_captured(node.args[1])
        if x is None or node.args[1].meta["val"].device.type != "cpu":  # type: ignore[union-attr]
            return torch.contiguous_format
        return compat.suggest_memory_format(x)
    return _captured_format(node.args[0])


def _captured_format(node: Any) -> torch.memory_format | None:
    """Returns the memory format that a value had in the capture; ``None`` for another layout."""
    value = _like_captured(node)
    if value is None or node.meta["val"].storage_offset() != 0:
        return None
    formats = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
    fitting = {4: formats[:2], 5: formats[::2]}.get(value.dim(), formats[:1])
    return next((each for each in fitting if value.is_contiguous(memory_format=each)), None)


def _like_captured(node: Any) -> torch.Tensor | None:
    """Returns a tensor of the captured layout without memory; ``None`` for other values and unknown sizes."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or compat.has_unbacked_sizes(value):
        return None
    layout = hinted_layout(value)
    return torch.empty_strided([size for size, _ in layout], [stride for _, stride in layout], device="meta")


def _in_format_of(graph: fx.Graph, given: Any, memory_format: torch.memory_format | None) -> Any:
    if memory_format is None:
        return given
    return graph.call_function(aten.contiguous.default, (given,), {"memory_format": memory_format})
