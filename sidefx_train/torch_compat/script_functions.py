"""Functions of TorchScript (``torch.jit.script``, ``torch.jit.trace``): what they do besides their result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_EFFECTS = frozenset(
    {"prim::Print", "aten::warn", "aten::save", "aten::manual_seed", "aten::seed", "prim::TimePoint"}
    | {"prim::PythonOp", "prim::SetAttr", "prim::fork", "prim::awaitable", "prim::rpc_async", "prim::rpc_sync"}
)
"""Instructions that show or change something, call Python, or run in another thread."""


def effect_of_script(fn: Any) -> str | None:
    """Returns the first instruction of a script function that does more than compute; ``None`` if there is none."""

    def kinds(block: Any) -> Iterator[str]:
        for node in block.nodes():
            yield node.kind()
            for inner in node.blocks():
                yield from kinds(inner)

    return next((kind for kind in kinds(fn.inlined_graph) if kind in _EFFECTS), None)


@contextmanager
def unoptimized_scripts() -> Iterator[None]:
    """Context in which script functions run instruction by instruction and learn nothing about their arguments."""
    before = torch._C._get_graph_executor_optimize()
    torch._C._set_graph_executor_optimize(False)
    try:
        yield
    finally:
        torch._C._set_graph_executor_optimize(before)
