"""Calls of operators through torch's dispatcher from generated C++, without torch's headers."""

from __future__ import annotations

import inspect
import json
import re
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any

import sympy
from torch import SymInt, dtype

from sidefx_train.torch_compat.distributed.collectives import called_by_cpp
from sidefx_train.torch_compat.inductor.cpp_toolchain import c_interface
from sidefx_train.torch_compat.inductor.lowerings import KERNEL_FUNCTION
from sidefx_train.torch_compat.inductor.patching import replaced
from sidefx_train.torch_compat.op_overloads import OpOverload

WHOLE = {
    f"sidefx::{name}": name
    for name in ("lstm", "lstm_backward", "attention", "attention_backward", "attention_backward_joined")
}
"""Operators that allocate their results and are kernels of the native modules, with their functions' names."""

DISPATCH_FUNCTION = "sidefx_dispatched"
"""Function that Inductor's C++ calls for operators of this library outside torch's C interface."""


ERROR_FUNCTION = "torch_exception_get_what_without_backtrace"
"""Function of torch's C interface that returns the message of the last error, from 2.13 on."""

_NEEDED = (
    *("aoti_torch_call_dispatcher", "torch_new_list_reserve_size", "torch_list_push_back"),
    *("torch_list_get_item", "torch_delete_list"),
)


def calls_dispatcher() -> bool:
    """Returns True if Inductor's C++ can call this library's operators through torch's dispatcher."""
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    method = getattr(CppWrapperCpu, "generate_fallback_kernel_with_runtime_lookup", None)
    names = list(inspect.signature(method).parameters) if method is not None else []
    known = ["self", "buf_name", "python_kernel_name", "get_args", "op_overload", "raw_args", "outputs"]
    return names == known and all(map(in_c_interface, _NEEDED))


def calls_collectives() -> bool:
    """Returns True if Inductor's C++ can issue collectives through torch's dispatcher, and say why one has failed."""
    return calls_dispatcher() and in_c_interface("torch_new_string_handle") and in_c_interface(ERROR_FUNCTION)


@lru_cache
def in_c_interface(name: str) -> bool:
    """Returns True if torch's C interface has a function."""
    return any(f"{name}(" in text for text in c_interface())


@contextmanager
def calling_dispatcher() -> Iterator[None]:
    """Context in which Inductor's C++ calls operators outside torch's C interface, and collectives, through torch's
    dispatcher; without a header, which would take seconds to read, where it can."""
    from torch._inductor import ir
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    if not calls_dispatcher():
        yield
        return
    special = [kind for kind in ir._CollectiveKernel.__subclasses__() if "codegen" in vars(kind)]
    with ExitStack() as stack:
        stack.enter_context(replaced(CppWrapperCpu, "generate_fallback_kernel_with_runtime_lookup", _dispatching))
        for kind in special:  # Inductor's C++ would call their operators past the dispatcher
            stack.enter_context(replaced(kind, "codegen", _issuing))
        yield


def _dispatching(before: Callable[..., None]) -> Callable[..., None]:
    def generate(
        wrapper: Any, buf_name: Any, python_kernel_name: Any, get_args: Any, op: Any, raw_args: Any, outputs: Any
    ) -> None:
        made = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        lines = _call(op, list(raw_args), [_name_of(each) for each in made])
        if lines is None and len(made) == 1 and isinstance(op, OpOverload) and _returns_list(op):
            raise NotImplementedError(f"C++ that calls {op} for a list of one tensor: it would take the list for it")
        if lines is None:
            before(wrapper, buf_name, python_kernel_name, get_args, op, raw_args, outputs)
        else:
            wrapper.writelines(lines)

    return generate


def _returns_list(op: Any) -> bool:
    return any(str(result.type) == "List[Tensor]" for result in op._schema.returns)


