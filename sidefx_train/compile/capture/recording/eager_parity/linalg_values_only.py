"""Matrix decompositions whose vectors are unused.

Eager computes the vectors only where autograd needs them; for a fake tensor torch always computes them. The two library
functions round differently, so the graph gets the one that eager would have called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

_FLAG = {aten._linalg_eigh.default: ("UPLO", "compute_v"), aten._linalg_svd.default: ("full_matrices", "compute_uv")}
_VALUES = {aten._linalg_eigh.default: 0, aten._linalg_svd.default: 1}
_DEFAULT = {aten._linalg_eigh.default: "L", aten._linalg_svd.default: False}
_MARK = "sidefx_undifferentiated"


def mark(func: Any, args: Any, graph: fx.Graph) -> None:
    """Records, right after ``func`` was recorded, that autograd does not need its vectors."""
    if func in _FLAG and not (torch.is_grad_enabled() and args[0].requires_grad):
        node = next((n for n in reversed(graph.nodes) if n.target is func), None)
        if node is not None:
            node.meta[_MARK] = True


def drop_unused_vectors(graph: fx.Graph) -> None:
    """Makes the marked decompositions compute only values if nothing uses the vectors."""
    for node in graph.nodes:
        if node.target not in _FLAG or _MARK not in node.meta:
            continue
        if all(user.args[1] == _VALUES[node.target] or not user.users for user in node.users):
            option, _ = _FLAG[node.target]
            given = node.args[1] if len(node.args) > 1 else node.kwargs.get(option, _DEFAULT[node.target])
            node.args = (node.args[0], given, False)
            node.kwargs = {k: v for k, v in node.kwargs.items() if k not in _FLAG[node.target]}
