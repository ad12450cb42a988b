"""Order of kernels, and which of them Inductor fuses to one loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sidefx_train.torch_compat.inductor.patching import replaced


@contextmanager
def kernels_in_order() -> Iterator[None]:
    """Runs kernels after those whose results they read, and random draws in the order of the graph.

    Upstream: an in-place write, such as ``bernoulli_``, renames its buffer, and later readers depend on the new name.
    ``SchedulerNode.recompute_size_and_body`` forgets the renaming when it fuses the reader's loops with others: dropout
    reads a mask that was not drawn yet. Seen in torch 2.11 to 2.13. Before code is generated, the order of kernels is
    compared with the dependencies that they had before fusion.

    Upstream: random draws without a use are dropped, though each advances the generator. Seen in torch 2.13.
    """
    from torch._inductor import scheduler
    from torch._inductor.virtualized import V

    def draws(node: Any) -> bool:
        tags = getattr(getattr(node.node, "op_overload", None), "tags", ())
        return torch.Tag.nondeterministic_seeded in tags

    def random_draws_in_order(before: Callable[..., Any]) -> Callable[..., Any]:
        def compute(plan: Any) -> None:
            for earlier, later in itertools.pairwise(filter(draws, plan.nodes)):
                V.graph.additional_buffer_deps[later.get_name()].add(earlier.get_outputs()[0].get_name())
            before(plan)

        return compute

    def or_draws(before: Callable[..., Any]) -> Callable[..., Any]:
        return lambda node: before(node) or draws(node)

    def renaming(before: Callable[..., Any]) -> Callable[..., Any]:
        def compute(node: Any, *args: Any, **kwargs: Any) -> None:
            before(node, *args, **kwargs)
            renames = getattr(node, "mutation_renames", None)  # none yet where the node is made
            if renames:
                node.set_read_writes(node.read_writes.rename(renames))

        return compute

    def remembering(before: Callable[..., Any]) -> Callable[..., Any]:
        def compute(plan: Any) -> None:
            before(plan)
            plan.sidefx_after = {
                node.get_name(): {plan.name_to_buf[dep.name].defining_op_name() for dep in node.unmet_dependencies}
                for node in plan.nodes
            }

        return compute

    def in_order(before: Callable[..., Any]) -> Callable[..., Any]:
        def codegen(plan: Any) -> Any:
            after: dict[str, set[str]] = getattr(plan, "sidefx_after", {})
            place = {part.get_name(): i for i, node in enumerate(plan.nodes) for part in node.get_nodes()}
            for name, earlier in after.items():
                late = [each for each in earlier if place.get(each, -1) > place.get(name, len(place))]
                if late:
                    raise RuntimeError(f"Inductor puts {name} before {', '.join(late)}, whose result it reads")
            return before(plan)

        return codegen

    with (
        replaced(scheduler.SchedulerNode, "_compute_attrs", renaming),
        replaced(scheduler.Scheduler, "compute_dependencies", random_draws_in_order),
        replaced(scheduler.ExternKernelSchedulerNode, "has_side_effects", or_draws),
        replaced(scheduler.Scheduler, "compute_ancestors", remembering),
        replaced(scheduler.Scheduler, "codegen", in_order),
    ):
        yield


@contextmanager
def mutations_fused_by_index() -> Iterator[None]:
    """Fuses a write over a buffer with a read of it only if both are at the same index.

    Upstream: ``Scheduler.fusable_weak_dep`` compares the indices of reads under the buffer's first name. After an
    in-place write the reads are under a later name and are not compared: ``bank[i] = h; bank.copy_(bank.roll(1, 0))``
    reads rows that it has just written. Seen with ``torch.compile`` in torch 2.11 to 2.13.
    """
    from torch._inductor import scheduler

    def of_all_names(before: Callable[..., Any]) -> Callable[..., Any]:
        def fusable(plan: Any, weak_dep: Any, node1: Any, node2: Any) -> bool:
            if not before(plan, weak_dep, node1, node2):
                return False
            real = plan.mutation_real_name
            memory = real[weak_dep.mutating_buf]
            (write,) = [write for write in node2.read_writes.writes if write.name == weak_dep.mutating_buf]
            reads = [read for part in node1.get_nodes() for read in part.read_writes.reads]
            return all(
                isinstance(read, scheduler.MemoryDep) and read.index == write.index and read.size == write.size
                for read in reads
                if not isinstance(read, scheduler.WeakDep) and real.get(read.name, read.name) == memory
            )

        return fusable

    with replaced(scheduler.Scheduler, "fusable_weak_dep", of_all_names):
        yield


@contextmanager
def local_buffers_hold_one_row() -> Iterator[None]:
    """Keeps values in buffers local to a loop only where one iteration of that loop computes one row.

    Upstream: kernels of equal outer loops become one loop, and what one computes for another in a row is kept in a
    local buffer of one row. Where the outer loop is tiled, an iteration computes as many rows as a vector has elements,
    and all overwrite the same buffer: the last row is read for each. Seen in torch 2.11 to 2.13.
    """
    from torch._inductor.codegen.cpp import OuterLoopFusedSchedulerNode
    from torch._inductor.virtualized import V

    def keeping_rows(before: Callable[..., Any]) -> Callable[..., Any]:
        def check(node: Any, kernels: Sequence[Any], depth: int) -> bool:
            local = getattr(V.local_buffer_context, "local_buffers", None)
            tiled = any(loop.steps != 1 for kernel in kernels for loop in kernel.loop_nest.loops[:depth])
            return not (local and tiled) and bool(before(node, kernels, depth))

        return check

    with replaced(OuterLoopFusedSchedulerNode, "check_outer_fusion_loop_level_attr", keeping_rows):
        yield
