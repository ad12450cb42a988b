"""Versions of installed packages: found in files, the same for the whole process, so asked for during the capture."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, Any

from sidefx_train.compile import registry
from sidefx_train.compile.heap.caches import settled

if TYPE_CHECKING:
    from sidefx_train.compile.heap.world import TraceWorld


@registry.intercept(importlib.metadata.version)
def _version(_: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return settled(importlib.metadata.version, args, kwargs)
