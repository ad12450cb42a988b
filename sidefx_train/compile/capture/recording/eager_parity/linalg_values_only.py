"""Decompositions of matrices of which only the values are used.

Eager asks the library for the vectors too only where autograd needs them; for a fake tensor torch always asks. The two
ways through the library round differently, so what eager would have asked for is put into the graph.
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
    """Notes, right after ``func`` was recorded, whether autograd had no need of its vectors."""
    if func in _FLAG and not (torch.is_grad_enabled() and args[0].requires_grad):
        node = next((n for n in reversed(graph.nodes) if n.target is func), None)
        if node is not None:
            node.meta[_MARK] = True


def drop_unused_vectors(graph: fx.Graph) -> None:
    """Has the marked decompositions compute values only, where nothing uses the vectors."""
    for node in graph.nodes:
        if node.target not in _FLAG or _MARK not in node.meta:
            continue
        if all(user.args[1] == _VALUES[node.target] or not user.users for user in node.users):
            option, _ = _FLAG[node.target]
            given = node.args[1] if len(node.args) > 1 else node.kwargs.get(option, _DEFAULT[node.target])
            node.args = (node.args[0], given, False)
            node.kwargs = {k: v for k, v in node.kwargs.items() if k not in _FLAG[node.target]}
