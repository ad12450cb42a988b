"""Products with sparse matrices from outside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.shadows.objects.sparse_matrices import SparseMatrix
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.ops.sparse_products import SparseProduct

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


@registry.intercept(torch.mm, torch.spmm, torch.matmul, torch.sparse.mm)
@registry.intercept(torch.Tensor.mm, torch.Tensor.matmul, torch.Tensor.__matmul__)
def product(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Computes the product of a sparse matrix and a dense tensor; leaves others to torch."""
    if not args or type(args[0]) is not SparseMatrix:
        return ABSENT
    matrix = args[0]
    if len(args) != 2 or kwargs or not _fits(matrix, args[1]):
        matrix.refuse(world.heap)
    given = (matrix.layout, matrix.coalesced, list(matrix.size), matrix.transposes, args[1], *matrix.parts)
    return world.guarded(SparseProduct.apply, given, {})


@registry.intercept(torch.t, torch.Tensor.t)
def _transpose(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].transposed() if len(args) == 1 and type(args[0]) is SparseMatrix else ABSENT


def _fits(matrix: SparseMatrix, dense: Any) -> bool:
    """Returns False for what torch refuses, or casts, and for another sparse matrix."""
    if type(dense) is not compat.FakeTensor or dense.layout is not torch.strided or dense.dim() not in (1, 2):
        return False
    alike = dense.dtype is matrix.real.dtype and dense.device == matrix.real.device
    plain = not dense.is_conj() and not dense.is_neg() and not torch.is_autocast_enabled(dense.device.type)
    return alike and plain and bool(dense.shape[0] == matrix.columns)
