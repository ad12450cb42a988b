"""Shadows of sparse matrices: products with dense tensors are captured, and little else; the rest runs natively.

The tensors of which the matrix consists are inputs of the graph.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.capture.shadows.deferred_values import LimitedShadow
from sidefx_train.compile.capture.shadows.records import Record
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.ops.sparse_tensors import LAYOUTS

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI

_PARTS = {"coo": ("_indices", "_values"), "csr": ("crow_indices", "col_indices", "values")}
READS = (
    "size", "_nnz", "is_coalesced", "_indices", "_values", "indices", "values", "crow_indices", "col_indices",
)  # fmt: skip
"""Methods that are answered from the parts."""
_FACTS = ("dtype", "device", "is_cuda")


class SparseMatrix(LimitedShadow):
    """A sparse matrix from outside, or one that the step made of dense tensors or transposed.

    Args:
        layout: a name in :data:`LAYOUTS`.
        size: numbers of rows and columns, symbolic if they change.
        parts: shadows of what it consists of, the values last.
        coalesced: its indices are sorted, and none is there twice.
        of: the matrix of which it is the transposed one.
    """

    __slots__ = ("coalesced", "layout", "parts", "size", "transposes")

    def __init__(
        self,
        layout: str,
        size: tuple[Any, ...],
        parts: tuple[Any, ...],
        coalesced: bool,
        of: SparseMatrix | None = None,
    ) -> None:
        if of is not None:
            super().__init__(torch.t, (of,))
        elif coalesced:
            known = {"is_coalesced": True, "check_invariants": False}
            super().__init__(torch.sparse_coo_tensor, (*parts, size), known)
        else:
            super().__init__(torch.sparse_coo_tensor, (*parts, size))
        self.layout, self.size, self.parts, self.coalesced = layout, size, parts, coalesced
        self.transposes: int = 0 if of is None else of.transposes + 1

    @property
    def columns(self) -> Any:
        """Number of columns."""
        return self.size[1 - self.transposes % 2]

    def transposed(self, parts: tuple[Any, ...]) -> SparseMatrix:
        """Returns the transposed matrix, of the same parts."""
        return SparseMatrix(self.layout, self.size, parts, self.coalesced, self)

    def given(self) -> tuple[Any, ...]:
        """Returns what the operators of ``ops/sparse_tensors.py`` take for the matrix."""
        return list(self.parts), self.layout, self.coalesced, list(self.size), self.transposes

    def attribute(self, name: str) -> Any:
        """Returns an attribute whose value is known or guarded, or a method in C; :data:`ABSENT` for others."""
        known: dict[str, Any] = {"requires_grad": self.parts[-1].requires_grad, "ndim": 2}
        if not known["requires_grad"]:
            known.update(grad_fn=None, is_leaf=True)
        if not self.transposes:
            known["shape"] = torch.Size(self.size)
            known["layout"] = LAYOUTS[self.layout]
            known.update(is_sparse=self.layout == "coo", is_sparse_csr=self.layout == "csr")
        if name in known:
            return known[name]
        if name in _FACTS:
            return getattr(self.parts[-1], name)
        found = getattr(torch.Tensor, name, None)
        return types.MethodType(found, self) if type(found) is types.MethodDescriptorType else ABSENT

    def reads(self, name: str, given: tuple[Any, ...]) -> Any:
        """Returns what a method in :data:`READS` returns; :data:`ABSENT` if that is not known, or if it raises."""
        if name == "size" and given in ((), (0,), (1,), (-1,), (-2,)):
            size = self.size[:: -1 if self.transposes % 2 else 1]
            return size[given[0]] if given else torch.Size(size)
        if given or self.transposes:
            return ABSENT
        if name == "_nnz":
            return self.parts[-1].shape[0]
        if name == "is_coalesced" and self.layout == "coo":
            return self.coalesced
        if name in _PARTS[self.layout]:
            return self.parts[_PARTS[self.layout].index(name)]
        if self.layout == "coo" and self.coalesced and f"_{name}" in _PARTS["coo"]:
            return self.parts[_PARTS["coo"].index(f"_{name}")]
        return ABSENT

    def refuse(self, heap: ShadowTableAPI) -> NoReturn:
        """Stops the capture at what does more than multiply."""
        heap.refuse("SFX109", f"computes with a tensor of layout {LAYOUTS[self.layout]}")


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
    made = SparseMatrix(layout, size, parts, coalesced)
    return heap.register(Record(heap, real, made, source))