def _issuing(before: Callable[..., None]) -> Callable[..., None]:
    """Generates collectives and waits that have code of their own like other calls."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    def codegen(kernel: Any, wrapper: Any) -> None:
        if not V.graph.cpp_wrapper:
            before(kernel, wrapper)
            return
        given, more = kernel.unflatten_args(kernel.inputs, kernel.constant_args)
        named = (kernel.get_kwargs_value(name, **more) for name in kernel.ordered_kwargs_for_cpp_kernel)
        result = None if isinstance(kernel.layout, ir.NoneLayout) else kernel.get_name()
        lines = _call(kernel.op_overload, [*given, *named], [result])
        if lines is None:
            raise NotImplementedError(f"C++ that calls {kernel.op_overload} through the dispatcher")
        wrapper.writelines(lines)

    return codegen


def _name_of(output: Any) -> str | None:
    """Returns the variable of a result; ``None`` if nothing reads it: it is an argument that was written to."""
    from torch._inductor import ir

    return None if output is None or isinstance(output, ir.MutationOutput) else str(output.get_name())


def _call(op: Any, given: list[Any], names: list[str | None]) -> list[str] | None:
    """Returns the C++ of a call of an operator; ``None`` if the C interface of the dispatcher does not support it.

    Args:
        op: the operator.
        given: its arguments.
        names: variables of its results.
    """
    kernel = WHOLE.get(op._schema.name) if isinstance(op, OpOverload) else None
    words = _words(op, given) if kernel is None and isinstance(op, OpOverload) else None
    if words is None and kernel is None:
        return None
    lines = [f"RAIIAtenTensorHandle {name};" for name in names if name is not None]
    listed = kernel is None and _returns_list(op)
    if words is None:
        arguments = ", ".join(["stack", *map(_plain_word, given)])
        lines += ["{", f"    AtenTensorHandle stack[{len(op._schema.returns)}];"]
        lines.append(f"    {KERNEL_FUNCTION}{kernel}({arguments});")
    else:
        words += ["0"] * (len(op._schema.returns) - len(words))
        lines += ["{", f"    uint64_t stack[] = {{{', '.join(words)}}};"]
        lines.append(f'    {DISPATCH_FUNCTION}("{called_by_cpp(op)}", "{op._schema.overload_name}", stack);')
    for i, name in enumerate(names) if listed else zip(range(len(op._schema.returns)), names, strict=False):
        result = f"sidefx_item(stack[0], {i})" if listed else f"stack[{i}]"
        taken = f"RAIIAtenTensorHandle(reinterpret_cast<AtenTensorHandle>({result}));"
        lines.append(f"    {taken}" if name is None else f"    {name} = {taken}")
    if listed:
        lines.append("    sidefx_delete_list(stack[0]);")
    return [*lines, "}"]


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
    results = [str(result.type) for result in op._schema.returns]
    if any(kind != "Tensor" for kind in results) and results != ["List[Tensor]"]:
        return None
    for argument in op._schema.arguments[len(given) :]:
        if not argument.has_default_value():
            return None
        given.append(argument.default_value)
    words = [
        _word("str" if str(a.type) == "Any" else str(a.real_type), value)
        for a, value in zip(op._schema.arguments, given, strict=True)
    ]
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
    if kind == "str":
        text = json.dumps(value)  # an escaped C string, as long as it is ASCII
        return f"sidefx_string({text}, {len(value)})" if isinstance(value, str) and value.isascii() else None
    if kind in ("bool", "int", "SymInt"):
        return _integer(value)
    if kind == "ScalarType":
        return f"(uint64_t)aoti_torch_dtype_{str(value).removeprefix('torch.')}()" if isinstance(value, dtype) else None
    if kind == "float" and isinstance(value, (int, float)):
        return f"{int.from_bytes(struct.pack('=d', value), sys.byteorder)}ULL"  # its bits
    return None


def _integer(value: Any) -> str | None:
    """Returns an integer, which may be an expression of the graph's sizes, as a word."""
    from torch._inductor.virtualized import V

    if isinstance(value, (int, sympy.Integer)):
        return f"(uint64_t){int(value)}LL"
    expression = value.node.expr if isinstance(value, SymInt) else value
    if not isinstance(expression, sympy.Expr) or not expression.is_integer:
        return None
    return f"(uint64_t)(int64_t)({V.graph.wrapper_code.codegen_sizevar(expression)})"
