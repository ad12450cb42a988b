"""Workarounds for bugs of Inductor that make results wrong.

Each has a name in ``sidefx_train/switches.py`` and a program in ``tests/unit/torch_compat/test_upstream_bugs.py`` that
fails once upstream is right. The docstrings say what comes out wrong upstream, and in which versions of torch that was
seen.

| switch | upstream | seen in torch |
|---|---|---|
| ``kernel_order`` | a buffer is read before an in-place write of it; unused draws are dropped | 2.11 to 2.13 |
| ``mutations_by_index`` | a buffer is overwritten in the loop that reads other places of it | 2.11 to 2.13 |
| ``no_write_while_read`` | an operand is overwritten while a view of it, or a concatenation, is read | 2.11 to 2.13 |
| ``extern_strides`` | a called operator's result has other strides than were planned | 2.13 |
| ``result_strides`` | a result that lies in a concatenation has the strides of the concatenation | 2.13 |
| ``rounding_casts`` | a cast to a narrow type and back does not round | 2.13 |
| ``results_own_storage`` | ``x * ones``, a copy of a written part, and from 2.14 ``x * 1``: no copies | 2.11 to 2.15 |
| ``copies_for_writes`` | an input gets the new value of another one, not the old one that was copied | 2.13 |
| ``rows_of_their_own`` | a buffer of one row is shared by the rows of a tile | 2.11 to 2.13 |
| ``masked_reads`` | on a GPU, padding has values of its neighbors | 2.13 |
| ``zero_products`` | ``x * 0`` is 0 where ``x`` is NaN or infinite | 2.13 |
| ``zero_sums`` | ``x + zeros`` (from 2.14 on ``x + 0``) is -0.0 where ``x`` is | 2.13 to 2.15 |
| ``small_arguments`` | ``atanh`` (in 2.13 ``expm1``) of vectors loses the digits of small numbers | 2.13 to 2.15 |
| ``index_arrays`` | loads use an array that a store behind them creates: C++ that cannot be compiled | 2.13 |
| (always on) | two draws with equal arguments, such as ``torch.normal``, are one; so are 0.0 and -0.0 | 2.13 |

Arguments that its patterns ignore are written out by ``compile/backend/passes/inductor_workarounds.py``.
What CSE merges is in ``common_subexpressions.py``, arithmetic with zero in ``zero_arithmetic.py``;
what Inductor changes in the process is put back in ``compile.py``.
"""

from __future__ import annotations

import dataclasses
import itertools
import types
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import sympy
import torch
from torch import fx

from sidefx_train.switches import enabled
from sidefx_train.torch_compat.inductor.patching import hidden, replaced, setting
from sidefx_train.torch_compat.inductor.zero_arithmetic import zero_products_computed, zero_sums_computed
from sidefx_train.torch_compat.op_overloads import holder_of

_IN_FORMAT_OF_ARGUMENT = frozenset(
    {torch.ops.aten.replication_pad2d_backward.default, torch.ops.aten.replication_pad3d_backward.default}
)
"""Operators whose results have the memory format of an argument, unlike those of their fake implementations."""


