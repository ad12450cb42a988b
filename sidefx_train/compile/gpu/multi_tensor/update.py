"""The operator that updates many tensors in one launch, and what generated code calls for it."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from sidefx_train.compile.common.generated_code import compile_function
from sidefx_train.compile.gpu.multi_tensor.address_table import BLOCK, AddressTables, is_recording
from sidefx_train.compile.gpu.multi_tensor.expression import Expression, triton_source
from sidefx_train.compile.ops.registration import define_operator

WARPS = 4

_expressions: dict[str, Expression] = {}
"""Expressions by their names, for the operator."""


def name_of(expression: Expression) -> str:
    """Returns the name under which the operator knows an expression."""
    name = hashlib.sha256(repr(expression).encode()).hexdigest()[:16]
    _expressions[name] = expression
    return name


def expression_of(name: str) -> Expression:
    """Returns the expression with a name."""
    return _expressions[name]


@functools.cache
def kernel(expression: Expression) -> Any:
    """Returns the Triton function of an expression."""
    import triton
    from triton.language.extra import libdevice

    source = triton_source(expression)
    from sidefx_train.compile.gpu.multi_tensor import device_functions

    names = {**vars(device_functions), "libdevice": libdevice, "__name__": __name__}
    file = f"<sidefx_train multi-tensor update {name_of(expression)}>"
    return triton.jit(compile_function("multi_tensor_update", source, names, file))


def _launch(written: list[torch.Tensor], read: list[torch.Tensor], table: torch.Tensor, chunks: int, name: str) -> None:
    kernel(expression_of(name))[(chunks,)](table, BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False)


define_operator(
    "multi_tensor_update(Tensor(a!)[] written, Tensor[] read, Tensor table, int chunks, str name) -> ()",
    _launch,
    lambda written, read, table, chunks, name: None,
    key="CUDA",
)

MULTI_TENSOR_UPDATE = torch.ops.sidefx.multi_tensor_update.default


class MultiTensorUpdate:
    """One update of many tensors in generated code.

    Args:
        expression: the new values.
        sizes: number of elements of each tensor.
    """

    def __init__(self, expression: Expression, sizes: Sequence[int]) -> None:
        self._expression, self._count = expression, len(sizes)
        self._name = name_of(expression)
        self._tables = AddressTables(sizes)
        kernel(expression)

    def __call__(self, written: list[torch.Tensor], read: list[torch.Tensor]) -> None:
        """Writes the new values.

        Args:
            written: the tensors, those of each result one after the other.
            read: what is read, in the same way.
        """
        if not is_recording() and _program_records(written[0]):
            self._one_by_one(written, read)
            return
        table = self._tables.table([*written, *read])
        MULTI_TENSOR_UPDATE(written, read, table, self._tables.chunks, self._name)

    def _one_by_one(self, written: list[torch.Tensor], read: list[torch.Tensor]) -> None:
        """Runs operator by operator: a table cannot be filled while the program records the step itself."""
        for i in range(self._count):
            self._expression.run(written[i :: self._count], read[i :: self._count])


def _program_records(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
