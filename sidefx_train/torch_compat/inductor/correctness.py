"""Results of Inductor that are wrong, mended. Each change has a name in ``sidefx_train/switches.py``."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import sympy
import torch
from torch import fx

from sidefx_train.switches import enabled
from sidefx_train.torch_compat.inductor.patching import replaced


@contextmanager
def recursion_limit_kept() -> Iterator[None]:
    """Inductor raises the interpreter's limit and leaves it so; it is the program's."""
    limit = sys.getrecursionlimit()
    try:
        yield
    finally:
        if sys.getrecursionlimit() != limit:
            sys.setrecursionlimit(limit)


@contextmanager
def results_laid_out_as_traced() -> Iterator[None]:
    """A graph's results have the strides that they were traced with.

    Inductor computes an operand of ``cat`` where it will lie in the whole, and a view of it that is a result has the
    whole's strides. What is lowered apart and takes it, a backward or a further part, expects the traced ones.
    """
    from torch._inductor import graph, ir
    from torch._inductor.virtualized import V

    def exact(before: Callable[..., Any]) -> Callable[..., Any]:
        def match(value: Any, strides: Any) -> Any:
            value = before(value, strides)
            known = V.graph.sizevars.statically_known_equals
            for size, wanted, given in zip(value.get_size(), strides, value.get_stride(), strict=True):
                if not (known(wanted, given) or known(size, 1) or known(size, 0)):
                    return ir.ExternKernel.require_exact_strides(value, strides)
            return value

        return match

    def exactly(before: Callable[..., Any]) -> Callable[..., Any]:
        def output(lowering: Any, *args: Any, **kwargs: Any) -> Any:
            with replaced(ir, "try_match_insignificant_strides", exact):
                return before(lowering, *args, **kwargs)

        return output

    with replaced(graph.GraphLowering, "output", exactly):
        yield


@contextmanager
def casts_round() -> Iterator[None]:
    """A cast to float16 or bfloat16 rounds, as in ``x.half().float()``; only operations between narrow values do not.

    Inductor computes with the wide value where it has it at hand, also where the program asked for the rounded one: a
    fake quantization, ``x + (x.half().float() - x).detach()``, did nothing.
    """
    from torch._inductor import lowering
    from torch._inductor.codegen import cpp
    from torch._inductor.virtualized import ops

    narrow = (torch.float16, torch.bfloat16)

    def rounding(before: Callable[..., Any]) -> Callable[..., Any]:
        def to_dtype(value: Any, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
            wide = value.get_dtype()
            if dtype not in narrow or wide not in (torch.float32, torch.float64):
                return before(value, dtype, *args, **kwargs)

            def rounded(x: Any) -> Any:
                return ops.to_dtype(ops.to_dtype(x, dtype, src_dtype=wide, use_compute_types=False), dtype)

            return lowering.make_pointwise(rounded, override_return_dtype=dtype)(value)

        return to_dtype

    def not_known(before: Callable[..., Any]) -> Callable[..., Any]:
        return lambda kernel, wide, wide_type, rounded, narrow_type: None  # that what was rounded once was this wide

    with replaced(lowering, "to_dtype", rounding), replaced(cpp.CppKernel, "cache_dtype_convert", not_known):
        yield


@contextmanager
def nothing_written_while_read() -> Iterator[None]:
    """Inductor writes into an operand that nobody needs afterwards, unless another operand is a view of it, or itself.

    ``v.index_put(indices, v[:3], accumulate=True)`` read, in ``torch.compile`` too (torch 2.11 to 2.13), what it had
    just written. Nor is an operand of a concatenation overwritten: Inductor computes it where it will lie in the whole,
    so that ``c = cat([v, y]); w = v.clone(); w[i] = 1`` wrote to ``c`` (``torch.compile`` too, torch 2.13).
    """
    from torch._inductor.fx_passes import reinplace
    from torch._inductor.fx_utils import get_node_storage

    def is_read(node: fx.Node, positions: Sequence[int]) -> bool:
        def storages(arguments: Any) -> set[Any]:
            found: set[Any] = set()
            fx.map_arg(arguments, lambda operand: found.add(get_node_storage(operand)))
            return found - {None}

        written = [node.args[i] for i in positions]
        others = [argument for i, argument in enumerate(node.args) if i not in positions]
        if not storages(written).isdisjoint(storages((others, node.kwargs))):
            return True
        wholes = node.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
        return any(not storages(written).isdisjoint(storages(whole.args[0])) for whole in wholes)

    def unless_read(before: dict[Any, Any]) -> dict[Any, Any]:
        def checked(how: Any) -> Any:
            at = (how.mutated_arg,) if isinstance(how.mutated_arg, int) else tuple(how.mutated_arg)
            allowed = how.extra_check
            return dataclasses.replace(how, extra_check=lambda node: not is_read(node, at) and allowed(node))

        return {target: checked(how) for target, how in before.items()}

    with replaced(reinplace, "inplaceable_ops", unless_read):
        yield


@contextmanager
def kernels_in_order() -> Iterator[None]:
    """Kernels run after those whose results they take, whatever Inductor does to their loops.

    What writes into a buffer in place, as ``bernoulli_`` does, gives it a name by which its later readers depend on it.
    Where Inductor takes up the loops of such a reader anew, to join them with others, it forgets that name (torch 2.11
    to 2.13, ``SchedulerNode.recompute_size_and_body``): dropout read a mask that was not drawn yet. The order in which
    kernels are written is compared with the dependencies that there were before loops were joined.

    Kernels that draw random numbers run in the order of the graph, and also where nothing uses them: each moves the
    generator.
    """
    from torch._inductor import scheduler
    from torch._inductor.virtualized import V

    def draws(node: Any) -> bool:
        tags = getattr(getattr(node.node, "op_overload", None), "tags", ())
        return torch.Tag.nondeterministic_seeded in tags

    def drawing_in_turn(before: Callable[..., Any]) -> Callable[..., Any]:
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
                    raise RuntimeError(f"Inductor puts {name} before {', '.join(late)}, whose result it takes")
            return before(plan)

        return codegen

    with (
        replaced(scheduler.SchedulerNode, "_compute_attrs", renaming),
        replaced(scheduler.Scheduler, "compute_dependencies", drawing_in_turn),
        replaced(scheduler.ExternKernelSchedulerNode, "has_side_effects", or_draws),
        replaced(scheduler.Scheduler, "compute_ancestors", remembering),
        replaced(scheduler.Scheduler, "codegen", in_order),
    ):
        yield


@contextmanager
def mutations_fused_by_index() -> Iterator[None]:
    """What overwrites a buffer is fused with what reads it only where both are at the same index.

    Inductor compares the indices of reads that go by the buffer's first name. Once it has been written in place, its
    readers go by a later one: all their reads were overlooked (``torch.compile`` too, torch 2.11 to 2.13), and
    ``bank[i] = h; bank.copy_(bank.roll(1, 0))`` read rows that it had just written.
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
def extern_results_as_planned() -> Iterator[None]:
    """Results of called operators have the strides that Inductor planned with, those of dimensions of size 1 included.

    These mean nothing for where an element is, but operators choose the memory format of their results by them: a
    convolution after one with a single output channel gave another than Inductor had planned with, and was read as the
    planned one (``torch.compile`` compares the strides, and raises; torch 2.13).
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    def planned(before: Callable[..., Any]) -> Callable[..., Any]:
        def codegen(kernel: Any, wrapper: Any) -> None:
            before(kernel, wrapper)
            sizes, strides = list(kernel.get_size()), list(kernel.get_stride())
            static = all(isinstance(number, (int, sympy.Integer)) for number in (*sizes, *strides))
            if not static or len(sizes) < 3 or 1 not in sizes or 0 in sizes or kernel.should_allocate():
                return
            name, size, stride = kernel.get_name(), *map(wrapper.codegen_shape_tuple, (sizes, strides))
            if not V.graph.cpp_wrapper:
                wrapper.writeline(f"{name} = reinterpret_tensor({name}, {size}, {stride}, 0)")
                return
            graph = wrapper.get_codegened_graph()
            arrays = [
                wrapper.codegen_int_array_var(text, wrapper.writeline, known_statically=True, graph=graph)
                for text in (size, stride)
            ]
            seen = f"reinterpret_tensor_wrapper({name}, {len(sizes)}, {', '.join(arrays)}, 0L)"
            wrapper.writeline(f"{name} = wrap_with_raii_handle_if_needed({seen});")

        return codegen

    with replaced(ir.ExternKernel, "codegen_size_asserts", planned):
        yield


_MENDED: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "kernel_order": kernels_in_order,
    "mutations_by_index": mutations_fused_by_index,
    "no_write_while_read": nothing_written_while_read,
    "extern_strides": extern_results_as_planned,
    "result_strides": results_laid_out_as_traced,
    "rounding_casts": casts_round,
}


@contextmanager
def right_results() -> Iterator[None]:
    """Around lowering: all that is mended in Inductor and not switched off."""
    with ExitStack() as stack:
        for name, mended in _MENDED.items():
            if enabled(name):
                stack.enter_context(mended())
        yield
