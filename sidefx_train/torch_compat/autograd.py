"""Autograd: version counters, views, nodes of the graph that a backward runs through, saved tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def without_view_relation(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that autograd does not take for a view of another."""
    return alias_hidden_from_autograd(tensor) if tensor._is_view() else tensor


def alias_hidden_from_autograd(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, with no autograd history and a version counter of its own."""
    with below_autograd():
        return torch.ops.aten.alias.default(tensor)  # type: ignore[no-any-return]


@contextmanager
def below_autograd() -> Iterator[None]:
    """Operations inside are unknown to autograd, and to version counters."""
    views = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(views):
        yield


def below_autograd_only() -> Any:
    """A context in which operations are unknown to autograd; version counters go on counting."""
    return torch._C._AutoDispatchBelowAutograd()


def output_of(node: Any, number: int) -> tuple[tuple[Any, ...], torch.dtype, torch.device]:
    """Shape, type and device of what a node of the autograd graph has made."""
    made = node._input_metadata[number]
    return tuple(made.shape), made.dtype, made.device


increment_version = torch._C._increment_version


def unchecked_saved(ctx: Any) -> list[torch.Tensor | None]:
    """The tensors that a node saved, changed or not; ``None`` for what is none, or where torch does not give them."""
    return [getattr(raw, "data", None) for raw in ctx._raw_saved_tensors]


def is_asked_for(node: Any) -> bool:
    """True if the backward that is running goes on to a node of the autograd graph, or is to give its gradient."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a leaf whose gradient ``autograd.grad`` returns
        return True


VERSIONS = 1 << 32
"""A version counter is an unsigned number of 32 bits: behind the last comes 0."""


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Sets a tensor's version counter, which its views share."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def has_no_derivative(node: Any) -> bool:
    """True for the autograd node of an operator that has no derivative."""
    return str(node.name()).endswith("NotImplemented")


def running_backward() -> int:
    """The number of the backward that is running."""
    return int(torch._C._current_graph_task_id())


def running_node() -> str:
    """The name of the node of the autograd graph whose derivative is being computed."""
    node = torch._C._current_autograd_node()
    return "" if node is None else node.name()


def running_derivative() -> tuple[str, int] | None:
    """What tells the node of the autograd graph whose derivative is being computed from others: its name and place."""
    node = torch._C._current_autograd_node()
    return None if node is None else (node.name(), node._sequence_nr())


def last_index() -> int:
    """The place of the node of the autograd graph that was made last, in the order of the forward."""
    return int(torch.autograd._get_sequence_nr()) - 1


def neg_view(tensor: torch.Tensor) -> torch.Tensor:
    """The negative of a tensor, in its memory."""
    return torch._neg_view(tensor)


def creation_of(tensor: torch.Tensor) -> Any:
    """How a view came to be, by which autograd decides what it says of an in-place change; ``None`` for others."""
    return torch._C._autograd._get_creation_meta(tensor) if tensor._is_view() else None


def set_creation(view: torch.Tensor, creation: Any) -> None:
    torch._C._autograd._set_creation_meta(view, creation)


NODES_BY_OPERATION = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""Errors of autograd name a node by its operation (``Exp``); before torch 2.13 by its class (``ExpBackward0``)."""

PLAIN_VIEW = torch._C._autograd.CreationMeta.DEFAULT
"""Of a view that was made while autograd was on."""


def share_version_counter(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two tensors share their version counter: it is moved for a moment."""
    if a.is_inference() or b.is_inference() or a._version != b._version:
        return False
    before = a._version
    set_version(a, before + 1)
    shared = b._version != before
    set_version(a, before)
    return bool(shared)


asks_for_execution = torch._C._will_engine_execute_node

number_of_backward = torch._C._current_graph_task_id


@contextmanager
def training_kernels() -> Iterator[None]:
    """Grad mode is on, as kernels that save for backward want it, and yet autograd records nothing."""
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        yield
