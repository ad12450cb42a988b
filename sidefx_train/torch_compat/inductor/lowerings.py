"""Lowerings of this library's operators."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch import fx

from sidefx_train.torch_compat.inductor.patching import setting

KERNEL_FUNCTION = "aoti_torch_sidefx_"
"""Prefix of the functions that Inductor's C++ calls for ``sidefx::product``, ``product_relu``, ``products`` (with the
suffix ``_narrow`` for bfloat16), ``sum_rows`` and the kernels in
:data:`~sidefx_train.torch_compat.inductor.dispatched_calls.WHOLE`."""


def register_kernel_lowerings() -> None:
    """Registers lowerings of ``sidefx::linear``, oneDNN's product of plain operands, also transposed ones, and of the
    native module's kernels."""
    from torch._inductor import ir, lowering, mkldnn_ir

    op = torch.ops.sidefx.linear.default
    if op in lowering.lowerings:
        return

    def lower_product(name: str, a: Any, b: Any, bias: Any = None) -> Any:
        inputs = [ir.ExternKernel.realize_input(t) for t in (a, b, bias) if t is not None]
        size = [*inputs[0].get_size()[:-1], inputs[1].get_size()[-1]]
        layout = ir.FixedLayout(a.get_device(), a.get_dtype(), size, ir.FlexibleLayout.contiguous_strides(size))
        narrow = "_narrow" if a.get_dtype() == torch.bfloat16 else ""
        kernel = ir.ExternKernelOut(
            layout=layout,
            inputs=inputs,
            python_kernel_name=f"torch.ops.sidefx.{name}.out",
            cpp_kernel_name=KERNEL_FUNCTION + name + narrow,
            op_overload=getattr(torch.ops.sidefx, name).out,
        )
        return ir.TensorBox.create(kernel)

    for name in ("product", "product_relu", "products"):
        target = getattr(torch.ops.sidefx, name).default
        lowering.register_lowering(target, type_promotion_kind=None)(functools.partial(lower_product, name))

    def lower_rows(index: Any, values: Any, height: int) -> Any:
        inputs = [ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(t)) for t in (index, values)]
        size = [height, values.get_size()[1]]
        layout = ir.FixedLayout(
            values.get_device(), values.get_dtype(), size, ir.FlexibleLayout.contiguous_strides(size)
        )
        kernel = ir.ExternKernelOut(
            layout=layout,
            inputs=inputs,
            python_kernel_name="torch.ops.sidefx.sum_rows.out",
            cpp_kernel_name=KERNEL_FUNCTION + "sum_rows",
            op_overload=torch.ops.sidefx.sum_rows.out,
        )
        return ir.TensorBox.create(kernel)

    lowering.register_lowering(torch.ops.sidefx.sum_rows.default, type_promotion_kind=None)(lower_rows)

    def lower_layer(target: Any, plain: Sequence[int], *given: Any) -> Any:
        args = [ir.ExternKernel.realize_input(each) if isinstance(each, ir.IRNode) else each for each in given]
        for at in plain:
            args[at] = args[at] and ir.ExternKernel.require_contiguous(args[at])
        made = ir.FallbackKernel.create(target, *args)
        return [*map(ir.TensorBox.create, made)] if isinstance(made, (list, tuple)) else ir.TensorBox.create(made)

    composite_kernels: list[tuple[str, Sequence[int]]] = [
        ("lstm", range(1, 7)),
        ("lstm_backward", range(1, 7)),
    ]  # all but x
    composite_kernels += [("attention", ()), ("attention_backward", (5,)), ("attention_backward_joined", (5,))]
    for name, plain in composite_kernels:  # and which of their arguments must be contiguous
        target = getattr(torch.ops.sidefx, name).default
        lowering.register_lowering(target, type_promotion_kind=None)(functools.partial(lower_layer, target, plain))

    def lower(x: Any, weight: Any, bias: Any) -> Any:
        x, weight = (ir.ExternKernel.realize_input(t) for t in (x, weight))
        inputs: list[Any] = [x, weight]
        constants: list[Any] = ["none", [-1], ""]
        if bias is None:
            constants.insert(0, None)
        else:
            inputs.append(ir.ExternKernel.realize_input(bias))
        size = [x.get_size()[0], weight.get_size()[0]]
        layout = ir.FixedLayout(x.get_device(), x.get_dtype(), size, ir.FlexibleLayout.contiguous_strides(size))
        kernel = mkldnn_ir.LinearUnary(layout=layout, inputs=inputs, constant_args=constants)
        return ir.TensorBox.create(mkldnn_ir._create_output_node(kernel))

    lowering.register_lowering(op, type_promotion_kind=None)(lower)
    _lower_choices()


