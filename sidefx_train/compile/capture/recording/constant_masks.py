"""Elements selected by a constant mask (``logits[~torch.eye(n, dtype=torch.bool)]``): their number is known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.recording.constant_folding import constant_value

if TYPE_CHECKING:
    from sidefx_train.compile.capture.recording.interfaces import GraphRecorder

aten = torch.ops.aten


def selected_count(tracer: GraphRecorder, func: Any, args: Any) -> int | None:
    """Returns how many elements a call selects by one mask that depends on no input; ``None`` for any other call."""
    if func is not aten.index.Tensor or len(args[1]) != 1:
        return None
    mask = args[1][0]
    if type(mask) is not compat.FakeTensor or mask.dtype is not torch.bool or not mask.dim():
        return None
    known = constant_value(tracer, mask)
    if known is None:
        return None
    with compat.real_world():
        return int(known.sum())


def select(tensor: torch.Tensor, mask: torch.Tensor, count: int) -> torch.Tensor:
    """Returns ``tensor[mask]`` by the positions of its ``count`` elements, which torch's own kernel computes too."""
    positions = aten.nonzero_static.default(mask, size=count)
    return aten.index.Tensor(tensor, list(aten.unbind.int(positions, 1)))  # type: ignore[no-any-return]
