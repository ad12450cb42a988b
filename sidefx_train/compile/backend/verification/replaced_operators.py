"""Runs a graph op by op, with functions in place of some of its operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx


class Calling(fx.Interpreter):
    """Runs a graph with replacements of some operators.

    Args:
        module: the graph.
        functions: the replacements.
    """

    def __init__(self, module: fx.GraphModule, functions: Mapping[Any, Callable[..., Any]] | None = None) -> None:
        super().__init__(module)
        self._functions = functions or {}

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        with torch.no_grad():
            return super().call_function(self._functions.get(target, target), args, kwargs)
