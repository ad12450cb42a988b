"""Products of a sparse matrix with a dense tensor as an operator of dense tensors: torch's own kernels compute them.

A graph has no sparse tensors. The operator gets what the matrix consists of, and makes a matrix
of it at every call, without a copy.
"""

from __future__ import annotations

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


class SparseProduct(torch.autograd.Function):
    """``matrix @ dense``: ``apply(layout, coalesced, size, transposes, dense, *parts)``.

    ``dense`` has one or two dimensions. The matrix was transposed ``transposes`` times; its parts need no gradient.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        """Returns the product."""
        *ctx.facts, ctx.transposes, dense = given[:5]
        parts = given[5:]
        ctx.save_for_backward(*parts)
        return torch.ops.sidefx.sparse_product.default(list(parts), *ctx.facts, ctx.transposes, dense)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Returns the gradient of the dense tensor: the product of the transposed matrix with ``grad``."""
        parts = ctx.saved_tensors
        found = SparseProduct.apply(*ctx.facts, ctx.transposes + 1, grad, *parts)  # type: ignore[no-untyped-call]
        return None, None, None, None, found, *[None] * len(parts)
