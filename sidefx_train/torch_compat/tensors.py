"""Real tensors: addresses, storages, allocations, and torch's C++ check of many tensors."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND
from torch._prims_common import elementwise_dtypes as _elementwise_dtypes


def elementwise_dtypes(*operands: Any) -> tuple[torch.dtype, torch.dtype]:
    """Returns the dtype in which an elementwise kernel computes (float32 for half precision), and its result's.

    Args:
        operands: tensors and numbers.
    """
    return _elementwise_dtypes(*operands, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)


def tensor_guards(tensors: list[torch.Tensor], sizes: list[list[Any]], strides: list[list[Any]]) -> Any:
    """Returns one C++ check of type, dtype, device, sizes, strides, requires_grad and dispatch keys of all tensors.

    A size or stride of ``None`` is not compared.
    """
    return torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


def has_memory(tensor: torch.Tensor) -> bool:
    """Returns False if a tensor's storage was freed (``untyped_storage().resize_(0)``), as sharding libraries do."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return True
    return tensor.untyped_storage().nbytes() > 0


def tensor_data_ptr_address() -> int | None:
    """Returns the address of torch's ``void* data_ptr(PyObject* tensor)``, which generated code calls."""
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    return getattr(guards, "_torchinductor_pyobject_tensor_data_ptr", None)


def c10_flags() -> list[str]:
    """Returns compiler and linker flags for C++ that reads ``c10::TensorImpl``."""
    root = os.path.dirname(torch.__file__)
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    return [f"-I{root}/include", abi, f"-L{root}/lib", "-lc10"]


def tensor_impl_address(tensor: torch.Tensor) -> int:
    """Returns the address of a tensor's C++ object."""
    return tensor._cdata  # type: ignore[no-any-return]


def is_plain_strided(tensor: Any) -> bool:
    """Returns True for a ``Tensor`` or ``Parameter`` (no subclass) with plain sizes and strides."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not isinstance(tensor, torch._subclasses.FakeTensor)
    )


def weak_storage(storage: torch.UntypedStorage) -> Any:
    """Returns a reference to a storage that does not keep it alive."""
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(storage)


def storage_behind(weak: Any) -> torch.UntypedStorage | None:
    """Returns the storage of a :func:`weak_storage`; ``None`` if it was freed."""
    return None if weak.expired() else torch.UntypedStorage._new_with_weak_ptr(weak.cdata)


def storage_id(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory, fake ones included, while both live; one without strides is on its own."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else id(tensor)


def storage_address(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage, whatever part of it the tensor shows; 0 without memory."""
    return int(tensor.untyped_storage().data_ptr())


def allocations(run: Callable[[], Any]) -> list[int]:
    """Returns the bytes of CPU tensor memory allocated (positive) and freed (negative) by a call, in order."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
