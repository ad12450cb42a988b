"""Fake tensors: their mode, fakes of inputs, strides and storages of fakes, errors without a fake kernel."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_slot
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from sidefx_train.torch_compat.autograd import below_autograd, creation_of, set_creation, set_version, training_kernels
from sidefx_train.torch_compat.recording import no_recording
from sidefx_train.torch_compat.symbols import _NamedSource
from sidefx_train.torch_compat.tensors import storage_id


def new_fake_mode(shape_env: ShapeEnv) -> FakeTensorMode:
    return FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=False)


@functools.cache
def attributes_of_fakes() -> frozenset[str]:
    """Returns the attributes of a fake tensor that a tensor does not have."""
    with no_recording(), FakeTensorMode():
        names = {*dir(FakeTensor), *vars(torch.empty(0))}
    return frozenset(names.difference(dir(torch.Tensor)))


def fake_snapshot(fake: torch.Tensor) -> torch.Tensor:
    """Returns a detached alias on the same fake storage that keeps the current sizes and strides."""
    with disable_proxy_modes_tracing(), torch.no_grad():
        return fake.detach()


def fake_of(mode: FakeTensorMode, real: torch.Tensor, dynamic: frozenset[int], name: str) -> torch.Tensor:
    """Returns a fake tensor; the sizes of the dimensions in ``dynamic`` are symbols."""
    if not dynamic:
        made = _complex_view(mode, real)
        return mode.from_tensor(real, static_shapes=True) if made is None else made
    sizes = [DimDynamic.DYNAMIC if i in dynamic else DimDynamic.STATIC for i in range(real.dim())]
    context = StatelessSymbolicContext(dynamic_sizes=sizes)
    return mode.from_tensor(real, source=_NamedSource(name), symbolic_context=context)


def _complex_view(mode: FakeTensorMode, real: torch.Tensor) -> torch.Tensor | None:
    """Returns a fake of a complex view of a real tensor, for which torch expects the base to be a list of pairs."""
    base = real._base
    if base is None or not real.is_complex() or base.is_complex() or base.itemsize * 2 != real.itemsize:
        return None
    if real.requires_grad or real.is_conj() or mode.fake_tensor_converter._get_memo(real) is not None:
        return None
    if base.dim() and base.shape[-1] == 2:
        return None
    whole = mode.from_tensor(base, static_shapes=True)
    pairs = (*(2 * stride for stride in real.stride()), 1)
    with mode:
        view = torch.view_as_complex(whole.as_strided((*real.shape, 2), pairs, 2 * real.storage_offset()))
    set_creation(view, creation_of(real))
    mode.fake_tensor_converter.set_tensor_memo(real, view)
    return view


def forget_reals(mode: FakeTensorMode) -> None:
    """Drops the weak references to real tensors that map to fakes: torch cannot swap tensors with such references."""
    converter = mode.fake_tensor_converter.meta_converter
    for known in (converter.tensor_memo, converter.storage_memo):
        known.clear()
    for known in (converter.describer.lookup_tensor, converter.describer.lookup_storage):
        known.clear()


def alias_fake(mode: FakeTensorMode, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor | None:
    """Returns an alias fake: a fake of a tensor that shares the version counter of another, whose fake is ``fake``.

    A later fake of a tensor whose base is ``real`` is made from it. Returns ``None`` for a dtype that would make it a
    view.
    """
    version = fake._version
    with torch.no_grad():
        alias = fake.detach()
        if alias.dtype != real.dtype:
            alias = alias.as_strided_((fake.untyped_storage().nbytes() // fake.itemsize,), (1,), 0).view(real.dtype)
        alias.as_strided_(real.size(), real.stride(), real.storage_offset())
    set_version(fake, version)
    if alias._is_view():
        return None
    alias.requires_grad_(real.requires_grad)
    mode.fake_tensor_converter.set_tensor_memo(real, alias)
    return alias


def sparse_fake(mode: FakeTensorMode, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Returns a fake sparse tensor of rows on the CPU, without any; nothing reads its own indices and values."""
    with no_recording(), mode, torch.no_grad():
        empty = torch.empty(1, 0, dtype=torch.int64), torch.empty(0, *size[1:], dtype=dtype)
        return torch.sparse_coo_tensor(*empty, size, check_invariants=False)


def fake_counted(fake: torch.Tensor) -> torch.Tensor:
    """Returns a detached alias with the same storage and version counter, unknown to the graph.

    A caller's dispatch mode is below the one that gives the alias that counter.
    """
    counts = torch._C.DispatchKey.ADInplaceOrView
    with (
        no_recording(),
        torch.no_grad(),
        torch._C._IncludeDispatchKeyGuard(counts),
        torch._C._SetExcludeDispatchKeyGuard(counts, False),
    ):
        return fake.detach()


def forget_numbers(fake: torch.Tensor) -> None:
    """Invalidates the number in a fake tensor, and how many of its elements are not zero, or differ."""
    for memo in ("nonzero_memo", "item_memo", "unique_memo", "unique_consecutive_memo"):
        if memo in vars(FakeTensor):  # a descriptor, which cannot be read on the class
            setattr(fake, memo, None)


def forget_contents(fake: torch.Tensor) -> None:
    """Invalidates all that is recorded of the contents of a fake tensor."""
    forget_numbers(fake)
    fake.constant = None  # type: ignore[attr-defined]


