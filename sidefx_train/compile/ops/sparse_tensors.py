"""Operators on sparse tensors as operators of the dense tensors that they consist of: torch's own kernels compute them.

A graph has no sparse tensors. An operator gets indices and values, and makes a sparse tensor of them at every call,
without a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.ops.registration import define_operator

LAYOUTS = {"coo": torch.sparse_coo, "csr": torch.sparse_csr}
"""Layouts of the matrices, by name."""


def _matrix(parts: list[Any], layout: str, coalesced: bool, size: list[int], transposes: int) -> torch.Tensor:
    if layout == "coo":
        made = torch.sparse_coo_tensor(*parts, size, is_coalesced=coalesced, check_invariants=False)
    else:
        made = torch.sparse_csr_tensor(*parts, size, check_invariants=False)
    for _ in range(transposes):
        made = made.t()
    return made


def _product(*given: Any) -> torch.Tensor:
    *matrix, dense = given
    with compat.recording_autograd(), torch.no_grad():
        return torch.matmul(_matrix(*matrix), dense)


def _product_fake(*given: Any) -> torch.Tensor:
    _, _, _, size, transposes, dense = given
    return dense.new_empty(size[transposes % 2], *dense.shape[1:])


define_operator(
    "sparse_product(Tensor[] parts, str layout, bool coalesced, SymInt[] size, int transposes, Tensor dense) -> Tensor",
    _product,
    _product_fake,
)


def _to_dense(*matrix: Any) -> torch.Tensor:
    with compat.recording_autograd(), torch.no_grad():
        return _matrix(*matrix).to_dense()


def _to_dense_fake(*matrix: Any) -> torch.Tensor:
    parts, _, _, size, transposes = matrix
    return parts[-1].new_empty(size[:: -1 if transposes % 2 else 1])


define_operator(
    "sparse_to_dense(Tensor[] parts, str layout, bool coalesced, SymInt[] size, int transposes) -> Tensor",
    _to_dense,
    _to_dense_fake,
)


_COUNTS = (torch.Tag.dynamic_output_shape,)


def _rows(indices: torch.Tensor, values: torch.Tensor, size: list[int], coalesced: bool) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, values, size, is_coalesced=coalesced, check_invariants=False)


def _parts(made: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return made._indices(), made._values()


def _some_rows(
    indices: torch.Tensor, values: torch.Tensor, fewest: int, most: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns fake indices and values of a number of rows that only the kernel knows."""
    count = torch.library.get_ctx().new_dynamic_size(min=fewest, max=most if type(most) is int else None)
    return indices.new_empty(indices.shape[0], count), values.new_empty(count, *values.shape[1:])


