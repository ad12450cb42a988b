"""Protocols of the recording: what its parts and the shadows know of the tracer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import fx

from sidefx_train.errors import Location, Unsupported


class StorageHandler(Protocol):
    """Told of operations that give tensors another storage."""

    def grow(self, tensor: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
        """``resize_`` past the end of the storage."""

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The tensor that ``set_`` or ``resize_`` gives; ``None`` for any other operation."""


class GraphRecorder(Protocol):
    """The tracer as the recording mode and its helpers see it; ``GraphTracer`` documents each member."""

    graph: fx.Graph
    tracer: Any
    memory: StorageHandler | None
    stop: Unsupported | None
    locate: Callable[[], Location | None]

    def node_of(self, value: Any) -> fx.Node: ...

    def has_node(self, value: Any) -> bool: ...

    def last_node(self) -> fx.Node: ...

    def keep_views(self, made: Any) -> None: ...

    def clone_after(self, value: torch.Tensor, node: fx.Node, at: fx.Node) -> fx.Node: ...
