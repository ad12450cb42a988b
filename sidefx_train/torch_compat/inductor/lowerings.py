"""Lowerings of this library's operators, and calls of operators through the dispatcher from generated C++."""

from __future__ import annotations

import functools
import inspect
import re
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from sidefx_train.torch_compat.inductor.cpp_toolchain import c_interface
from sidefx_train.torch_compat.op_overloads import OpOverload

KERNEL_FUNCTION = "aoti_torch_sidefx_"
"""Prefix of the functions that Inductor's C++ calls for ``sidefx::product``, ``product_relu``, ``products`` (with the
suffix ``_narrow`` for bfloat16), ``sum_rows`` and the kernels of :data:`_WHOLE`."""


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


_WHOLE = {
    f"sidefx::{name}": name
    for name in ("lstm", "lstm_backward", "attention", "attention_backward", "attention_backward_joined")
}
"""Operators that allocate their results and are kernels of the native modules, with their functions' names."""

DISPATCH_FUNCTION = "sidefx_dispatched"
"""Function that Inductor's C++ calls for operators of this library outside torch's C interface."""


def multiplies_narrow() -> bool:
    """Returns True if oneDNN supports bfloat16 products on this processor: they need AVX-512."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def calls_dispatcher() -> bool:
    """Returns True if Inductor's C++ can call this library's operators through torch's dispatcher."""
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    method = getattr(CppWrapperCpu, "generate_fallback_kernel_with_runtime_lookup", None)
    names = list(inspect.signature(method).parameters) if method is not None else []
    known = ["self", "buf_name", "python_kernel_name", "get_args", "op_overload", "raw_args", "outputs"]
    return names == known and all(
        any(f"{name}(" in text for text in c_interface())
        for name in ("aoti_torch_call_dispatcher", "torch_new_list_reserve_size", "torch_list_push_back")
    )


def _dispatching(before: Callable[..., None]) -> Callable[..., None]:
    """Generates calls through torch's dispatcher in C++ without torch's headers, which take seconds to read."""

    def generate(
        wrapper: Any, buf_name: Any, python_kernel_name: Any, get_args: Any, op: Any, raw_args: Any, outputs: Any
    ) -> None:
        kernel = _WHOLE.get(op._schema.name) if isinstance(op, OpOverload) else None
        words = _words(op, list(raw_args)) if kernel is None and isinstance(op, OpOverload) else None
        if words is None and kernel is None:
            before(wrapper, buf_name, python_kernel_name, get_args, op, raw_args, outputs)
            return
        made = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        names = [None if each is None else each.get_name() for each in made]
        lines = [f"RAIIAtenTensorHandle {name};" for name in names if name is not None]
        if words is None:
            given = ", ".join(["stack", *map(_plain_word, raw_args)])
            lines += ["{", f"    AtenTensorHandle stack[{len(op._schema.returns)}];"]
            lines.append(f"    {KERNEL_FUNCTION}{kernel}({given});")
        else:
            words += ["0"] * (len(op._schema.returns) - len(words))
            lines += ["{", f"    uint64_t stack[] = {{{', '.join(words)}}};"]
            lines.append(f'    {DISPATCH_FUNCTION}("{op._schema.name}", "{op._schema.overload_name}", stack);')
        for i, name in enumerate(names):
            taken = f"RAIIAtenTensorHandle(reinterpret_cast<AtenTensorHandle>(stack[{i}]));"
            lines.append(f"    {taken}" if name is None else f"    {name} = {taken}")
        wrapper.writelines([*lines, "}"])

    return generate


def _plain_word(value: Any) -> str:
    """Returns a tensor, none, or a number as an argument of a C++ function."""
    if value is None:
        return "nullptr"
    if hasattr(value, "codegen_reference"):
        return str(value.codegen_reference())
    return repr(value) if isinstance(value, float) else str(int(value))


def _words(op: Any, given: list[Any]) -> list[str] | None:
    """Returns an operator's arguments for the dispatcher's C interface; ``None`` if it does not support them.

    The dispatcher owns everything it is passed: handles of tensors, lists, and the memory of optional values.
    """
    if any(str(result.type) != "Tensor" for result in op._schema.returns):
        return None
    for argument in op._schema.arguments[len(given) :]:
        if not argument.has_default_value():
            return None
        given.append(argument.default_value)
    words = [_word(str(a.type), value) for a, value in zip(op._schema.arguments, given, strict=True)]
    return None if any(word is None for word in words) else [word for word in words if word is not None]


def _word(kind: str, value: Any) -> str | None:
    whole = re.fullmatch(r"(Optional|List)\[(.*)\]", kind)
    if whole is not None and whole[1] == "Optional":
        word = None if value is None else _word(whole[2], value)
        return "0" if value is None else word and f"sidefx_optional({word})"
    if whole is not None:
        items = [_word(whole[2], item) for item in value] if isinstance(value, (list, tuple)) else [None]
        return None if None in items else f"sidefx_list({', '.join(map(str, items))})"
    if kind == "Tensor":
        return f"sidefx_tensor({value.codegen_reference()})" if hasattr(value, "codegen_reference") else None
    if kind in ("bool", "int"):
        return f"(uint64_t){int(value)}LL" if isinstance(value, (int, sympy.Integer)) else None
    if kind == "float" and isinstance(value, (int, float)):
        return f"{int.from_bytes(struct.pack('=d', value), sys.byteorder)}ULL"  # its bits
    return None
