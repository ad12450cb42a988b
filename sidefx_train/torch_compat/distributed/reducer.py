"""What ``DistributedDataParallel`` and its C++ reducer know: gradient buckets, hooks, buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist


def sent_by_hook(hook: Any) -> torch.dtype | Literal["unchanged"] | None:
    """Returns the dtype in which a communication hook sends a bucket, divided by the number of processes.

    Returns:
        ``None`` for a hook that does anything else.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if hook is default_hooks.allreduce_hook:
        return "unchanged"
    return torch.float16 if hook is default_hooks.fp16_compress_hook else None


def gradient_buckets(reducer: Any) -> list[list[torch.nn.Parameter]]:
    """Returns the parameters of each bucket in the order in which buckets are reduced."""
    return [list(bucket.parameters()) for bucket in reducer._get_zeros_like_grad_buckets()]


def builtin_hook(logger: Any) -> str:
    """Returns the name of the communication hook that the reducer's logger has; "" without one."""
    return str(logger._get_ddp_logging_data().strs_map.get("comm_hook", ""))


def coalesced(tensors: list[torch.Tensor], size: int) -> list[list[int]]:
    """Returns the positions of the tensors that ``_broadcast_coalesced`` sends together, in the order of sending."""
    return list(dist._compute_bucket_assignment_by_size(tensors, [size])[0]) if tensors else []


def after_backward(call: Callable[[], None]) -> None:
    """Calls a function at the end of the running backward."""
    torch.autograd.Variable._execution_engine.queue_callback(call)
