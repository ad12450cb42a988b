"""``DTensor``: a tensor class over local tensors, with operators that communicate."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_LOSS = "torch.distributed.tensor.parallel.loss"


def dtensor_class() -> Any:
    """Returns the class ``DTensor``, ``None`` while nobody has imported it."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def is_dtensor(value: Any) -> bool:
    """Returns True for an instance of exactly ``DTensor``."""
    cls = dtensor_class()
    return cls is not None and type(value) is cls


def has_dtensor(types: Any) -> bool:
    """Returns True if ``DTensor`` is among the classes of an operator's arguments."""
    cls = dtensor_class()
    return cls is not None and cls in types


def dtensor_dispatcher() -> tuple[Any, dict[Any, Any], str]:
    """Returns the object that runs operators of ``DTensor``, with what programs change of it.

    That is the rules for single operators, which ``loss_parallel`` adds to, and the name of the attribute that
    ``implicit_replication`` sets.
    """
    dispatcher = dtensor_class()._op_dispatcher
    return dispatcher, dispatcher._custom_op_handlers, "_allow_implicit_replication"


def loss_parallel_switches() -> tuple[Any, Any] | None:
    """Returns the functions by which ``loss_parallel`` begins and ends, ``None`` while nobody has imported it."""
    module = sys.modules.get(_LOSS)
    return None if module is None else (module._enable_custom_loss_ops, module._disable_custom_loss_ops)


def has_loss_rules() -> bool:
    """Returns True inside ``loss_parallel``."""
    return not dtensor_dispatcher()[1].keys().isdisjoint(sys.modules[_LOSS].customized_loss_ops)


def needs_derivative(given: Any) -> bool:
    """Returns True if a tensor among nested arguments requires gradients."""
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in tree_leaves(given))


def make_dtensor(local: torch.Tensor, spec: Any, requires_grad: bool = False) -> Any:
    """Returns a ``DTensor`` over a local tensor, without history."""
    return dtensor_class()(local, spec, requires_grad=requires_grad)


def gradient_dtype(leaf: torch.Tensor) -> torch.dtype | None:
    """Returns the dtype that gradients of a leaf must have; ``None`` for any."""
    return getattr(leaf, "grad_dtype", leaf.dtype)


def copy_gradient_dtype(leaf: torch.Tensor, into: torch.Tensor) -> None:
    """Copies the dtype of gradients of a leaf, where it is not that of the leaf itself."""
    dtype = gradient_dtype(leaf)
    if dtype is not leaf.dtype:
        into.grad_dtype = dtype


def local_of(dtensor: Any) -> torch.Tensor:
    """Returns the local tensor of a ``DTensor``."""
    local: torch.Tensor = dtensor._local_tensor
    return local


def spec_of(dtensor: Any) -> Any:
    """Returns what describes how a ``DTensor`` is distributed."""
    return dtensor._spec
