"""Settings of torch that kernels read when they run: a graph runs with those of the moment when it is called.

So an operation is recorded only while they are those of the step's start. Changed ones are kept as effects of the part
before a graph break, and the part behind it starts with them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from sidefx_train import torch_compat as compat
from sidefx_train.errors import Unsupported


def check_settings(settings: compat.KernelSettings, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses an operation that the step computes with other settings than those that it started with.

    Raises:
        Unsupported: the kernel may compute something else when the graph runs.
    """

    def tensors() -> list[torch.Tensor]:
        return [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]

    def devices() -> set[str]:
        chosen = kwargs.get("device")
        found = [tensor.device for tensor in tensors()] or [torch.device("cpu")]
        return {device.type for device in (found if chosen is None else [*found, torch.device(chosen)])}

    if func.is_view or func in compat.READS:
        return
    changed = settings.changed(devices)
    if changed is None and settings.other_dtype() and kwargs.get("dtype") is None:
        changed = None if any(tensor.is_floating_point() for tensor in tensors()) else "the default dtype"
    if changed is not None:
        raise Unsupported("SFX111", f"computes {func} while the step has a setting of torch changed: {changed}")