@contextmanager
def results_laid_out_as_traced() -> Iterator[None]:
    """Gives a graph's results the strides that they were traced with.

    Upstream: an operand of ``cat`` is computed in the memory of the concatenation, and a view of it that is a result
    has the concatenation's strides. A graph that is lowered separately and takes this result, such as the backward,
    expects the traced strides and reads other elements. Seen in torch 2.13.
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
    """Makes casts to float16 and bfloat16 round; operations between narrow values are computed in float32 as before.

    Upstream: the wide value is used instead of the rounded one where both are in one kernel, so that the fake
    quantization ``x + (x.half().float() - x).detach()`` does nothing. Seen in torch 2.13.
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
    """Keeps an operator from writing into an operand that is read at the same time.

    Upstream: an operator with an in-place form writes into its operand if that has no later use.

    - Another operand may be a view of it: ``v.index_put(indices, v[:3], accumulate=True)`` reads what it has just
      written. Seen with ``torch.compile`` in torch 2.11 to 2.13.
    - The operand may lie in the memory of a concatenation: ``c = cat([v, y]); w = v.clone(); w[i] = 1`` writes to
      ``c``. Seen with ``torch.compile`` in torch 2.13.
    - The operand may be a view of a copy that a pass has removed: ``w = v.clone().squeeze(); w.index_put(i, x)``, or a
      reduction of ``w`` between processes, writes to ``v``. Seen with ``torch.compile`` in torch 2.13.
    """
    from torch._inductor.fx_passes import reinplace
    from torch._inductor.fx_utils import get_node_storage

    def is_read(node: fx.Node, positions: Sequence[int]) -> bool:
        def storages(arguments: Any) -> set[Any]:
            found: set[Any] = set()
            fx.map_arg(arguments, lambda operand: found.add(get_node_storage(operand)))
            return found - {None}

        written = [node.args[i] for i in positions]
        if storages(written) != storages([_viewed(each) for each in written]):
            return True
        others = [argument for i, argument in enumerate(node.args) if i not in positions]
        if not storages(written).isdisjoint(storages((others, node.kwargs))):
            return True
        concatenations = node.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
        return any(not storages(written).isdisjoint(storages(whole.args[0])) for whole in concatenations)

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
def extern_results_as_planned() -> Iterator[None]:
    """Gives results of called operators the planned strides, those of dimensions of size 1 included.

    Upstream: the strides of such dimensions are not restored. They do not affect the position of an element, but
    operators choose the memory format of their results by them: a convolution after one with a single output channel
    returns another format than planned, and is read as the planned one. The derivative of a padding with the values at
    the border has the memory format of its argument, and is planned as contiguous. ``torch.compile`` compares the
    strides and raises. Seen in torch 2.13.
    """
    from torch._inductor import graph, ir, lowering
    from torch._inductor.virtualized import V

    def contiguous(before: Callable[..., Any]) -> Callable[..., Any]:
        return lambda op: lowering.require_contiguous if op in _IN_FORMAT_OF_ARGUMENT else before(op)

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

    with (
        replaced(ir.ExternKernel, "codegen_size_asserts", planned),
        replaced(graph, "maybe_layout_constraints", contiguous),
    ):
        yield


@contextmanager
def results_own_storage() -> Iterator[None]:
    """Keeps arithmetic without effect from making a result share storage with an input or another result.

    Upstream: ``x + 0``, ``x - 0``, ``x * 1`` and ``x / 1`` are replaced by ``x``, also where they are a result: whoever
    changes the result changes ``x``. Seen with ``torch.compile`` in torch 2.13 for tensors of zeros and ones that the
    graph creates, and in 2.14 and 2.15 for numbers too. A copy of a part of an input that the graph has written
    (``x[0].add_(1); return x[0].clone()``) is removed as well, and the result lies in the input's memory. Seen with
    ``torch.compile`` in torch 2.11 to 2.15.
    """
    from torch._inductor.fx_passes import joint_graph, post_grad

    def with_copies(before: Callable[..., Any]) -> Callable[..., Any]:
        def remove_no_ops(module: fx.GraphModule, *args: Any) -> None:
            copies = _copied_results(module.graph)
            values = {node: node.meta["val"] for node in module.graph.nodes if "val" in node.meta}
            before(module, *args)
            for node in module.graph.nodes:  # an operand gets the metadata of the sum that it replaces
                if node in values:
                    node.meta["val"] = values[node]
            for original, copied in copies.items():
                if copied.args[0] is original:  # it is still computed
                    copied.replace_all_uses_with(original)
                    module.graph.erase_node(copied)

        return remove_no_ops

    with (
        replaced(joint_graph, "remove_no_ops", with_copies),
        replaced(
            post_grad, "remove_noop_ops", _hiding(lambda graph: _copies_of_written(graph, post_grad.noop_registry))
        ),
    ):
        yield