def _coalesce(indices: torch.Tensor, values: torch.Tensor, size: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    with compat.recording_autograd(), torch.no_grad():
        made = _parts(_rows(indices, values, size, False).coalesce())
        if values.shape[0] < 2:
            return made[0].clone(), made[1].clone()  # they are the operand's
        return made[0].contiguous(), made[1].contiguous()  # rows of indices have gaps where some were equal


def _coalesce_fake(indices: torch.Tensor, values: torch.Tensor, size: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return _some_rows(indices, values, min(_fewest(values), 1), values.shape[0])


def _fewest(values: torch.Tensor) -> int:
    """Returns a number of rows that there are at least."""
    count: Any = values.shape[0]
    if type(count) is int:
        return count
    return int(not compat.is_unbacked(count) or bool(compat.known_truth(count >= 1)))


define_operator(
    "sparse_coalesce(Tensor indices, Tensor values, SymInt[] size) -> (Tensor indices, Tensor values)",
    _coalesce,
    _coalesce_fake,
    tags=_COUNTS,
)


def _sum(
    indices: torch.Tensor,
    values: torch.Tensor,
    coalesced: bool,
    more_indices: torch.Tensor,
    more_values: torch.Tensor,
    more_coalesced: bool,
    size: list[int],
    alpha: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    with compat.recording_autograd(), torch.no_grad():
        a = _rows(indices, values.contiguous(), size, coalesced)
        b = _rows(more_indices, more_values.contiguous(), size, more_coalesced)
        indices, values = _parts(torch.add(a, b, alpha=alpha))
        return indices.clone(), values.clone()  # they may be longer than they show, or an operand's


def _sum_fake(indices: torch.Tensor, values: torch.Tensor, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    more_values: torch.Tensor = given[2]
    most = values.shape[0] + more_values.shape[0]
    return _some_rows(indices, values, max(_fewest(values), _fewest(more_values)), most)


define_operator(
    "sparse_sum(Tensor indices, Tensor values, bool coalesced, Tensor more_indices, Tensor more_values, "
    "bool more_coalesced, SymInt[] size, Scalar alpha) -> (Tensor indices, Tensor values)",
    _sum,
    _sum_fake,
    tags=_COUNTS,
)


def _add_(
    dense: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, coalesced: bool, alpha: float
) -> torch.Tensor:
    with compat.recording_autograd(), torch.no_grad():
        dense.detach().add_(_rows(indices, values, list(dense.shape), coalesced), alpha=alpha)
    return dense


def _add_fake(dense: torch.Tensor, *rows: Any) -> torch.Tensor:
    return dense


def _added(dense: torch.Tensor, *rows: Any) -> torch.Tensor:
    return _add_(dense.clone(), *rows)


def _added_fake(dense: torch.Tensor, *rows: Any) -> torch.Tensor:
    return torch.empty_like(dense)


define_operator(
    "sparse_add_(Tensor(a!) dense, Tensor indices, Tensor values, bool coalesced, Scalar alpha) -> Tensor(a!)",
    _add_,
    _add_fake,
)
define_operator(
    "sparse_added(Tensor dense, Tensor indices, Tensor values, bool coalesced, Scalar alpha) -> Tensor",
    _added,
    _added_fake,
)


def _gather(dense: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return torch.index_select(dense, 0, indices[0])


def _gather_fake(dense: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return dense.new_empty(indices.shape[1], *dense.shape[1:])


define_operator("sparse_gather(Tensor dense, Tensor indices) -> Tensor", _gather, _gather_fake)


def _gathered(dense: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._unsafe_index.Tensor(dense, [torch.ops.aten.select.int(indices, 0, 0)])  # type: ignore[no-any-return]


def decompositions(deterministic: bool) -> dict[Any, Callable[..., torch.Tensor]]:
    """Returns operators that Inductor need not call: it compiles loops over the rows, which write into the tensor.

    Eager does not check the indices either.

    Args:
        deterministic: the order of sums must not depend on threads.
    """

    def added(
        dense: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, coalesced: bool, alpha: float
    ) -> torch.Tensor:
        place, rows = torch.ops.aten.select.int(indices, 0, 0), values if alpha == 1 else torch.mul(values, alpha)
        if coalesced:
            rows = torch.add(_gathered(dense, indices), rows)
        put = torch.ops.aten.index_put if deterministic else torch.ops.aten._unsafe_index_put
        return put.default(dense, [place], rows, not coalesced)  # type: ignore[no-any-return]

    return {
        torch.ops.sidefx.sparse_added.default: added,
        torch.ops.sidefx.sparse_gather.default: _gathered,
        torch.ops.sidefx.sparse_products_at.default: _products_of_rows,
    }


def _bag_gradient(grad: torch.Tensor, *given: Any) -> torch.Tensor:
    *middle, mode, per_sample_weights = given
    with compat.recording_autograd(), torch.no_grad():
        kernel = torch.ops.aten._embedding_bag_backward.default
        return kernel(grad, *middle, False, mode, True, per_sample_weights)._values().contiguous()


def _bag_gradient_fake(grad: torch.Tensor, indices: torch.Tensor, *given: Any) -> torch.Tensor:
    return grad.new_empty(indices.shape[0], grad.shape[1])


define_operator(
    "sparse_bag_gradient(Tensor grad, Tensor indices, Tensor offsets, Tensor offset2bag, Tensor bag_size, "
    "Tensor maximum_indices, SymInt num_weights, int mode, Tensor? per_sample_weights) -> Tensor",
    _bag_gradient,
    _bag_gradient_fake,
)


def _products_at(grad: torch.Tensor, dense: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Returns ``grad @ dense.t()`` at places; eager computes all of it, which decides how it is rounded."""
    with compat.recording_autograd(), torch.no_grad():
        if dense.dim() == 1:
            return grad[rows] * dense[columns]
        return torch.mm(grad, dense.t())[rows, columns]


def _products_at_fake(
    grad: torch.Tensor, dense: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    return grad.new_empty(rows.shape[0])


define_operator(
    "sparse_products_at(Tensor grad, Tensor dense, Tensor rows, Tensor columns) -> Tensor",
    _products_at,
    _products_at_fake,
)


def _products_of_rows(
    grad: torch.Tensor, dense: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    aten = torch.ops.aten
    made = aten._unsafe_index.Tensor(grad, [rows]) * aten._unsafe_index.Tensor(dense, [columns])
    return made.sum(-1) if dense.dim() == 2 else made  # type: ignore[no-any-return]


class SparseProduct(torch.autograd.Function):
    """``matrix @ dense``: ``apply(layout, coalesced, size, transposes, dense, *parts)``.

    ``dense`` has one or two dimensions. The matrix was transposed ``transposes`` times; of its parts, the values of a
    matrix in coordinates may need a gradient.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        """Returns the product."""
        *ctx.facts, ctx.transposes, dense = given[:5]
        parts = given[5:]
        ctx.save_for_backward(*parts, *([dense] if ctx.needs_input_grad[-1] else []))
        return torch.ops.sidefx.sparse_product.default(list(parts), *ctx.facts, ctx.transposes, dense)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Returns the gradients of the dense tensor, a product of the transposed matrix with ``grad``, and of the
        values."""
        parts, of_dense, of_values = list(ctx.saved_tensors), None, None
        if ctx.needs_input_grad[-1]:
            facts = ctx.facts[2], ctx.transposes
            of_values = _ProductsAt.apply(*facts, grad, parts.pop(), parts[0])  # type: ignore[no-untyped-call]
        if ctx.needs_input_grad[4]:
            of_dense = SparseProduct.apply(*ctx.facts, ctx.transposes + 1, grad, *parts)  # type: ignore[no-untyped-call]
        return None, None, None, None, of_dense, *[None] * (len(parts) - 1), of_values


class _ProductsAt(torch.autograd.Function):
    """The gradient of a matrix's values: ``apply(size, transposes, grad, dense, indices)``."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        """Returns the elements of ``grad @ dense.t()`` that the matrix has."""
        ctx.size, ctx.transposes, grad, dense, indices = given
        ctx.save_for_backward(grad, dense, indices)
        places = indices[ctx.transposes % 2], indices[1 - ctx.transposes % 2]
        return torch.ops.sidefx.sparse_products_at.default(grad, dense, *places)

    @staticmethod
    def backward(ctx: Any, values: Any) -> Any:
        """Returns the gradients of ``grad`` and ``dense``: products with a matrix of these values."""
        grad, dense, indices = ctx.saved_tensors
        matrix = "coo", False, ctx.size
        of_grad = SparseProduct.apply(*matrix, ctx.transposes, dense, indices, values)  # type: ignore[no-untyped-call]
        of_dense = SparseProduct.apply(*matrix, ctx.transposes + 1, grad, indices, values)  # type: ignore[no-untyped-call]
        return None, None, of_grad, of_dense, None


class ToDense(torch.autograd.Function):
    """``matrix.to_dense()``: ``apply(layout, coalesced, size, transposes, *parts)``."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        """Returns the dense matrix."""
        *facts, ctx.transposes = given[:4]
        parts = given[4:]
        ctx.save_for_backward(parts[0])
        return torch.ops.sidefx.sparse_to_dense.default(list(parts), *facts, ctx.transposes)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Returns the gradient of the values of a matrix in coordinates."""
        (indices,) = ctx.saved_tensors
        places = indices[ctx.transposes % 2], indices[1 - ctx.transposes % 2]
        return None, None, None, None, None, torch.ops.aten._unsafe_index.Tensor(grad, list(places))
