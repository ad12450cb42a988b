"""Checks of Inductor's schedules: nothing is read before it is written, or after it is overwritten.

They are always on. A graph that fails one is not compiled that way: the report says so (SFX201), and the step runs
eagerly. None of them fails if Inductor is correct; the first two also verify the corrections in ``correctness.py`` and
the changes in ``speedups.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sidefx_train.torch_compat.inductor.patching import replaced


class WrongSchedule(RuntimeError):
    """Kernels would read memory before it is written, or after it is overwritten."""


@contextmanager
def checked_codegen() -> Iterator[None]:
    """Context around lowering in which every schedule, and every C++ loop nest, is checked before it is used.

    Raises:
        WrongSchedule: from inside, if a kernel would read a missing value.
    """
    from torch._inductor import scheduler
    from torch._inductor.codegen import cpp

    def scheduled(before: Callable[..., Any]) -> Callable[..., Any]:
        def codegen(plan: Any) -> Any:
            check_schedule(plan)
            return before(plan)

        return codegen

    def aggregated(before: Callable[..., Any]) -> Callable[..., Any]:
        def aggregate(proxy: Any, by_range: bool, outer_loop: Any) -> None:
            stored = [_stored_behind(kernel) for kernel in proxy.kernels]
            before(proxy, by_range, outer_loop)
            if by_range and outer_loop is not None:
                _check_stores(outer_loop, stored[0], stored[-1])

        return aggregate

    with (
        replaced(scheduler.Scheduler, "codegen", scheduled),
        replaced(getattr(cpp, "CppKernelProxy", None), "aggregate_reduction_buffers", aggregated),
    ):
        yield


def check_schedule(plan: Any) -> None:
    """Compares the reads of all kernels, in execution order, with the writes to the same memory.

    A buffer that is written in place has one name per state: a kernel that reads a state must find the memory in that
    state. Fused kernels run as one loop: there a state may be overwritten only at the index at which it is read.

    Args:
        plan: Inductor's scheduler with its final nodes.

    Raises:
        WrongSchedule: a state is read before it exists, or after it was overwritten.
    """
    memory = plan.mutation_real_name
    state: dict[str, str] = {}  # memory -> name of its contents
    written: set[str] = set()
    for kernel in plan.nodes:
        parts = kernel.get_nodes()
        overwritten: dict[str, list[Any]] = {}  # state -> the writes over it in this kernel
        for part in parts:
            name = part.get_name()
            for read in part.read_writes.reads:
                if _is_order(read):
                    continue
                real = memory.get(read.name, read.name)
                if read.name in plan.name_to_buf and read.name not in written:
                    raise WrongSchedule(f"Inductor has {name} read {read.name} before it is written")
                if state.get(real, real) != read.name:
                    _check_index(name, read, overwritten.get(read.name))
            for write in part.read_writes.writes:
                written.add(write.name)
                real = memory.get(write.name, write.name)
                if real == write.name:
                    continue
                before = state.get(real, real)
                _check_earlier(name, write, before, parts[: parts.index(part) + 1], len(parts))
                overwritten.setdefault(before, []).append(write)
                state[real] = write.name
            written.update(buffer.get_name() for buffer in part.get_outputs())
            for buffer in part.get_outputs():
                real = memory.get(buffer.get_name(), buffer.get_name())
                if real != buffer.get_name():
                    state[real] = buffer.get_name()


def _is_order(dep: Any) -> bool:
    """Returns True for a dependency that orders kernels and reads nothing."""
    return type(dep).__name__ == "WeakDep" or getattr(dep, "is_fake", False)


def _check_index(name: str, read: Any, writes: list[Any] | None) -> None:
    """Checks that an overwritten state is read only in the loop that overwrites it, at the same index."""
    if writes is None or not all(_same_index(read, write) for write in writes):
        raise WrongSchedule(f"Inductor has {name} read {read.name} after it is written over")


def _check_earlier(name: str, write: Any, state: str, parts: list[Any], fused: int) -> None:
    """Checks that parts of a loop read a state at an index before that is written."""
    if fused == 1 and type(write).__name__ != "MemoryDep":
        return  # a single operator handles this itself
    for part in parts:
        for read in part.read_writes.reads:
            if _is_order(read) or read.name != state or _covers_buffer(read, part):
                continue
            if not _same_index(read, write):
                raise WrongSchedule(f"Inductor has {name} write {write.name} at other places than {state} is read at")


def _covers_buffer(read: Any, part: Any) -> bool:
    """Returns True for the dependency of a write on the state before it, which is not a read."""
    mutated = {name for buffer in part.get_outputs() for name in buffer.get_mutations()}
    return type(read).__name__ == "StarDep" and bool(mutated)


def _same_index(read: Any, write: Any) -> bool:
    if type(read).__name__ != "MemoryDep" or type(write).__name__ != "MemoryDep":
        return False
    if read.is_indirect() or write.is_indirect():
        return bool(read.index == write.index)
    if (read.index, read.size) == (write.index, write.size):
        return True
    read, write = read.normalize(), write.normalize()
    return bool((read.index, read.size) == (write.index, write.size))


def _stored_behind(kernel: Any) -> set[str]:
    """Returns the names of the buffers that a C++ kernel stores after its loops."""
    lines = getattr(kernel.reduction_suffix, "_lines", ())
    return {line.name for line in lines if type(line).__name__ == "DeferredLine"}


def _check_stores(outer_loop: Any, main: set[str], rest: set[str]) -> None:
    """Checks that the vector loop and the remainder loop of a size store the same results, if there is a remainder."""
    left = outer_loop.size - outer_loop.tiled_size
    if left != 0 and main - rest:
        raise WrongSchedule(f"Inductor leaves the end of {', '.join(sorted(main - rest))} unwritten")
    if outer_loop.tiled_size != 0 and rest - main:
        raise WrongSchedule(f"Inductor leaves the beginning of {', '.join(sorted(rest - main))} unwritten")