def _lower_choices() -> None:
    """Registers lowerings of the least and the greatest of sizes, as torch's tracer records those that C++ code
    computes; Inductor has them for two sizes."""
    from torch._inductor import lowering
    from torch.fx.experimental import proxy_tensor
    from torch.utils._sympy import functions

    for name, choice in (("_nary_sym_min", functions.Min), ("_nary_sym_max", functions.Max)):
        function = getattr(proxy_tensor, name, None)  # before torch 2.13, the tracer did not know them
        if function is not None:
            lowering.register_lowering(function, type_promotion_kind=None)(choice)


def call_composite(op: Any) -> None:
    """Makes Inductor call an operator that it would decompose."""
    from torch._inductor import lowering

    if op not in lowering.lowerings:
        constraint = lowering.constrain_to_fx_strides
        lowering.make_fallback(op, layout_constraint=constraint, warn=False, override_decomp=True)


def _call_unlowered(graph: fx.Graph) -> None:
    """Makes Inductor call operators without a lowering that were not decomposed.

    That is its default, but if the environment has ``CI``, as for its own tests and a user's, it refuses operators for
    which any decomposition exists.
    """
    from torch._decomp import get_decompositions
    from torch._inductor import lowering
    from torch._library.utils import get_layout_constraint_tag

    for op in {node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)}:
        if op not in lowering.lowerings and get_decompositions([op]):
            constraint = lowering.tag_to_layout_constraint(get_layout_constraint_tag(op, with_default=True))
            lowering.make_fallback(op, layout_constraint=constraint, warn=False, override_decomp=True)


def multiplies_narrow() -> bool:
    """Returns True if oneDNN supports bfloat16 products on this processor: they need AVX-512."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@contextmanager
def convolutions_of_all_sizes() -> Iterator[None]:
    """Context in which convolutions with a symbolic stride, padding, dilation or kernel size call torch's kernels.

    Their lowering fixes these numbers. That of the backward also guards the strides of its results, of which it needs
    only the order: each size was a graph of its own.
    """
    from torch._inductor import kernel, lowering, virtualized

    forward, backward = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
    before = {target: lowering.lowerings[target] for target in (forward, backward) if target in lowering.lowerings}
    if not hasattr(kernel.conv, "convolution_backward_lowering"):  # before torch 2.13, it calls torch's kernel
        before.pop(backward, None)

    def lower_backward(*args: Any, **kwargs: Any) -> Any:
        sizes = virtualized.V.graph.sizevars
        with setting(sizes, "guard_int_seq", lambda given: list(sizes.guarding_hints_or_throw(given))):
            return before[backward](*args, **kwargs)

    for target, lower, weight in ((forward, before.get(forward), 1), (backward, lower_backward, 2)):
        if target in before:
            called = lowering.fallback_handler(target, add_to_fallback_set=False)
            lowering.lowerings[target] = functools.partial(_convolved, lower, called, weight)
    try:
        yield
    finally:
        lowering.lowerings.update(before)


def _convolved(lower: Any, called: Any, weight: int, *args: Any) -> Any:
    """Lowers a convolution, or its backward, by ``lower`` or ``called``; ``weight`` is the place of the weight."""
    after = weight + 2  # the bias, or its size, is in between
    stride, padding, dilation, _, output_padding = args[after : after + 5]
    numbers = (*args[weight].get_size(), *stride, *padding, *dilation, *output_padding)
    return (lower if _are_plain(numbers) else called)(*args)


def _are_plain(numbers: Iterable[Any]) -> bool:
    return all(isinstance(number, (int, sympy.Integer)) for number in numbers)


@contextmanager
def strides_of_all_sizes() -> Iterator[None]:
    """Context in which strides are compared by torch's remainder: of polynomials, sympy's is a quotient that torch
    cannot evaluate, and the compilation fails."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V
    from torch.utils._sympy.functions import Mod

    def at_least(stride: Any, other: Any) -> bool:
        known = V.graph.sizevars.guard_or_false
        if known(sympy.Eq(other, 0)):
            return True
        return not known(sympy.Eq(stride, 0)) and (
            known(sympy.Ge(stride, other)) or known(sympy.Eq(Mod(stride, other), 0))
        )

    with setting(ir.Layout, "_stride_expr_ge_or_false", staticmethod(at_least)):
        yield


@contextmanager
def pools_of_all_sizes() -> Iterator[None]:
    """Context in which adaptive pooling of symbolic sizes calls torch's kernels: its lowering fixes the sizes."""
    from torch._inductor import lowering

    before = {}
    for name in ("_adaptive_avg_pool2d", "adaptive_max_pool2d"):
        target = getattr(torch.ops.aten, name).default
        called = getattr(lowering, f"fallback_{name.lstrip('_')}", None)
        if called is not None and target in lowering.lowerings:
            before[target] = lowering.lowerings[target]
            lowering.lowerings[target] = functools.partial(_pooled, before[target], called)
    try:
        yield
    finally:
        lowering.lowerings.update(before)


def _pooled(lower: Any, called: Any, x: Any, output_size: Any) -> Any:
    plain = _are_plain((*x.get_size()[-2:], *output_size))
    return lower(x, output_size) if plain else called(x, output_size)
