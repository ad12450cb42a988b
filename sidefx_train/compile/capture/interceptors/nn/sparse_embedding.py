"""Embeddings whose sparse gradients leave a part of the step run natively; the rest is captured around them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


def _register(fn: Any, table: int, sparse: int) -> None:
    """Stops the capture at calls of a function of these positions of the table and of the flag ``sparse``."""

    @registry.intercept(fn)
    def check(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        weight = args[table] if len(args) > table else kwargs.get("weight")
        if not world.specialization.native_lookups:
            return ABSENT
        asked = args[sparse] if len(args) > sparse else kwargs.get("sparse", False)
        if asked is True and torch.is_grad_enabled() and safe_isinstance(weight, torch.Tensor) and weight.requires_grad:
            world.heap.refuse("SFX109", "looks up rows of a table whose gradient is sparse")
        return ABSENT


_register(F.embedding, 1, 6)
_register(F.embedding_bag, 1, 7)
_register(torch.embedding, 0, 4)
_register(torch.embedding_bag, 0, 5)
