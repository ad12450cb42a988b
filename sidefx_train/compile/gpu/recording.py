"""One recording of a device section, with the memory it reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.gpu.section import Section
from sidefx_train.compile.graph.strided_layout import is_dense


class Launcher(Protocol):
    """What a recorded section is launched with."""

    def replay(self) -> None:
        """Launches the recorded work again."""


class Device(Protocol):
    """Records work of a device."""

    def record(self, run: Callable[[], Sequence[Any]]) -> tuple[Launcher, Sequence[Any]]:
        """Records what ``run`` launches, without executing it.

        Returns:
            The launcher, and the results of ``run``, which every replay writes again.

        Raises:
            RuntimeError: something in it cannot be recorded; the device stays usable.
        """

    def buffer_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns memory of the device with a tensor's layout."""


class CannotRecord(Exception):
    """A section that ran, or could run, but cannot be recorded."""


class Recording:
    """A recorded section.

    Args:
        run: the section, called with a list of its arguments.
        section: its arguments and results.
        args: the arguments of a call; the buffers get their values.
        device: what records.

    Raises:
        CannotRecord: its results share memory with its arguments.
        Exception: whatever an operation that cannot be recorded raises.
    """

    def __init__(self, run: Callable[[list[Any]], Sequence[Any]], section: Section, args: list[Any], device: Device):
        self._fixed = [(i, args[i]) for i, role in enumerate(section.roles) if role in ("static", "written")]
        self._addresses = [tensor.data_ptr() for _, tensor in self._fixed]
        self._fixed_positions = [i for i, _ in self._fixed]
        self._copied = [i for i, role in enumerate(section.roles) if role == "input"]
        self._buffers = [device.buffer_like(args[i]) for i in self._copied]
        given = list(args)
        for i, buffer in zip(self._copied, self._buffers, strict=True):
            given[i] = buffer.copy_(args[i])
        tensors = [tensor for _, tensor in self._fixed]
        before = [tensor._version for tensor in tensors]
        writes: list[int] = []
        try:
            self._launcher, self._results = device.record(lambda: run(list(given)))
        finally:  # nothing was executed
            for (i, tensor), version in zip(self._fixed, before, strict=True):
                writes += [i] * (tensor._version - version)
                if tensor._version != version:
                    compat.set_version(tensor, version)
        self._writes = writes
        self._escaping = section.escaping
        self._copiers = _copiers(self._results, self._escaping, [*self._buffers, *tensors])
        self.memory = sum(result.untyped_storage().nbytes() for result in _tensors(self._results))
        self._fixed = []  # the addresses are enough: what the program drops must not live here

    def fits(self, args: list[Any]) -> bool:
        """Returns True if every tensor that is not copied is where it was."""
        return [args[i].data_ptr() for i in self._fixed_positions] == self._addresses

    def replay(self, args: list[Any]) -> Sequence[Any]:
        """Runs the section for a call with the same layouts and numbers; results that escape are copies."""
        if self._copied:
            torch._foreach_copy_(self._buffers, [args[i] for i in self._copied], non_blocking=True)
        self._launcher.replay()
        if self._writes:
            compat.increment_version([args[i] for i in self._writes])
        results = list(self._results)
        for position, copier in self._copiers:
            results[position] = copier()
        return results


def _tensors(results: Sequence[Any]) -> list[torch.Tensor]:
    return [result for result in results if isinstance(result, torch.Tensor)]


def _copiers(
    results: Sequence[Any], escaping: Sequence[int], arguments: list[torch.Tensor]
) -> list[tuple[int, Callable[[], torch.Tensor]]]:
    """Returns what copies each escaping result out of the recording's memory."""
    owned = {tensor.untyped_storage().data_ptr() for tensor in arguments if tensor.untyped_storage().nbytes()}
    seen: set[int] = set()
    copiers = []
    for position in escaping:
        result = results[position]
        if not isinstance(result, torch.Tensor) or not result.numel():
            continue
        memory = result.untyped_storage().data_ptr()
        if memory in owned or memory in seen:
            raise CannotRecord("a result shares memory with an input or with another result")
        seen.add(memory)
        if not is_dense(result):
            raise CannotRecord("a result is not dense in memory")
        copiers.append((position, result.clone))
    return copiers
