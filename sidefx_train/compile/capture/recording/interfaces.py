"""Protocols of the recording: the tracer as seen by its parts and the shadows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import fx

from sidefx_train.errors import Location, Unsupported


class StorageHandler(Protocol):
    """Handles operations that replace or resize a tensor's storage."""

    def grow(self, tensor: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
        """Handles ``resize_`` past the end of the storage."""

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of ``set_`` or ``resize_``; ``None`` for any other operation."""


class GraphRecorder(Protocol):
    """The tracer's interface to the recording mode and its helpers; ``GraphTracer`` documents each member."""

    graph: fx.Graph
    tracer: Any
    fake_mode: Any
    memory: StorageHandler | None
    stop: Unsupported | None
    locate: Callable[[], Location | None]
    touches: Callable[[], None]
    wrapper_dispatch: Callable[..., Any]
    read_by_code: Callable[[Any], Any]
    count_before: Callable[[Any], Any]

    def node_of(self, value: Any) -> fx.Node: ...

    def has_node(self, value: Any) -> bool: ...

    def last_node(self) -> fx.Node: ...

    def keep_views(self, made: Any) -> None: ...

    def forget_overwritten(self, values: Iterable[Any]) -> None: ...

    def clone_after(self, value: torch.Tensor, node: fx.Node, at: fx.Node) -> fx.Node: ...
