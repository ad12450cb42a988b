"""One recording of a device section, with the memory it reads and writes."""

from __future__ import annotations

import functools
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.gpu.multi_tensor import tables_of_recording
from sidefx_train.compile.gpu.prefetch import Prefetcher, StagingDevice
from sidefx_train.compile.gpu.section import Section
from sidefx_train.compile.graph.strided_layout import is_dense
from sidefx_train.compile.native import guards_module


class Launcher(Protocol):
    """What a recorded section is launched with."""

    def replay(self) -> None:
        """Launches the recorded work again."""


class Device(StagingDevice, Protocol):
    """Records work of a device.

    Attributes:
        epoch: recordings of an earlier epoch draw from another random state than the program.
    """

    epoch: int

    def new_pool(self) -> Any:
        """Returns a memory pool for recordings, each of which may overwrite the results of the others."""

    def record(self, run: Callable[[], Sequence[Any]], pool: Any) -> tuple[Launcher, Sequence[Any]]:
        """Records what ``run`` launches, without executing it; ``None`` is a pool for all recordings of the device.

        Returns:
            The launcher, and the results of ``run``, which every replay writes again.

        Raises:
            RuntimeError: something in it cannot be recorded; the device stays usable.
        """

    def reserved(self) -> int:
        """Returns how many bytes are reserved for tensors, and for those of recordings."""


class CannotRecord(Exception):
    """A section that ran, or could run, but cannot be recorded."""


class Recording:
    """A recorded section.

    Args:
        run: the section, called with a list of its arguments.
        section: its arguments and results.
        args: the arguments of a call; the buffers get their values.
        device: what records.
        gradients: results that the program gets only as the gradient of an argument: result -> argument.
        pool: the memory pool.

    Attributes:
        memory: bytes of its results.

    Raises:
        CannotRecord: its results share memory with its arguments.
        Exception: whatever an operation that cannot be recorded raises.
    """

    def __init__(
        self,
        run: Callable[[list[Any]], Sequence[Any]],
        section: Section,
        args: list[Any],
        device: Device,
        gradients: dict[int, int],
        pool: Any,
    ) -> None:
        self._fixed = _Addresses(args, [i for i, role in enumerate(section.roles) if role in ("static", "written")])
        self._device, self._epoch = device, device.epoch
        self._waits = section.waits
        self._copied = [i for i, role in enumerate(section.roles) if role == "input"]
        self._buffers = [device.buffer_like(args[i]) for i in self._copied]
        given = list(args)
        for i, buffer in zip(self._copied, self._buffers, strict=True):
            given[i] = buffer.copy_(args[i])
        fixed = [args[i] for i in self._fixed.positions]
        before = [tensor._version for tensor in fixed]
        try:
            with tables_of_recording() as self._tables:
                self._launcher, self._results = device.record(lambda: run(list(given)), pool)
        finally:  # nothing was executed
            for tensor, version in zip(fixed, before, strict=True):
                if tensor._version != version:
                    compat.set_version(tensor, version)
        copied = [position for position in section.escaping if position not in gradients]
        self._copiers = _copiers(self._results, section.escaping, copied, [*self._buffers, *fixed])
        self._handed_out = HandedOut([self._results[i] for i in gradients], tuple(gradients.values()))
        self.memory = sum(each.nbytes for each in self._results if isinstance(each, torch.Tensor))

    def fits(self, args: list[Any]) -> bool:
        """Returns True if every tensor that is not copied is where it was, and the random state too."""
        return self._epoch == self._device.epoch and self._fixed.hold(args)

    def may_write(self, args: list[Any]) -> bool:
        """Returns True if nothing but gradients, which the step replaces, refers to results that were handed out."""
        return self._handed_out.unshared(args)

    def replay(self, args: list[Any], prefetcher: Prefetcher | None = None) -> Sequence[Any]:
        """Runs the section for a call with the same layouts and numbers; results that escape are copies."""
        if prefetcher is None:
            for i, buffer in zip(self._copied, self._buffers, strict=True):
                buffer.copy_(args[i], non_blocking=i not in self._waits)
        else:
            self._take(args, prefetcher)
        self._launcher.replay()
        results = list(self._results)
        for position, copier in self._copiers:
            results[position] = copier()
        return results

    def _take(self, args: list[Any], prefetcher: Prefetcher) -> None:
        """Copies the inputs, those that were prefetched on the device."""
        waits = [place for place, i in enumerate(self._copied) if i in self._waits]
        with prefetcher.staged([args[i] for i in self._copied], waits) as copies:
            for i, buffer, staged in zip(self._copied, self._buffers, copies, strict=True):
                if staged is None:
                    buffer.copy_(args[i], non_blocking=i not in self._waits)
                else:
                    self._device.copy_staged(buffer, staged)


