"""Autograd: version counters, views, nodes of the autograd graph, saved tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def without_view_relation(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an alias that autograd does not treat as a view."""
    return alias_hidden_from_autograd(tensor) if tensor._is_view() else tensor


def alias_hidden_from_autograd(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an alias without autograd history and with its own version counter."""
    with below_autograd():
        return torch.ops.aten.alias.default(tensor)  # type: ignore[no-any-return]


def plain_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same alias in half of the time; for code that runs while no mode of torch is active."""
    if tensor.is_conj() or tensor.is_neg():  # their kernels cannot be called directly
        return alias_hidden_from_autograd(tensor)
    keys = torch._C._dispatch_keys(tensor) & _BELOW_VIEWS
    return _ALIAS.redispatch(keys, tensor)  # type: ignore[no-any-return]


_ALIAS = torch.ops.aten.alias.default
_BELOW_VIEWS = torch._C._after_ADInplaceOrView_keyset


@contextmanager
def below_autograd() -> Iterator[None]:
    """Context whose operations are unknown to autograd and to version counters."""
    views = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(views):
        yield


def below_autograd_only() -> Any:
    """Returns a context whose operations are unknown to autograd; version counters still count."""
    return torch._C._AutoDispatchBelowAutograd()


def output_of(node: Any, number: int) -> tuple[tuple[Any, ...], torch.dtype, torch.device]:
    """Returns shape, dtype and device of an output of an autograd node."""
    made = node._input_metadata[number]
    return tuple(made.shape), made.dtype, made.device


_APPLY = vars(torch.autograd.Function)["apply"]

FUNCTION_APPLY = getattr(_APPLY, "__func__", _APPLY)
"""What ``Function.apply`` calls: a Python function up to torch 2.13, a class method of C code from 2.14."""


def bound_apply(cls: type) -> Any:
    """Returns torch's ``Function.apply`` bound to a class, which may override it."""
    return _APPLY.__get__(None, cls)


def apply_of(cls: type) -> Any:
    """Returns what ``cls.apply`` does, without what only transforms of functions need, which takes half of the time."""
    direct = super(torch.autograd.Function, cls).apply  # type: ignore[misc]

    def apply(*args: Any) -> Any:
        return cls.apply(*args) if torch._C._are_functorch_transforms_active() else direct(*args)  # type: ignore[attr-defined]

    return apply


increment_version = torch._C._increment_version


def unchecked_saved(ctx: Any) -> list[torch.Tensor | None]:
    """Returns the saved tensors of a node, changed or not; ``None`` for other values, or if torch does not provide
    them."""
    return [getattr(raw, "data", None) for raw in ctx._raw_saved_tensors]


def saved_are_released(node: Any) -> bool:
    """Returns True if a backward pass has released what an autograd node saved, so that another one raises."""
    for name in dir(node):
        if name.startswith("_saved_") or name == "saved_tensors":
            try:
                getattr(node, name)
            except RuntimeError as error:
                if "a second time" in str(error):
                    return True
    return False


def is_asked_for(node: Any) -> bool:
    """Returns True if the running backward continues at an autograd node, or returns its gradient."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a leaf whose gradient ``autograd.grad`` returns
        return True


VERSIONS = 1 << 32
"""A version counter is an unsigned number of 32 bits, which wraps to 0."""


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Sets a tensor's version counter, which its views share."""
    set_versions((tensor,), (version,))


def set_versions(tensors: tuple[torch.Tensor, ...], versions: tuple[int, ...]) -> None:
    """Sets the version counters of tensors."""
    torch._C._autograd._unsafe_set_version_counter(tensors, versions)


def has_no_derivative(node: Any) -> bool:
    """Returns True for the autograd node of an operator without a derivative."""
    return str(node.name()).endswith("NotImplemented")


def running_backward() -> int:
    """Returns the number of the running backward."""
    return int(torch._C._current_graph_task_id())


def running_node() -> str:
    """Returns the name of the autograd node whose derivative is being computed."""
    node = torch._C._current_autograd_node()
    return "" if node is None else node.name()


def running_derivative() -> tuple[str, int] | None:
    """Returns (name, sequence number) of the autograd node whose derivative is being computed."""
    node = torch._C._current_autograd_node()
    return None if node is None else (node.name(), node._sequence_nr())


def last_index() -> int:
    """Returns the sequence number of the newest autograd node."""
    return int(torch.autograd._get_sequence_nr()) - 1


def neg_view(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the negative of a tensor as a view."""
    return torch._neg_view(tensor)


def creation_of(tensor: torch.Tensor) -> Any:
    """Returns a view's creation metadata, which selects autograd's error for an in-place change; ``None`` for
    others."""
    return torch._C._autograd._get_creation_meta(tensor) if tensor._is_view() else None


def set_creation(view: torch.Tensor, creation: Any) -> None:
    torch._C._autograd._set_creation_meta(view, creation)


_RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))

NODES_BY_OPERATION = _RELEASE >= (2, 13)
"""Errors of autograd name a node by its operation (``Exp``); before torch 2.13 by its class (``ExpBackward0``)."""

POWERS_HIDE_NUMBER = _RELEASE >= (2, 14)
"""The derivative of a power puts a symbolic exponent into a tensor; before, it made the exponent a constant."""

PLAIN_VIEW = torch._C._autograd.CreationMeta.DEFAULT
"""Creation metadata of a view made with autograd on."""


def share_version_counter(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns True if two tensors share their version counter, which is changed temporarily."""
    if a.is_inference() or b.is_inference() or a._version != b._version:
        return False
    before = a._version
    set_version(a, before + 1)
    shared = b._version != before
    set_version(a, before)
    return bool(shared)


asks_for_execution = torch._C._will_engine_execute_node

ENGINE = type(torch.autograd.Variable._execution_engine)
"""Class of autograd's engine."""

number_of_backward = torch._C._current_graph_task_id


@contextmanager
def training_kernels() -> Iterator[None]:
    """Context with grad mode on, as kernels that save for backward need it, in which autograd records nothing."""
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        yield


_RECORDING = (
    torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCPU)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradOther)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradNestedTensor)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
)


@contextmanager
def recording_autograd() -> Iterator[None]:
    """Context in which autograd records operations on the CPU, also within a kernel, which autograd has dispatched."""
    included = torch._C._dispatch_tls_local_include_set() | torch._C.DispatchKeySet(
        torch._C.DispatchKey.ADInplaceOrView
    )
    excluded = torch._C._dispatch_tls_local_exclude_set() - _RECORDING
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


pack_sequences = torch._pack_padded_sequence
pad_sequences = torch._pad_packed_sequence
pad_list = torch._C._nn.pad_sequence
