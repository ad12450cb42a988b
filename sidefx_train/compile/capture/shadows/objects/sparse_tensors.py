"""Shadows of sparse tensors of rows: gradients of embeddings, and optimizer state made of them.

Indices and values become inputs of the graph when an operator needs them: a step that only replaces its gradients does
not depend on how many rows the old ones have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.capture.recording.sparse_tensors import Rows
from sidefx_train.compile.capture.shadows.records import Record
from sidefx_train.compile.common.sentinels import ABSENT

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI


class SparseRecord(Record):
    """A sparse tensor of rows; its shadow is a fake tensor without a node.

    Attributes:
        entry: what it consists of at entry; ``None`` while nothing needs that.
    """

    NOTES = ("entry",)

    def __init__(self, heap: ShadowTableAPI, real: torch.Tensor, shadow: torch.Tensor, source: Source) -> None:
        super().__init__(heap, real, shadow, source)
        self.entry: Rows | None = None
        self._version = shadow._version

    @property
    def writes(self) -> int:
        """How often the step has written to it."""
        return int(self.shadow._version) - self._version

    @property
    def replaced(self) -> bool:
        """Returns True if it consists of other tensors than at entry, or is marked otherwise."""
        if self.entry is None:
            return False
        now = self.heap.tracer.proxy_mode.sparse.known(self.shadow)
        return any(a is not b for a, b in zip(now, self.entry, strict=True))

    def read(self) -> Rows:
        """Makes indices and values inputs of the graph."""
        heap, real, source = self.heap, self.real, self.source
        with compat.real_world():
            coalesced = real.is_coalesced()
            held = {name: getattr(real, name)().data for name in ("_indices", "_values")}
        heap.guard("is", heap.sources.call(heap.sources.slot(source, "is_coalesced")), coalesced)
        paths = {name: heap.sources.call(heap.sources.slot(source, name)) for name in held}
        indices, values = (heap.shadow(part, heap.sources.slot(paths[name], "data")) for name, part in held.items())
        self.entry = Rows(indices, values, coalesced)
        return self.entry

    def reset(self) -> None:
        if self.entry is not None:
            self.heap.tracer.proxy_mode.sparse.replace(self.shadow, self.entry)


def sparse_shadow(heap: ShadowTableAPI, real: torch.Tensor, source: Source) -> Any:
    """Returns the shadow of a sparse tensor of rows, or :data:`ABSENT` for another sparse tensor."""
    plain = type(real) is torch.Tensor and not real.requires_grad and not real.is_inference() and real.is_cpu
    if not plain or real.layout is not torch.sparse_coo or real.dim() != 2 or real.is_complex():
        return ABSENT
    if real.sparse_dim() != 1:
        return ABSENT
    heap.guard("type", source, type(real))
    for name in ("layout", "dtype", "is_cpu", "requires_grad"):
        heap.guard("is", heap.sources.slot(source, name), getattr(real, name))
    heap.guard("equal", heap.sources.slot(source, "shape"), real.shape)
    heap.guard("equal", heap.sources.call(heap.sources.slot(source, "sparse_dim")), 1)
    sparse = heap.tracer.proxy_mode.sparse
    shadow = compat.sparse_fake(heap.tracer.fake_mode, tuple(real.shape), real.dtype)
    record = SparseRecord(heap, real, shadow, source)
    sparse.add(shadow, record.read)
    return heap.register(record)
