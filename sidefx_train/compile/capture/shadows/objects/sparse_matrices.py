"""Stand-ins for outside sparse matrices: products with dense tensors are captured, everything else runs natively.

The tensors of which the matrix consists are inputs of the graph.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.capture.shadows.deferred_values import OutsideStandIn
from sidefx_train.compile.capture.shadows.records import Record
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.ops.sparse_products import LAYOUTS

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI

_PARTS = {"coo": ("_indices", "_values"), "csr": ("crow_indices", "col_indices", "values")}
_FACTS = ("dtype", "device", "layout", "is_sparse", "is_sparse_csr", "requires_grad", "is_cuda", "ndim")


class SparseMatrix(OutsideStandIn):
    """A sparse matrix from outside, or one that was transposed in the step.

    Args:
        real: the matrix from outside.
        layout: a name in :data:`LAYOUTS`.
        size: numbers of rows and columns, symbolic if they change.
        parts: shadows of what it consists of.
        coalesced: its indices are sorted, and none is there twice.
        of: the matrix of which it is the transposed one.
    """

    __slots__ = ("coalesced", "layout", "parts", "real", "size", "transposes")

    def __init__(
        self,
        real: torch.Tensor,
        layout: str,
        size: tuple[Any, ...],
        parts: tuple[Any, ...],
        coalesced: bool,
        of: SparseMatrix | None = None,
    ) -> None:
        super().__init__(torch.t, (of,))
        self.real, self.layout, self.size, self.parts, self.coalesced = real, layout, size, parts, coalesced
        self.transposes: int = 0 if of is None else of.transposes + 1

    @property
    def columns(self) -> Any:
        """Number of columns."""
        return self.size[1 - self.transposes % 2]

    def transposed(self) -> SparseMatrix:
        """Returns the transposed matrix."""
        return SparseMatrix(self.real, self.layout, self.size, self.parts, self.coalesced, self)

    def attribute(self, name: str) -> Any:
        """Returns an attribute whose value is known or guarded, or a method in C; :data:`ABSENT` for others."""
        if name == "shape" and not self.transposes:
            return torch.Size(self.size)
        if name in _FACTS and not self.transposes:
            return getattr(self.real, name)
        found = getattr(torch.Tensor, name, None)
        return types.MethodType(found, self) if type(found) is types.MethodDescriptorType else ABSENT

    def refuse(self, heap: ShadowTableAPI) -> NoReturn:
        """Stops the capture at what does more than multiply."""
        heap.refuse("SFX109", f"computes with a tensor of layout {self.real.layout}")


def sparse_matrix(heap: ShadowTableAPI, real: torch.Tensor, source: Source) -> Any:
    """Returns what stands for a sparse matrix, or :data:`ABSENT` for one whose products are not captured."""
    layout = next((name for name, known in LAYOUTS.items() if real.layout is known), "")
    plain = type(real) is torch.Tensor and not real.requires_grad and not real.is_inference() and real.is_cpu
    if not layout or not plain or real.dim() != 2 or real.dtype not in (torch.float32, torch.float64):
        return ABSENT
    if layout == "coo" and real.sparse_dim() != 2:
        return ABSENT
    heap.guard("type", source, type(real))
    for name in ("layout", "requires_grad"):
        heap.guard("is", heap.sources.slot(source, name), getattr(real, name))
    shape = heap.sources.slot(source, "shape")
    size = tuple(heap.shadow(each, heap.sources.item(shape, dim)) for dim, each in enumerate(real.shape))
    with compat.real_world():
        coalesced = layout == "csr" or real.is_coalesced()
        held = {name: getattr(real, name)().data for name in _PARTS[layout]}  # else those of CSR are views of it
    if layout == "coo":
        heap.guard("is", heap.sources.call(heap.sources.slot(source, "is_coalesced")), coalesced)
    paths = {name: heap.sources.call(heap.sources.slot(source, name)) for name in held}
    parts = tuple(heap.shadow(part, heap.sources.slot(paths[name], "data")) for name, part in held.items())
    made = SparseMatrix(real, layout, size, parts, coalesced)
    return heap.register(Record(heap, real, made, source))
