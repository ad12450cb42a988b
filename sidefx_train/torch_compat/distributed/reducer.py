"""What ``DistributedDataParallel`` and its C++ reducer know: gradient buckets, hooks, buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

BEGIN_FORWARD, END_FORWARD = DistributedDataParallel._pre_forward, DistributedDataParallel._post_forward
"""What the forward of a wrapper does before, and after, it calls the module."""


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


def builtin_hook(wrapper: Any) -> str:
    """Returns the name of the communication hook that the logger of a wrapper has; "" without one."""
    return str(wrapper.logger._get_ddp_logging_data().strs_map.get("comm_hook", ""))


def coalesced(tensors: list[torch.Tensor], size: int) -> list[list[int]]:
    """Returns the positions of the tensors that ``_broadcast_coalesced`` sends together, in the order of sending."""
    return list(dist._compute_bucket_assignment_by_size(tensors, [size])[0]) if tensors else []


def after_backward(call: Callable[[], None]) -> None:
    """Calls a function at the end of the running backward."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def used_counts(reducer: Any) -> list[int]:
    """Returns how many processes have used each parameter in the last exchange of that."""
    return [int(count) for count in reducer._get_local_used_map().tolist()]


def has_final_buckets(wrapper: Any) -> bool:
    """Returns True if the reducer of a wrapper whose flag says so has arranged its buckets again.

    A wrapper that was copied or unpickled has the flag of the original and a reducer of its own, whose statistics tell,
    one forward later. The process group is the first attribute that such a wrapper gets.
    """
    if next(iter(vars(wrapper)), "") != "process_group":
        return True
    return bool(wrapper.logger._get_ddp_logging_data().ints_map.get("has_rebuilt_buckets"))


def is_finalized(wrapper: Any) -> bool:
    """Returns True unless a backward has reduced some gradients only: the next forward in grad mode raises then."""
    try:
        wrapper.reducer._check_reducer_finalized()
    except RuntimeError:
        return False
    return True


def prepare_reducer(reducer: Any) -> None:
    """Prepares the reducer as a forward does whose backward reduces the gradients of all parameters."""
    reducer.prepare_for_forward()
    reducer.prepare_for_backward([])


def mark_used(reducer: Any, indices: tuple[int, ...]) -> None:
    """Tells the reducer that gradients were accumulated in a backward without reduction."""
    for index in indices:
        reducer._autograd_hook(index)


def reset_used(reducer: Any) -> None:
    """Resets the reducer's state to that after a reduction, for one whose every forward finds unused parameters."""
    reducer._reset_state()


def tensors_in(outputs: Any) -> list[torch.Tensor]:
    """Returns the tensors of a forward's results through which the wrapper looks for parameters."""
    return list(torch.nn.parallel.distributed._find_tensors(outputs))


def gradient_sink() -> tuple[Any, Any, Any]:
    """Returns torch's functions that flatten a forward's results, restore them, and the sink for tensors between."""
    module = torch.nn.parallel.distributed
    return module._tree_flatten_with_rref, module._tree_unflatten_with_rref, module._DDPSink.apply


def leaves_behind(tensors: list[torch.Tensor]) -> set[int]:
    """Returns the ids of the leaves that the autograd graph of tensors accumulates gradients into."""
    found: set[int] = set()
    stack = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.add(id(leaf))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return found
