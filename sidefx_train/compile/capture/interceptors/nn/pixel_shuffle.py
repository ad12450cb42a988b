"""``F.pixel_shuffle`` and ``F.pixel_unshuffle`` by a factor that changes, which torch takes as a plain number.

Both put the elements of a tensor in another order: a view of more dimensions, permuted and copied.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld

aten = torch.ops.aten

_SHUFFLE = inspect.signature(lambda input, upscale_factor: None)
_UNSHUFFLE = inspect.signature(lambda input, downscale_factor: None)


def _reordered(
    signature: inspect.Signature, down: bool, world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    given = registry.bound_arguments(signature, args, kwargs)
    if given is None:
        return ABSENT
    x, factor = given.values()
    if not compat.are_changing_integers(factor):
        return ABSENT
    if not safe_isinstance(x, compat.FakeTensor) or x.dim() < 3 or not x.is_contiguous() or not world.truth(factor > 0):
        return ABSENT
    *outer, channels, height, width = x.shape
    divided, by = ((height, width), factor) if down else ((channels,), factor * factor)
    if not all(world.truth(size % by == 0) for size in divided):  # torch says what is wrong
        return ABSENT
    if down:
        height, width = height // factor, width // factor
        split, order = (channels, height, factor, width, factor), (0, 2, 4, 1, 3)
        shape = (channels * factor * factor, height, width)
    else:
        channels = channels // by
        split, order = (channels, factor, factor, height, width), (0, 3, 1, 4, 2)
        shape = (channels, height * factor, width * factor)
    dims = (*range(len(outer)), *(len(outer) + dim for dim in order))
    permuted = world.guarded(
        torch.Tensor.permute, (world.guarded(torch.Tensor.view, (x, (*outer, *split)), {}), dims), {}
    )
    copied = world.guarded(torch.clone, (permuted,), {"memory_format": torch.contiguous_format})
    return world.guarded(aten._unsafe_view.default, (copied, [*outer, *shape]), {})


registry.intercept(F.pixel_shuffle)(partial(_reordered, _SHUFFLE, False))
registry.intercept(F.pixel_unshuffle)(partial(_reordered, _UNSHUFFLE, True))