class _Addresses:
    """Addresses of tensors among the arguments."""

    def __init__(self, args: list[Any], positions: Sequence[int]) -> None:
        self.positions = tuple(positions)
        self._addresses = _packed([args[i] for i in positions])
        native = _native()
        self._are_at = _are_at if native is None else native.are_at

    def hold(self, args: list[Any]) -> bool:
        return self._are_at(args, self.positions, self._addresses)  # type: ignore[no-any-return]


def _packed(tensors: Sequence[torch.Tensor]) -> bytes:
    return struct.pack(f"={len(tensors)}Q", *[tensor.data_ptr() for tensor in tensors])


def _are_at(args: list[Any], positions: tuple[int, ...], addresses: bytes) -> bool:
    return _packed([args[i] for i in positions]) == addresses


class HandedOut:
    """Results in a recording's memory that the program has, each as the gradient of an argument.

    Args:
        results: the results; nothing but the recording refers to them yet.
        holders: positions of the arguments.
    """

    def __init__(self, results: list[torch.Tensor], holders: tuple[int, ...]) -> None:
        self._results, self._holders = results, holders
        self._native = _native()
        storages = [result.untyped_storage() for result in results]  # from now on it makes no difference who asks
        uses = self._native.uses_of(results, storages) if results else b""
        self._known = storages, _packed(results), uses

    def unshared(self, args: list[Any]) -> bool:
        """Returns True if nothing but the gradients of the arguments refers to the results."""
        if not self._results:
            return True
        check = self._native.are_unshared
        return check(self._results, *self._known, args, self._holders, _added_by_gradient())  # type: ignore[no-any-return]


def can_be_handed_out() -> bool:
    """Returns True if this machine can tell who uses a tensor."""
    return _native() is not None


def _native() -> Any:
    """Returns the module that reads tensors' addresses and references; ``None`` if this machine cannot build it."""
    module = guards_module()
    return module if module is not None and module.tensors_readable() else None


@functools.cache
def _added_by_gradient() -> int:
    """Returns what becoming a gradient adds to Python's count of references to a tensor: releases of torch differ."""
    tensor, holder = torch.zeros(1), torch.zeros(1, requires_grad=True)
    before = sys.getrefcount(tensor)
    holder.grad = tensor
    return sys.getrefcount(tensor) - before


def storage_begin(tensor: torch.Tensor) -> int:
    """Returns the address of a tensor's storage, without making a Python object for it, which would count as a use."""
    return tensor.data_ptr() - tensor.storage_offset() * tensor.itemsize


def _copiers(
    results: Sequence[Any], escaping: Sequence[int], copied: Sequence[int], arguments: list[torch.Tensor]
) -> list[tuple[int, Callable[[], torch.Tensor]]]:
    """Returns what copies each escaping result out of the recording's memory."""
    owned = {storage_begin(tensor) for tensor in arguments if tensor.numel()}
    seen: set[int] = set()
    copiers = []
    for position in escaping:
        result = results[position]
        if not isinstance(result, torch.Tensor) or not result.numel():
            continue
        memory = storage_begin(result)
        if memory in owned or memory in seen:
            raise CannotRecord("a result shares memory with an input or with another result")
        seen.add(memory)
        if not is_dense(result):
            raise CannotRecord("a result is not dense in memory")
        if position in copied:
            copiers.append((position, result.clone))
    return copiers
