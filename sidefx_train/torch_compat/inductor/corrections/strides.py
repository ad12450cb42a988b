"""Strides of results: of the graph, and of operators that generated code calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sympy
import torch

from sidefx_train.torch_compat.inductor.patching import replaced

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
