"""``random_(low, high)``: torch names its overload ``from``, which no code that is generated in Python can spell.

The numbers are those of ``random_(high - low)``, moved by ``low``: both kernels draw from the range alone.
"""

from __future__ import annotations

from typing import Any

import torch

from sidefx_train.errors import Unsupported

BOUNDED = getattr(torch.ops.aten.random_, "from")


def draw(value: torch.Tensor, low: Any, high: Any = None, generator: torch.Generator | None = None) -> torch.Tensor:
    """Fills ``value`` with integers from ``low`` to below ``high``.

    Raises:
        Unsupported: ``value`` does not hold every integer between the bounds, or the bounds are none.
    """
    if high is None or not _holds(value.dtype, low, high):
        raise Unsupported("SFX110", f"random_ of {value.dtype} between {low} and {high}")
    drawn = torch.empty_like(value, dtype=torch.int64).random_(high - low, generator=generator)
    return value.copy_(drawn.add_(low))


def _holds(dtype: torch.dtype, low: Any, high: Any) -> bool:
    if dtype.is_complex:
        return False
    if dtype.is_floating_point:
        largest = int(2 / torch.finfo(dtype).eps)
        smallest = -largest
    else:
        smallest, largest = (0, 2) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return bool(smallest <= low < high <= largest and high - low < 2**63)
