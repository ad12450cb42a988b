"""Runs Triton kernels on CPU tensors by Triton's own interpreter, in a process that can compile them too.

Triton interprets if an environment variable is set when it is imported; then it cannot compile. Here its functions are
those that compile, and what the variable would change is changed while a graph runs.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.gpu.simulation.libdevice import functions


class DeviceAssertFailed(RuntimeError):
    """A kernel found an index out of range. On a GPU, the process could not use the device any more."""


@contextmanager
def interpreting() -> Iterator[None]:
    """Context in which :func:`run_kernel` works, and in which nothing may be compiled."""
    import triton.language as tl
    from triton import knobs
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    library = compat.math_library()
    language = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    with ExitStack() as stack:
        stack.enter_context(np.errstate(all="ignore"))
        stack.enter_context(
            _attribute(JITFunction, "__call__", lambda fn, *args, **more: _rewritten(fn)(*args, **more))
        )
        for name, function in functions().items():
            stack.enter_context(_attribute(library, name, function))
        stack.enter_context(_attribute(interpreter.InterpreterBuilder, "cast_impl", _cast))
        stack.enter_context(_attribute(interpreter.InterpreterBuilder, "create_assert", _assert))
        stack.enter_context(knobs.runtime.scope())
        knobs.runtime.interpret = True
        stack.callback(interpreter._patch_lang(language).restore)
        yield


def run_kernel(
    function: Any,
    args: tuple[Any, ...],
    constants: dict[str, Any],
    grid: tuple[int, int, int],
    asserts: bool = True,
) -> None:
    """Runs a kernel for every point of a grid.

    Args:
        function: the Triton function.
        args: its arguments, on the CPU.
        constants: its further arguments by name.
        grid: number of programs in each dimension.
        asserts: assertions in it are tested.

    Raises:
        DeviceAssertFailed: one of them fails.
    """
    from triton.runtime.interpreter import _implicit_cvt, interpreter_builder

    body = _rewritten(function)
    known = inspect.signature(function.fn).parameters
    given = inspect.getcallargs(body, *args, **{name: value for name, value in constants.items() if name in known})
    values = {name: value if name in constants else _implicit_cvt(value) for name, value in given.items()}
    interpreter_builder.options = replace(interpreter_builder.options, debug=asserts, sanitize_overflow=False)
    interpreter_builder.set_grid_dim(*grid)
    for x in range(grid[0]):
        for y in range(grid[1]):
            for z in range(grid[2]):
                interpreter_builder.set_grid_idx(x, y, z)
                body(**values)


def _assert(builder: Any, condition: Any, message: str) -> None:
    if not condition:
        raise DeviceAssertFailed(message)


def _cast(builder: Any, value: Any, dtype: Any) -> Any:
    """Converts numbers as a GPU does, to the nearest; Triton's own conversion to bfloat16 cuts digits off."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle, _get_np_dtype

    known, wanted = value.dtype.scalar, dtype.scalar
    numbers = value.data
    if tl.bfloat16 in (known, wanted):  # held as integers with the same bits
        tensor = torch.from_numpy(np.ascontiguousarray(numbers))
        tensor = tensor.view(torch.bfloat16).float() if known == tl.bfloat16 else tensor
        if wanted == tl.bfloat16:
            return TensorHandle(tensor.to(torch.bfloat16).view(torch.uint16).numpy(), wanted)
        numbers = tensor.numpy()
    return TensorHandle(numbers.astype(_get_np_dtype(dtype)), wanted)


def _rewritten(function: Any) -> Any:
    """Returns a Triton function as Python that computes with the interpreter's values."""
    from triton.runtime.interpreter import InterpretedFunction

    return InterpretedFunction(function.fn).rewrite()


@contextmanager
def _attribute(place: Any, name: str, value: Any) -> Iterator[None]:
    if not hasattr(place, name):
        yield
        return
    before = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)
