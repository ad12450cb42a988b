"""Functional tensors and the modes that record operations on them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, PythonKeyTracer

from sidefx_train.torch_compat.recording import RecordingMode, tracing_subgraphs


@contextmanager
def _decomposing(tracer: PythonKeyTracer, decompositions: Any) -> Iterator[None]:
    """Context that records operations and decomposes those in a table: the mode's own, before torch 2.12 the
    module's."""
    if "decomposition_table" in inspect.signature(ProxyTorchDispatchMode).parameters:
        with RecordingMode(tracer, decompositions):
            yield
        return
    from torch.fx.experimental.proxy_tensor import decompose

    with decompose(decompositions), RecordingMode(tracer):
        yield


@contextmanager
def functionalizing(fake_mode: FakeTensorMode, tracer: PythonKeyTracer, decompositions: Any) -> Iterator[None]:
    """Context that records operations on functional tensors over fakes, without in-place operations, in a graph."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch._subclasses.functional_tensor import FunctionalTensorMode
    from torch.fx.experimental.proxy_tensor import disable_autocast_cache

    with (
        fake_mode,
        enable_python_dispatcher(),
        _decomposing(tracer, decompositions),
        disable_autocast_cache(),
        torch.no_grad(),
        torch._C._AutoDispatchBelowAutograd(),  # Python rules for Autograd would decompose operators again
        torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)),
        tracing_subgraphs(fake_mode, tracer, decompositions),
        FunctionalTensorMode(),
    ):
        yield


@contextmanager
def below_functionalization() -> Iterator[None]:
    """Context whose operations are recorded unchanged (for example in-place ``copy_`` into an input)."""
    from torch._subclasses.functional_tensor import disable_functional_mode

    with disable_functional_mode():
        yield


def to_functional(fake: torch.Tensor) -> torch.Tensor:
    from torch._subclasses.functional_tensor import FunctionalTensor

    return FunctionalTensor.to_functional(fake)


def from_functional(value: Any) -> Any:
    """Returns the plain (proxied, fake) tensor of a functional one, after pending updates."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    if not isinstance(value, FunctionalTensor):
        return value
    torch._sync(value)
    return torch._from_functional_tensor(value.elem)


def has_data_mutation(value: torch.Tensor) -> bool:
    return torch._functionalize_has_data_mutation(value.elem)


def has_metadata_mutation(value: torch.Tensor) -> bool:
    """Returns True if an operation changed a functional tensor's sizes or strides in place."""
    return torch._functionalize_has_metadata_mutation(value.elem)


def storage_replaced(value: torch.Tensor) -> bool:
    """Returns True if ``set_`` replaced a functional tensor's storage."""
    return torch._functionalize_was_storage_changed(value.elem)