@contextmanager
def copies_for_writes() -> Iterator[None]:
    """Keeps the copy of an input that the graph writes where another input gets it.

    Upstream: the copy is removed, and the input written first: ``t = x.clone(); x.copy_(y); y.copy_(t)`` leaves ``y``
    as it is. Seen with ``torch.compile`` in torch 2.13. ``order_writes`` in ``compile/backend/passes`` puts the writes
    in an order in which few copies are needed.
    """
    from torch._inductor.fx_passes import post_grad

    with replaced(post_grad, "remove_noop_ops", _hiding(_copies_for_writes)):
        yield


def _hiding(find: Callable[[fx.Graph], list[fx.Node]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns what hides some nodes from a pass that removes copies."""

    def without_them(before: Callable[..., Any]) -> Callable[..., Any]:
        def remove_noop_ops(graph: fx.Graph) -> None:
            with hidden(find(graph)):
                before(graph)

        return remove_noop_ops

    return without_them


def _viewed(node: Any) -> Any:
    """Returns the node whose memory a node views."""
    while isinstance(node, fx.Node) and getattr(node.target, "is_view", False) and node.args:
        node = node.args[0]
    return node


def _copies_of_written(graph: fx.Graph, removable: Any) -> list[fx.Node]:
    """Returns results, or what results are views of, that are copies of values with which the graph updates inputs."""
    copy = torch.ops.aten.copy_.default
    written = {_viewed(node.args[1]) for node in graph.find_nodes(op="call_function", target=copy)}
    found: list[fx.Node] = []
    for result in graph.output_node().all_input_nodes:
        node = chain = _viewed(result)
        while chain not in written and chain.target in removable and chain.all_input_nodes:
            source = chain.all_input_nodes[1 if chain.target is torch.ops.aten.copy.default else 0]
            chain = _viewed(source)
        if chain in written and node is not chain:
            found.append(node)
    return found


def _copies_for_writes(graph: fx.Graph) -> list[fx.Node]:
    """Returns copies of inputs that the graph writes, where these are the values of other inputs."""
    writes = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    written = {write.args[0] for write in writes}
    found = []
    for write in writes:
        node: Any = write.args[1]
        if node.target is torch.ops.aten.clone.default:
            source = holder_of(node.args[0])
            if source in written and source is not write.args[0]:
                found.append(node)
    return found


_ARITHMETIC = frozenset(getattr(torch.ops.aten, name).Tensor for name in ("add", "sub", "mul", "div"))


def _copied_results(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Inserts copies of sums and products that are results, or whose views are; returns the copies by the original."""
    copies: dict[fx.Node, fx.Node] = {}
    output = graph.output_node()
    for result in output.all_input_nodes:
        user, node = output, result
        while isinstance(node.target, torch._ops.OpOverload) and node.target.is_view and node not in copies.values():
            user, node = node, node.all_input_nodes[0]
        if node.target in _ARITHMETIC:
            if node not in copies:
                with graph.inserting_after(node):
                    copies[node] = graph.call_function(torch.ops.aten.clone.default, (node,))
                value = node.meta["val"]
                with value.fake_mode:  # with storage of its own: later passes compare it
                    copies[node].meta = {**node.meta, "val": value.clone()}
            user.replace_input_with(node, copies[node])
    return copies


@contextmanager
def small_arguments_kept() -> Iterator[None]:
    """Calls the functions of vectors for ``expm1`` and ``atanh``.

    Upstream: ``expm1(x)`` of a vector is ``exp(x) - 1``, which is 0 for 1e-8, and so is ``atanh``: the logarithm of
    either is minus infinity. Seen with ``torch.compile`` in torch 2.13.
    """
    from torch._inductor.codegen import cpp

    def expm1(x: Any) -> str:  # both keep their names, by which the functions of single numbers are found
        return f"{x}.expm1()"

    def atanh(x: Any) -> str:
        return f"{x}.atanh()"

    with (
        setting(cpp.CppVecOverrides, "expm1", staticmethod(expm1)),
        setting(cpp.CppVecOverrides, "atanh", staticmethod(atanh)),
    ):
        yield


class _ComputedBody:
    """The body of a masked operation, which seems to compute its result rather than to read it."""

    def __init__(self, body: Callable[[], Any]) -> None:
        self._body = body
        self.graph = self

    def __call__(self) -> Any:
        return self._body()

    def find_nodes(self, op: str) -> list[Any]:
        return [types.SimpleNamespace(args=(types.SimpleNamespace(target=""),))]


@contextmanager
def masked_reads_filled() -> Iterator[None]:
    """Fills in what a masked read leaves out if the kernel of a GPU computes what it reads itself.

    Upstream: nothing is read from memory then, and only the read has the mask, so that padding has values of its
    neighbors. Seen in torch 2.13; right from 2.14 on.
    """
    from torch._inductor.codegen.triton import TritonKernelOverrides
    from torch._inductor.virtualized import V

    before = vars(TritonKernelOverrides)["masked"]

    def masked(mask: Any, body: Any, other: Any) -> Any:
        known = V.kernel.cse.store_cache
        read = {arg.args[1] for node in body.graph.find_nodes(op="output") for arg in node.args if arg.target == "load"}
        return before.__func__(mask, _ComputedBody(body) if not read.isdisjoint(known) else body, other)

    TritonKernelOverrides.masked = staticmethod(masked)  # type: ignore[method-assign]
    try:
        yield
    finally:
        TritonKernelOverrides.masked = before  # type: ignore[method-assign]


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


@contextmanager
def index_arrays_where_created() -> Iterator[None]:
    """Lets only the code behind it use an array of indices that a store has created.

    Upstream: the loads of a loop, which come before its stores, use the array, too. The C++ compiler refuses that:
    ``y = x.scatter(0, i, s)`` and the gradients of both in one graph. Seen with ``torch.compile`` in torch 2.13.
    """
    from torch._inductor.codegen import cpp

    def kept_apart(before: Callable[..., Any]) -> Callable[..., Any]:
        def load_or_store(kernel: Any, var: Any, index: Any, dtype: Any, buffer: Any = None, **stored: Any) -> Any:
            if buffer is None or buffer is kernel.loads:
                return before(kernel, var, index, dtype, buffer, **stored)
            known, created = kernel.cse._cache, dict[Any, Any]()
            kernel.cse._cache = ChainMap(created, known)
            try:
                made = before(kernel, var, index, dtype, buffer, **stored)
            finally:
                kernel.cse._cache = known
            known.update({key: value for key, value in created.items() if value is made})
            return made

        return load_or_store

    with replaced(cpp.CppVecKernel, "_load_or_store_non_contiguous", kept_apart):
        yield


_MENDED: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "kernel_order": kernels_in_order,
    "mutations_by_index": mutations_fused_by_index,
    "no_write_while_read": nothing_written_while_read,
    "extern_strides": extern_results_as_planned,
    "result_strides": results_laid_out_as_traced,
    "rounding_casts": casts_round,
    "results_own_storage": results_own_storage,
    "copies_for_writes": copies_for_writes,
    "rows_of_their_own": local_buffers_hold_one_row,
    "masked_reads": masked_reads_filled,
    "zero_products": zero_products_computed,
    "zero_sums": zero_sums_computed,
    "small_arguments": small_arguments_kept,
    "index_arrays": index_arrays_where_created,
}


@contextmanager
def right_results() -> Iterator[None]:
    """Context around lowering that applies all workarounds that are not disabled."""
    with ExitStack() as stack:
        for name, mended in _MENDED.items():
            if enabled(name):
                stack.enter_context(mended())
        yield
