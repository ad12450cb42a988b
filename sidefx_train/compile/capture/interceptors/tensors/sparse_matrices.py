"""Products with sparse matrices, from outside or made in the step; rows of sparse gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.shadows.objects.sparse_matrices import READS, SparseMatrix
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.ops.sparse_tensors import SparseProduct, ToDense

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
    parts, *facts = matrix.given()
    return world.guarded(SparseProduct.apply, (*facts, args[1], *parts), {})


@registry.intercept(torch.t, torch.Tensor.t)
def _transpose(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 1 or type(args[0]) is not SparseMatrix:
        return ABSENT
    *rest, values = args[0].parts
    return args[0].transposed((*rest, _with_node(world, values)))


@registry.intercept(torch.Tensor.to_dense)
def _to_dense(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 1 or kwargs or type(args[0]) is not SparseMatrix:
        return ABSENT
    parts, *facts = args[0].given()
    return world.guarded(ToDense.apply, (*facts, *parts), {})


@registry.intercept(torch.sparse_coo_tensor)
def _make(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Makes a matrix of fake indices and values; leaves what else the function takes to torch."""
    if len(args) == 2 and [*kwargs] == ["size"]:
        args, kwargs = (*args, kwargs["size"]), {}
    if len(args) != 3 or kwargs or torch.sparse.check_sparse_tensor_invariants.is_enabled():
        return ABSENT
    indices, values, size = args
    dense = all(type(each) is compat.FakeTensor and each.layout is torch.strided for each in args[:2])
    if not dense or type(size) not in (tuple, list, torch.Size) or len(size) != 2 or not indices.is_cpu:
        return ABSENT
    numbers = all(type(each) in (int, torch.SymInt) and each >= 0 for each in size)
    shaped = indices.dim() == 2 and values.dim() == 1 and indices.shape[0] == 2 and indices.shape[1] == values.shape[0]
    if not numbers or not shaped or indices.dtype is not torch.int64 or not values.is_cpu:
        return ABSENT
    if values.requires_grad and not torch.is_grad_enabled():
        values = world.guarded(torch.Tensor.detach, (values,), {})
    values = _with_node(world, values)
    return SparseMatrix("coo", tuple(size), (indices, values), coalesced=False)


def _with_node(world: TraceWorld, values: torch.Tensor) -> torch.Tensor:
    """Returns values with an autograd node of their own, as eager's matrix has: gradients are added up there."""
    return world.guarded(torch.Tensor.view_as, (values, values), {}) if values.requires_grad else values  # type: ignore[no-any-return]


def _answers(name: str) -> None:
    """Has a method that reads what a matrix consists of answered, unless it was transposed or would raise."""

    def answer(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "_nnz" and _is_of_rows(args):
            return world.tracer.proxy_mode.sparse.known(args[0]).count  # C++ code returns no symbolic number
        if not args or type(args[0]) is not SparseMatrix:
            return ABSENT
        matrix = args[0]
        found = matrix.reads(name, args[1:]) if not kwargs else ABSENT
        if name == "values" and matrix.parts[-1].requires_grad:  # it is differentiable, unlike ``_values``
            found = ABSENT
        if found is ABSENT:
            matrix.refuse(world.heap)
        return world.guarded(torch.Tensor.detach, (found,), {}) if type(found) is compat.FakeTensor else found

    registry.intercept(getattr(torch.Tensor, name))(answer)


for _name in READS:
    _answers(_name)


@registry.intercept(torch.Tensor.coalesce)
def _coalesce(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Coalesces a matrix, or a gradient without asking whether it has two rows."""
    if len(args) == 1 and not kwargs and type(args[0]) is SparseMatrix:
        return _coalesced(world, args[0])
    return world.guarded(world.tracer.proxy_mode.sparse.coalesce, args, {}) if _is_of_rows(args) else ABSENT


def _coalesced(world: TraceWorld, matrix: SparseMatrix) -> SparseMatrix:
    if matrix.layout != "coo" or matrix.transposes > 1 or matrix.parts[-1].requires_grad:
        matrix.refuse(world.heap)
    if matrix.coalesced and not matrix.transposes:
        return matrix
    (indices, values), size = matrix.parts, matrix.size
    if matrix.transposes:
        indices, size = world.guarded(torch.Tensor.flip, (indices, (0,)), {}), size[::-1]
    if values.shape[0] < 2:
        parts = tuple(world.guarded(torch.Tensor.clone, (part,), {}) for part in (indices, values))
    else:
        parts = world.guarded(torch.ops.sidefx.sparse_coalesce.default, (indices, values, list(size)), {})
    return SparseMatrix("coo", size, parts, coalesced=True)


def _is_of_rows(args: tuple[Any, ...]) -> bool:
    return len(args) == 1 and type(args[0]) is compat.FakeTensor and args[0].is_sparse


def _fits(matrix: SparseMatrix, dense: Any) -> bool:
    """Returns False for what torch refuses, or casts, and for another sparse matrix."""
    if type(dense) is not compat.FakeTensor or dense.layout is not torch.strided or dense.dim() not in (1, 2):
        return False
    values = matrix.parts[-1]
    alike = dense.dtype is values.dtype in (torch.float32, torch.float64) and dense.device == values.device
    plain = not dense.is_conj() and not dense.is_neg() and not torch.is_autocast_enabled(dense.device.type)
    return alike and plain and bool(dense.shape[0] == matrix.columns)
