"""Transforms of ``torch.func``: ``vmap``, ``grad``, ``functionalize``."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch._functorch import autograd_function as _functions

apply_in_transform = _functions.custom_function_call_grad
"""Kernel by which ``grad`` and ``jvp`` of ``torch.func`` apply an autograd function."""

class_in_transform = _functions.generate_single_level_function
single_level_functions = _functions.enable_single_level_autograd_function


def inside_transform() -> bool:
    """Returns True inside a transform of ``torch.func``: ``vmap``, ``grad``, ``functionalize``..."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_batched(value: Any) -> bool:
    """Returns True for a batch of gradients, as passed by ``torch.autograd.grad(..., is_grads_batched=True)``."""
    return value is not None and (
        torch._C._functorch.is_legacy_batchedtensor(value) or torch._C._functorch.is_batchedtensor(value)
    )


def outside_transforms() -> Any:
    """Returns a context outside the active transforms of ``torch.func``: tensors created inside would belong to
    them."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def loads_batching_rules() -> Any:
    """Returns the function by which torch loads ``vmap``'s decompositions on first use."""
    from torch._functorch import vmap

    return vmap.lazy_load_decompositions


def load_forward_derivatives() -> None:
    """Loads what the first dual tensor of a process loads: derivatives of operators that are scripted functions."""
    from torch._decomp import decompositions_for_jvp as decompositions_for_jvp
