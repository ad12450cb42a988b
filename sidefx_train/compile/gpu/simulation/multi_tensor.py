"""The kernel that updates many tensors, where there is no GPU: interpreted on CPU tensors, or compiled.

Importing this module gives the operator a kernel for the CPU.
"""

from __future__ import annotations

import torch

from sidefx_train.compile.gpu.multi_tensor.address_table import BLOCK
from sidefx_train.compile.gpu.multi_tensor.expression import Expression
from sidefx_train.compile.gpu.multi_tensor.update import WARPS, expression_of, kernel
from sidefx_train.compile.gpu.simulation.interpreter import interpreting, run_kernel
from sidefx_train.compile.gpu.simulation.kernels import Cubin
from sidefx_train.compile.ops.registration import implement_operator


def _interpret(
    written: list[torch.Tensor], read: list[torch.Tensor], table: torch.Tensor, chunks: int, name: str
) -> None:
    with interpreting():
        run_kernel(kernel(expression_of(name)), (table,), {"BLOCK": BLOCK}, (chunks, 1, 1))


implement_operator("multi_tensor_update", _interpret, "CPU")


def compile_update(expression: Expression, capability: int) -> Cubin:
    """Compiles the kernel of an expression for a GPU.

    Raises:
        triton.compiler.errors.CompilationError: it does not compile.
    """
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(kernel(expression), {"table": "*i64", "BLOCK": "constexpr"}, {"BLOCK": BLOCK})
    options = {"num_warps": WARPS, "enable_fp_fusion": False}
    made = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return Cubin(
        "multi_tensor_update", capability, len(made.asm["cubin"]), made.metadata.shared, made.metadata.num_warps
    )