def forget_constant(fake: torch.Tensor, tracer: Any) -> None:
    """Invalidates torch's constant contents of a fake tensor; its recorder misses writes through a view."""
    fake.constant = None  # type: ignore[attr-defined]
    slot = get_proxy_slot(fake, tracer, None)
    if slot is not None:
        slot.constant = None


def set_strides(fake: torch.Tensor, strides: tuple[int, ...]) -> None:
    """Sets the strides of a new fake tensor, which nothing has read yet."""
    with below_autograd(), no_recording():
        torch.ops.aten.as_strided_.default(fake, fake.shape, strides)


def set_memory(fake: torch.Tensor, other: torch.Tensor) -> None:
    """Sets storage and offset of a new fake tensor, which nothing has read yet, to another's."""
    place = (other.untyped_storage(), other.storage_offset(), fake.shape, fake.stride())
    with below_autograd(), no_recording():
        torch.ops.aten.set_.source_Storage_storage_offset(fake, *place)


def fake_elsewhere(fake: torch.Tensor, device: torch.device, storages: dict[int, torch.Tensor]) -> torch.Tensor:
    """Returns a fake tensor like another, on a device; called in the fake mode and without gradients.

    Args:
        fake: the other.
        device: where the new one is.
        storages: by the storage of the other, a tensor on the device that owns the new one's; extended.
    """
    key = storage_id(fake)
    if key not in storages:
        storages[key] = torch.empty(fake.untyped_storage().nbytes(), dtype=torch.uint8, device=device)
    made = torch.empty(0, dtype=fake.dtype, device=device)
    place = (storages[key].untyped_storage(), fake.storage_offset(), fake.shape, fake.stride())
    torch.ops.aten.set_.source_Storage_storage_offset(made, *place)
    made = torch._conj(made) if fake.is_conj() else made
    return torch._neg_view(made) if fake.is_neg() else made


NOT_FOR_NUMPY = ".numpy() is not supported for tensor subclasses."
"""What the error says that NumPy gets when it reads a fake tensor."""


def data_dependent_errors() -> tuple[type[BaseException], ...]:
    """Returns the errors raised if the program reads a value that only exists when the graph runs."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


def unsupported_fake_errors() -> tuple[type[BaseException], ...]:
    """Returns the errors raised if an operation has no fake implementation."""
    from torch._subclasses.fake_tensor import UnsupportedOperatorException

    return (UnsupportedOperatorException,)


def needs_plain_sizes(error: BaseException) -> bool:
    """Returns True for the error of C++ code that reads the sizes of a tensor whose sizes are symbolic."""
    return isinstance(error, RuntimeError) and "on tensor with symbolic sizes/strides" in str(error)


def has_no_meta_kernel(error: BaseException) -> bool:
    """Returns True for the error of C++ code that cannot compute the shape of a result."""
    return isinstance(error, NotImplementedError) and re.search(r"\b[Mm]eta\b", str(error)) is not None


_MISSING = ("its data is not allocated yet", "Cannot access data pointer", "Cannot copy out of meta tensor")


def reads_missing_memory(error: BaseException) -> bool:
    """Returns True for the error of C++ code that reads the memory of a fake tensor."""
    return isinstance(error, (RuntimeError, NotImplementedError)) and any(text in str(error) for text in _MISSING)


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Context that keeps torch from printing a traceback for every error of a fake tensor: eager prints the step's."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextmanager
def uncached(fake_mode: FakeTensorMode) -> Iterator[None]:
    """Context whose fake results are computed, not taken from the cache that all fake modes share."""
    before, fake_mode.cache_enabled = fake_mode.cache_enabled, False
    try:
        yield
    finally:
        fake_mode.cache_enabled = before


@contextmanager
def without_recording(fake_mode: FakeTensorMode) -> Iterator[None]:
    """Context whose operations run on fake tensors without effect on graph or guards."""
    from torch.utils._python_dispatch import _disable_current_modes

    env = fake_mode.shape_env
    with _disable_current_modes(), fake_mode, torch.no_grad(), training_kernels():
        with env.suppress_guards() if env is not None else nullcontext(), torch.autocast("cpu", enabled=False):
            yield


def fake_constant(fake_mode: FakeTensorMode, constant: Any) -> Any:
    """Returns the fake of a constant tensor of a graph; anything else unchanged."""
    return fake_mode.from_tensor(constant, static_shapes=True) if isinstance(constant, torch.Tensor) else constant


def mode_of(tensor: torch.Tensor) -> Any:
    """Returns the fake mode of a fake tensor."""
    return getattr(tensor, "fake_mode", None)


@contextmanager
def outside_tracing() -> Iterator[None]:
    """Context whose operations run on real tensors, outside any recording; no function mode is asked."""
    from torch.utils._python_dispatch import _disable_current_modes

    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def fake_transposed(fake: torch.Tensor) -> torch.Tensor:
    """Returns the transpose of a fake matrix."""
    with disable_proxy_modes_tracing(), torch.no_grad():
        return fake.t()


@contextmanager
def real_world() -> Iterator[None]:
    """Context whose tensor operations run on real tensors and are not recorded, also during a capture."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with disable_proxy_modes_tracing(), unset_fake_temporarily():
        yield
